"""Tiers: places below the host pool, and the seam to them. Jobs go in, results come out, and no call waits.

A tier is called with the manager lock held, on the engine's thread or an operator's, one call at a time. `poll`,
`health` and `counts` are called without it, each by one thread at a time, possibly while another call is under way.
Every call but `close` returns at once, whatever the tier's disk or network does; what takes time ends in a result that
`poll` hands out, once. For each request, in this order:

    on_new_request -> look_up, load, store (any number of times) -> on_request_finished (once, behind the last of them)

Whoever submits a job may `cancel` it, and does so when it has been open for longer than the tier's `timeout_s`. Once
`cancel` has returned, the tier touches none of that job's slots any more, also when a thread of its own still hangs in
a system call. That is why a dead tier can keep neither a slot nor a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.policy import Level
from kvferry.core.transfers import Slots

HOST = "host"
"""What the pool itself is called where tiers are named; no tier may be called so."""


class SlotBytes(Protocol):
    """The bytes of the pool's slots, as tiers reach them. May be called from any thread."""

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """The first `num_bytes` bytes of what a slot holds, in order, to be read or written in place.

        Most often one flat array; several where each rank has its own part of a slot. Must be called for each block of
        a job, before its bytes are accessed and not on the engine thread: it may write to the pool's file. May raise,
        and then the block failed.
        """


class TierRefused(ValueError):
    """A tier that cannot be used as it was asked for. The message names the tier, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The process as a tier sees it.

    `fingerprint` is whatever changes what bytes mean: blocks that were stored under another one must never be found.
    No block is longer than `slot_bytes`. `on_finished` may be called from any thread once `poll` has something new that
    a request waits for; it only notifies. `engine` names the engine; those that share one configuration, as
    data-parallel ones do, have names of their own.
    """

    name: str
    fingerprint: Mapping[str, object]
    slot_bytes: int
    slots: SlotBytes
    on_finished: Callable[[], None]
    engine: str = "kvferry"


@dataclass(frozen=True, slots=True)
class TierRequest:
    """A request as tiers get to know it. `tenant` is a digest; an end user sent `kv_transfer_params`, unchecked."""

    request_id: str
    num_prompt_tokens: int
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to store from slots into a tier, or to load from it into slots: for every i, `keys[i]` and `slots[i]`.

    `num_bytes` is the real length of each block, at most a slot's. A key's length never changes. `origins` says whom
    each block came from; a load has none, and learns them. No key and no slot is named twice.
    """

    number: int
    request_id: str
    keys: Sequence[Key]
    slots: Slots
    num_bytes: NDArray[np.int64]
    origins: Sequence[RequestIdentity] = ()

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class TierResult:
    """The end of one look-up, store or load. `ok` says of each of its keys whether it is found, kept or loaded.

    The slot of a block that was not loaded holds anything. `origins` are those of loaded blocks, where the tier knows.
    `num_bytes` and `seconds` are what was moved and how long it took, from submit on.
    """

    number: int
    ok: NDArray[np.bool_]
    origins: Sequence[RequestIdentity | None] = ()
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TierResetResult:
    """The end of a reset: what it dropped will not come back, not after a restart either."""

    number: int
    dropped_blocks: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What a tier holds now, and what became of the blocks it was given since it was opened.

    Of blocks to store: `stored`, `present` (they were there already), `dropped` (the tier was busy, full or out of
    order, so that they were not even tried) or `failed`. Of blocks to load: `loaded`, `missing` (gone since they were
    looked up), `corrupt` (their bytes did not verify) or `failed`. What was canceled counts as nothing.
    """

    blocks: int = 0
    bytes: int = 0
    max_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    present: int = 0
    dropped: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    missing: int = 0
    corrupt: int = 0
    failed: int = 0
    evicted: int = 0


class Tier(Protocol):
    """One tier. Nothing here raises for what happens to a disk or a network: that is counted, and told by `health`."""

    @property
    def timeout_s(self) -> float:
        """How long a job may be open, time in the tier's own queue included."""

    def on_new_request(self, request: TierRequest) -> Level:
        """What this tier needs of a request: its new blocks only, or all of its blocks, prefix hits too."""

    def on_request_finished(self, request_id: str) -> None:
        """Nothing more will be submitted for this request. Jobs may still be open."""

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """Find out which of these keys could be loaded. It does not count as a use of them."""

    def store(self, job: TierJob) -> None:
        """Keep these blocks; the bytes are in their slots. A tier that cannot keep up drops them, and never queues
        without bound. A block that it has already is as good as stored."""

    def load(self, job: TierJob) -> None:
        """Bring these blocks into their slots. Only bytes that were stored under that key, checked, count as loaded."""

    def cancel(self, number: int) -> None:
        """Touch the slots of this job no more, from when this returns. Its result may come or not, and means nothing.

        Waits for no disk and no network; for a copy of a piece of a slot at most. Of a store, blocks may be kept.
        Raises if the job still uses its slots: it keeps them until its result, and the tier gets no jobs until then."""

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget these keys: not found any more at once, and from disk as soon as may be."""

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """Forget everything, or what matching requests stored; a tier that cannot tell them apart forgets everything.

        From when this returns until its result, nothing that it means can be found or loaded, and what was submitted
        before is not kept. The result says that it will not come back, and may take as long as a disk hangs.
        """

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """The results since the last call, each once. Called every step, and every second when there are no steps.

        Whatever a tier has to do for its threads (start a dead one again), it does here at the latest."""

    def health(self) -> Sequence[str]:
        """Why this tier does less than it should, one reason an item; nothing when all is well."""

    def counts(self) -> TierCounts:
        """What it holds and has done. Cheap: it is asked for with every poll of stats."""

    def close(self, timeout_s: float) -> None:
        """Stop. No slot is touched once this returns, in `timeout_s` and a moment, whatever still hangs."""


TIER_METHODS = (
    "on_new_request",
    "on_request_finished",
    "look_up",
    "store",
    "load",
    "cancel",
    "drop",
    "reset",
    "poll",
    "health",
    "counts",
    "close",
)
"""What a tier must have to be attached; `timeout_s` besides."""
