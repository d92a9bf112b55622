"""Counters, and the snapshot that is taken of them under the lock, so that both identities hold in every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.core.histograms import JobHistograms
from kvferry.core.misses import MissedTokens
from kvferry.core.reasons import SkipReason
from kvferry.core.tier_stats import TierStats
from kvferry.core.transfers import Direction


def _no_skips() -> dict[str, int]:
    return {reason.value: 0 for reason in SkipReason}


@dataclass(slots=True)
class RequestCounts:
    """Requests by what became of them; `running` are those announced and not finished, waiting ones among them."""

    seen: int = 0
    running: int = 0
    waiting_for_load: int = 0
    finished: int = 0
    preempted: int = 0

    def copy(self) -> RequestCounts:
        """The counts of this moment."""
        return RequestCounts(self.seen, self.running, self.waiting_for_load, self.finished, self.preempted)


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens by what served them; `total` is the sum of the rest once a request's prefill is done."""

    total: int = 0
    device_hit: int = 0
    host_hit: int = 0
    tier_hit: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0

    def copy(self) -> PromptTokens:
        """The counts of this moment."""
        return PromptTokens(self.total, self.device_hit, self.host_hit, dict(self.tier_hit), self.recomputed)


@dataclass(slots=True)
class StoreCounts:
    """Blocks offered, by their answer: `offered = stored + sum(skipped) + failed + in_flight`."""

    offered: int = 0
    stored: int = 0
    bytes: int = 0
    failed: int = 0
    in_flight: int = 0
    seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=_no_skips)

    def settle(self, in_flight: int) -> None:
        """Set the number of blocks in flight, and count as reset the offered ones that have no other answer."""
        self.in_flight = in_flight
        answered = self.stored + sum(self.skipped.values()) + self.failed + in_flight
        self.offered = max(self.offered, answered)
        self.skipped[SkipReason.RESET.value] += self.offered - answered

    def copy(self) -> StoreCounts:
        """The counts of this moment."""
        return StoreCounts(
            self.offered, self.stored, self.bytes, self.failed, self.in_flight, self.seconds, dict(self.skipped)
        )


@dataclass(slots=True)
class LoadCounts:
    """Blocks loaded; `declined` are hits not taken since recomputing was faster or loading was not allowed."""

    blocks: int = 0
    bytes: int = 0
    failed: int = 0
    corrupt: int = 0
    declined: int = 0
    in_flight: int = 0
    seconds: float = 0.0

    def copy(self) -> LoadCounts:
        """The counts of this moment."""
        return LoadCounts(
            self.blocks, self.bytes, self.failed, self.corrupt, self.declined, self.in_flight, self.seconds
        )


@dataclass(slots=True)
class EvictionCounts:
    """Blocks that left the pool; `regretted` were asked for again afterwards."""

    total: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    regretted: int = 0

    def copy(self) -> EvictionCounts:
        """The counts of this moment."""
        return EvictionCounts(self.total, dict(self.by_reason), self.regretted)


@dataclass(slots=True)
class PoolCounts:
    """Slots by state: `slots = free + ready + storing`; `loading`, `pinned` and `unverified` count among `ready`.

    While the pool changes its size `slots` is on its way to `wanted_slots`.
    """

    slots: int = 0
    wanted_slots: int = 0
    slot_bytes: int = 0
    free: int = 0
    ready: int = 0
    storing: int = 0
    loading: int = 0
    pinned: int = 0
    unverified: int = 0
    bytes: int = 0
    eviction_policy: str = ""

    def copy(self) -> PoolCounts:
        """The counts of this moment."""
        return replace(self)


@dataclass(slots=True)
class Snapshot:
    """All of core's counters at one moment."""

    epoch: int
    pool: PoolCounts
    requests: RequestCounts
    prompt_tokens: PromptTokens
    store: StoreCounts
    load: LoadCounts
    evictions: EvictionCounts
    missed_tokens: MissedTokens
    open_jobs: int
    transfers: Mapping[Direction, JobHistograms]
    tiers: Mapping[str, TierStats] = field(default_factory=dict)

    def copy(self) -> Snapshot:
        """The counts of this moment."""
        return replace(
            self,
            pool=self.pool.copy(),
            requests=self.requests.copy(),
            prompt_tokens=self.prompt_tokens.copy(),
            store=self.store.copy(),
            load=self.load.copy(),
            evictions=self.evictions.copy(),
            missed_tokens=self.missed_tokens.copy(),
            transfers=dict(self.transfers),
        )
