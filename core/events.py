"""What the cache did, as batches for whoever keeps history. A sink is called under the lock: it may only queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.origins import Origin
from kvferry.core.reasons import EvictionReason
from kvferry.core.records import Records, records_in
from kvferry.core.stats import PromptTokens


# These two are made on the hot path, and a named tuple is made in less than half of a frozen dataclass's time.
class SlotRows(NamedTuple):
    """A batch of slots as columns of one length, the way history and listings read them.

    `positions` is the index of the block within its request, `sizes` are bytes, times are Unix seconds (`hit_s` 0
    for a block never hit), `classes` are those of priority. `live` is False for a slot that no longer holds a loadable
    block; the others are then stale.
    """

    slots: NDArray[np.int64]
    keys: Sequence[Key]
    live: NDArray[np.bool_]
    origins: Sequence[Origin]
    lines: NDArray[np.int64]

    @property
    def records(self) -> Records:
        return records_in(self.lines)

    @property
    def generations(self) -> NDArray[np.int64]:
        return self.records["generation"]

    @property
    def epochs(self) -> NDArray[np.int32]:
        return self.records["epoch"]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.records["size"]

    @property
    def positions(self) -> NDArray[np.int64]:
        return self.records["position"]

    @property
    def stored_s(self) -> NDArray[np.float64]:
        return self.records["stored_s"]

    @property
    def hit_s(self) -> NDArray[np.float64]:
        return self.records["hit_s"]

    @property
    def hits(self) -> NDArray[np.int32]:
        return self.records["hits"]

    @property
    def classes(self) -> NDArray[np.uint8]:
        return self.records["priority_class"]


class StoreBatch(NamedTuple):
    """Blocks of one request that can be loaded from now on, in its order."""

    time_s: float
    origin: Origin
    keys: Sequence[Key]


class EvictionBatch(NamedTuple):
    """Blocks that left the pool together. `needed_by` is the request whose store needed the room, if one did."""

    time_s: float
    reason: EvictionReason
    policy: str
    rows: SlotRows
    needed_by: str | None = None


@dataclass(frozen=True, slots=True)
class ResetEvent:
    """A reset: blocks of older epochs are gone, as many as `dropped`."""

    time_s: float
    epoch: int
    dropped: int


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request is over; `prompt_tokens` says what served its prompt, and is zero if its prefill was never done."""

    time_s: float
    origin: Origin
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_tokens: PromptTokens


class EventSink(Protocol):
    """Where core says what it did. Implementations queue and return: no I/O, no waiting, no exception."""

    def stored(self, batch: StoreBatch) -> None: ...
    def evicted(self, batch: EvictionBatch) -> None: ...
    def was_reset(self, event: ResetEvent) -> None: ...
    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Evicted keys that were asked for again."""

    def request_ended(self, end: RequestEnd) -> None: ...


class NullSink:
    """A sink for those who keep no history."""

    def stored(self, batch: StoreBatch) -> None:
        """Forget it."""

    def evicted(self, batch: EvictionBatch) -> None:
        """Forget it."""

    def was_reset(self, event: ResetEvent) -> None:
        """Forget it."""

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Forget it."""

    def request_ended(self, end: RequestEnd) -> None:
        """Forget it."""
