"""Requests: their state from announcement to finish, and views of live and recent requests."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from threading import RLock
from typing import NamedTuple

from kvferry.core.counters import copy_counts
from kvferry.core.engine_api import BlockTables, EngineRequest
from kvferry.core.groups import Group
from kvferry.core.keys import MAX_NAME_CHARS, Key, RequestIdentity, is_session
from kvferry.core.policy import POLICY_FIELDS, EffectivePolicy, PolicyPatch, PolicyResolver, RequestPolicy
from kvferry.core.pool.leases import LeaseReceipt
from kvferry.core.pool.pins import Pin
from kvferry.core.rules import RuleSubject
from kvferry.core.scheduler.lookup import PrefixHit, RequestKeys
from kvferry.core.scheduler.tier_loads import TierLookup
from kvferry.core.stats import MissCause, MissedTokens, Misses, NotStored, PromptTokens, StoreCounts

_MAX_CHARS = 128
_DIGEST_CHARS = 32
_MAX_NAMES = 4
_MAX_ALIASES = 7
"""Aliases kept of a finished request: the last ones, which are the shortest forms of its id."""
_VIEW_BATCH = 50
"""Requests copied under one hold of the manager lock."""


NO_OFFLOADING = EffectivePolicy(RequestPolicy(store=False, load=False), dict.fromkeys(POLICY_FIELDS, "error"))
"""Policy of a request whose own could not be resolved."""


DISCARDED = "in another call"
"""Error of a request that was alive when the state of all requests was discarded."""


class RequestPhase(StrEnum):
    """Phase of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """An `EngineRequest` without blocks, in place of an engine's object that is gone or cannot be read."""

    request_id: str = ""
    aliases: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    tenant: str | None = None
    lora: str | None = None
    block_hashes: tuple[bytes, ...] = ()
    kv_transfer_params: None = None


@dataclass(slots=True)
class GroupProgress:
    """Store decisions for a request's slots in one group. Written by the store planners only.

    The first `num_decided` slots were offered or skipped for good, except the ranges `passed`, which no hit would read,
    and those skipped from `output_start` on: they are output, which becomes prompt if a session goes on. In lazy mode
    the first `num_recorded` slots are recorded for the device blocks that the request has now. A slot that found no
    space for the reason `refusal` is offered again once `OffloadManager.space_version` is not `refused_version`.
    Reasons of misses were recorded up to slot `refused_end` and up to block `inner_blocks_end`.
    """

    group: Group
    num_decided: int = 0
    output_start: int | None = None
    num_recorded: int = 0
    refused_version: tuple[int, ...] | None = None
    refusal: NotStored = NotStored.NO_SPACE
    refused_end: int = 0
    inner_blocks_end: int = 0
    passed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class LoadProgress:
    """Hit and load of a request. Written by the load planner only.

    `hit` was found after `matched_tokens` tokens on the device, and `pin` holds its slots until `commit`; `wanted` is
    the decision to load it. The latest look-up found blocks up to `found_end`; what the pool has beyond that is unused
    for the cause `unused`. `misses` are the causes for the rest, and `boundary_tokens` is the end of the prefix that
    other requests computed. The device has `device_tokens` tokens and `loaded_tokens` were loaded.
    """

    hit: PrefixHit | None = None
    pin: Pin | None = None
    matched_tokens: int | None = None
    wanted: bool | None = None
    found_end: int = 0
    unused: MissCause = MissCause.GAP
    misses: Misses | None = None
    boundary_tokens: int = 0
    is_decline_counted: bool = False
    failed: bool = False
    device_tokens: int = 0
    loaded_tokens: int = 0


@dataclass(slots=True)
class DemandProgress:
    """Stores that a request waits for, of blocks behind its hit `first_token` to `end_token`. Written by `Demands`.

    The `search`, None once it has ended, goes on in each match. The hit might become longer, up to `limit_token`, by
    the `sources` that it has found. The longer hit that is chosen has the keys of `target`, of which the pool lacked
    those `missing`. The first `num_begun` of them have been stored or are to be, and the request waits for `keys`.
    """

    first_token: int
    end_token: int
    limit_token: int
    search: Iterator[None] | None = None
    sources: set[Key] = field(default_factory=set)
    target: frozenset[Key] = frozenset()
    missing: Sequence[Key] = ()
    num_begun: int = 0
    keys: Sequence[Key] = ()


@dataclass(slots=True)
class WaitProgress:
    """What a request waits for, and the block hashes of prefixes that it is `loading`. Written by `InflightPrefixes`.

    `loader` is the sequence of the request that it follows until `follow_until_s`. `tier_until_s` is the end of its
    waits for tiers, if its policy gives them a number of seconds. `Demands` writes its `demand`, for which it waits
    until `demand_until_s`.
    """

    deadline_s: float | None = None
    tier_until_s: float | None = None
    follow_until_s: float | None = None
    demand_until_s: float | None = None
    demand: DemandProgress | None = None
    loader: int | None = None
    loading: Sequence[bytes] = ()


@dataclass(slots=True)
class TierProgress:
    """A request in the tiers. Written by `Promotions`; the load planner forgets the look-up.

    `promoted` has the tier that each piece of the prompt was promoted from; a piece has the layout's alignment.
    `num_early_slots` slots were promoted before its first match. It waits for tiers since `wait_began_s`, if it does.
    """

    lookup: TierLookup | None = None
    num_early_slots: int = 0
    wait_began_s: float | None = None
    promoted: dict[int, str] = field(default_factory=dict)


class FoundTokens(NamedTuple):
    """Prompt tokens that an attempt found on the device and loaded, and why it missed the others."""

    device_tokens: int
    loaded_tokens: int
    misses: Misses | None

    @property
    def total(self) -> int:
        """Return the tokens that were not to be computed."""
        return self.device_tokens + self.loaded_tokens


@dataclass(slots=True)
class PrefillProgress:
    """Where the tokens of a prompt came from. Written by `Prefills` only, except `planned`.

    The prompt's end is `planned` with a step and `counted` after that step.
    """

    planned: bool = False
    counted: bool = False
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    missed_tokens: MissedTokens = field(default_factory=MissedTokens)
    evicted_between_s: tuple[float, float] | None = None
    least: FoundTokens | None = None
    """What an attempt found that was preempted before the prompt's end, the least of several."""


@dataclass(slots=True)
class RequestTimes:
    """When a request passed its stages, in Unix seconds of the engine's calls; None for a stage that it has not passed.

    `load_s` is the time in which it waited for loads, up to the step after each; `load_began_s` belongs to one that has
    not ended. `later_s` and `later_began_s` are the same for waits before a match: for loads of other requests, for
    stores and for tiers; `tier_s` is the part of it for its own promotions, None if it never waited for them.
    `computed_s` is the time of the step after its prompt was computed, when it had its first token.
    """

    arrived_s: float
    scheduled_s: float | None = None
    load_began_s: float | None = None
    load_s: float = 0.0
    later_began_s: float | None = None
    later_s: float = 0.0
    tier_s: float | None = None
    computed_s: float | None = None
    finished_s: float | None = None

    def record_schedule(self, now_s: float, *, is_loading: bool) -> None:
        """Record that the engine has allocated blocks to the request, and whether it waits for a load from now on."""
        if self.scheduled_s is None:
            self.scheduled_s = now_s
        if is_loading and self.load_began_s is None:
            self.load_began_s = now_s

    def record_match(self, now_s: float, *, is_later: bool) -> None:
        """Record whether the request has to wait before it can be matched."""
        if is_later and self.later_began_s is None:
            self.later_began_s = now_s
        elif not is_later and self.later_began_s is not None:
            self.later_s += max(0.0, now_s - self.later_began_s)
            self.later_began_s = None

    def end_load(self, now_s: float) -> None:
        """Record that the request waits for no load from now on."""
        if self.load_began_s is not None:
            self.load_s += max(0.0, now_s - self.load_began_s)
            self.load_began_s = None


class StageKind(StrEnum):
    """Kind of a stage of a traced request."""

    MATCH = "match"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class TraceStage:
    """A stage of a traced request that has ended, in Unix seconds of the engine's calls.

    A match lasts from the first look-up of an admission to its `commit`, and led to a load of `num_tokens` tokens. The
    copies of a load or store took `copy_s` on the slowest worker, all requests of the job together.
    """

    kind: StageKind
    began_s: float
    ended_s: float
    num_lookups: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    copy_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class TraceProgress:
    """The match of a traced request that has not ended, and the receiver of its stages and of its final view."""

    receive: Callable[[TraceStage | RequestView], None]
    began_s: float = 0.0
    num_lookups: int = 0

    def record_lookup(self, now_s: float) -> None:
        """Count a look-up."""
        if not self.num_lookups:
            self.began_s = now_s
        self.num_lookups += 1

    def end_match(self, now_s: float, num_tokens: int = 0) -> None:
        """End the match, if there were look-ups since the last one."""
        if self.num_lookups:
            self.receive(TraceStage(StageKind.MATCH, self.began_s, now_s, self.num_lookups, num_tokens))
            self.num_lookups = 0


@dataclass(slots=True)
class RequestState:
    """One announced request. The scheduler writes the fields of this class, other parts only their own record.

    `subject` is what rules match, as it was at the arrival. `storing` are the store decisions for each group. The first
    `ordered_tokens` tokens are in eviction order, written by `StoreJobs`. `now_s` is the time of the engine call that
    is being processed. `trace` is None if it is not sampled. `lease` is written by `Retention` at its end. A request
    with an `error`, and one whose hashes leave something out (`unhashed`), is computed without offloading: none of its
    keys is made, looked up or offered.
    """

    sequence: int
    request: EngineRequest
    keys: RequestKeys
    subject: RuleSubject
    patch: PolicyPatch
    policy: EffectivePolicy
    policy_version: int
    storing: tuple[GroupProgress, ...]
    times: RequestTimes
    ordered_tokens: int = 0
    has_recorded_uses: bool = False
    phase: RequestPhase = RequestPhase.WAITING
    block_ids: BlockTables = ()
    num_blocks: int = 0
    num_computed_tokens: int = 0
    now_s: float = 0.0
    store: StoreCounts = field(default_factory=StoreCounts)
    load: LoadProgress = field(default_factory=LoadProgress)
    wait: WaitProgress = field(default_factory=WaitProgress)
    tiers: TierProgress = field(default_factory=TierProgress)
    prefill: PrefillProgress = field(default_factory=PrefillProgress)
    trace: TraceProgress | None = None
    error: str | None = None
    unhashed: str | None = None
    lease: LeaseReceipt | None = None
    origin: RequestIdentity = field(init=False)

    def __post_init__(self) -> None:
        self.origin = self.subject.origin

    @property
    def is_offloaded(self) -> bool:
        """Whether its blocks may be looked up and offered."""
        return self.error is None and self.unhashed is None

    @classmethod
    def without_offloading(
        cls, sequence: int, request: EngineRequest, groups: Sequence[Group], now_s: float
    ) -> RequestState:
        """Return the state of a request that could not be announced, of which only the engine's object is known."""
        return cls(
            sequence=sequence,
            request=request,
            keys=RequestKeys(request, groups),
            subject=RuleSubject(RequestIdentity(request.request_id[:MAX_NAME_CHARS])),
            patch={},
            policy=NO_OFFLOADING,
            policy_version=0,
            storing=tuple(map(GroupProgress, groups)),
            times=RequestTimes(now_s),
        )

    def update_policy(self, policies: PolicyResolver, now_s: float) -> None:
        """Resolve the policy again if any policy has changed, in an engine call. Requires: manager lock held."""
        self.now_s = now_s
        if self.policy_version != policies.version and self.error is None:
            self.policy = _resolve_policy(policies, self.request, self.subject, self.patch, now_s, self.policy)
            self.policy_version = policies.version

    def discard(self) -> None:
        """Begin anew after an exception in any call: the request is computed without offloading from now on."""
        self.error = self.error or DISCARDED
        load = self.load
        self.load = LoadProgress(
            matched_tokens=load.matched_tokens, device_tokens=load.device_tokens, loaded_tokens=load.loaded_tokens
        )
        self.wait, self.tiers = WaitProgress(), TierProgress(promoted=self.tiers.promoted)
        if self.phase is RequestPhase.LOADING:
            self.phase = RequestPhase.WAITING

    def record_promoted(self, first: int, last: int, tier: str) -> None:
        """Record that a tier loaded the aligned pieces `first` to `last`, unless the prompt is already counted."""
        if not self.prefill.counted and self.phase is not RequestPhase.FINISHED:
            self.tiers.promoted.update(dict.fromkeys(range(first, last + 1), tier))

    def view(self) -> RequestView:
        """Return a view whose counts continue to change."""
        request = self.request
        return RequestView(
            sequence=self.sequence,
            request_id=request.request_id,
            aliases=tuple(request.aliases),
            phase=self.phase,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_tokens - request.num_prompt_tokens,
            tenant=request.tenant,
            lora=request.lora,
            session=self.origin.session,
            priority=getattr(request, "priority", None),
            policy=self.policy,
            prompt_tokens=self.prefill.prompt_tokens,
            missed_tokens=self.prefill.missed_tokens,
            evicted_between_s=self.prefill.evicted_between_s,
            store=self.store,
            times=self.times,
            error=self.error,
            lease=self.lease,
        )


def _resolve_policy(
    policies: PolicyResolver,
    request: EngineRequest,
    subject: RuleSubject,
    patch: PolicyPatch,
    now_s: float,
    before: EffectivePolicy | None = None,
) -> EffectivePolicy:
    """Return the effective policy of a request, without what its engine cannot do. Requires: manager lock held."""
    policy = policies.resolve(subject, patch, now_s, before)
    unhashed = getattr(request, "unhashed", None)
    if unhashed is None and getattr(request, "may_load", True):
        return policy
    if unhashed is None:
        sources = policy.sources | {"load": "engine"}
        return replace(policy, policy=replace(policy.policy, load=False), sources=sources)
    sources = policy.sources | dict.fromkeys(("store", "load"), f"engine:{unhashed}")
    return replace(policy, policy=replace(policy.policy, store=False, load=False), sources=sources)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as operators see it, detached from the engine. `sequence` increases with each announcement.

    With an `error`, the hook and the type of the exception or `DISCARDED`, it is computed without offloading.

    Finished requests are kept in this form, in at most 5 KiB each: long texts are shortened, but for the session.
    """

    sequence: int
    request_id: str
    aliases: tuple[str, ...]
    phase: RequestPhase
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str | None
    lora: str | None
    session: str | None
    priority: int | None
    policy: EffectivePolicy
    prompt_tokens: PromptTokens
    missed_tokens: MissedTokens
    evicted_between_s: tuple[float, float] | None
    store: StoreCounts
    times: RequestTimes
    error: str | None = None
    lease: LeaseReceipt | None = None

    def subject(self) -> RuleSubject:
        """Return the properties that rules match. Shortened texts do not match as the whole ones did."""
        origin = RequestIdentity(self.request_id, self.tenant, self.lora, self.aliases, self.session)
        return RuleSubject(origin, self.num_prompt_tokens, self.priority)

    def bounded(self) -> RequestView:
        """Return the view with long texts shortened."""
        policy = self.policy.policy
        if policy.tiers is not None:
            policy = replace(policy, tiers=tuple(map(shorten, policy.tiers[:_MAX_NAMES])))
        return replace(
            self,
            request_id=shorten(self.request_id),
            aliases=tuple(map(shorten, self.aliases[-_MAX_ALIASES:])),
            tenant=None if self.tenant is None else shorten(self.tenant),
            lora=None if self.lora is None else shorten(self.lora),
            policy=replace(self.policy, policy=policy),
            error=None if self.error is None else shorten(self.error),
        )


def shorten(text: str) -> str:
    """Replace the end of a long text by a digest of the text."""
    if len(text) <= _MAX_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{text[: _MAX_CHARS - _DIGEST_CHARS - 1]}~{digest}"


class RequestTable:
    """Live requests by id, and views of the latest finished ones. Requires: manager lock held, with exceptions."""

    def __init__(self, num_recent: int, policies: PolicyResolver, lock: RLock) -> None:
        self.live: dict[str, RequestState] = {}
        self._policies = policies
        self._lock = lock
        self._num_recent = num_recent
        self._recent: dict[int, RequestView] = {}
        # By sequence: a request keeps its place when it finishes.
        self._known: dict[int, RequestState | RequestView] = {}
        self.last_sequence = 0
        """The number of the latest announcement."""

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.live.values())

    def all_known(self) -> list[RequestState | RequestView]:
        """Return the live requests and the recent ones."""
        return list(self._known.values())

    def next_sequence(self) -> int:
        """Return the number of the next announcement."""
        self.last_sequence += 1
        return self.last_sequence

    def new_state(
        self, request: EngineRequest, keys: RequestKeys, patch: PolicyPatch, groups: Sequence[Group], now_s: float
    ) -> RequestState:
        """Return the state of a new request, without a change of any other state."""
        trace = getattr(request, "trace", None)
        name = request.request_id[:MAX_NAME_CHARS]
        given = getattr(request, "session", None)
        session = given if is_session(given) else None
        origin = RequestIdentity(name, request.tenant, request.lora, tuple(request.aliases), session)
        subject = RuleSubject(origin, request.num_prompt_tokens, getattr(request, "priority", None))
        return RequestState(
            sequence=self.next_sequence(),
            request=request,
            keys=keys,
            subject=subject,
            patch=patch,
            policy=_resolve_policy(self._policies, request, subject, patch, now_s),
            policy_version=self._policies.version,
            storing=tuple(map(GroupProgress, groups)),
            times=RequestTimes(now_s),
            trace=None if trace is None else TraceProgress(trace),
            unhashed=getattr(request, "unhashed", None),
        )

    def add(self, state: RequestState) -> None:
        """Add a live request."""
        self.live[state.request.request_id] = state
        self._known[state.sequence] = state

    def retire(self, state: RequestState) -> RequestView:
        """Move a live request to the recent ones, release the engine's object, and return the view.

        Counts continue while stores of the request are open. If this raises, the request stays live and can be finished
        again.
        """
        state.phase = RequestPhase.FINISHED
        view = state.view().bounded()
        del self.live[state.request.request_id]
        state.request = state.keys.request = PlainRequest()
        state.block_ids = ()
        state.load.misses = None
        state.tiers.promoted = {}
        self._known[state.sequence] = self._recent[state.sequence] = view
        if len(self._recent) > self._num_recent:
            oldest = next(iter(self._recent))
            del self._recent[oldest], self._known[oldest]
        return view

    def some(self, sequences: Iterable[int]) -> list[RequestState | RequestView]:
        """Return those of these requests that are still known, in this order."""
        return [request for sequence in sequences if (request := self._known.get(sequence)) is not None]

    def page(
        self, after: int | None, limit: int, now_s: float, fits: Callable[[RequestView], bool] = lambda view: True
    ) -> list[RequestView]:
        """Return views of live and recent requests, latest first; `after` is the last sequence of the previous page.

        Only those that fit are copied and count. Fewer than `limit` are the last ones. Thread: any; acquires the
        manager lock, as `find` does.
        """
        with self._lock:
            sequences = list(self._known)
        end = len(sequences) if after is None else bisect_left(sequences, after)
        views: list[RequestView] = []
        while end > 0 and len(views) < limit:
            start = max(end - _VIEW_BATCH, 0)
            with self._lock:
                current = (self._current(request, now_s) for request in self.some(reversed(sequences[start:end])))
                views += map(copy_counts, islice(filter(fits, current), limit - len(views)))
            end = start
        return views

    def find(self, request_id: str, now_s: float) -> RequestView | None:
        """Return a view of the latest request with this id or alias; live requests and exact ids come first."""
        with self._lock:
            latest = self._find(request_id)
            return None if latest is None else copy_counts(self._current(latest, now_s))

    def _current(self, request: RequestState | RequestView, now_s: float) -> RequestView:
        """Return a view whose counts continue to change. A finished request keeps its last policy."""
        if isinstance(request, RequestView):
            return request
        request.update_policy(self._policies, now_s)
        return request.view()

    def _find(self, request_id: str) -> RequestState | RequestView | None:
        exact = self.live.get(request_id)
        if exact is not None:
            return exact
        for state in reversed(self.live.values()):
            if request_id in state.request.aliases:
                return state
        short = shorten(request_id)
        recent = list(reversed(self._recent.values()))
        named = [view for view in recent if view.request_id == short]
        return next(iter(named or [view for view in recent if short in view.aliases]), None)
