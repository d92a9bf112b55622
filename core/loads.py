"""The load side of the scheduler: hits and their pins, the decision to load, and the jobs that bring blocks back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.hits import PrefixHit
from kvferry.core.jobs import DeviceHolds, JobTable, OpenJob
from kvferry.core.leaders import Leaders
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.prefixes import PrefixFinder
from kvferry.core.promotions import PromotionSide
from kvferry.core.requests import RequestPhase, RequestState
from kvferry.core.stats import EvictionReason, LoadCounts, MissCause, Misses, NotStored
from kvferry.core.transfers import BlockRun, Direction, LoadOutcome, Slots, TransferJob

_EXAMINED_SLOTS = 1000
"""Slots of one request behind its hit of which it is found out why they are missing."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The next `num_tokens` tokens can be loaded: whole blocks, pinned until `commit`."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing can be loaded: compute."""


@dataclass(frozen=True, slots=True)
class Later:
    """This very prefix is being brought, by another's load or from a tier: ask again next step, and schedule others."""


MatchResult = Hit | Miss | Later
_MISS = Miss()
_LATER = Later()


class LoadSide:
    """Called under the manager's lock, on the engine's thread."""

    def __init__(
        self,
        manager: OffloadManager,
        holds: DeviceHolds,
        jobs: JobTable,
        layout: GroupLayout,
        null_block: int,
        choice: LoadOrCompute,
        finder: PrefixFinder,
        leaders: Leaders,
    ) -> None:
        self.promotions: PromotionSide | None = None
        """Brings in what only a tier has, before a request is answered; None without tiers."""
        self.counts = LoadCounts()
        self.num_waiting = 0
        self._manager = manager
        self._holds = holds
        self._jobs = jobs
        self._layout = layout
        self._null_block = null_block
        self._choice = choice
        self._pending: list[TransferJob] = []
        self._lost: list[tuple[RequestState, LoadOutcome]] = []
        self._outcomes: list[LoadOutcome] = []
        self._num_pinned = 0
        self._bytes_in_flight = 0
        self._finder = finder
        self._leaders = leaders

    def has_outcomes(self) -> bool:
        """Whether outcomes wait to be returned to the engine."""
        return bool(self._lost or self._outcomes)

    def match(self, state: RequestState, num_computed_tokens: int) -> MatchResult:
        """Find, pin and decide; see `OffloadScheduler.match`."""
        is_other = state.matched_tokens != num_computed_tokens
        state.matched_tokens = num_computed_tokens
        if not state.policy.policy.load:
            self._set_hit(state, None)
            self._leaders.stop(state)
            if is_other or not state.decline_noted:
                hit = self._finder.find(state, num_computed_tokens)
                state.boundary_tokens = self._finder.find_boundary(state, num_computed_tokens)
                self.counts.declined += 0 if state.decline_noted else hit.num_blocks
                state.decline_noted = True
                state.found_end, state.in_pool = hit.end_token, MissCause.GAP
            return _MISS
        if num_computed_tokens < state.loadable_tokens and self._leaders.follows(state, num_computed_tokens):
            self._set_hit(state, None)
            return _LATER
        room = max(self._manager.num_slots // 2, 1) - self._num_pinned + len(state.pin or ())
        hit = self._finder.find(state, num_computed_tokens)
        state.boundary_tokens = self._finder.find_boundary(state, hit.end_token)
        in_pool = MissCause.GAP
        if len(hit.slots) > room:
            in_pool = MissCause.PIN_LIMIT
        elif state.is_load_cap(hit.end_token, self._layout.alignment_tokens):
            in_pool = MissCause.LOAD_DISABLED
        while hit.num_tokens and len(hit.slots) > room:
            # Windows make the slots of a hit grow by less than its tokens: it takes a few rounds to fit.
            fitting = hit.num_tokens * max(room, 0) // len(hit.slots)
            hit = self._finder.find(state, num_computed_tokens, num_computed_tokens + fitting)
        self._set_hit(state, hit)
        if self.promotions is not None:
            if self.promotions.waits(state, hit, room - len(hit.slots)):
                return _LATER
            if not hit.num_tokens:
                self._leaders.stop(state)
        state.found_end, state.in_pool = hit.end_token, in_pool
        if not hit.num_tokens:
            return _MISS
        if state.load_wanted is None:
            # Decided once until `commit`, however often the engine asks: the pin must not flicker.
            state.load_wanted = self._choice.should_load(hit.num_bytes, self._bytes_in_flight, hit.num_tokens)
            self.counts.declined += 0 if state.load_wanted else hit.num_blocks
        if not state.load_wanted:
            self._set_hit(state, None)
            self._leaders.stop(state)
            return _MISS
        return Hit(hit.num_tokens)

    def commit(self, state: RequestState, num_loaded_tokens: int, now_s: float) -> None:
        """Begin the load that the engine agreed to, or let the pin go; see `OffloadScheduler.commit`."""
        if state.matched_tokens is None:
            return
        self._finder.note_computed(state)
        if not state.prefill_counted:
            self._note_misses(state)
        state.device_tokens = state.num_computed_tokens = state.matched_tokens
        state.loaded_tokens = 0
        state.matched_tokens = None
        state.load_wanted = None
        state.waits_until_s = state.follow_until_s = None
        self._leaders.stop(state)
        hit, pin = state.hit, state.pin
        self._set_hit(state, None, release=False)
        if num_loaded_tokens > 0:
            self._begin(state, hit, pin or Pin.empty(), num_loaded_tokens, now_s)
            return
        state.phase = RequestPhase.RUNNING
        if pin is not None:
            self._manager.unpin(pin)

    def take_jobs(self) -> list[TransferJob]:
        """The loads that were committed since the last step."""
        jobs, self._pending = self._pending, []
        return jobs

    def end_lost(self) -> None:
        """End the loads that could not begin, of requests that still wait for them."""
        lost, self._lost = self._lost, []
        for state, outcome in lost:
            if state.lost_load is outcome:
                self._stop_waiting(state)
                self._outcomes.append(outcome)

    def take_outcomes(self) -> list[LoadOutcome]:
        """The outcomes of all loads that ended since the last call, for requests that waited for them."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def end(self, ended: OpenJob, now_s: float) -> None:
        """Let go of what a load touched, and queue its outcome if its request still waits for it."""
        job, hit, state = ended.job, ended.hit, ended.request
        pin = Pin.empty() if ended.pin is None else ended.pin
        intact = self._manager.complete_load(pin)
        self._holds.release(ended)
        self.counts.in_flight -= job.num_blocks
        self.counts.seconds += ended.seconds
        if ended.errors and pin.epoch == self._manager.epoch:
            self._drop_failed(ended, pin.slots, now_s)
        ok = intact and not ended.errors and not ended.is_abandoned
        if ok:
            self._manager.record_verified(pin)
            self.counts.blocks += job.num_blocks
            self.counts.bytes += ended.num_bytes
            self._choice.bytes_rate.observe(ended.num_bytes, ended.seconds)
        else:
            self.counts.failed += job.num_blocks
        if hit is None:
            return
        self._bytes_in_flight -= hit.num_bytes
        if state is None:
            return
        self._stop_waiting(state)
        state.load_failed |= not ok
        if ok:
            state.loaded_tokens = hit.num_tokens
            state.num_computed_tokens = hit.end_token
        self._outcomes.append(LoadOutcome(state.request.request_id, ok, hit.first_token, hit.num_tokens))

    def detach(self, state: RequestState) -> None:
        """Let go of the pin and of the load of a request that goes away or starts again."""
        state.matched_tokens = None
        state.load_wanted = None
        state.waits_until_s = state.follow_until_s = None
        state.look = None
        self._leaders.stop(state)
        if state.phase is RequestPhase.LOADING:
            for job in self._jobs:
                if job.request is state:
                    job.request = None
            self._stop_waiting(state)
        self._set_hit(state, None)

    def abandon(self, dropped: Sequence[OpenJob], states: Iterable[RequestState]) -> None:
        """Let go of every hit, and fail the loads of live requests that are in no open job.

        `dropped` are jobs that were removed and touch nothing.
        """
        self._pending = []
        self._lost = []
        self._leaders.clear()
        self._num_pinned = self.num_waiting = 0
        loads = [job for job in self._jobs if not job.is_store]
        for job in loads:
            job.is_abandoned = True
        self.counts.in_flight = sum(job.job.num_blocks for job in loads)
        self._bytes_in_flight = sum(job.hit.num_bytes for job in loads if job.hit is not None)
        for job in dropped:
            state, hit = job.request, job.hit
            if not job.is_store:
                self.counts.failed += job.job.num_blocks
            if state is not None and hit is not None:
                state.lost_load = LoadOutcome(state.request.request_id, False, hit.first_token, hit.num_tokens)
        loading = {id(job.request) for job in loads}
        for state in states:
            state.hit = state.pin = state.look = state.load_wanted = None
            state.leads = ()
            if state.phase is not RequestPhase.LOADING:
                continue
            self.num_waiting += 1
            if id(state) in loading:
                continue
            state.load_failed = True
            if state.lost_load is None:
                state.lost_load = LoadOutcome(state.request.request_id, False, state.device_tokens, 0)
            self._lost.append((state, state.lost_load))

    def _note_misses(self, state: RequestState) -> None:
        """Note why what is behind the latest hit of a request could not be loaded.

        Once per admission, so that causes are those of the look-up that counts. Tokens whose load failed before keep
        that cause.
        """
        end_token = state.found_end
        if state.load_failed and state.misses is not None:
            end_token = max(end_token, state.misses.hit_end)
        state.misses = misses = Misses(end_token)
        num_tokens, alignment = state.request.num_tokens, self._layout.alignment_tokens
        limit = (num_tokens - 1) // alignment * alignment
        # A hit needs the slots of all full-attention groups, which are stored together.
        group = self._layout.prefix_group
        size = group.slot_tokens
        # A hit may end within a slot, but only a whole slot has a key.
        first, end = end_token // size, min(-(-limit // size), num_tokens // size)
        keys = self._finder.keys(state, group, first, min(end, first + _EXAMINED_SLOTS))
        found, misses.evicted_between_s = self._manager.history.explain(keys, state.now_s)
        # In lazy mode the device may have what the pool has not, and windows alone are never stored from end to end.
        has_all = self._layout.full_groups and self._manager.evictor.residency is None
        num_known = 0 if has_all else state.boundary_tokens // size - first
        causes = [
            state.in_pool if cause is MissCause.GAP or (cause is MissCause.NEW and i < num_known) else cause
            for i, cause in enumerate(found)
        ]
        num_old = causes.index(MissCause.NEW) if MissCause.NEW in causes else len(causes)
        misses.extend(causes[:num_old], first * size, size)
        if group.slot_blocks > 1:
            # Of prompts that part within a slot, or end there, the first blocks of that slot may be known.
            start, block_size = max((first + num_old) * size, end_token), group.spec.block_size
            parts = state.keys_of_parts(group, start // block_size, (first + num_old + 1) * group.slot_blocks)
            num_parts = self._manager.history.count_parts(parts)
            misses.extend([NotStored.PART_OF_SLOT] * num_parts, start, block_size)
        misses.extend(causes[num_old:], (first + num_old) * size, size)
        rest = max((first + len(causes)) * size, misses.end_token)
        if limit > rest:
            misses.extend([MissCause.NEW if len(causes) == end - first else MissCause.UNEXAMINED], rest, limit - rest)
        misses.end_at(limit)

    def _begin(self, state: RequestState, hit: PrefixHit | None, pin: Pin, num_tokens: int, now_s: float) -> None:
        state.phase = RequestPhase.LOADING
        state.lost_load = LoadOutcome(state.request.request_id, False, state.device_tokens, num_tokens)
        self.num_waiting += 1
        whole = num_tokens % self._layout.alignment_tokens == 0
        wanted = hit.shorten(num_tokens) if hit is not None and num_tokens <= hit.num_tokens and whole else None
        runs = None if wanted is None else wanted.runs(state.block_ids, self._null_block)
        if wanted is not None and runs is not None:
            if wanted is not hit:
                kept = wanted.slots
                self._manager.unpin(Pin(np.setdiff1d(pin.slots, kept), pin.epoch))
                pin = Pin(kept, pin.epoch)
            if self._manager.prepare_load(pin, now_s):
                self._open(state, wanted, pin, runs, now_s)
                return
        self._manager.unpin(pin)
        self.counts.failed += num_tokens // self._layout.alignment_tokens if wanted is None else wanted.num_blocks
        state.load_failed = True
        self._lost.append((state, state.lost_load))

    def _open(self, state: RequestState, hit: PrefixHit, pin: Pin, runs: tuple[BlockRun, ...], now_s: float) -> None:
        verify = self._manager.unverified(pin.slots)
        job = TransferJob(
            self._jobs.new_id(),
            Direction.LOAD,
            runs,
            state.request.request_id,
            verify=verify if len(verify) else None,
        )
        opened = OpenJob(job, now_s, pin.slots, request=state, pin=pin, hit=hit)
        self._holds.hold(opened, [block_id for run in runs for block_id in run.block_ids.tolist()])
        self._jobs.open(opened)
        self._pending.append(job)
        state.lost_load = None
        self._leaders.lead(state, hit.first_token, hit.end_token)
        self.counts.in_flight += job.num_blocks
        self._bytes_in_flight += hit.num_bytes

    def _drop_failed(self, ended: OpenJob, slots: Slots, now_s: float) -> None:
        """Drop the slots that failed: those that did not verify, and all where something else went wrong."""
        corrupt = np.intersect1d(slots, np.fromiter(ended.corrupt, dtype=np.int64))
        self.counts.corrupt += self._manager.drop(corrupt, EvictionReason.FAILED_VERIFICATION, now_s)
        if not ended.only_corrupt:
            self._manager.drop(slots, EvictionReason.LOAD_FAILED, now_s)

    def _stop_waiting(self, state: RequestState) -> None:
        state.phase = RequestPhase.WAITING
        state.lost_load = None
        self.num_waiting -= 1
        self._leaders.stop(state)

    def _set_hit(self, state: RequestState, hit: PrefixHit | None, *, release: bool = True) -> None:
        """Pin what a waiting request has found, instead of what it had."""
        old, state.hit = state.pin, hit
        state.pin = None if hit is None else self._manager.pin(hit.slots)
        self._num_pinned += len(state.pin or ()) - len(old or ())
        if old is not None and release:
            self._manager.unpin(old)
