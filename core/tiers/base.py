"""The tier protocol: a tier is a store below the host pool that receives jobs and returns results without blocking.

The client calls a tier with the manager lock held, on the engine thread or an operator's thread, one call at a time.
Every method except `close` returns immediately, whatever the tier's disk or network does; work that takes time ends in
a result, which `poll` returns once.

The client cancels a job that has been open for longer than the tier's `timeout_s`. After `cancel` returns, the tier
must not touch any slot of that job, even if one of its own threads still hangs in a system call. A dead tier therefore
cannot block a slot or a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.counters import counter, gauge
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.policy import Level
from kvferry.core.transfers import Slots

HOST = "host"
"""Name of the pool where tiers are named; a tier must not have this name."""


class CascadeWhen(StrEnum):
    """When a tier receives blocks of the pool."""

    STORE = "store"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class TierJob:
    """Blocks to store from slots into a tier, or to load into slots: `keys[i]` belongs to `slots[i]`.

    `num_bytes` is the length of each block, at most a slot's; a key's length never changes. `origins` are the origins
    of blocks to store; a load has none. No key and no slot occurs twice.
    """

    number: int
    keys: Sequence[Key]
    slots: Slots
    num_bytes: NDArray[np.int64]
    origins: Sequence[RequestIdentity] = ()

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class TierResult:
    """The result of one look-up, store or load. `ok` holds for each key whether it was found, stored or loaded.

    The slot of a block that was not loaded has undefined contents. `origins` are those of loaded blocks, as far as the
    tier knows them. `num_bytes` were moved in `seconds`, measured from submission.
    """

    number: int
    ok: NDArray[np.bool_]
    origins: Sequence[RequestIdentity | None] = ()
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TierResetResult:
    """The end of a reset or of a drop of keys: the dropped blocks will not reappear, even after a restart.

    A drop of keys does not count its blocks.
    """

    number: int
    dropped_blocks: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Contents of a tier, and outcomes of the blocks submitted to it since it was opened, but for canceled jobs."""

    blocks: int = gauge("Blocks in the tier", "tier_blocks")
    bytes: int = gauge("Bytes in the tier", "tier_bytes")
    max_bytes: int = gauge("Limit of the tier; 0 if only time limits it", "tier_max_bytes")
    stored: int = counter("Blocks stored in the tier", "tier_stored")
    stored_bytes: int = counter("Bytes stored in the tier", "tier_stored_bytes")
    present: int = counter("Blocks given to the tier that it had already", "tier_present")
    dropped: int = counter("Blocks that the tier was too busy, full or out of order to keep", "tier_dropped")
    loaded: int = counter("Blocks loaded from the tier", "tier_loaded")
    loaded_bytes: int = counter("Bytes loaded from the tier", "tier_loaded_bytes")
    missing: int = counter("Blocks gone from the tier since they were looked up", "tier_missing")
    corrupt: int = counter("Blocks of the tier whose bytes did not verify", "tier_corrupt")
    failed: int = counter("Blocks that the tier could not store or load", "tier_failed")
    evicted: int = counter("Blocks that left the tier to make room", "tier_evicted")
    unavailable: int = gauge("1 while the tier does not use its store, which failed repeatedly", "tier_unavailable")
    outages: int = counter("Times that the tier stopped using its store, or started without it", "tier_outages")
    retries: int = counter("Calls of the tier's store that were repeated after an error", "tier_retries")


@dataclass(slots=True)
class TierUse:
    """The client's own counters for a tier."""

    cascaded: int = counter("Blocks given to the tier", "tier_cascaded")
    cascades_dropped: int = counter(
        "Blocks not given to the tier: cascades held enough of the pool, or were too late for an eviction",
        "tier_cascades_dropped",
    )
    looked_up: int = counter("Blocks looked up in the tier", "tier_looked_up")
    found: int = counter("Blocks found in the tier", "tier_found")
    known_missing: int = counter(
        "Blocks not looked up in the tier: it had just answered that it lacks them", "tier_known_missing"
    )
    promoted: int = counter("Blocks promoted from the tier for a waiting request", "tier_promoted")
    prefetched: int = counter("Blocks promoted from the tier because an operator asked for them", "tier_prefetched")
    promotions_failed: int = counter("Blocks requested from the tier that did not arrive", "tier_promotions_failed")
    declined: int = counter("Blocks found and not requested: recomputing was faster", "tier_declined")
    gave_up: int = counter("Times that the tier was too slow for a request to wait for it", "tier_gave_up")
    timed_out: int = counter("Jobs that the tier did not answer in time", "tier_timed_out")
    errors: int = counter("Calls of the tier that failed", "tier_errors")
    open_jobs: int = gauge("Jobs that the tier is working on", "tier_open_jobs")
    open_resets: int = gauge("Resets and drops of blocks that the tier has not completed", "tier_open_resets")
    look_up_s: float | None = gauge(
        "Seconds until the tier answers a look-up, once some were measured", "tier_look_up_seconds", default=None
    )
    problems: int = gauge("Reasons in /readyz why the tier works with restrictions, when last checked", "tier_problems")


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's own counters, and the client's counters for it."""

    counts: TierCounts
    use: TierUse


class Tier(Protocol):
    """One tier. Failures of disks and networks must not raise: count them and report them in `health`."""

    @property
    def timeout_s(self) -> float:
        """Longest time that a job may be open, including time in the tier's own queue."""

    @property
    def level(self) -> Level:
        """Whether the tier receives only new blocks of a request, or all of them, prefix hits included."""

    @property
    def drops_matching(self) -> bool:
        """Whether a reset by match drops the blocks of matching origins; it drops all of them otherwise."""

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """Determine which of these keys could be loaded. Must not count as an access to them."""

    def store(self, job: TierJob) -> None:
        """Store these blocks from their slots. A tier that cannot keep up drops them instead of queueing without bound.

        A block that the tier already has counts as stored.
        """

    def load(self, job: TierJob) -> None:
        """Load these blocks into their slots. Only verified bytes that were stored under that key count as loaded."""

    def cancel(self, number: int) -> None:
        """Stop touching the slots of this job before returning. A later result of the job is ignored.

        Must not wait for a disk or network; it may wait for the copy of a part of a slot. Blocks of a canceled store
        may be kept. Raises if the job still uses its slots: it keeps them until its result, and the tier gets no jobs
        until then.
        """

    def drop(self, number: int, keys: Sequence[Key]) -> None:
        """Forget these keys: not found from now on, and deleted from the medium as soon as possible.

        Ends in a `TierResetResult`, which may take as long as a disk hangs. Keys that the tier does not know, such as
        those that an earlier process was to drop, have to be looked for in the medium.
        """

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """Forget all blocks, or those of matching origins if the tier `drops_matching`.

        May wait for the copy of a part of a slot, as `cancel` does; `drop` does not wait. A tier that
        raises is not used again.

        From return until the result, no affected block can be found or loaded, and earlier submissions are not kept.
        The result confirms that the blocks will not reappear, and may take as long as a disk hangs.
        """

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """Return the results since the last call, each once. Called every step, and every second without steps."""

    def health(self) -> Sequence[str]:
        """Return the reasons why the tier works with restrictions, one per item; empty if it does not."""

    def counts(self) -> TierCounts:
        """Return the tier's counters. Called whenever statistics are requested, so it must be cheap."""

    def close(self, timeout_s: float) -> None:
        """Stop within about `timeout_s`. No slot may be touched after this returns, even if a thread still hangs."""
