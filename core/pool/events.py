"""Events of the pool and of requests, in batches. A sink is called under the manager lock and may only queue them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class RegretBatch(NamedTuple):
    """Evicted keys that were looked up again, and when each was evicted."""

    time_s: float
    keys: Sequence[Key]
    evicted_s: Sequence[float]


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


class RequestBlocks(NamedTuple):
    """The slots of a request that has ended, in the group whose hits are prefixes: what other caches can be judged by.

    Requests have rising numbers. `keys` are those of its full slots, of the answer too, and must not be changed. The
    first `num_storable` may be stored by its policy, which says with `may_load` whether any may be loaded. Of its
    prompt, `num_served_tokens` tokens were not computed. Where they are asked for, `token_ids` are those of prompt and
    answer, which the engine does not change any more.
    """

    time_s: float
    number: int
    origin: RequestIdentity
    keys: Sequence[Key]
    num_prompt_tokens: int
    num_output_tokens: int
    num_storable: int
    num_served_tokens: int
    token_ids: Sequence[int] | None = None
    may_load: bool = True


CacheEvent = StoreBatch | EvictionBatch | RegretBatch | ResetEvent | RequestEnd | RequestBlocks
EventSink = Callable[[CacheEvent], None]
"""Receiver of events. It queues them and returns: no I/O, no waiting, no exception."""
