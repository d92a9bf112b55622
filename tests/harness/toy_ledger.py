"""What a toy engine remembers of what it asked of core and what it was told, to hold the one against the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.core.cost_model import LoadDecision
from kvferry.core.counters import copy_counts
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import TierWait, TierWaitMode
from kvferry.core.scheduler.jobs import StoreCause, StorePart
from kvferry.core.scheduler.requests import RequestPhase, RequestState
from kvferry.core.scheduler.resets import ResetTicket
from kvferry.core.scheduler.scheduler import Hit, Later, MatchResult
from kvferry.core.scheduler.tier_loads import LookupPhase
from kvferry.core.stats import PromptTokens, StoreCounts
from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult
from tests.harness.toy_compute import Chunk, first_needed
from tests.harness.toy_oracle import (
    PolicyOracle,
    boundary_slots,
    find_boundary,
    key_of,
    longest_hit,
    matches,
    needed_slots,
)
from tests.harness.toy_tokens import ToyRequest

if TYPE_CHECKING:
    from tests.harness.toy_engine import ToyEngine

PINNED_WAIT_S = 1.0
KINDS_OF_WAITS = 3
"""For tiers, for another request's load or promotion, and for blocks that only the device has."""


@dataclass
class Record:
    """One announced request. `told` are the tokens that core knows to be computed, None while it may not offer any.

    `storable` are the fewest and the most tokens that its policy let be stored at any time so far.
    """

    request: ToyRequest
    state: RequestState
    full: list[int]
    granted: list[int]
    storable: tuple[int, int]
    told: int | None = None
    was_preempted: bool = False
    was_admitted: bool = False
    is_session: bool = False
    failed: bool = False
    waits_until_s: float | None = None
    tier_wait: TierWait | None = None
    """What its policy said when `waits_until_s` was set; None: it is to be set anew."""
    waited_s: float = 0.0
    """When it was last seen to wait."""
    num_lapsed: int = 0
    """How often `waits_until_s` was set anew because it passed before the next match."""


@dataclass
class JobNote:
    """One planned job, and who has reported it."""

    job: TransferJob
    seconds: float = 0.0
    reported: set[int] = field(default_factory=set)


@dataclass
class ResetNote:
    """A reset that is about to come: the pool's epoch, and the generation of each slot that it has to drop."""

    match: RequestFilter | None
    places: Sequence[str] | None
    epoch: int
    generations: dict[int, int] = field(default_factory=dict)


class Ledger:
    """Called by the engine around what it does; every method either notes something or fails an assertion."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._groups = engine.groups
        self._events = engine.events
        self.policies = PolicyOracle(engine.policies.settings)
        self.live: dict[str, Record] = {}
        self.ended: list[Record] = []
        self._settled = (StoreCounts(), PromptTokens(tier_hit=dict.fromkeys(engine.tiers, 0)))
        self._num_checks = 0
        self.num_seen = self.num_finished = self.num_preempted = 0
        self.grants: set[bytes] = set()
        self.jobs: dict[int, JobNote] = {}
        self.seconds = {"store": 0.0, "load": 0.0}
        self.disowned: dict[int, int] = {}
        self.tenants: tuple[dict[str | None, int | None], Counter[str | None], int] = ({}, Counter(), 0)
        """Limits and slots of the tenants at the latest check, and the number of blocks that came besides stores."""
        self.was_lazy = engine.offload.store_mode is StoreMode.LAZY
        kinds = {group.spec.kind for group in self._groups}
        self._one_full = [group.spec.kind for group in self._groups] == [GroupKind.FULL]
        self._has_full = GroupKind.FULL in kinds
        self._has_states = GroupKind.RECURRENT in kinds
        self._has_windows = GroupKind.SLIDING in kinds and GroupKind.RECURRENT not in kinds

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrived(self, request: ToyRequest) -> None:
        """A request was announced."""
        state = self._engine.offload.requests.live.get(request.request_id)
        assert state is not None
        self.num_seen += 1
        count = len(self._groups)
        limit = self.policies.storable_tokens(request, self._engine.now_s)
        self.live[request.request_id] = Record(request, state, [0] * count, [0] * count, (limit, limit))
        self.learn(request)

    def learn(self, request: ToyRequest) -> None:
        """A request has new tokens."""
        self._engine.truth.learn(request)
        self.grant(self.live[request.request_id])

    def grant(self, record: Record) -> None:
        """Note what may be stored of a request by its policy of this moment."""
        request = record.request
        limit = self.policies.storable_tokens(request, self._engine.now_s)
        record.storable = min(record.storable[0], limit), max(record.storable[1], limit)
        limit = min(limit, request.num_hashed)
        for group in self._groups:
            granted = record.granted[group.index]
            if limit // group.slot_tokens > granted:
                record.granted[group.index] = limit // group.slot_tokens
                self.grants.update(key_of(request, group, slot) for slot in range(granted, limit // group.slot_tokens))

    def grant_all(self) -> None:
        """Policies may have changed."""
        for record in self.live.values():
            self.grant(record)

    def continued(self, request: ToyRequest, num_kept: int) -> None:
        """A session has a longer prompt behind the tokens kept, so that slots are offered that were kept back."""
        record = self.live[request.request_id]
        record.is_session = True
        record.granted = [
            min(each, num_kept // group.slot_tokens) for each, group in zip(record.granted, self._groups, strict=True)
        ]
        self.learn(request)

    def finishing(self, request: ToyRequest) -> None:
        """A request is about to be ended."""
        record = self.live[request.request_id]
        self.grant(record)
        if request.state == "loading":
            self._events["aborted while loading"] += 1
        if not record.was_admitted:
            self._events["ended before it was scheduled"] += 1
        if self._engine.under_way(request):
            self._events["ended with a step under way"] += 1

    def finished(self, request: ToyRequest) -> None:
        """All that was full has its answer, each slot once."""
        record = self.live[request.request_id]
        if record.told is not None:
            if not self._has_states or request.num_computed < record.told:
                # With the drafts that were accepted since, and without those that were not.
                record.told = request.num_computed
            self._note_full(record, record.told)
        self._retire(record)
        if record.failed or record.is_session or self.was_lazy:
            return
        offered = record.state.store.offered
        most = sum(full * group.slot_blocks for full, group in zip(record.full, self._groups, strict=True))
        if request.unhashed is not None:
            most = 0
        assert offered <= most, f"{request.request_id}: {offered} blocks were offered, and only {most} were ever full"
        if record.told is not None and self._one_full:
            assert offered == most, f"{request.request_id}: {offered} blocks have their answer, and {most} were full"
        if record.told is not None and self._has_windows and not record.was_preempted:
            self._check_windows(record, record.told)

    def _check_windows(self, record: Record, told: int) -> None:
        """Of windows those at the end of the prompt, at its boundary and where it was aborted were offered."""
        request, state = record.request, record.state
        prompt = request.num_prompt_tokens
        if record.storable != (prompt, prompt):
            return
        layout, boundary, most = self._engine.layout, state.load.boundary_tokens, 0
        step, skipped = layout.alignment_tokens, layout.skipped_tokens
        for group, full in zip(self._groups, record.full, strict=True):
            slots = set(range(full))
            if group.spec.kind is GroupKind.SLIDING:
                slots = boundary_slots(group, boundary, boundary + skipped) if boundary else set()
                interval, reach = layout.window_interval_tokens, group.reach_tokens or 0
                for end in range(interval, full * group.slot_tokens + reach + 1, interval) if interval else ():
                    slots |= boundary_slots(group, end, -(-end // group.slot_tokens) * group.slot_tokens)
                for num_tokens in {prompt, min(told, prompt)}:
                    whole = [num_tokens // each.slot_tokens * each.slot_tokens for each in self._groups]
                    resumable = min(num_tokens - 1, *whole) // step * step - skipped
                    slots |= boundary_slots(group, max(resumable, 0), full * group.slot_tokens)
                # Nothing of a hit is there before its last window.
                hit_end = state.load.device_tokens + state.load.loaded_tokens
                slots &= set(range(-(-first_needed(group, hit_end) // group.slot_blocks), full))
            most += len(slots) * group.slot_blocks
        offered = state.store.offered
        assert offered <= most, f"{request.request_id}: {offered} blocks were offered, and boundaries need {most}"
        # What finds no space at once may have left its window when there is some.
        if not self._engine.habits.drops_passed and not state.load.failed:
            assert offered == most, f"{request.request_id}: {offered} blocks were offered, boundaries need {most}"
            self._events["windows at a boundary were stored"] += boundary > 0

    def forgetting(self, request: ToyRequest) -> None:
        """An id is about to come again while its request is there."""
        self._events["an id came again while its request was there"] += 1
        self._retire(self.live[request.request_id])

    def _retire(self, record: Record) -> None:
        del self.live[record.request.request_id]
        self.num_finished += 1
        self.ended.append(record)

    def may_sum_up(self) -> bool:
        """Whether to look at all requests now: in lazy mode not every time, since ended ones never settle there."""
        self._num_checks += 1
        return not self.was_lazy or self._num_checks % 16 == 0

    def sum_up(self) -> tuple[StoreCounts, PromptTokens]:
        """What all requests add up to. One that has ended is added once for all when nothing of it is in flight."""
        if not self.was_lazy:
            done = [record for record in self.ended if record.state.store.in_flight == 0]
            self.ended = [record for record in self.ended if record.state.store.in_flight != 0]
            for record in done:
                _add(*self._settled, record.state)
        store, prompt = (copy_counts(counts) for counts in self._settled)
        for record in (*self.live.values(), *self.ended):
            _add(store, prompt, record.state)
        return store, prompt

    def preempting(self, request: ToyRequest) -> None:
        """A request is about to lose its blocks."""
        record = self.live[request.request_id]
        self.num_preempted += 1
        self._events["preempted while loading" if request.state == "loading" else "preempted"] += 1
        if any(part.request is record.state for job in self._engine.offload._jobs for part in job.parts):
            self._events["preempted with its stores in flight"] += 1
        if self._engine.under_way(request):
            self._events["preempted with a step under way"] += 1
        record.was_preempted = True
        record.told = record.waits_until_s = None
        if len(self._groups) == 1:
            # What was full and had found no space is lost with its blocks.
            record.full = [record.state.store.offered // self._groups[0].slot_blocks]

    # --- matching and loading ---------------------------------------------------------------------------------------

    def matched(self, request: ToyRequest, prefix: int, answer: MatchResult) -> None:
        """Hold an answer against the pool as it is."""
        record, engine = self.live[request.request_id], self._engine
        if isinstance(answer, Later):
            self._check_leader(record, prefix)
            return
        end, keys = longest_hit(engine, request, prefix, record.state.keys.known_end)
        # A prefix that this very match has found elsewhere makes the next hit longer.
        least = longest_hit(engine, request, prefix)[0] if engine.layout.skipped_tokens else end
        policy = self.policies.of(request, engine.now_s)
        settled = self.policies.is_settled(request, engine.now_s)
        if self._has_full and policy.load and settled:
            boundary = record.state.load.boundary_tokens
            expected = {find_boundary(engine, request, end), find_boundary(engine, request, least)}
            assert boundary in expected, f"{request.request_id} has its boundary at {boundary} instead of {expected}"
            self._events["left a prefix that others computed"] += boundary > 0
        found = answer.num_tokens if isinstance(answer, Hit) else 0
        # An override that ran out since the last step may have lifted the cap of a rule.
        assert 0 <= found <= end - prefix or not settled, f"a hit of {found} tokens, and the pool has {end - prefix}"
        assert found % engine.layout.alignment_tokens == 0
        assert policy.load or not found or not settled, "a request that may not load has a hit"
        if found and record.waits_until_s is not None:
            self._events["waited for another's load, then hit"] += 1
        elif prefix and record.waits_until_s is not None:
            self._events["waited for another's load, then found it on the device"] += 1
        if not policy.load or not settled or engine.offload.cost_model.decision is not LoadDecision.ALWAYS:
            self._events["a hit was declined"] += end > prefix and not found
            return
        pinned = sum(len(r.state.load.pin or ()) for r in self.live.values() if r is not record)
        room = max(engine.manager.num_slots // 2, 1) - pinned
        if len(keys) <= room:
            assert least <= found + prefix, f"a hit of {found} tokens, and the pool has {end - prefix} and room to pin"
        else:
            self._events["a hit was cut short by pins"] += 1
            self._check_cut(prefix, end, found, room)

    def _check_cut(self, prefix: int, end: int, found: int, room: int) -> None:
        """Hold a hit that was cut to `found` tokens against what fits: it pins no more, and hardly less."""

        def fits(end: int) -> bool:
            return sum(len(needed_slots(group, prefix, end)) for group in self._groups) <= room

        assert not found or fits(prefix + found), f"a hit of {found} tokens, and room to pin {room} slots"
        if self._one_full:
            step = self._engine.layout.alignment_tokens
            best = max((one - prefix for one in range(prefix, end, step) if fits(one)), default=0)
            lost = best - found
            assert lost < self._groups[0].slot_tokens + step, f"a hit of {found} tokens, and there is room for {best}"

    def _check_leader(self, record: Record, prefix: int) -> None:
        """Tiers are asked, or somebody else brings this very prefix, and the wait has a bound."""
        engine, request = self._engine, record.request
        place = (prefix + engine.layout.alignment_tokens) // request.hash_block_size - 1
        look = record.state.tiers.lookup
        if look is not None and look.phase is not LookupPhase.DONE and look.waits_for:
            self._events["waited for tiers"] += 1
        elif any(
            other is not record and other.state.phase is RequestPhase.WAITING and self._mark(record, place) in leads
            for other in self.live.values()
            if (leads := other.state.wait.loading)
        ):
            self._events["waited for another's promotion"] += 1
        elif self._has_demand(record):
            self._events["waited for blocks that only the device had"] += 1
        else:
            assert any(
                other is not request
                and other.state == "loading"
                and other.num_computed <= prefix < other.num_computed + other.num_loading
                and other.block_hashes[place] == request.block_hashes[place]
                for other in engine.requests.values()
            ), f"{request.request_id} waits for a load that nobody leads"
            self._events["waited for another's load"] += record.waits_until_s is None
        tier_wait = record.state.policy.policy.tier_wait
        if record.waits_until_s is None:
            record.num_lapsed = 0
        elif record.waited_s <= record.waits_until_s < engine.now_s and record.num_lapsed < KINDS_OF_WAITS:
            # A wait of another kind may begin only now.
            record.tier_wait = None
            record.num_lapsed += 1
        record.waited_s = engine.now_s
        if record.waits_until_s is None or tier_wait != record.tier_wait:
            # An operator may have given it more time meanwhile, or the clock was changed.
            record.tier_wait = tier_wait
            compute_s = engine.offload.cost_model.tokens_rate.estimate_s(request.num_tokens)
            wait_s = PINNED_WAIT_S if compute_s is None else compute_s
            if tier_wait.mode is TierWaitMode.WAIT_COMPLETE:
                # A look-up and a promotion for each part of the prompt, and for the loader that it follows.
                wait_s += 6 * max((client.timeout_s for client in engine.offload.tiers.clients), default=0.0)
            until_s = engine.now_s + wait_s + (tier_wait.timeout_s or 0.0)
            record.waits_until_s = max(until_s, record.waits_until_s or until_s)
        assert engine.now_s <= record.waits_until_s, f"{request.request_id} waits for ever"

    def _has_demand(self, record: Record) -> bool:
        """Blocks of the request are being stored, or will be with the next step, and it waits for them."""
        engine, wait = self._engine, record.state.wait
        demand, until_s = wait.demand, wait.demand_until_s
        if demand is None or until_s is None or engine.now_s >= until_s:
            return False
        if any(demand.request is record.state for demand in engine.offload._demands.open):
            return True
        parts = store_parts(engine)
        if not demand.keys:
            # It looks for blocks, or the stores for others hold as many as they may.
            others = engine.offload._demands.open or any(part.cause is StoreCause.DEMANDED for part in parts)
            return demand.search is not None or bool(others)
        stored = {key for part in parts for key in engine.manager.table.keys[part.slots].tolist()}
        # A tier may begin to bring a block that was to be stored from the device.
        stored.update(key for promotion in engine.offload.tiers.loads.open for key in promotion.keys)
        return not stored.isdisjoint(demand.keys)

    def _mark(self, record: Record, place: int) -> bytes:
        return record.request.block_hashes[place]

    def committed(self, request: ToyRequest) -> None:
        """A request got its blocks."""
        record = self.live[request.request_id]
        record.was_admitted = True
        record.waits_until_s = None
        record.told = None if request.num_loading else request.num_computed
        self._events["resumed after preemption"] += record.was_preempted
        if request.num_loading:
            self._events["loads"] += 1
            end = request.num_computed + request.num_loading
            for group in self._groups:
                size = group.slot_tokens
                self._events["loaded a slot without its head"] += request.num_computed % size > 0
                self._events["loaded a slot without its tail"] += end % size > 0
                self._events[f"loaded for a {group.spec.kind} group"] += 1

    def loaded(self, request: ToyRequest, outcome: LoadOutcome) -> None:
        """A load ended. Core offers nothing of the request before it hears of a step."""
        self.live[request.request_id].told = None
        self._events["loads that came"] += outcome.ok
        self._events["loads that failed"] += not outcome.ok

    # --- steps and jobs ---------------------------------------------------------------------------------------------

    def planned(self, chunk: Chunk) -> None:
        """A chunk is part of the next step."""
        record = self.live[chunk.request.request_id]
        record.told = chunk.end
        self._note_full(record, chunk.end)

    def _note_full(self, record: Record, num_tokens: int) -> None:
        request = record.request
        num_tokens = min(num_tokens, request.num_hashed)
        for group in self._groups:
            record.full[group.index] = max(record.full[group.index], num_tokens // group.slot_tokens)

    def step_failed(self, requests: Sequence[ToyRequest]) -> None:
        """What these hold was not computed."""
        self._events["a step failed"] += 1
        for request in requests:
            self.live[request.request_id].failed = True

    def clock_changed(self) -> None:
        """The clock leapt: a wait of another kind that begins only now has its whole time."""
        for record in self.live.values():
            record.tier_wait = None

    def expired(self) -> None:
        """Core let go of what is over."""
        if self.policies.overrides:
            self.policies.expire(self._engine.now_s)
            self.grant_all()

    def opened(self, plan: StepPlan) -> None:
        """Jobs were planned."""
        self.expired()
        for job in plan.jobs:
            self.jobs[job.job_id] = JobNote(job)

    def reported(self, results: Sequence[TransferResult]) -> None:
        """Sum up what ended, every rank's first report only, at the pace of the slowest."""
        for result in results:
            note = self.jobs.get(result.job_id)
            if note is None or result.worker in note.reported or not 0 <= result.worker < self._engine.num_workers:
                self._events["a report that nobody waited for"] += 1
                continue
            note.reported.add(result.worker)
            note.seconds = max(note.seconds, result.seconds)
            if len(note.reported) == self._engine.num_workers:
                self.seconds[note.job.direction] += note.seconds
                del self.jobs[result.job_id]

    # --- resets -----------------------------------------------------------------------------------------------------

    def resetting(self, match: RequestFilter | None, places: Sequence[str] | None) -> ResetNote:
        """A reset is about to come: note what it disowns."""
        offload, table = self._engine.offload, self._engine.manager.table
        of_pool = places is None or HOST in places
        note = ResetNote(match, places, offload.snapshot().epoch)
        self._disown_promotions(match, places, of_pool)
        if not of_pool:
            return note
        mine = [part for part in store_parts(self._engine) if match is None or matches(match, part.request.origin)]
        for part in mine:
            for slot in part.slots.tolist():
                self.disowned[slot] = int(table.generations[slot])
        kind = "whole reset" if match is None else "reset by match"
        self._events[f"{kind} with stores in flight"] += bool(mine)
        self._events[f"{kind} with loads in flight"] += any(not job.is_store for job in offload._jobs)
        ready = np.flatnonzero(table.is_ready(np.arange(table.end_slot))).tolist()
        note.generations = {
            slot: int(table.generations[slot]) for slot in ready if match is None or matches(match, table.origins[slot])
        }
        return note

    def _disown_promotions(self, match: RequestFilter | None, places: Sequence[str] | None, of_pool: bool) -> None:
        table = self._engine.manager.table
        for promotion in self._engine.offload.tiers.loads.open:
            if not of_pool and promotion.client.name not in (places or ()):
                continue
            name = promotion.client.name
            blocks = self._engine.tiers[name].blocks
            for slot, key in zip(promotion.slots.tolist(), promotion.keys, strict=True):
                if match is None or (key in blocks and matches(match, blocks[key][1])):
                    self._events["a reset met a promotion"] += 1
                    self.disowned[slot] = int(table.generations[slot])

    def was_reset(self, note: ResetNote, ticket: ResetTicket, *, is_alone: bool) -> None:
        """It answered how much was dropped, and that is gone; nothing else happened meanwhile if it `is_alone`."""
        match, places = note.match, note.places
        # They are never found again.
        self.disowned |= note.generations
        if not is_alone:
            self._events["a reset was interfered with"] += 1
            return
        is_whole = match is None and (places is None or HOST in places)
        assert ticket.epoch == note.epoch + is_whole == self._engine.offload.snapshot().epoch
        assert ticket.tiers.keys() == {name for name in self._engine.tiers if places is None or name in places}
        for client in self._engine.offload.tiers.clients:
            if client.name in ticket.tiers and not client._refused:
                blocks = self._engine.tiers[client.name].blocks.values()
                assert not any(match is None or matches(match, origin) for _, origin in blocks)
        if places is None or HOST in places:
            assert ticket.dropped_blocks == len(note.generations)
            assert ticket.dropped_bytes == ticket.dropped_blocks * self._engine.manager.slot_bytes
            assert not any(match is None or matches(match, origin) for origin in self._ready_origins())

    def _ready_origins(self) -> list:
        table = self._engine.manager.table
        return table.origins[: table.end_slot][table.is_ready(np.arange(table.end_slot))].tolist()


def store_parts(engine: ToyEngine) -> list[StorePart]:
    """What is being stored, or will be with the next step."""
    return [*engine.offload._stores.parts, *(part for job in engine.offload._jobs for part in job.parts)]


class NoLedger:
    """Replaces the ledger where its predictions do not hold, or are not wanted."""

    was_lazy = True

    def __init__(self, engine: ToyEngine) -> None:
        self._scheduler = engine.offload
        self.arrived = self.learn = engine.truth.learn

    @property
    def live(self) -> dict[int, Any]:
        return {state.sequence: SimpleNamespace(state=state) for state in self._scheduler.requests}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def _add(store: StoreCounts, prompt: PromptTokens, state: RequestState) -> None:
    for total, part in ((store, state.store), (prompt, state.prefill.prompt_tokens)):
        for name in total.__slots__:
            value = getattr(part, name)
            if isinstance(value, dict):
                counts = getattr(total, name)
                for key, count in value.items():
                    counts[key] = counts.get(key, 0) + count
            elif value:
                setattr(total, name, getattr(total, name) + value)
