"""The load side of the scheduler: hits and their pins, the decision to load, and the jobs that bring blocks back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.engine import DeviceView
from core.events import EvictionReason
from core.grants import Pin
from core.jobs import JobTable, OpenJob
from core.keys import Key
from core.manager import OffloadManager
from core.rates import LoadOrCompute
from core.requests import RequestPhase, RequestState
from core.stats import LoadCounts
from core.transfers import Direction, LoadOutcome, TransferJob

_REGRET_BLOCKS = 1000
"""Missing blocks of one request that are looked up among the evicted ones."""
_FOLLOW_S = 1.0
"""How long to wait for another's load while nobody knows how long recomputing takes."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The next `num_tokens` tokens can be loaded: whole blocks, pinned until `commit`."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing can be loaded: compute."""


@dataclass(frozen=True, slots=True)
class Later:
    """A load of this very prefix is under way: ask again next step, and schedule others meanwhile."""


MatchResult = Hit | Miss | Later
_MISS = Miss()
_LATER = Later()


class LoadSide:
    """Called under the manager's lock, on the engine's thread."""

    def __init__(
        self,
        manager: OffloadManager,
        device: DeviceView,
        jobs: JobTable,
        block_size: int,
        choice: LoadOrCompute,
    ) -> None:
        self.counts = LoadCounts()
        self.num_waiting = 0
        self._manager = manager
        self._device = device
        self._jobs = jobs
        self._block_size = block_size
        self._choice = choice
        self._pending: list[TransferJob] = []
        self._lost: list[tuple[RequestState, LoadOutcome]] = []
        self._num_pinned = 0
        self._leaders: dict[Key, RequestState] = {}

    def has_lost(self) -> bool:
        """Whether outcomes wait to be told of loads that could not even begin."""
        return bool(self._lost)

    def match(self, state: RequestState, num_computed_tokens: int) -> MatchResult:
        """Find, pin and decide; see `OffloadScheduler.match`."""
        state.matched_tokens = num_computed_tokens
        first, partial = divmod(num_computed_tokens, self._block_size)
        end = max((state.request.num_tokens - 1) // self._block_size, first)
        keys = [] if partial else state.keys[first : state.extend_keys(end)]
        if not state.policy.policy.load:
            self._set_pin(state, None)
            if not state.decline_noted:
                state.decline_noted = True
                self.counts.declined += self._manager.count_prefix(keys)
            return _MISS
        if keys and self._follows(state, keys):
            self._set_pin(state, None)
            return _LATER
        room = max(self._manager.num_slots // 2, 1) - self._num_pinned + len(state.pin or ())
        pin = self._manager.pin_prefix(keys[: max(room, 0)])
        self._set_pin(state, pin)
        if not state.misses_noted:
            state.misses_noted = True
            self._manager.note_misses(keys[len(pin) :][:_REGRET_BLOCKS], state.now_s)
        if not len(pin):
            return _MISS
        if state.load_wanted is None:
            # Decided once until `commit`, however often the engine asks: the pin must not flicker.
            num_bytes = len(pin) * self._manager.slot_bytes
            queued_bytes = self.counts.in_flight * self._manager.slot_bytes
            num_tokens = len(pin) * self._block_size
            state.load_wanted = self._choice.should_load(num_bytes, queued_bytes, num_tokens)
            self.counts.declined += 0 if state.load_wanted else len(pin)
        if not state.load_wanted:
            self._set_pin(state, None)
            return _MISS
        return Hit(len(pin) * self._block_size)

    def commit(self, state: RequestState, num_loaded_tokens: int, now_s: float) -> None:
        """Begin the load that the engine agreed to, or let the pin go; see `OffloadScheduler.commit`."""
        if state.matched_tokens is None:
            return
        state.device_tokens = state.num_computed_tokens = state.matched_tokens
        state.loaded_tokens = 0
        state.matched_tokens = None
        state.load_wanted = None
        state.follow_until_s = None
        pin = state.pin if state.pin is not None else Pin.empty()
        self._set_pin(state, None, release=False)
        num_blocks = num_loaded_tokens // self._block_size
        pin = self._manager.split_pin(pin, num_blocks)
        if num_blocks:
            self._begin(state, pin, num_blocks, now_s)
        else:
            state.phase = RequestPhase.RUNNING

    def take_jobs(self) -> list[TransferJob]:
        """The loads that were committed since the last step."""
        jobs, self._pending = self._pending, []
        return jobs

    def take_lost(self) -> list[LoadOutcome]:
        """Outcomes of loads that could not begin, for requests that still wait for them."""
        lost, self._lost = self._lost, []
        outcomes: list[LoadOutcome] = []
        for state, outcome in lost:
            if state.lost_load is outcome:
                self._stop_waiting(state)
                outcomes.append(outcome)
        return outcomes

    def end(self, ended: OpenJob, now_s: float) -> list[LoadOutcome]:
        """Let go of what a load touched; its outcome, if its request still waits for it."""
        job, pin, state = ended.job, ended.pin or Pin.empty(), ended.request
        num_blocks = len(job.slots)
        intact = self._manager.end_load(pin)
        self._device.release(job.block_ids.tolist())
        self.counts.in_flight -= num_blocks
        self.counts.seconds += ended.seconds
        if ended.errors and pin.epoch == self._manager.epoch:
            self._manager.drop(pin.slots, EvictionReason.LOAD_FAILED, now_s)
        ok = intact and not ended.errors
        if ok:
            self.counts.blocks += num_blocks
            self.counts.bytes += ended.num_bytes
            self._choice.bytes_rate.observe(ended.num_bytes, ended.seconds)
        else:
            self.counts.failed += num_blocks
        if state is None:
            return []
        self._stop_waiting(state)
        if ok:
            state.loaded_tokens = num_blocks * self._block_size
            state.num_computed_tokens = (ended.first_block + num_blocks) * self._block_size
        return [LoadOutcome(state.request.request_id, ok, ended.first_block, num_blocks)]

    def detach(self, state: RequestState) -> None:
        """Let go of the pin and of the load of a request that goes away or starts again."""
        self._set_pin(state, None)
        state.matched_tokens = None
        state.load_wanted = None
        state.follow_until_s = None
        if state.phase is not RequestPhase.LOADING:
            return
        for job in self._jobs:
            if job.request is state:
                job.request = None
        self._stop_waiting(state)

    def _follows(self, state: RequestState, keys: Sequence[Key]) -> bool:
        """Whether another request is loading what this one needs next, and waiting for it still pays.

        It waits for one leader, once: then it finds the blocks on the device, or loads its own copy.
        """
        leader = self._leaders.get(keys[0])
        if leader is None or leader is state:
            return False
        if state.follow_until_s is None:
            num_tokens = self._manager.count_prefix(keys) * self._block_size
            patience_s = self._choice.tokens_rate.estimate_s(num_tokens)
            state.follow_until_s = state.now_s + (_FOLLOW_S if patience_s is None else patience_s)
            state.leader = leader.sequence
        return leader.sequence == state.leader and state.now_s < state.follow_until_s

    def _lead(self, state: RequestState, keys: Sequence[Key]) -> None:
        for key in keys:
            self._leaders.setdefault(key, state)

    def _stop_leading(self, state: RequestState) -> None:
        first = state.device_tokens // self._block_size
        for key in state.keys[first:]:
            if self._leaders.get(key) is state:
                del self._leaders[key]

    def _begin(self, state: RequestState, pin: Pin, num_blocks: int, now_s: float) -> None:
        first = state.device_tokens // self._block_size
        state.phase = RequestPhase.LOADING
        self.num_waiting += 1
        if len(pin) < num_blocks or not self._manager.begin_load(pin, now_s):
            self._manager.release(pin)
            self.counts.failed += num_blocks
            state.lost_load = LoadOutcome(state.request.request_id, False, first, num_blocks)
            self._lost.append((state, state.lost_load))
            return
        block_ids = np.array(state.block_ids[first : first + num_blocks], dtype=np.int64)
        job = TransferJob(self._jobs.new_id(), Direction.LOAD, block_ids, pin.slots)
        self._jobs.open(OpenJob(job, now_s, request=state, pin=pin, first_block=first))
        self._pending.append(job)
        self._device.hold(block_ids.tolist())
        self._lead(state, state.keys[first : first + num_blocks])
        self.counts.in_flight += num_blocks

    def _stop_waiting(self, state: RequestState) -> None:
        state.phase = RequestPhase.WAITING
        state.lost_load = None
        self.num_waiting -= 1
        self._stop_leading(state)

    def _set_pin(self, state: RequestState, pin: Pin | None, *, release: bool = True) -> None:
        """Replace what a waiting request has pinned."""
        old, state.pin = state.pin, pin
        self._num_pinned += len(pin or ()) - len(old or ())
        if old is not None and release:
            self._manager.release(old)
