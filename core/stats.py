"""Counters, histograms, the reasons they count by, and the snapshot taken of them under the manager lock.

A snapshot is of one moment, so that sums of counters agree in each.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, product

from kvferry.core.cost_model import Rate
from kvferry.core.counters import counter, gauge
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
    TENANT_LIMIT = "tenant_limit"
    """Its tenant had as many slots as it may have, and new blocks to store."""


class NotStored(StrEnum):
    """Why an offered block was not stored."""

    PROMPT_ONLY = "prompt_only"
    TOKEN_CAP = "token_cap"
    ALREADY_STORED = "already_stored"
    IN_FLIGHT = "in_flight"
    """One of its blocks was being stored, possibly as part of another slot."""
    ADMISSION = "admission"
    NO_SPACE = "no_space"
    TENANT_LIMIT = "tenant_limit"
    """Its tenant had as many slots as it may have, and none of them could be evicted."""
    LEFT_DEVICE = "left_device"
    DISABLED = "disabled"
    PAUSED = "paused"
    """Storing was paused, as it cost more than it saved."""
    RESET = "reset"
    """A reset disowned its store."""
    FAILED = "failed"
    PART_OF_SLOT = "part_of_slot"
    """It was computed without all the other blocks of its slot."""


JOB_BYTES = tuple(float(1 << exponent) for exponent in range(14, 35, 2))
"""From 16 KiB, a small block, to 16 GiB."""
JOB_SECONDS = tuple(power * factor for power in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for factor in (1.0, 2.5, 5.0))


_BY_SOURCE = "Prompt tokens by what served them"
_BY_STATE = "Slots by state; the states add up to the pool"
_STORING = "Slots neither free nor loadable: being stored, promoted, or held by a disowned job"
_STORE_SECONDS = (
    "Time spent in stores that have ended; of a request, its share of each of its jobs by number of blocks, so that "
    "all requests add up to the total"
)


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


class PromptSource(StrEnum):
    """What a prompt began with: blocks loaded from the pool or a tier, else blocks on the device, else nothing."""

    LOADED = "loaded"
    DEVICE = "device"
    NONE = "none"


class PromptLength(StrEnum):
    """Class of a prompt by its tokens. Times compare only within one: long prompts load more often than short ones."""

    UNDER_1K = "<1k"
    UNDER_8K = "1k-8k"
    UNDER_32K = "8k-32k"
    LONGER = "32k+"

    @classmethod
    def of(cls, num_tokens: int) -> PromptLength:
        """Return the class of a prompt."""
        return tuple(cls)[bisect_right(_LENGTH_BOUNDS, num_tokens)]


_LENGTH_BOUNDS = (1 << 10, 8 << 10, 32 << 10)
"""Tokens from which on a prompt is of the next class."""

REQUEST_SECONDS = tuple(power * factor for power in (1e-3, 1e-2, 1e-1, 1.0, 10.0) for factor in (1.0, 2.5, 5.0))


@dataclass(slots=True)
class Latencies:
    """Seconds of requests whose prompt was computed.

    `load_wait` is the time in which those with a load waited for it, `tier_wait` that in which requests waited for
    tiers, and `first_token` the time from the arrival to the step after the prompt was computed.
    """

    load_wait: Histogram = field(default_factory=lambda: empty(REQUEST_SECONDS))
    tier_wait: Histogram = field(default_factory=lambda: empty(REQUEST_SECONDS))
    first_token: dict[tuple[PromptSource, PromptLength], Histogram] = field(
        default_factory=lambda: dict.fromkeys(product(PromptSource, PromptLength), empty(REQUEST_SECONDS))
    )

    def count(
        self, source: PromptSource, num_tokens: int, load_s: float, tier_s: float | None, first_token_s: float
    ) -> None:
        """Count one request with a prompt of `num_tokens`; `tier_s` is None if it did not wait for tiers."""
        if tier_s is not None:
            self.tier_wait = self.tier_wait.counting(tier_s)
        if source is PromptSource.LOADED:
            self.load_wait = self.load_wait.counting(load_s)
        kind = (source, PromptLength.of(num_tokens))
        self.first_token[kind] = self.first_token[kind].counting(first_token_s)


_COST = "What offloading has cost, by what took the time"
_GAIN = (
    "Time that computing the loaded prompt tokens would have taken, at the prefill rate measured then; tokens that "
    "were loaded before a rate was measured are added with the first one"
)


@dataclass(slots=True)
class BalanceCounts:
    """What offloading has cost and saved; see docs/balance.md. `hook_s` is written by the guard of the engine's hooks.

    `unpriced_tokens` were loaded, and wait for a measured prefill rate to become part of `gain_s`.
    """

    hook_s: float = counter(
        "Time in the engine's hooks", "balance_cost_seconds", label=("part", "hooks"), help=_COST, default=0.0
    )
    load_wait_s: float = counter(
        "Time for which requests waited for loads and tiers before their first token",
        "balance_cost_seconds",
        label=("part", "load_waits"),
        default=0.0,
    )
    gain_s: float = counter(_GAIN, "balance_gain_seconds", default=0.0)
    unpriced_tokens: int = 0
    prefill_tokens_per_s: float | None = gauge(
        "Measured prefill rate; NaN while too few steps were measured",
        "balance_prefill_tokens_per_second",
        default=None,
    )

    @property
    def cost_s(self) -> float:
        """Time in hooks and load waits."""
        return self.hook_s + self.load_wait_s

    def add(self, load_wait_s: float, saved_tokens: int, tokens_rate: Rate) -> None:
        """Count a prompt that was computed, `saved_tokens` of which were loaded."""
        self.load_wait_s += load_wait_s
        self.unpriced_tokens += saved_tokens
        if self.unpriced_tokens:
            gain_s = tokens_rate.estimate_s(self.unpriced_tokens)
            if gain_s is not None:
                self.gain_s += gain_s
                self.unpriced_tokens = 0


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
    """Less than a block, the last token, or the block that `GroupLayout.skipped_tokens` leaves out."""
    LOAD_FAILED = "load_failed"
    """It was found, and its load failed."""
    DECLINED = "declined"
    """It was found, and recomputing it was expected to be faster."""
    LOAD_DISABLED = "load_disabled"
    """The request policy forbids loading."""
    ERROR = "error"
    """The request is computed without offloading, after an unexpected error."""
    UNEXAMINED = "unexamined"
    """Its cause was not determined: too many blocks were missing, or the prompt was never looked up."""


MissReason = MissCause | EvictionReason | NotStored

_BY_CAUSE = "Prompt tokens computed, by why they were not loaded"
_CAUSES = (
    "`new`: never offered; `other_fingerprint`: held by an earlier process whose pool was dropped at start, since its "
    "model, layout or sizes differ; `tail`: too short for a block, the last token, or the last block with EAGLE; "
    "`gap`: in the pool, but useless without a block that is not; `load_failed`; `declined`: computing was faster; "
    "`load_disabled`: by the request's policy; `pin_limit`: waiting requests hold too much; `in_flight`: being "
    "stored, or promoted from a tier; `error`: an unexpected error kept the request from offloading; `unexamined`: "
    "too many to look at"
)
_NOT_STORED = (
    "By why it was not stored when it was considered; `in_flight`: one of its blocks was being stored as part of "
    "another slot; `part_of_slot`: computed without the rest of its slot; `reset`: one came meanwhile; `paused`: by "
    "KVFERRY_AUTO_PAUSE"
)


def _zeros(names: Iterable[StrEnum]) -> Callable[[], dict[str, int]]:
    return lambda: {name.value: 0 for name in names}


@dataclass(slots=True)
class MissedTokens:
    """Prompt tokens that were computed, by cause; together as many as `PromptTokens.recomputed`.

    `evicted` counts by `EvictionReason`, `not_stored` by `NotStored`, and `causes` by `MissCause`.
    """

    causes: dict[str, int] = counter(
        _CAUSES, "missed_prompt_tokens", label=("cause", ""), help=_BY_CAUSE, factory=_zeros(MissCause)
    )
    evicted: dict[str, int] = counter(
        "By the reason of the eviction", "missed_prompt_tokens", label=("cause", "evicted:"), factory=dict
    )
    not_stored: dict[str, int] = counter(
        _NOT_STORED, "missed_prompt_tokens", label=("cause", "not_stored:"), factory=dict
    )

    def add(self, cause: MissReason, num_tokens: int) -> None:
        """Count tokens of a cause."""
        if isinstance(cause, EvictionReason):
            counts = self.evicted
        elif isinstance(cause, NotStored):
            counts = self.not_stored
        else:
            counts = self.causes
        counts[cause.value] = counts.get(cause.value, 0) + num_tokens

    def num_avoidable(self) -> int:
        """Count the tokens that are not the tail, which is computed in any case."""
        causes = sum(self.causes.values()) - self.causes.get(MissCause.TAIL.value, 0)
        return causes + sum(self.evicted.values()) + sum(self.not_stored.values())

    def flat(self) -> dict[str, int]:
        """Return all counts in one dict, with keys like `evicted:capacity`, `not_stored:prompt_only` and `new`."""
        evicted = {f"evicted:{reason}": tokens for reason, tokens in self.evicted.items()}
        not_stored = {f"not_stored:{reason}": tokens for reason, tokens in self.not_stored.items()}
        return self.causes | evicted | not_stored


@dataclass(slots=True)
class Misses:
    """The result of the latest lookup of a request: a hit up to `hit_end`, and runs of causes from there on.

    Each run has its end token and its cause.
    `evicted_between_s` are the Unix seconds between which blocks were evicted, None if none were.
    """

    hit_end: int
    runs: list[tuple[int, MissReason]] = field(default_factory=list)
    evicted_between_s: tuple[float, float] | None = None

    @property
    def end_token(self) -> int:
        """First token behind the hit and all runs."""
        return self.runs[-1][0] if self.runs else self.hit_end

    def extend(self, causes: Iterable[MissReason], first_token: int, tokens_each: int) -> None:
        """Add the causes of slots of `tokens_each` tokens, the first of which begins at `first_token`."""
        end = first_token
        # By identity, as members of different enums may be equal as strings.
        for _, run in groupby(causes, key=id):
            same = list(run)
            cause = same[0]
            end += len(same) * tokens_each
            if self.runs and self.runs[-1][1] is cause:
                self.runs.pop()
            self.runs.append((end, cause))

    def end_at(self, limit_token: int) -> None:
        """Count the tokens behind `limit_token`, where no hit can end, as the tail."""
        self.runs = [(min(end, limit_token), cause) for end, cause in self.runs]

    def skip_to(self, end_token: int) -> None:
        """Count the tokens of gaps before `end_token`, which a hit leaves out, as the tail."""
        runs: list[tuple[int, MissReason]] = []
        start = self.hit_end
        for end, cause in self.runs:
            if cause is MissCause.GAP and start < end_token:
                runs.append((min(end, end_token), MissCause.TAIL))
            if cause is not MissCause.GAP or end > end_token:
                runs.append((end, cause))
            start = end
        self.runs = runs

    def spans(self, served: int, total: int, lost_hit: MissCause) -> Iterator[tuple[int, int, MissReason]]:
        """Yield first token, end and cause of each run of the prompt's tokens from `served` to `total`.

        The cause of tokens within the hit is `lost_hit`, that of tokens behind the last run is the tail.
        """
        start = served
        for end, cause in ((self.hit_end, lost_hit), *self.runs):
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


_SKIPS = [reason for reason in NotStored if reason not in (NotStored.FAILED, NotStored.PART_OF_SLOT)]

MAX_HINT_TYPES = 16
OTHER_HINTS = "other"
_HINT_TYPE = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


@dataclass(slots=True)
class RequestCounts:
    """Requests by state. `running` are announced and not finished, waiting ones included."""

    seen: int = counter("Requests announced", "requests_seen")
    running: int = gauge("Requests announced and not finished, waiting ones included", "requests_running")
    waiting_for_load: int = gauge("Requests waiting for a load", "requests_waiting_for_load")
    finished: int = counter("Requests finished or aborted", "requests_finished")
    preempted: int = counter("Preemptions of requests", "requests_preempted")
    excluded: int = counter(
        "Requests computed without offloading, after an unexpected error of their own", "requests_excluded"
    )
    ignored_sessions: int = counter(
        "Requests whose session id was ignored: longer than 256 characters, or not printable",
        "requests_ignored_sessions",
    )
    kv_hints: dict[str, int] = counter(
        "Requests that came with KV hints, by type of action; no action is executed",
        "kv_hints",
        label=("action", ""),
        factory=dict,
    )

    def count_kv_hints(self, action_types: Iterable[str]) -> None:
        """Count a request with actions of these types, the first `MAX_HINT_TYPES` of which have counts of their own."""
        counts, named = self.kv_hints, self.kv_hints.keys() - {OTHER_HINTS}
        types = set()
        for name in action_types:
            if name not in named and len(named) < MAX_HINT_TYPES and _HINT_TYPE.fullmatch(name):
                named.add(name)
            types.add(name if name in named else OTHER_HINTS)
        for name in types:
            counts[name] = counts.get(name, 0) + 1


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens by source. `total` is the sum of the others once a request's prefill is done."""

    total: int = counter("Prompt tokens of requests whose prefill is done: the sum of the other fields")
    device_hit: int = counter(
        "Tokens found on the device", "prompt_tokens", label=("source", "device"), help=_BY_SOURCE
    )
    host_hit: int = counter("Tokens loaded from the pool", "prompt_tokens", label=("source", "host"))
    tier_hit: dict[str, int] = counter(
        "Tokens loaded from tiers, by tier", "prompt_tokens", label=("source", "tier:"), factory=dict
    )
    recomputed: int = counter("Tokens that were computed", "prompt_tokens", label=("source", "recomputed"))

    def add(self, tokens: PromptTokens) -> None:
        """Add the tokens of other prompts."""
        self.total += tokens.total
        self.device_hit += tokens.device_hit
        self.host_hit += tokens.host_hit
        self.recomputed += tokens.recomputed
        for name, number in tokens.tier_hit.items():
            self.tier_hit[name] = self.tier_hit.get(name, 0) + number


@dataclass(slots=True)
class TierWaitCounts:
    """Waits of requests that could run for their own look-ups in tiers and promotions."""

    requests: int = counter("Requests that waited for tiers")
    seconds: float = counter("Time for which requests waited for tiers", default=0.0)
    ended_early: int = counter(
        "Waits for tiers that the request's `tier_wait` ended before the tiers had answered", "tier_waits_ended_early"
    )


@dataclass(slots=True)
class StoreCounts:
    """Blocks offered, by result: `offered = stored + sum(skipped) + failed + in_flight`."""

    offered: int = counter("Blocks considered for storing", "store_offered_blocks")
    stored: int = counter("Blocks stored", "store_stored_blocks")
    bytes: int = counter("Bytes stored", "store_bytes")
    failed: int = counter("Blocks whose store failed", "store_failed_blocks")
    in_flight: int = gauge("Blocks being stored", "store_in_flight_blocks")
    seconds: float = counter(_STORE_SECONDS, "store_seconds", default=0.0)
    skipped: dict[str, int] = counter(
        "Blocks offered and not stored", "store_skipped_blocks", label=("reason", ""), factory=_zeros(_SKIPS)
    )

    def end_in_flight(self) -> None:
        """Count offered blocks without a result as reset."""
        self.in_flight = 0
        answered = self.stored + sum(self.skipped.values()) + self.failed
        self.offered = max(self.offered, answered)
        self.skipped[NotStored.RESET.value] += self.offered - answered


@dataclass(slots=True)
class LoadCounts:
    """Blocks loaded. `declined` were hit, but recomputing was faster or loading was not allowed."""

    blocks: int = counter("Blocks loaded", "load_blocks")
    bytes: int = counter("Bytes loaded", "load_bytes")
    failed: int = counter("Blocks whose load failed", "load_failed_blocks")
    corrupt: int = counter("Blocks whose bytes did not match their checksum", "load_corrupt_blocks")
    declined: int = counter("Hits not loaded: recomputing was faster, or not allowed", "load_declined_blocks")
    in_flight: int = gauge("Blocks being loaded", "load_in_flight_blocks")
    seconds: float = counter("Time spent in loads", "load_seconds", default=0.0)


@dataclass(slots=True)
class EvictionCounts:
    """Blocks that left the pool. `regretted` were looked up again afterwards."""

    total: int = counter("Blocks that left the pool")
    by_reason: dict[str, int] = counter(
        "Blocks that left the pool, by reason", "evictions", label=("reason", ""), factory=dict
    )
    regretted: int = counter("Evicted blocks that were requested again", "evictions_regretted")


class LeaseOutcome(StrEnum):
    """Result of a request for a lease: of all blocks, of the first ones, or of none."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


class LeaseEnd(StrEnum):
    """Why a lease ended."""

    TIME = "time"
    NEXT_REQUEST = "next_request"
    """Its session's next request was admitted."""
    OPERATOR = "operator"
    """An operator ended it or replaced it, or operators' pins took its blocks."""
    RESET = "reset"


@dataclass(slots=True)
class LeaseCounts:
    """Leases, which keep blocks of sessions from eviction after their requests."""

    outcomes: dict[str, int] = counter(
        "Requests for leases: granted for all blocks, for the first ones (`clipped`) or not at all",
        "leases",
        label=("outcome", ""),
        factory=_zeros(LeaseOutcome),
    )
    ended: dict[str, int] = counter(
        "Leases that ended, by cause: their time, their session's next request, an operator, a reset of the pool",
        "leases_ended",
        label=("cause", ""),
        factory=_zeros(LeaseEnd),
    )
    slots: int = gauge("Slots under leases, each counted once", "leased_slots")
    pending: int = gauge("Blocks under leases that are not in the pool yet, each counted once", "leases_pending_blocks")


@dataclass(slots=True)
class PoolCounts:
    """Slots by state: `slots = free + ready + storing`; `loading`, `pinned` and `unverified` count among `ready`.

    During a resize `slots` approaches `wanted_slots`.
    """

    slots: int = gauge("Slots of the pool: `free + ready + storing`")
    wanted_slots: int = gauge("Slots of the pool once a resize is done", "pool_wanted_slots")
    slot_bytes: int = gauge("Size of a slot", "pool_slot_bytes")
    free: int = gauge("Slots without a block", "pool_slots", label=("state", "free"), help=_BY_STATE)
    ready: int = gauge("Slots whose block can be loaded", "pool_slots", label=("state", "ready"))
    storing: int = gauge(_STORING, "pool_slots", label=("state", "storing"))
    loading: int = gauge("Ready slots that are being loaded from", "pool_loading_slots")
    pinned: int = gauge("Ready slots that may not be evicted", "pool_pinned_slots")
    unverified: int = gauge("Recovered slots not yet verified", "pool_unverified_slots")
    bytes: int = gauge("Size of the pool", "pool_bytes")
    eviction_policy: str = ""


@dataclass(slots=True)
class Snapshot:
    """All counters of core at one moment."""

    pool: PoolCounts
    evictions: EvictionCounts
    leases: LeaseCounts
    prompt_tokens: PromptTokens
    epoch: int = 0
    open_jobs: int = 0
    requests: RequestCounts = field(default_factory=RequestCounts)
    store: StoreCounts = field(default_factory=StoreCounts)
    load: LoadCounts = field(default_factory=LoadCounts)
    missed_tokens: MissedTokens = field(default_factory=MissedTokens)
    transfers: dict[Direction, JobHistograms] = field(default_factory=lambda: dict.fromkeys(Direction, JobHistograms()))
    latencies: Latencies = field(default_factory=Latencies)
    balance: BalanceCounts = field(default_factory=BalanceCounts)
    tier_waits: TierWaitCounts = field(default_factory=TierWaitCounts)
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
