"""What became of what core asked of a tier, beside the tier's own account of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.tiers import TierCounts


@dataclass(slots=True)
class TierUse:
    """What a tier was used for, in blocks. `cascades_dropped` were not even given to it: cascades held enough slots.

    Of keys `looked_up` it had `found`. Of those `promoted` came into the pool, and `promotions_failed` did not, though
    it was asked for them; `declined` were not asked for, since recomputing was faster. `gave_up` are requests that
    stopped waiting for it, `timed_out` jobs that it was given up on, `errors` calls that failed.
    """

    cascaded: int = 0
    cascades_dropped: int = 0
    looked_up: int = 0
    found: int = 0
    promoted: int = 0
    promotions_failed: int = 0
    declined: int = 0
    gave_up: int = 0
    timed_out: int = 0
    errors: int = 0
    open_jobs: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier by its own account, and what it was used for."""

    counts: TierCounts
    use: TierUse
