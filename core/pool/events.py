"""Events of the pool and of requests, in batches. A sink is called under the manager lock and may only queue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.pool.records import SlotRows
from kvferry.core.stats import EvictionReason, PromptTokens


# Created on the hot path, as `EvictionBatch`: a named tuple takes less than half of a frozen dataclass's time.
class StoreBatch(NamedTuple):
    """Blocks of one request that were published, in the request's order."""

    time_s: float
    origin: RequestIdentity
    keys: Sequence[Key]


class EvictionBatch(NamedTuple):
    """Blocks that left the pool together. `needed_by` is the request whose store needed the space, if one did."""

    time_s: float
    reason: EvictionReason
    policy: str
    rows: SlotRows
    needed_by: str | None = None


@dataclass(frozen=True, slots=True)
class ResetEvent:
    """A reset to a new epoch, which dropped all blocks."""

    time_s: float
    epoch: int
    dropped: int


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request. `prompt_tokens` is zero if its prefill was never done."""

    time_s: float
    origin: RequestIdentity
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_tokens: PromptTokens


class EventSink:
    """Receiver of events, which drops those whose method is not overridden.

    Methods queue and return: no I/O, no waiting, no exception.
    """

    def stored(self, batch: StoreBatch) -> None:
        """Receive stored blocks."""

    def evicted(self, batch: EvictionBatch) -> None:
        """Receive evicted blocks."""

    def was_reset(self, event: ResetEvent) -> None:
        """Receive a reset."""

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Receive evicted keys that were looked up again."""

    def request_ended(self, end: RequestEnd) -> None:
        """Receive the end of a request."""
