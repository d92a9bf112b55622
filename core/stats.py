"""Counters, histograms, the reasons they count by, and the snapshot taken of them under the manager lock.

A snapshot is of one moment, so that sums of counters agree in each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from kvferry.core.tiers.base import TierStats
from kvferry.core.transfers import Direction


class EvictionReason(StrEnum):
    """Why a block left the pool."""

    CAPACITY = "capacity"
    RESET = "reset"
    OPERATOR = "operator"
    LOAD_FAILED = "load_failed"
    FAILED_VERIFICATION = "failed_verification"
    SHRINK = "shrink"


class SkipReason(StrEnum):
    """Why an offered block was not stored."""

    PROMPT_ONLY = "prompt_only"
    TOKEN_CAP = "token_cap"
    ALREADY_STORED = "already_stored"
    IN_FLIGHT = "in_flight"
    ADMISSION = "admission"
    NO_SPACE = "no_space"
    LEFT_DEVICE = "left_device"
    DISABLED = "disabled"
    RESET = "reset"


class NotStored(StrEnum):
    """Why a block that was considered for storing was not stored."""

    PROMPT_ONLY = "prompt_only"
    TOKEN_CAP = "token_cap"
    DISABLED = "disabled"
    ADMISSION = "admission"
    NO_SPACE = "no_space"
    LEFT_DEVICE = "left_device"
    FAILED = "failed"
    RESET = "reset"
    """A reset by match disowned its store."""
    IN_FLIGHT = "in_flight"
    """One of its blocks was being stored, as part of another slot."""
    PART_OF_SLOT = "part_of_slot"
    """It was computed without all the other blocks of its slot."""


JOB_BYTES = tuple(float(1 << exponent) for exponent in range(14, 35, 2))
"""From 16 KiB, a small block, to 16 GiB."""
JOB_SECONDS = tuple(power * factor for power in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for factor in (1.0, 2.5, 5.0))


@dataclass(frozen=True, slots=True)
class Histogram:
    """An immutable histogram with fixed buckets.

    `counts[i]` is the number of values up to `bounds[i]` and above the bound before; the last count is of values above
    every bound. Counting returns a new histogram, so that a snapshot needs no copy.
    """

    bounds: tuple[float, ...]
    """Ascending upper bounds."""
    counts: tuple[int, ...]
    total: float = 0.0

    def counting(self, value: float) -> Histogram:
        """Return this histogram with one more value."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.total + value)


def empty(bounds: tuple[float, ...]) -> Histogram:
    """Return a histogram without values."""
    return Histogram(bounds, (0,) * (len(bounds) + 1))


NO_BYTES, NO_SECONDS = empty(JOB_BYTES), empty(JOB_SECONDS)


@dataclass(frozen=True, slots=True)
class JobHistograms:
    """Successful jobs of one direction: bytes of all workers, and seconds of the slowest worker."""

    bytes: Histogram = NO_BYTES
    seconds: Histogram = NO_SECONDS

    def counting(self, num_bytes: int, seconds: float) -> JobHistograms:
        """Return these histograms with one more job."""
        return JobHistograms(self.bytes.counting(num_bytes), self.seconds.counting(seconds))


def by_direction() -> dict[Direction, JobHistograms]:
    """Return empty histograms for both directions."""
    return {direction: JobHistograms() for direction in Direction}


class MissCause(StrEnum):
    """Why a block was not loaded, where it was neither evicted nor skipped."""

    NEW = "new"
    """It was never offered, as far as the history goes back."""
    OTHER_FINGERPRINT = "other_fingerprint"
    """An earlier process stored it with another model or layout, so it was dropped at start."""
    GAP = "gap"
    """It is in the pool or on the device, but a block before it is in neither."""
    PIN_LIMIT = "pin_limit"
    """It is in the pool, but waiting requests have pinned as many blocks as they may."""
    IN_FLIGHT = "in_flight"
    """It is being stored or promoted, and cannot be loaded before that ends."""
    TAIL = "tail"
    """Less than a block, or the last token, which is always computed."""
    LOAD_FAILED = "load_failed"
    """It was found, and its load failed."""
    DECLINED = "declined"
    """It was found, and recomputing it was expected to be faster."""
    LOAD_DISABLED = "load_disabled"
    """The request policy forbids loading."""
    UNEXAMINED = "unexamined"
    """Its cause was not determined: too many blocks were missing, or the prompt was never looked up."""


MissReason = MissCause | EvictionReason | NotStored


class FoundMisses(NamedTuple):
    """Causes of the misses of some keys, and the Unix seconds between which the evicted ones were evicted."""

    causes: list[MissReason]
    evicted_between_s: tuple[float, float] | None


@dataclass(slots=True)
class MissedTokens:
    """Prompt tokens that were computed, by cause; together as many as `PromptTokens.recomputed`.

    `evicted` counts by `EvictionReason`, `not_stored` by `NotStored`, and `causes` by `MissCause`.
    """

    causes: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in MissCause})
    evicted: dict[str, int] = field(default_factory=dict)
    not_stored: dict[str, int] = field(default_factory=dict)

    def add(self, cause: MissReason, num_tokens: int) -> None:
        """Count tokens of a cause."""
        if isinstance(cause, EvictionReason):
            counts = self.evicted
        elif isinstance(cause, NotStored):
            counts = self.not_stored
        else:
            counts = self.causes
        counts[cause.value] = counts.get(cause.value, 0) + num_tokens

    def flat(self) -> dict[str, int]:
        """Return all counts in one dict, with keys like `evicted:capacity`, `not_stored:prompt_only` and `new`."""
        evicted = {f"evicted:{reason}": tokens for reason, tokens in self.evicted.items()}
        not_stored = {f"not_stored:{reason}": tokens for reason, tokens in self.not_stored.items()}
        return self.causes | evicted | not_stored

    def copy(self) -> MissedTokens:
        """Return a copy."""
        return MissedTokens(dict(self.causes), dict(self.evicted), dict(self.not_stored))


@dataclass(frozen=True, slots=True)
class MissRun:
    """Tokens from the end of the run before up to `end_token`, which were missed for one cause."""

    end_token: int
    cause: MissReason


@dataclass(slots=True)
class Misses:
    """The result of the latest lookup of a request: a hit up to `hit_end`, and runs of causes from there on.

    `evicted_between_s` are the Unix seconds between which blocks were evicted, None if none were.
    """

    hit_end: int
    runs: list[MissRun] = field(default_factory=list)
    evicted_between_s: tuple[float, float] | None = None

    @classmethod
    def unexamined(cls, num_tokens: int) -> Misses:
        """Return the misses of a prompt that was never looked up."""
        return cls(0, [MissRun(num_tokens, MissCause.UNEXAMINED)])

    @property
    def end_token(self) -> int:
        """First token behind the hit and all runs."""
        return self.runs[-1].end_token if self.runs else self.hit_end

    def extend(self, causes: Iterable[MissReason], first_token: int, tokens_each: int) -> None:
        """Add the causes of slots of `tokens_each` tokens, the first of which begins at `first_token`."""
        end = first_token
        # By identity, as members of different enums may be equal as strings.
        for _, run in groupby(causes, key=id):
            same = list(run)
            cause = same[0]
            end += len(same) * tokens_each
            if self.runs and self.runs[-1].cause is cause:
                self.runs.pop()
            self.runs.append(MissRun(end, cause))

    def end_at(self, limit_token: int) -> None:
        """Count the tokens behind `limit_token`, where no hit can end, as the tail."""
        self.runs = [MissRun(min(run.end_token, limit_token), run.cause) for run in self.runs]

    def spans(self, served: int, total: int, lost_hit: MissCause) -> Iterator[tuple[int, int, MissReason]]:
        """Yield first token, end and cause of each run of the prompt's tokens from `served` to `total`.

        The cause of tokens within the hit is `lost_hit`, that of tokens behind the last run is the tail.
        """
        start = served
        for end, cause in ((self.hit_end, lost_hit), *((run.end_token, run.cause) for run in self.runs)):
            end = min(end, total)
            if end > start:
                yield start, end, cause
                start = end
        if total > start:
            yield start, total, MissCause.TAIL

    def count(self, served: int, total: int, lost_hit: MissCause, missed: Iterable[MissedTokens]) -> None:
        """Count the prompt's tokens from `served` to `total` by cause; see `spans`."""
        for start, end, cause in self.spans(served, total, lost_hit):
            for counts in missed:
                counts.add(cause, end - start)


def _no_skips() -> dict[str, int]:
    return {reason.value: 0 for reason in SkipReason}


@dataclass(slots=True)
class RequestCounts:
    """Requests by state. `running` are announced and not finished, waiting ones included."""

    seen: int = 0
    running: int = 0
    waiting_for_load: int = 0
    finished: int = 0
    preempted: int = 0

    def copy(self) -> RequestCounts:
        """Return a copy."""
        return RequestCounts(self.seen, self.running, self.waiting_for_load, self.finished, self.preempted)


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens by source. `total` is the sum of the others once a request's prefill is done."""

    total: int = 0
    device_hit: int = 0
    host_hit: int = 0
    tier_hit: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0

    def copy(self) -> PromptTokens:
        """Return a copy."""
        return PromptTokens(self.total, self.device_hit, self.host_hit, dict(self.tier_hit), self.recomputed)


@dataclass(slots=True)
class StoreCounts:
    """Blocks offered, by result: `offered = stored + sum(skipped) + failed + in_flight`."""

    offered: int = 0
    stored: int = 0
    bytes: int = 0
    failed: int = 0
    in_flight: int = 0
    seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=_no_skips)

    def settle(self, in_flight: int) -> None:
        """Set the number of blocks in flight, and count offered blocks without a result as reset."""
        self.in_flight = in_flight
        answered = self.stored + sum(self.skipped.values()) + self.failed + in_flight
        self.offered = max(self.offered, answered)
        self.skipped[SkipReason.RESET.value] += self.offered - answered

    def copy(self) -> StoreCounts:
        """Return a copy."""
        return StoreCounts(
            self.offered, self.stored, self.bytes, self.failed, self.in_flight, self.seconds, dict(self.skipped)
        )


@dataclass(slots=True)
class LoadCounts:
    """Blocks loaded. `declined` were hit, but recomputing was faster or loading was not allowed."""

    blocks: int = 0
    bytes: int = 0
    failed: int = 0
    corrupt: int = 0
    declined: int = 0
    in_flight: int = 0
    seconds: float = 0.0

    def copy(self) -> LoadCounts:
        """Return a copy."""
        return LoadCounts(
            self.blocks, self.bytes, self.failed, self.corrupt, self.declined, self.in_flight, self.seconds
        )


@dataclass(slots=True)
class EvictionCounts:
    """Blocks that left the pool. `regretted` were looked up again afterwards."""

    total: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    regretted: int = 0

    def copy(self) -> EvictionCounts:
        """Return a copy."""
        return EvictionCounts(self.total, dict(self.by_reason), self.regretted)


@dataclass(slots=True)
class PoolCounts:
    """Slots by state: `slots = free + ready + storing`; `loading`, `pinned` and `unverified` count among `ready`.

    During a resize `slots` approaches `wanted_slots`.
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
        """Return a copy."""
        return replace(self)


@dataclass(slots=True)
class Snapshot:
    """All counters of core at one moment."""

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
        """Return a copy."""
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
