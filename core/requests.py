"""What core remembers of a request, from its announcement until a thousand others have finished after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import merge
from typing import Any, NamedTuple

from kvferry.core.engine_api import BlockTables, EngineRequest
from kvferry.core.groups import Group
from kvferry.core.hits import PrefixHit
from kvferry.core.keys import Key, RequestIdentity, make_keys
from kvferry.core.policy import EffectivePolicy, PolicyResolver
from kvferry.core.pool.pins import Pin
from kvferry.core.rules import RuleSubject
from kvferry.core.stats import MissCause, MissedTokens, Misses, PromptTokens, SkipReason, StoreCounts
from kvferry.core.tier_look import TierLook
from kvferry.core.tier_sessions import TierSession
from kvferry.core.transfers import LoadOutcome

_MAX_CHARS = 128
_DIGEST_CHARS = 32
_MAX_NAMES = 4
_MAX_ALIASES = 8
"""The last ones are kept: clients know a request by what is most stripped of decoration."""


class RequestPhase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is kept of an engine's request once it is over: an `EngineRequest` without blocks."""

    request_id: str
    aliases: tuple[str, ...]
    num_prompt_tokens: int
    num_tokens: int
    tenant: str | None
    lora: str | None
    block_hashes: tuple[bytes, ...] = ()
    kv_transfer_params: None = None


@dataclass(slots=True)
class GroupProgress:
    """A request's slots in one group: their keys, and how many from the start have their answer, which stands.

    In lazy mode the verdict on the first `kept` slots is noted at the device blocks that the request has now. `passed`
    are ranges of slots before `answered` that were not offered.
    """

    group: Group
    keys: list[Key] = field(default_factory=list)
    answered: int = 0
    kept: int = 0
    refused_at: int | None = None
    noted_refused: int = 0
    noted_parts: int = 0
    passed: list[tuple[int, int]] = field(default_factory=list)

    def pass_over(self, end: int) -> None:
        """Advance `answered` to `end` over slots that are not offered, since no hit would read them."""
        if end <= self.answered:
            return
        first = self.passed.pop()[0] if self.passed and self.passed[-1][1] == self.answered else self.answered
        self.passed.append((first, end))
        self.answered = end

    def extend_keys(self, block_hashes: Sequence[bytes], num_slots: int) -> int:
        """Make the keys of the first `num_slots` slots, or of as many as have a hash, and say how many there are."""
        known = len(self.keys)
        if known < num_slots:
            # A slot goes by its last block, whose chained hash covers all before it.
            step = self.group.hashes_per_slot
            self.keys += make_keys(block_hashes[(known + 1) * step - 1 : num_slots * step : step], self.group.index)
        return min(len(self.keys), num_slots)


def chain(groups: Sequence[GroupProgress], end_token: int, first_token: int = 0) -> list[Key]:
    """The keys of all groups' slots that end behind `first_token`, and at or before `end_token`, in that order."""
    sizes = [progress.group.slot_tokens for progress in groups]
    parts = [
        progress.keys[first_token // size : end_token // size] for progress, size in zip(groups, sizes, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    ends = (
        [(number * size, key) for number, key in enumerate(keys, first_token // size + 1)]
        for keys, size in zip(parts, sizes, strict=True)
    )
    return [key for _, key in merge(*ends)]


def subject_of(request: EngineRequest, origin: RequestIdentity) -> RuleSubject:
    """A request as rules see it. Not every engine knows priorities."""
    return RuleSubject(origin, request.num_prompt_tokens, getattr(request, "priority", None))


class PromotedRun(NamedTuple):
    """Pieces of a prompt of the layout's alignment each, from number `first` to `last`, and the tier they came from."""

    first: int
    last: int
    tier: str


@dataclass(slots=True)
class RequestState:
    """One announced request. `promoted` are runs of aligned pieces of the prompt, and the tier that brought them."""

    sequence: int
    request: EngineRequest
    groups: tuple[GroupProgress, ...]
    origin: RequestIdentity
    patch: Mapping[str, Any]
    policy: EffectivePolicy
    policy_version: int
    phase: RequestPhase = RequestPhase.WAITING
    block_ids: BlockTables = ()
    num_blocks: int = 0
    num_computed_tokens: int = 0
    ordered_tokens: int = 0
    boundary_tokens: int = 0
    hit: PrefixHit | None = None
    pin: Pin | None = None
    matched_tokens: int | None = None
    found_end: int = 0
    in_pool: MissCause = MissCause.GAP
    misses: Misses | None = None
    load_wanted: bool | None = None
    decline_noted: bool = False
    load_failed: bool = False
    lost_load: LoadOutcome | None = None
    waits_until_s: float | None = None
    follow_until_s: float | None = None
    leader: int | None = None
    leads: Sequence[bytes] = ()
    session: TierSession | None = None
    look: TierLook | None = None
    promoted: list[PromotedRun] = field(default_factory=list)
    now_s: float = 0.0
    device_tokens: int = 0
    loaded_tokens: int = 0
    prefill_planned: bool = False
    prefill_counted: bool = False
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    missed_tokens: MissedTokens = field(default_factory=MissedTokens)
    evicted_between_s: tuple[float, float] | None = None
    store: StoreCounts = field(default_factory=StoreCounts)

    def extend_keys(self) -> None:
        """Make the keys of all slots that a hit may read. Thread: engine; the manager lock is not needed."""
        for progress in self.groups:
            progress.extend_keys(self.request.block_hashes, (self.request.num_tokens - 1) // progress.group.slot_tokens)

    def keys_of_parts(self, group: Group, first_block: int, end_block: int) -> list[Key]:
        """Make the keys of those of these blocks that do not end a slot, each standing for the block alone."""
        step = group.hashes_per_slot // group.slot_blocks
        hashes = self.request.block_hashes
        numbers = range(first_block, min(end_block, len(hashes) // step))
        parts = (hashes[(i + 1) * step - 1] for i in numbers if (i + 1) % group.slot_blocks)
        return make_keys(parts, group.index)

    def note_promoted(self, first: int, last: int, tier: str) -> None:
        """Note that a tier brought the aligned pieces `first` to `last`, unless the prompt is accounted for already."""
        if self.prefill_counted or self.phase is RequestPhase.FINISHED:
            return
        run = self.promoted[-1] if self.promoted else None
        if run is not None and run.tier == tier and run.first <= first <= run.last + 1:
            self.promoted[-1] = PromotedRun(run.first, max(run.last, last), tier)
        else:
            self.promoted.append(PromotedRun(first, last, tier))

    def settle(self, policies: PolicyResolver, now_s: float) -> None:
        """Bring the policy up to date, and note the time for what is done under it. Called under the manager's lock."""
        self.now_s = now_s
        if self.policy_version != policies.version:
            self.policy = policies.settle(subject_of(self.request, self.origin), self.patch, now_s, self.policy)
            self.policy_version = policies.version

    def forget_progress(self) -> None:
        """Forget which blocks the device holds and how far they are computed, until the engine reports it again."""
        self.block_ids = ()
        self.num_computed_tokens = 0
        self.misses = None
        for progress in self.groups:
            progress.refused_at = None

    def split_storable(self, group: Group, first: int, end: int) -> tuple[int, list[tuple[SkipReason, int]]]:
        """Of full slots `first` to `end`, where the storable ones end, and how many of the rest are kept back why."""
        policy = self.policy.policy
        if not policy.store:
            return first, [(SkipReason.DISABLED, end - first)]
        prompt_end, cap_end = self._storable_ends(group, end)
        storable_end = max(first, min(end, prompt_end, cap_end))
        decode = end - max(storable_end, min(prompt_end, end))
        capped = end - storable_end - decode
        kept_back = [(SkipReason.TOKEN_CAP, capped), (SkipReason.PROMPT_ONLY, decode)]
        return storable_end, [(reason, count) for reason, count in kept_back if count]

    def longest_hit(self, alignment_tokens: int, num_tokens: int) -> int:
        """Where the longest hit of these first `num_tokens` tokens ends, with all whole slots stored that may be.

        It leaves the last token to compute.
        """
        end_token = max(num_tokens - 1, 0)
        for progress in self.groups:
            size = progress.group.slot_tokens
            full = num_tokens // size
            end_token = min(end_token, size * min(full, *self._storable_ends(progress.group, full)))
        return end_token // alignment_tokens * alignment_tokens

    def _storable_ends(self, group: Group, end: int) -> tuple[int, int]:
        """Where prompt and cap end the slots of a group that may be stored; at `end` where they do not."""
        policy = self.policy.policy
        prompt_end = self.request.num_prompt_tokens // group.slot_tokens if policy.offload_prompt_only else end
        cap_end = end if policy.max_offload_tokens is None else policy.max_offload_tokens // group.slot_tokens
        return prompt_end, cap_end

    @property
    def loadable_tokens(self) -> int:
        """The tokens from the start that may be loaded: not the last one, and none beyond the policy's cap."""
        cap = self.policy.policy.max_load_tokens
        last = self.request.num_tokens - 1
        return last if cap is None else min(last, cap)

    def is_load_cap(self, end_token: int, alignment_tokens: int) -> bool:
        """Whether a hit that ends at `end_token` would be longer but for the policy's cap."""
        return (
            self.loadable_tokens < self.request.num_tokens - 1 and end_token + alignment_tokens > self.loadable_tokens
        )

    @property
    def answered_tokens(self) -> int:
        """The tokens from the start whose slots have their answer in some group."""
        return max(progress.answered * progress.group.slot_tokens for progress in self.groups)

    def why_hit_lost(self) -> MissCause:
        """Why tokens that the pool had were computed, where any were."""
        if self.load_failed:
            return MissCause.LOAD_FAILED
        return MissCause.DECLINED if self.policy.policy.load else MissCause.LOAD_DISABLED

    def retire(self) -> None:
        """Let go of the engine's own object and of the keys. Counts go on while stores of this request are open."""
        request = self.request
        self.request = FinishedRequest(
            request.request_id,
            tuple(request.aliases),
            request.num_prompt_tokens,
            request.num_tokens,
            request.tenant,
            request.lora,
        )
        self.phase = RequestPhase.FINISHED
        self.groups = ()
        self.block_ids = ()
        self.misses = None
        self.promoted = []

    def view(self) -> RequestView:
        """What may be shown, with the counts that go on counting."""
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
            policy=self.policy,
            prompt_tokens=self.prompt_tokens,
            missed_tokens=self.missed_tokens,
            evicted_between_s=self.evicted_between_s,
            store=self.store,
        )


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as it is shown, detached from the engine. `sequence` grows with each announcement.

    Of a finished request this is all that is remembered, in at most 4 KiB: long texts are shortened.
    """

    sequence: int
    request_id: str
    aliases: tuple[str, ...]
    phase: RequestPhase
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str | None
    lora: str | None
    policy: EffectivePolicy
    prompt_tokens: PromptTokens
    missed_tokens: MissedTokens
    evicted_between_s: tuple[float, float] | None
    store: StoreCounts

    def copy(self) -> RequestView:
        """The counts of this moment."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens.copy(),
            missed_tokens=self.missed_tokens.copy(),
            store=self.store.copy(),
        )

    def bounded(self) -> RequestView:
        """The same with long texts shortened."""
        policy = self.policy.policy
        if policy.tiers is not None and len(policy.tiers) > _MAX_NAMES:
            policy = replace(policy, tiers=policy.tiers[:_MAX_NAMES])
        if policy.tiers is not None:
            policy = replace(policy, tiers=tuple(map(shorten, policy.tiers)))
        return replace(
            self,
            request_id=shorten(self.request_id),
            aliases=tuple(map(shorten, self.aliases[-_MAX_ALIASES:])),
            tenant=None if self.tenant is None else shorten(self.tenant),
            lora=None if self.lora is None else shorten(self.lora),
            policy=replace(self.policy, policy=policy),
        )


def shorten(text: str) -> str:
    """A text of bounded length: the beginning and a digest of one that is longer."""
    if len(text) <= _MAX_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{text[: _MAX_CHARS - _DIGEST_CHARS - 1]}~{digest}"


class RequestTable:
    """Live requests by id, and the latest finished ones."""

    def __init__(self, num_recent: int) -> None:
        self._num_recent = num_recent
        self._live: dict[str, RequestState] = {}
        self._recent: dict[int, RequestView] = {}
        # In the order of their sequences, since a request keeps its place when it finishes.
        self._known: dict[int, RequestState | RequestView] = {}
        self._next_sequence = 1

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._live.values())

    def all_known(self) -> list[RequestState | RequestView]:
        """The live requests and the recent ones."""
        return list(self._known.values())

    def next_sequence(self) -> int:
        """The number of the next announcement."""
        self._next_sequence += 1
        return self._next_sequence - 1

    def get(self, request_id: str) -> RequestState | None:
        """The live request of this exact id."""
        return self._live.get(request_id)

    def add(self, state: RequestState) -> None:
        """Remember a live request."""
        self._live[state.request.request_id] = state
        self._known[state.sequence] = state

    def retire(self, state: RequestState) -> None:
        """Move a live request to the recent ones. It stays live if that raises, so that it can be finished again."""
        state.retire()
        view = state.view().bounded()
        del self._live[state.request.request_id]
        self._known[state.sequence] = self._recent[state.sequence] = view
        if len(self._recent) > self._num_recent:
            oldest = next(iter(self._recent))
            del self._recent[oldest], self._known[oldest]

    def sequences(self) -> list[int]:
        """The sequences of the live and the recent requests, the earliest announced first."""
        return list(self._known)

    def some(self, sequences: Iterable[int]) -> list[RequestState | RequestView]:
        """Those of these requests that are still known, in this order."""
        return [found for sequence in sequences if (found := self._known.get(sequence)) is not None]

    def find(self, request_id: str) -> RequestState | RequestView | None:
        """The latest request that goes by this id, live ones and exact ids first."""
        exact = self._live.get(request_id)
        if exact is not None:
            return exact
        for state in reversed(self._live.values()):
            if request_id in state.request.aliases:
                return state
        short = shorten(request_id)
        alias: RequestView | None = None
        for view in reversed(self._recent.values()):
            if view.request_id == short:
                return view
            if alias is None and short in view.aliases:
                alias = view
        return alias
