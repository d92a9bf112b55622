"""Loads: hits and their pins, the decision to load, load jobs, and the causes of misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import BlockTables
from kvferry.core.groups import GroupLayout
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.jobs import JobTable, OpenJob
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup
from kvferry.core.scheduler.requests import RequestPhase, RequestState, StageKind, TraceStage
from kvferry.core.stats import EvictionReason, LoadCounts, MissCause, Misses, NotStored
from kvferry.core.transfers import BlockRun, Direction, LoadOutcome, Slots, TransferJob

_EXAMINED_SLOTS = 1000
"""Slots of one request after its hit whose miss causes are determined."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The next `num_tokens` tokens can be loaded: whole blocks, pinned until `commit`."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing can be loaded: compute."""


@dataclass(frozen=True, slots=True)
class Later:
    """Blocks of this prefix are on their way to the pool or to the device: match again in the next step."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up after the first `first_token` tokens found.

    `hit` is None if nothing was looked up: the request follows another one's load (`follows`), or its policy forbids
    loads and the hit that it misses is counted. `unused` is the cause of misses behind the hit, `max_slots` the most
    slots that the request may pin.
    """

    first_token: int
    hit: PrefixHit | None = None
    follows: bool = False
    boundary_tokens: int = 0
    unused: MissCause = MissCause.GAP
    max_slots: int = 0


MatchResult = Hit | Miss | Later
_MISS = Miss()
_LATER = Later()


class HitSource(Protocol):
    """Copies blocks to the pool for requests that wait for longer hits. Requires: manager lock held."""

    def must_wait(self, state: RequestState, hit: PrefixHit, max_slots: int) -> bool:
        """Return whether a request with this hit in the pool waits for more, in at most `max_slots` other slots.

        To be called until it returns False.
        """

    def forget(self, state: RequestState) -> None:
        """Forget what a request waited for, as it has finished or was preempted. Copies under way are published."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of the part of a hit that is `wanted`; `runs` are None if a block table is too short."""

    hit: PrefixHit
    wanted: PrefixHit
    runs: tuple[BlockRun, ...] | None


class LoadPlanner:
    """Finds, pins and loads hits. Thread: engine. Requires: manager lock held. Writes `RequestState.load`."""

    def __init__(
        self,
        manager: OffloadManager,
        jobs: JobTable,
        layout: GroupLayout,
        cost_model: LoadOrCompute,
        lookup: PrefixLookup,
        inflight: InflightPrefixes,
        sources: Sequence[HitSource],
        counts: LoadCounts,
    ) -> None:
        """`sources` may make hits longer, the fastest first."""
        self.counts = counts
        self._manager = manager
        self._jobs = jobs
        self._layout = layout
        self._cost_model = cost_model
        self._lookup = lookup
        self._inflight = inflight
        self._sources = sources
        self.pending: list[TransferJob] = []
        """Loads that were committed since the last step."""
        self.lost: list[tuple[RequestState, LoadOutcome]] = []
        """Loads that could not start, to be ended."""
        self._num_pinned = 0
        self._bytes_in_flight = 0
        self._num_unusable = layout.alignment_tokens + layout.skipped_tokens
        """Tokens behind a hit that are too few to make it longer."""

    # --- matching ---------------------------------------------------------------------------------------------------

    def find(self, state: RequestState, num_computed_tokens: int) -> Found:
        """Look up the hit of a request. Changes nothing but the waits and keys of the request, and pins nothing."""
        load, first_token = state.load, num_computed_tokens
        limit = state.keys.loadable_tokens(state.policy.policy)
        if not state.policy.policy.load:
            if load.matched_tokens == first_token and load.is_decline_counted:
                return Found(first_token)
            hit = self._lookup.find(state.keys, first_token, limit)
            return Found(first_token, hit, boundary_tokens=self._lookup.find_boundary(state.keys, first_token))
        may_follow = first_token < limit and bool(self._inflight.loaders)
        if may_follow and self._inflight.must_wait(state, first_token):
            return Found(first_token, follows=True)
        num_pinned = self._num_pinned - (0 if load.pin is None else len(load.pin.slots))
        max_slots = max(self._manager.table.num_slots // 2, 1) - num_pinned
        hit = self._lookup.find(state.keys, first_token, limit)
        boundary_tokens = self._lookup.find_boundary(state.keys, hit.end_token)
        unused = MissCause.GAP
        if len(hit.slots) > max_slots:
            unused = MissCause.PIN_LIMIT
        elif limit < state.request.num_tokens - 1 and hit.end_token + self._num_unusable > limit:
            unused = MissCause.LOAD_DISABLED
        while hit.num_tokens and len(hit.slots) > max_slots:
            # With windows, the slots of a hit grow by less than its tokens: it takes several rounds to fit.
            fitting = hit.num_tokens * max(max_slots, 0) // len(hit.slots)
            hit = self._lookup.find(state.keys, first_token, first_token + fitting)
        return Found(first_token, hit, False, boundary_tokens, unused, max_slots)

    def match(self, state: RequestState, found: Found) -> MatchResult:
        """Pin a hit that was found in the same hold of the lock, and decide whether to load it.

        See `OffloadScheduler.match`.
        """
        load, hit = state.load, found.hit
        load.matched_tokens = found.first_token
        if found.follows:
            self._set_hit(state, None)
            return _LATER
        if hit is None:
            return self._miss(state)
        load.boundary_tokens = found.boundary_tokens
        if not state.policy.policy.load:
            self.counts.declined += 0 if load.is_decline_counted else hit.num_blocks
            load.is_decline_counted = True
            load.found_end, load.unused = hit.end_token, found.unused
            return self._miss(state)
        self._set_hit(state, hit)
        max_slots = found.max_slots - len(hit.slots)
        if any(source.must_wait(state, hit, max_slots) for source in self._sources):
            return _LATER
        load.found_end, load.unused = hit.end_token, found.unused
        if not hit.num_tokens:
            return self._miss(state)
        if load.wanted is None:
            # Decided once until `commit`, however often the engine matches: the pin must not flicker.
            load.wanted = self._cost_model.should_load(hit.num_bytes, self._bytes_in_flight, hit.num_tokens)
            self.counts.declined += 0 if load.wanted else hit.num_blocks
        return Hit(hit.num_tokens) if load.wanted else self._miss(state)

    def _miss(self, state: RequestState) -> Miss:
        """Release the request's pin, and let others no longer wait for it."""
        if state.load.hit is not None:
            self._set_hit(state, None)
        if state.wait.loading:
            self._inflight.end(state)
        return _MISS

    def _set_hit(self, state: RequestState, hit: PrefixHit | None, *, release: bool = True) -> None:
        """Pin a new hit, or none, and release the pin of the old one."""
        load = state.load
        old, load.hit = load.pin, hit
        load.pin = None if hit is None else self._manager.pin(hit.slots)
        self._num_pinned += (0 if load.pin is None else len(load.pin.slots)) - (0 if old is None else len(old.slots))
        if old is not None and release:
            self._manager.unpin(old)

    # --- loading ----------------------------------------------------------------------------------------------------

    def plan_copies(self, state: RequestState, tables: BlockTables, num_tokens: int) -> Copies | None:
        """Return the copies of the first tokens of a request's hit. Thread: engine; the manager lock is not needed."""
        hit = state.load.hit
        is_whole = num_tokens % self._layout.alignment_tokens == 0
        if hit is None or not is_whole or not 0 < num_tokens <= hit.num_tokens:
            return None
        wanted = hit.shorten(num_tokens)
        return None if wanted is None else Copies(hit, wanted, wanted.runs(tables, self._layout.null_block))

    def commit(self, state: RequestState, num_loaded_tokens: int, copies: Copies | None, now_s: float) -> None:
        """Start the load that the engine agreed to, or release the pin; see `OffloadScheduler.commit`."""
        load = state.load
        if load.matched_tokens is None:
            return
        if state.is_offloaded:
            self._lookup.record_scheduled(state.keys)
            if not state.prefill.counted:
                self._find_misses(state)
        load.device_tokens = state.num_computed_tokens = load.matched_tokens
        load.loaded_tokens = 0
        load.matched_tokens = load.wanted = None
        self._inflight.forget(state)
        hit, pin = load.hit, load.pin
        self._set_hit(state, None, release=False)
        if num_loaded_tokens > 0:
            if copies is not None and copies.hit is not hit:
                copies = None
            self._start(state, copies, Pin.empty() if pin is None else pin, num_loaded_tokens, now_s)
            return
        state.phase = RequestPhase.RUNNING
        if pin is not None:
            self._manager.unpin(pin)

    def take_jobs(self) -> list[TransferJob]:
        """Return the loads that were committed since the last step."""
        jobs, self.pending = self.pending, []
        return jobs

    def end_lost(self) -> list[LoadOutcome]:
        """End the loads that could not start, and return their outcomes."""
        lost = self.lost
        for state, _ in lost:
            self._stop_waiting(state)
        return [outcome for _, outcome in lost]

    def end(self, ended: OpenJob, now_s: float) -> LoadOutcome | None:
        """Release what a load held; return its outcome if its request still waits for it."""
        hit, state = ended.hit, ended.request
        pin = Pin.empty() if ended.pin is None else ended.pin
        is_done = not ended.errors
        ok = self._manager.complete_load(pin, is_done=is_done) and is_done
        self._jobs.release(ended)
        num_blocks = ended.num_blocks
        self.counts.in_flight -= num_blocks
        self.counts.seconds += ended.seconds
        if ended.errors and pin.epoch == self._manager.epoch:
            self._drop_failed(ended, pin.slots, now_s)
        if ok:
            self.counts.blocks += num_blocks
            self.counts.bytes += ended.num_bytes
            self._cost_model.bytes_rate.observe(ended.num_bytes, ended.seconds)
        else:
            self.counts.failed += num_blocks
        if hit is None:
            return None
        self._bytes_in_flight -= hit.num_bytes
        if state is None:
            return None
        self._stop_waiting(state)
        state.load.failed |= not ok
        if ok:
            state.load.loaded_tokens = hit.num_tokens
            state.num_computed_tokens = hit.end_token
        if state.trace is not None:
            state.trace.receive(
                TraceStage(
                    StageKind.LOAD,
                    ended.opened_s,
                    now_s,
                    num_tokens=hit.num_tokens,
                    num_blocks=num_blocks,
                    num_bytes=ended.num_bytes,
                    copy_s=ended.seconds,
                    error=None if ok else next(iter(ended.errors), "dropped while it was loaded"),
                )
            )
        return LoadOutcome(state.request.request_id, ok, hit.first_token, hit.num_tokens)

    def detach(self, state: RequestState) -> None:
        """Release the pin and the load of a request that has finished, was preempted or is not offloaded any more."""
        state.load.matched_tokens = state.load.wanted = state.load.misses = None
        state.load.failed = False
        self._inflight.forget(state)
        for source in self._sources:
            source.forget(state)
        if state.phase is RequestPhase.LOADING:
            for job in self._jobs:
                if job.request is state:
                    job.request = None
            self._stop_waiting(state)
        self._set_hit(state, None)

    def _start(self, state: RequestState, copies: Copies | None, pin: Pin, num_tokens: int, now_s: float) -> None:
        state.phase = RequestPhase.LOADING
        if copies is not None and copies.runs is not None:
            wanted = copies.wanted
            if wanted is not copies.hit:
                self._manager.unpin(Pin(np.setdiff1d(pin.slots, wanted.slots), pin.epoch))
                pin = Pin(wanted.slots, pin.epoch)
            if self._manager.prepare_load(pin, now_s):
                self._open(state, wanted, pin, copies.runs, now_s)
                return
        self._manager.unpin(pin)
        num_failed = num_tokens // self._layout.alignment_tokens if copies is None else copies.wanted.num_blocks
        self.counts.failed += num_failed
        state.load.failed = True
        outcome = LoadOutcome(state.request.request_id, False, state.load.device_tokens, num_tokens)
        self.lost.append((state, outcome))

    def _open(self, state: RequestState, hit: PrefixHit, pin: Pin, runs: tuple[BlockRun, ...], now_s: float) -> None:
        verify = self._manager.unverified(pin.slots)
        job = TransferJob(
            self._jobs.new_id(),
            Direction.LOAD,
            runs,
            state.request.request_id,
            verify=verify if len(verify) else None,
        )
        block_ids = np.concatenate([run.block_ids for run in runs]).tolist()
        opened = OpenJob(job, now_s, pin.slots, len(block_ids), request=state, pin=pin, hit=hit)
        self._jobs.hold(opened, block_ids)
        self._jobs.open(opened)
        self.pending.append(job)
        self._inflight.begin(state, hit.first_token, hit.end_token)
        self.counts.in_flight += opened.num_blocks
        self._bytes_in_flight += hit.num_bytes

    def _drop_failed(self, ended: OpenJob, slots: Slots, now_s: float) -> None:
        """Drop the slots that failed verification, and all slots if anything else failed."""
        corrupt = np.intersect1d(slots, np.fromiter(ended.corrupt, dtype=np.int64))
        corrupt = corrupt[self._manager.table.is_ready(corrupt)]
        self._manager.drop(corrupt, EvictionReason.FAILED_VERIFICATION, now_s)
        self.counts.corrupt += sum(int(np.isin(run.slots, corrupt).sum()) for run in ended.job.runs)
        if not ended.only_corrupt:
            self._manager.drop(slots, EvictionReason.LOAD_FAILED, now_s)

    def _stop_waiting(self, state: RequestState) -> None:
        state.phase = RequestPhase.WAITING
        self.lost = [one for one in self.lost if one[0] is not state]
        self._inflight.end(state)

    # --- misses -----------------------------------------------------------------------------------------------------

    def _find_misses(self, state: RequestState) -> None:
        """Determine why the tokens after the latest hit of a request could not be loaded.

        Once per admission, so that the causes are those of the look-up that counts. Tokens whose load failed before
        keep that cause.
        """
        load = state.load
        end_token = load.found_end
        if load.failed and load.misses is not None:
            end_token = max(end_token, load.misses.hit_end)
        load.misses = misses = Misses(end_token)
        num_tokens, alignment = state.request.num_tokens, self._layout.alignment_tokens
        limit = (num_tokens - 1) // alignment * alignment
        # A hit needs the slots of all full-attention groups, which are stored together.
        group = self._layout.prefix_group
        size = group.slot_tokens
        # A hit may end within a slot, but only a whole slot has a key.
        first, end = end_token // size, min(-(-limit // size), num_tokens // size)
        keys = state.keys.of(group, first, min(end, first + _EXAMINED_SLOTS))
        found, misses.evicted_between_s = self._manager.history.explain(keys, state.now_s)
        # What was computed is not new: the device has it in lazy mode, windows and states are not stored everywhere.
        causes = [
            load.unused if cause is MissCause.GAP or (cause is MissCause.NEW and was_computed) else cause
            for cause, was_computed in zip(found, self._lookup.were_computed(keys), strict=True)
        ]
        num_old = causes.index(MissCause.NEW) if MissCause.NEW in causes else len(causes)
        misses.extend(causes[:num_old], first * size, size)
        if group.slot_blocks > 1:
            # Of prompts that part within a slot, or end there, the first blocks of that slot may be known.
            start, block_size = max((first + num_old) * size, end_token), group.spec.block_size
            keys = state.keys.of_inner_blocks(group, start // block_size, (first + num_old + 1) * group.slot_blocks)
            num_inner = self._manager.history.count_inner_blocks(keys)
            misses.extend([NotStored.PART_OF_SLOT] * num_inner, start, block_size)
        misses.extend(causes[num_old:], (first + num_old) * size, size)
        rest = max((first + len(causes)) * size, misses.end_token)
        if limit > rest:
            misses.extend([MissCause.NEW if len(causes) == end - first else MissCause.UNEXAMINED], rest, limit - rest)
        misses.end_at(limit)
        skipped = self._layout.skipped_tokens
        if skipped and end_token > 0 and state.keys.known_end <= end_token + skipped:
            misses.skip_to(end_token + skipped)
