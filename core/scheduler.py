"""The offload scheduler: which blocks are stored and loaded for which request, one engine step at a time.

It mirrors an engine's own scheduler and is engine-neutral. Per request the engine calls, in this order:
`on_new_request`, `match` (any number of times), `commit`, every step `plan_step` and `on_transfers_finished`, on
preemption `on_preempted` (after which it matches and commits again), and in the end `on_request_finished`, once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.engine import DeviceView, EngineRequest, StepProgress
from core.events import EvictionReason, Origin
from core.jobs import JobTable, OpenJob, StorePart
from core.manager import OffloadManager, Pin
from core.origins import OriginMatch
from core.policy import (
    PRIORITY_CLASS,
    REQUEST_FIELDS_DEFAULT,
    EffectivePolicy,
    IgnoredField,
    Override,
    PolicyBook,
    PolicyPatch,
    RequestPolicy,
    parse_request_fields,
)
from core.requests import RequestPhase, RequestState, RequestTable, RequestView
from core.stats import LoadCounts, PromptTokens, RequestCounts, SkipReason, Snapshot, StoreCounts
from core.transfers import Direction, LoadOutcome, Slots, StepPlan, TransferJob, TransferResult

_log = logging.getLogger(__name__)

_OFFER_BLOCKS = 512
"""Blocks offered under one hold of the lock by the final offers of a request."""
_STEP_BLOCKS = 1000
"""Blocks of one request offered in one step; the rest follows in the next."""
_RETRY_BLOCKS = 64
"""Blocks of one request that are offered again in one step after there was no space for them."""
_WARN_EVERY_S = 60.0


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


@dataclass(frozen=True, slots=True)
class ResetTicket:
    """What a reset did at once: `job_ids` are the transfers it disowned that still have to end."""

    epoch: int
    dropped_blocks: int
    dropped_bytes: int
    job_ids: tuple[int, ...]


class OffloadScheduler:
    """Decides stores and loads for an engine. Every method takes the manager's lock itself.

    The engine's hooks are called on one thread; what operators ask for may come from any.
    """

    def __init__(
        self,
        manager: OffloadManager,
        policies: PolicyBook,
        device: DeviceView,
        block_size: int,
        *,
        request_fields: Sequence[str] = REQUEST_FIELDS_DEFAULT,
        num_workers: int = 1,
        num_recent_requests: int = 1000,
    ) -> None:
        """`block_size` is in tokens; `request_fields` are the policy fields that `kv_transfer_params` may set."""
        self.manager = manager
        self.block_size = block_size
        self._policies = policies
        self._device = device
        self._request_fields = tuple(request_fields)
        self._requests = RequestTable(num_recent_requests)
        self._jobs = JobTable(num_workers)
        self._pending_loads: list[OpenJob] = []
        self._pending_parts: list[StorePart] = []
        self._lost_loads: list[tuple[RequestState, LoadOutcome]] = []
        self._storing_blocks: set[int] = set()
        self._num_waiting_pins = 0
        self._num_resets = 0
        self._request_counts = RequestCounts()
        self._prompt_tokens = PromptTokens()
        self._store = StoreCounts()
        self._load = LoadCounts()
        self._last_warned_s: dict[str, float] = {}

    # --- the engine's hooks -------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """A request exists, and its policy is settled. An id may come again once the request before it has finished."""
        patch, ignored = parse_request_fields(request.kv_transfer_params, self._request_fields)
        with self.manager.lock:
            ids = (request.request_id, *request.aliases)
            state = RequestState(
                sequence=self._requests.next_sequence(),
                request=request,
                origin=Origin(request.request_id, request.tenant, request.lora, tuple(request.aliases)),
                patch=patch,
                policy=self._policies.settle(ids, patch, now_s),
                policy_version=self._policies.version,
            )
            if self._requests.get(request.request_id) is not None:
                self._finish(request.request_id, now_s)
            self._requests.add(state)
            self._request_counts.seen += 1
            self._request_counts.running += 1
            to_warn = [field for field in ignored if self._may_warn(field.name, now_s)]
        for field in to_warn:
            _warn_ignored(field, request.request_id)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> MatchResult:
        """How many tokens after the first `num_computed_tokens` the host can serve.

        A hit is pinned until `commit`, and asking again replaces the pin. It ends before the last token of the request,
        which has to be computed in any case. An unknown request, or one that is loading, misses.
        """
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None or state.phase is RequestPhase.LOADING:
                return _MISS
            state.matched_tokens = num_computed_tokens
            first, partial = divmod(num_computed_tokens, self.block_size)
            end = max((state.request.num_tokens - 1) // self.block_size, first)
            keys = [] if partial else state.keys[first : state.extend_keys(end)]
            if not self._policy(state, now_s).load:
                self._set_pin(state, None)
                if keys and not state.decline_noted:
                    state.decline_noted = True
                    self._load.declined += self.manager.count_prefix(keys)
                return _MISS
            room = self.manager.num_slots // 2 - self._num_waiting_pins + len(state.pin or ())
            pin = self.manager.pin_prefix(keys[: max(room, 0)])
            self._set_pin(state, pin)
            if not state.misses_noted:
                state.misses_noted = True
                self.manager.note_misses(keys[len(pin) :][:_STEP_BLOCKS], now_s)
            return Hit(len(pin) * self.block_size) if len(pin) else _MISS

    def commit(self, request_id: str, block_ids: Sequence[int], num_loaded_tokens: int, now_s: float) -> None:
        """The engine has allocated: `block_ids` is the request's whole table; it took `num_loaded_tokens` of the hit.

        With tokens to load the request has to wait for its `LoadOutcome`. What turns out not to be loadable any more is
        a failed load, not an error. A second call for the same match only brings the table up to date.
        """
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None:
                return
            state.block_ids = block_ids
            if state.matched_tokens is None:
                return
            state.device_tokens = state.matched_tokens
            state.num_computed_tokens = state.matched_tokens
            state.loaded_tokens = 0
            state.matched_tokens = None
            pin = state.pin if state.pin is not None else Pin.empty()
            self._set_pin(state, None, release=False)
            num_blocks = num_loaded_tokens // self.block_size
            pin = self.manager.split_pin(pin, num_blocks)
            if num_blocks:
                self._begin_load(state, pin, num_blocks, now_s)
            else:
                state.phase = RequestPhase.RUNNING

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """The transfers to start with this step, whose requests will have come as far as `progress` says.

        Called every step, also one without requests. The blocks of the plan are held until their job ends.
        """
        with self.manager.lock:
            self._policies.expire(now_s)
            self.manager.expire_pins(now_s)
            for step in progress:
                state = self._requests.get(step.request_id)
                if state is None or state.phase is RequestPhase.LOADING:
                    continue
                state.phase = RequestPhase.RUNNING
                state.block_ids = step.block_ids
                state.num_computed_tokens = step.num_computed_tokens
                if not state.prefill_counted and step.num_computed_tokens >= state.request.num_prompt_tokens:
                    self._count_prefill(state)
                self._offer(state, _STEP_BLOCKS if state.refused_at is None else _RETRY_BLOCKS, now_s)
            loads = [pending.job for pending in self._pending_loads]
            self._pending_loads.clear()
            return StepPlan(loads=loads, stores=self._take_store_job())

    def on_step_failed(self, request_ids: Sequence[str]) -> None:
        """The compute of a step failed: nothing of what its requests hold may be stored from now on.

        The engine reports the step's store jobs as failed besides.
        """
        with self.manager.lock:
            for request_id in request_ids:
                state = self._requests.get(request_id)
                if state is not None:
                    state.num_computed_tokens = 0

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """Take the workers' reports, and say which requests' loads have ended and how. Called every step."""
        errors: list[str] = []
        with self.manager.lock:
            outcomes: list[LoadOutcome] = []
            for state, outcome in self._lost_loads:
                if state.phase is RequestPhase.LOADING and self._requests.get(outcome.request_id) is state:
                    self._stop_waiting(state)
                    outcomes.append(outcome)
            self._lost_loads.clear()
            for result in results:
                ended = self._jobs.report(result)
                if ended is None:
                    continue
                if ended.is_store:
                    self._end_store(ended, now_s)
                else:
                    outcomes += self._end_load(ended, now_s)
                if ended.errors and self._may_warn(f"{ended.job.direction} failed", now_s):
                    errors.append(f"{ended.job.direction} job {ended.job.job_id}: {ended.errors[0]}")
        for error in errors:
            _log.error("%s; its blocks are dropped and will be recomputed", error)
        return outcomes

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """A request lost its device blocks. Answers already given stand; transfers under way keep their own hold."""
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None:
                return
            self._request_counts.preempted += 1
            self._detach(state)
            state.phase = RequestPhase.WAITING
            state.block_ids = ()
            state.num_computed_tokens = 0
            state.misses_noted = False

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        """A request is over, whatever became of it. Called before its blocks are freed: what was full is offered."""
        with self.manager.lock:
            self._finish(request_id, now_s)

    def has_open_work(self) -> bool:
        """Whether transfers are open or waiting to be planned, so that an idle engine has to go on stepping."""
        with self.manager.lock:
            return bool(len(self._jobs) or self._pending_parts or self._lost_loads)

    # --- what operators see and do ------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All counters at one moment."""
        with self.manager.lock:
            evictions = self.manager.evictions
            return Snapshot(
                epoch=self._num_resets,
                pool=self.manager.counts(),
                requests=replace(self._request_counts),
                prompt_tokens=replace(self._prompt_tokens, tier_hit=dict(self._prompt_tokens.tier_hit)),
                store=replace(self._store, skipped=dict(self._store.skipped)),
                load=replace(self._load),
                evictions=replace(evictions, by_reason=dict(evictions.by_reason)),
                open_jobs=len(self._jobs),
            )

    def list_requests(self, after: int | None, limit: int, now_s: float) -> list[RequestView]:
        """Live and recent requests, the latest first; `after` is the sequence that the page before ended with."""
        with self.manager.lock:
            return [self._view(found, now_s) for found in self._requests.page(after, limit)]

    def find_request(self, request_id: str, now_s: float) -> RequestView | None:
        """The latest request that goes by this id, with its policy as it is now."""
        with self.manager.lock:
            found = self._requests.find(request_id)
            return None if found is None else self._view(found, now_s)

    def policy_defaults(self) -> EffectivePolicy:
        """The policy of a request that nothing else is said about."""
        with self.manager.lock:
            return self._policies.defaults()

    def set_runtime_policy(self, patch: PolicyPatch, removed: Sequence[str] = ()) -> EffectivePolicy:
        """Lay runtime defaults over the settings, or take them away; blocks not yet answered follow."""
        with self.manager.lock:
            self._policies.set_runtime(patch, removed)
            return self._policies.defaults()

    def set_override(self, override: Override) -> None:
        """Set the policy of a request by its id, before it arrives or while it runs."""
        with self.manager.lock:
            self._policies.set_override(override)

    def drop_override(self, request_id: str) -> bool:
        """Take an override away; False if there was none."""
        with self.manager.lock:
            return self._policies.drop_override(request_id)

    def find_override(self, request_id: str, now_s: float) -> Override | None:
        """The live override of this very id."""
        with self.manager.lock:
            return self._policies.override((request_id,), now_s)

    def reset(self, now_s: float, match: OriginMatch | None = None) -> ResetTicket:
        """Forget all blocks, or those whose origin matches; nothing that is being stored of them is published.

        A whole reset costs no more than the open jobs. One by match looks at every slot, in batches between which the
        lock is free, so it belongs on a thread that may take its time.
        """
        with self.manager.lock:
            self._num_resets += 1
            epoch = self._num_resets
            if match is None:
                job_ids = tuple(job.job.job_id for job in self._jobs)
                dropped = self.manager.reset(self._touched_slots(), now_s)
            else:
                job_ids = self._disown(match)
                dropped = 0
        if match is not None:
            next_slot: int | None = 0
            while next_slot is not None:
                count, next_slot = self.manager.drop_matching(match.matches, next_slot, now_s)
                dropped += count
        return ResetTicket(epoch, dropped, dropped * self.manager.slot_bytes, job_ids)

    def open_jobs(self, job_ids: Sequence[int]) -> int:
        """How many of these jobs have not ended."""
        with self.manager.lock:
            return self._jobs.count_open(job_ids)

    # --- inside -------------------------------------------------------------------------------------------------

    def _view(self, found: RequestState | RequestView, now_s: float) -> RequestView:
        if isinstance(found, RequestView):
            return found
        self._policy(found, now_s)
        return found.view()

    def _policy(self, state: RequestState, now_s: float) -> RequestPolicy:
        if state.policy_version != self._policies.version:
            state.policy = self._policies.settle(state.ids, state.patch, now_s)
            state.policy_version = self._policies.version
        return state.policy.policy

    def _set_pin(self, state: RequestState, pin: Pin | None, *, release: bool = True) -> None:
        """Replace what a waiting request has pinned."""
        old, state.pin = state.pin, pin
        self._num_waiting_pins += len(pin or ()) - len(old or ())
        if old is not None and release:
            self.manager.release(old)

    def _begin_load(self, state: RequestState, pin: Pin, num_blocks: int, now_s: float) -> None:
        first = state.device_tokens // self.block_size
        state.phase = RequestPhase.LOADING
        self._request_counts.waiting_for_load += 1
        if len(pin) < num_blocks or not self.manager.begin_load(pin, now_s):
            self.manager.release(pin)
            self._load.failed += num_blocks
            lost = LoadOutcome(state.request.request_id, False, first, num_blocks)
            self._lost_loads.append((state, lost))
            return
        block_ids = np.array(state.block_ids[first : first + num_blocks], dtype=np.int64)
        job = TransferJob(self._jobs.new_id(), Direction.LOAD, block_ids, pin.slots)
        opened = OpenJob(job, request=state, pin=pin, first_block=first)
        self._jobs.open(opened)
        self._pending_loads.append(opened)
        self._device.hold(block_ids.tolist())
        state.load_job_id = job.job_id
        self._load.in_flight += num_blocks

    def _end_load(self, ended: OpenJob, now_s: float) -> list[LoadOutcome]:
        job, pin, state = ended.job, ended.pin or Pin.empty(), ended.request
        num_blocks = len(job.slots)
        intact = self.manager.end_load(pin)
        self._device.release(job.block_ids.tolist())
        self._load.in_flight -= num_blocks
        self._load.seconds += ended.seconds
        if ended.errors:
            self.manager.drop(pin.slots, EvictionReason.LOAD_FAILED, now_s)
        ok = intact and not ended.errors
        if ok:
            self._load.blocks += num_blocks
            self._load.bytes += ended.num_bytes
        else:
            self._load.failed += num_blocks
        if state is None:
            return []
        self._stop_waiting(state)
        state.loaded_tokens = num_blocks * self.block_size if ok else 0
        return [LoadOutcome(state.request.request_id, ok, ended.first_block, num_blocks)]

    def _stop_waiting(self, state: RequestState) -> None:
        state.phase = RequestPhase.WAITING
        state.load_job_id = None
        self._request_counts.waiting_for_load -= 1

    def _detach(self, state: RequestState) -> None:
        """Let go of the pin and of the load of a request that goes away or starts again."""
        self._set_pin(state, None)
        state.matched_tokens = None
        if state.phase is not RequestPhase.LOADING:
            return
        for job in self._jobs:
            if job.request is state:
                job.request = None
        self._stop_waiting(state)

    def _finish(self, request_id: str, now_s: float) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.phase is RequestPhase.RUNNING:
            self._offer(state, None, now_s)
        self._detach(state)
        state.phase = RequestPhase.FINISHED
        state.num_tokens_at_end = state.request.num_tokens
        self._requests.retire(state)
        self._request_counts.running -= 1
        self._request_counts.finished += 1

    def _count_prefill(self, state: RequestState) -> None:
        """Say once where a request's prompt came from, now that all of it is there."""
        state.prefill_counted = True
        total = state.request.num_prompt_tokens
        device_hit = min(state.device_tokens, total)
        host_hit = min(state.loaded_tokens, total - device_hit)
        for counts in (self._prompt_tokens, state.prompt_tokens):
            counts.total += total
            counts.device_hit += device_hit
            counts.host_hit += host_hit
            counts.recomputed += total - device_hit - host_hit

    def _offer(self, state: RequestState, limit: int | None, now_s: float) -> None:
        """Offer the full blocks that have no answer yet, up to `limit`; None: all, and what finds no space is final."""
        full = min(state.num_computed_tokens // self.block_size, len(state.block_ids))
        full = state.extend_keys(full)
        if full <= state.answered:
            return
        if limit is not None and state.refused_at == self.manager.space_version:
            return
        self._policy(state, now_s)
        end, kept_back = state.split_storable(state.answered, full, self.block_size)
        stop = end if limit is None else min(end, state.answered + limit)
        state.refused_at = None
        room = True
        while room and state.answered < stop:
            room = self._offer_batch(state, min(stop, state.answered + _OFFER_BLOCKS), now_s)
        if not room and limit is None:
            self._count_skipped(state, SkipReason.NO_SPACE, end - state.answered)
            state.answered = end
        if state.answered == end:
            for reason, count in kept_back:
                self._count_skipped(state, reason, count)
            state.answered = full

    def _offer_batch(self, state: RequestState, end: int, now_s: float) -> bool:
        """Offer blocks `state.answered` to `end`, and advance over those that were answered; False if room ran out."""
        first = state.answered
        positions = np.arange(first, end)
        offered = state.block_ids[first:end]
        if not self._storing_blocks.isdisjoint(offered):
            idle = np.array([block_id not in self._storing_blocks for block_id in offered], dtype=np.bool_)
            positions = positions[idle]
        wanted = state.keys[first:end]
        if len(positions) < len(wanted):
            wanted = [state.keys[i] for i in positions.tolist()]
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        answer = self.manager.offer(wanted, state.origin, positions, priority, now_s)
        if answer.num_answered < len(wanted):
            state.refused_at = self.manager.space_version
            end = int(positions[answer.num_answered])
        self._count_skipped(state, SkipReason.IN_FLIGHT, end - first - answer.num_answered)
        self._count_skipped(state, SkipReason.ALREADY_STORED, answer.num_answered - len(answer.slots))
        state.answered = end
        if len(answer.slots):
            block_ids = [state.block_ids[i] for i in positions[answer.stored_at].tolist()]
            self._pending_parts.append(StorePart(state, self.manager.epoch, answer.slots, block_ids))
            self._storing_blocks.update(block_ids)
            self._device.hold(block_ids)
            for counts in (self._store, state.store):
                counts.offered += len(block_ids)
                counts.in_flight += len(block_ids)
        return state.refused_at is None

    def _count_skipped(self, state: RequestState, reason: SkipReason, count: int) -> None:
        if count:
            for counts in (self._store, state.store):
                counts.offered += count
                counts.skipped[reason.value] += count

    def _take_store_job(self) -> list[TransferJob]:
        """One job of all blocks that were given a slot since the last step."""
        parts, self._pending_parts = self._pending_parts, []
        if not parts:
            return []
        slots = parts[0].slots if len(parts) == 1 else np.concatenate([part.slots for part in parts])
        block_ids = np.array([block_id for part in parts for block_id in part.block_ids], dtype=np.int64)
        job = TransferJob(self._jobs.new_id(), Direction.STORE, block_ids, slots)
        self._jobs.open(OpenJob(job, parts=parts))
        return [job]

    def _end_store(self, ended: OpenJob, now_s: float) -> None:
        for part in ended.parts:
            count = len(part.slots)
            self._storing_blocks.difference_update(part.block_ids)
            self._device.release(part.block_ids)
            disowned = part.disowned or part.epoch != self.manager.epoch
            published = 0
            if ended.errors or disowned:
                self.manager.abandon(part.slots)
            else:
                published = self.manager.publish(part.slots, now_s)
            for counts in (self._store, part.request.store):
                counts.in_flight -= count
                counts.stored += published
                counts.bytes += published * self.manager.slot_bytes
                if disowned:
                    counts.skipped[SkipReason.RESET.value] += count
                elif ended.errors:
                    counts.failed += count
                else:
                    counts.skipped[SkipReason.ALREADY_STORED.value] += count - published
        self._store.seconds += ended.seconds

    def _touched_slots(self) -> Slots:
        """The slots that transfers open or decided read or write, each once."""
        touched = [job.job.slots for job in self._jobs] + [part.slots for part in self._pending_parts]
        return np.unique(np.concatenate(touched)) if touched else np.empty(0, dtype=np.int64)

    def _disown(self, match: OriginMatch) -> tuple[int, ...]:
        """Disown what open jobs store or load of matching blocks; the jobs concerned."""
        concerned: list[int] = []
        for part in self._pending_parts:
            part.disowned = part.disowned or match.matches(part.request.origin)
        for job in self._jobs:
            matching = [part for part in job.parts if match.matches(part.request.origin)]
            for part in matching:
                part.disowned = True
            if matching or not job.is_store:
                concerned.append(job.job.job_id)
        return tuple(concerned)

    def _may_warn(self, subject: str, now_s: float) -> bool:
        """Whether a minute has passed since this was last said."""
        if now_s - self._last_warned_s.get(subject, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return False
        self._last_warned_s[subject] = now_s
        return True


def _warn_ignored(field: IgnoredField, request_id: str) -> None:
    _log.warning(
        "kv_transfer_params.%s=%s of request %s was ignored: it has the wrong type or is out of range",
        field.name,
        field.value,
        request_id,
    )
