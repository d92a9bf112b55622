"""Guard between an engine and offloading: an exception in kvferry's code becomes a miss, not a failure of the engine.

`OffloadGuard` has the hooks of `OffloadScheduler` that an engine calls. `GuardedSink` and
`GuardedCopies` stand before the event sink and the copy engine in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.keys import Key
from kvferry.core.pool.events import EventSink, EvictionBatch, RequestEnd, ResetEvent, StoreBatch
from kvferry.core.scheduler.scheduler import MatchResult, Miss, OffloadScheduler
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import CopyEngine

_log = logging.getLogger(__name__)

MAX_ERRORS = 10
"""Offloading is switched off after so many unexpected errors within `ERROR_WINDOW_S`."""
ERROR_WINDOW_S = 60.0
DISCARD_EVERY_S = 1.0
"""How often a state that could not be discarded is tried again."""
_MAX_PLACES = 200
_MAX_TEXT = 300


class ErrorLog:
    """Unexpected errors: counted, and logged with the traceback once per place in the code. Thread: any."""

    def __init__(self) -> None:
        self.count = 0
        self.last: str | None = None
        self._lock = threading.Lock()
        self._places: set[tuple[object, ...]] = set()

    def count_logged(self, text: str) -> None:
        """Count an error that was logged elsewhere."""
        with self._lock:
            self.count += 1
            self.last = text

    def record(self, where: str, error: BaseException) -> str:
        """Count an error that was raised in `where`; returns its text without the traceback, limited in length."""
        text = f"{where}: {type(error).__name__}: {error}"[:_MAX_TEXT]
        # Not `traceback.extract_tb`, which reads source files: this may be the engine thread.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (where, type(error), trace and trace.tb_frame.f_code.co_filename, trace and trace.tb_lineno)
        with self._lock:
            self.count += 1
            self.last = text
            is_new = place not in self._places and len(self._places) < _MAX_PLACES
            if is_new:
                self._places.add(place)
        if is_new:
            _log.error("unexpected error in %s (logged once per place)", where, exc_info=error)
        return text


@dataclass(slots=True)
class _Load:
    """A load job that the workers have. `waiter` numbers the wait of the request that it loads for."""

    request_id: str
    waiter: int | None
    reported: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """Whether offloading is on, and the unexpected errors so far. `reason` says why it is off."""

    is_on: bool
    reason: str | None
    num_errors: int
    last_error: str | None


class OffloadGuard:
    """The engine's hooks of an `OffloadScheduler`, none of which raises.

    After an exception the hook answers "miss" or an empty plan, and `OffloadScheduler.abandon_all` discards what the
    scheduler knows of requests: jobs that the workers have keep their blocks until they end and publish nothing, and
    requests that wait for another load recompute. Blocks in the pool stay, unless the exception interrupted a change of
    the pool. After `MAX_ERRORS` within `ERROR_WINDOW_S` offloading is off until `resume`.

    Thread: engine, except `guarding`, `record_error`, `count_error`, `status`, `degraded` and `resume`, which any
    thread may call.
    """

    def __init__(
        self,
        scheduler: OffloadScheduler,
        num_workers: int,
        errors: ErrorLog,
        clock: Callable[[], float] = time.time,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` has an idle engine take a step."""
        self._wake = wake
        self._scheduler = scheduler
        self._num_workers = num_workers
        self._errors = errors
        self._clock = clock
        self._planned: list[int] = []
        self._last_sent = 0
        self._loads: dict[int, _Load] = {}
        self._waiting: dict[str, int] = {}
        self._num_waits = 0
        self._lost: list[str] = []
        self._unread: list[TransferResult] = []
        self._announced: set[str] = set()
        self._finished: list[str] = []
        self._lock = threading.Lock()
        self._recent_s: deque[float] = deque(maxlen=MAX_ERRORS)
        self._off_reason: str | None = None
        self._must_discard = False
        self._must_check_loads = False
        self._is_unusable = False
        self._is_shut = False
        self._discarded_s = 0.0

    # --- the engine's hooks -------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """See `OffloadScheduler`."""
        if self._is_on(now_s):
            self._announced.add(request.request_id)
            try:
                self._scheduler.on_new_request(request, now_s)
            except Exception as error:  # noqa: BLE001 - the request is served without offloading
                self.fail("on_new_request", error, now_s)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> MatchResult:
        """See `OffloadScheduler`."""
        if self._is_on(now_s):
            try:
                return self._scheduler.match(request_id, num_computed_tokens, now_s)
            except Exception as error:  # noqa: BLE001 - a miss is always a right answer
                self.fail("match", error, now_s)
        return Miss()

    def boundary(self, request_id: str, now_s: float) -> int:
        """See `OffloadScheduler`."""
        if self._is_on(now_s):
            try:
                return self._scheduler.boundary(request_id)
            except Exception as error:  # noqa: BLE001 - nothing is stored for this boundary
                self.fail("boundary", error, now_s)
        return 0

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """See `OffloadScheduler`. A request with tokens to load gets an outcome in every case."""
        if num_loaded_tokens > 0:
            self._num_waits += 1
            self._waiting[request_id] = self._num_waits
        is_loading = False
        if self._is_on(now_s):
            try:
                self._scheduler.commit(request_id, block_ids, num_loaded_tokens, now_s)
                is_loading = self._scheduler.is_loading(request_id)
            except Exception as error:  # noqa: BLE001 - the load has failed, and its request recomputes
                self.fail("commit", error, now_s)
        if num_loaded_tokens > 0 and not is_loading:
            self._lost.append(request_id)

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """See `OffloadScheduler`."""
        plan = StepPlan()
        if self._is_on(now_s):
            try:
                plan = self._scheduler.plan_step(progress, now_s)
            except Exception as error:  # noqa: BLE001 - nothing is stored or loaded in this step
                self.fail("plan_step", error, now_s)
        self._planned = [job.job_id for job in plan.jobs]
        self._last_sent = max(self._planned, default=self._last_sent)
        for job in plan.loads:
            if job.request_id is not None:
                self._loads[job.job_id] = _Load(job.request_id, self._waiting.get(job.request_id))
        return plan

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        """See `OffloadScheduler`."""
        if self._is_on(now_s):
            try:
                self._scheduler.on_step_failed(request_ids, now_s)
            except Exception as error:  # noqa: BLE001 - what was decided for these requests is discarded, too
                self.fail("on_step_failed", error, now_s)

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """See `OffloadScheduler`. Called every step; jobs end here also while offloading is off."""
        self._is_on(now_s)
        ended = [load for result in results if (load := self._end_load(result)) is not None]
        self._unread += results
        outcomes: list[LoadOutcome] = []
        # Once more after an error: reports that were read before it are known as repeated ones.
        for _ in range(2):
            if self._is_unusable:
                break
            try:
                outcomes += self._scheduler.on_transfers_finished(self._unread, now_s)
                self._unread = []
                break
            except Exception as error:  # noqa: BLE001 - what ended is dropped, and requests that wait recompute
                self.fail("on_transfers_finished", error, now_s)
        if self._unread:
            self._lost += [load.request_id for load in ended if self._waiting.get(load.request_id) == load.waiter]
        outcomes = [one for one in outcomes if self._waiting.pop(one.request_id, None) is not None]
        if self._must_check_loads:
            self._check_loads()
        lost, self._lost = self._lost, []
        outcomes += [LoadOutcome(one, False, 0, 0) for one in lost if self._waiting.pop(one, None) is not None]
        return outcomes

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """See `OffloadScheduler`."""
        self._waiting.pop(request_id, None)
        if self._is_on(now_s):
            try:
                self._scheduler.on_preempted(request_id, now_s)
            except Exception as error:  # noqa: BLE001 - nothing of this request may be stored from its old blocks
                self.fail("on_preempted", error, now_s)

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        """See `OffloadScheduler`. Called also while offloading is off, so that the request is not kept."""
        self._waiting.pop(request_id, None)
        if request_id not in self._announced:
            return
        self._announced.discard(request_id)
        self._is_on(now_s)
        if self._is_unusable:
            self._finished.append(request_id)
            return
        try:
            self._scheduler.on_request_finished(request_id, now_s)
        except Exception as error:  # noqa: BLE001 - its last blocks are not stored
            self._finished.append(request_id)
            self.fail("on_request_finished", error, now_s)

    def has_open_work(self) -> bool:
        """See `OffloadScheduler`."""
        if self._lost:
            return True
        try:
            return not self._is_unusable and self._scheduler.has_open_work()
        except Exception as error:  # noqa: BLE001 - the engine sleeps until the next request
            self.record_error("has_open_work", error)
            return False

    # --- what the engine's adapter reports ----------------------------------------------------------------------

    def fail(self, where: str, error: Exception, now_s: float) -> None:
        """Record an error after which the scheduler may have a wrong view of its requests or blocks."""
        self._count(self._errors.record(where, error), now_s)
        self._discard(now_s)

    def lose_plan(self, now_s: float) -> None:
        """End the jobs of the latest plan as failed: the adapter could not hand it to the workers."""
        lost = [
            TransferResult(one, rank, "not submitted") for one in self._planned for rank in range(self._num_workers)
        ]
        for outcome in self.on_transfers_finished(lost, now_s):
            self._waiting[outcome.request_id] = 0
            self._lost.append(outcome.request_id)

    def reset(self, now_s: float) -> None:
        """Drop all blocks and switch offloading on again: the engine's own call for it. See also `resume`."""
        self._is_on(now_s)
        if not self._is_unusable:
            try:
                self._scheduler.resets.reset(now_s)
            except Exception as error:  # noqa: BLE001 - the recovery from a failed reset drops all blocks
                self.fail("reset", error, now_s)
        self.resume()

    # --- any thread ---------------------------------------------------------------------------------------------

    @contextmanager
    def guarding(self, where: str) -> Iterator[None]:
        """Discard the scheduler's state in the engine's next hook if the body raises; the exception is not suppressed.

        For calls that change the scheduler beside the engine's hooks, after which its state may be half-changed.
        """
        try:
            yield
        except Exception as error:
            self._must_discard = True
            self._count(self._errors.record(where, error), self._clock())
            self._wake()
            raise

    def record_error(self, where: str, error: Exception) -> None:
        """Count an unexpected error beside the scheduler: in the engine's adapter or a copy engine."""
        self._count(self._errors.record(where, error), self._clock())

    def count_error(self, text: str) -> None:
        """Count an unexpected error that another process has logged."""
        self._errors.count_logged(text)
        self._count(text, self._clock())

    @property
    def status(self) -> OffloadStatus:
        """Whether offloading is on, and the errors so far."""
        reason = self._off_reason
        return OffloadStatus(reason is None, reason, self._errors.count, self._errors.last)

    def degraded(self) -> list[str]:
        """Why offloading is off, for `/readyz`; empty while it is on."""
        reason = self._off_reason
        # What it was shut for is listed by its cause.
        return (
            []
            if reason is None or self._is_shut
            else [f"offloading is off: {reason}; see the log, then POST /admin/v1/reset"]
        )

    def shut(self, reason: str) -> None:
        """Switch offloading off for as long as this process lives."""
        self._is_shut = True
        self._must_discard = True
        self._off_reason = reason

    def resume(self) -> None:
        """Switch offloading on again, unless it was shut."""
        with self._lock:
            self._recent_s.clear()
            if self._off_reason is not None and not self._is_shut:
                _log.warning("offloading is switched on again")
                # Every hook looks at `_must_discard` first.
                self._must_discard |= self._is_unusable
                self._off_reason = None

    # --- inside -------------------------------------------------------------------------------------------------

    def _is_on(self, now_s: float) -> bool:
        """Whether the scheduler may be called. Discards its state first if that is due."""
        if self._must_discard or (self._is_unusable and now_s - self._discarded_s >= DISCARD_EVERY_S):
            self._discard(now_s)
        return self._off_reason is None

    def _count(self, text: str, now_s: float) -> None:
        """Switch offloading off if unexpected errors repeat."""
        with self._lock:
            self._recent_s.append(now_s)
            repeats = len(self._recent_s) == MAX_ERRORS and now_s - self._recent_s[0] <= ERROR_WINDOW_S
        if repeats and self._off_reason is None:
            self._switch_off(f"{MAX_ERRORS} unexpected errors within {ERROR_WINDOW_S:g} s, the last one {text}")

    def _switch_off(self, reason: str) -> None:
        # Requests go on without a call from here: what is known of their blocks must not be used later.
        self._must_discard = True
        self._off_reason = reason
        _log.error("offloading is switched off: %s; POST /admin/v1/reset switches it on again", reason)

    def _discard(self, now_s: float) -> None:
        self._must_discard = False
        self._must_check_loads = True
        self._discarded_s = now_s
        try:
            for error in self._scheduler.abandon_all(now_s, self._last_sent):
                self._errors.record("abandon_all", error)
            self._is_unusable = False
            while self._finished:
                # Known to the scheduler still if the call failed; ignored there otherwise.
                self._scheduler.on_request_finished(self._finished[-1], now_s)
                self._finished.pop()
        except Exception as error:  # noqa: BLE001 - the scheduler is not called until its state can be discarded
            self._is_unusable = True
            self._switch_off(f"its state could not be discarded: {self._errors.record('abandon_all', error)}")
            # Tried again in a second, not at every hook: device blocks may be held until it succeeds.
            self._must_discard = False
            loading = {load.waiter for load in self._loads.values()}
            self._lost += [request_id for request_id, waiter in self._waiting.items() if waiter not in loading]

    def _check_loads(self) -> None:
        """Fail the loads that the scheduler does not know any more: an exception may have cost it their outcomes."""
        if self._is_unusable:
            return
        try:
            self._lost += [one for one in self._waiting if not self._scheduler.is_loading(one)]
            self._must_check_loads = False
        except Exception as error:  # noqa: BLE001 - checked again at the next call
            self.record_error("is_loading", error)

    def _end_load(self, result: TransferResult) -> _Load | None:
        """Record a worker's report of a load; the load, if this was the last report."""
        load = self._loads.get(result.job_id)
        if load is None:
            return None
        load.reported.add(result.worker)
        if len(load.reported) < self._num_workers:
            return None
        return self._loads.pop(result.job_id)


class GuardedSink:
    """An `EventSink` that does not raise: what the cache did matters less than that it goes on."""

    def __init__(self, inner: EventSink, errors: ErrorLog) -> None:
        self._inner = inner
        self._errors = errors

    def stored(self, batch: StoreBatch) -> None:
        """See `EventSink`."""
        self._emit("stored", lambda: self._inner.stored(batch))

    def evicted(self, batch: EvictionBatch) -> None:
        """See `EventSink`."""
        self._emit("evicted", lambda: self._inner.evicted(batch))

    def was_reset(self, event: ResetEvent) -> None:
        """See `EventSink`."""
        self._emit("was_reset", lambda: self._inner.was_reset(event))

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """See `EventSink`."""
        self._emit("regretted", lambda: self._inner.regretted(keys, time_s))

    def request_ended(self, end: RequestEnd) -> None:
        """See `EventSink`."""
        self._emit("request_ended", lambda: self._inner.request_ended(end))

    def _emit(self, name: str, emit: Callable[[], None]) -> None:
        try:
            emit()
        except Exception as error:  # noqa: BLE001 - one event is missing
            self._errors.record(f"event {name}", error)


class GuardedCopies:
    """A `CopyEngine` whose `submit` and `poll` do not raise, and that ends every job once.

    A job that `submit` did not take has failed. When `poll` raises, jobs that have ended and are not reported by the
    next call have failed: their results are lost. Thread: engine.
    """

    def __init__(self, inner: CopyEngine, record_error: Callable[[str, Exception], object], worker: int = 0) -> None:
        self._inner = inner
        self._record_error = record_error
        self._worker = worker
        self._open: set[int] = set()
        self._doubtful: set[int] = set()
        self._refused: list[TransferResult] = []

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._submit(job, self._inner.submit)

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._submit(job, self._inner.submit_ahead)

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        refused, self._refused = self._refused, []
        # Looked at before `poll`: a job that ends after this is in the next call's results.
        ended = {job_id for job_id in self._doubtful if self._has_ended(job_id)}
        polled: list[TransferResult] = []
        try:
            polled = self._inner.poll()
        except Exception as error:  # noqa: BLE001 - what it had is looked for below, at the next call
            self._record_error("poll of the copy engine", error)
            self._doubtful = set(self._open)
        else:
            self._doubtful -= ended
        results = [one for one in (*refused, *polled) if one.job_id in self._open]
        lost = ended - {one.job_id for one in results}
        results += [self._failed(job_id, "its result is lost") for job_id in sorted(lost)]
        for one in results:
            self._open.discard(one.job_id)
        self._doubtful &= self._open
        return results

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        return self._inner.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._inner.is_alive()

    def close(self) -> None:
        """See `CopyEngine`."""
        self._inner.close()

    def _submit(self, job: TransferJob, submit: Callable[[TransferJob], None]) -> None:
        self._open.add(job.job_id)
        try:
            submit(job)
        except Exception as error:  # noqa: BLE001 - reported as the job's result
            self._record_error("submit of the copy engine", error)
            if self._has_ended(job.job_id):
                self._refused.append(self._failed(job.job_id, f"not submitted: {error}"))

    def _has_ended(self, job_id: int) -> bool:
        try:
            return self._inner.wait((job_id,), 0.0)
        except Exception as error:  # noqa: BLE001 - asked again at the next call
            self._record_error("wait of the copy engine", error)
            return False

    def _failed(self, job_id: int, error: str) -> TransferResult:
        return TransferResult(job_id, self._worker, error=error)
