"""Guard of the engine's hooks of `OffloadScheduler`: after an exception they answer "miss" instead of raising."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.app.guard.wrappers import ErrorLog, HookTimer
from kvferry.core.counters import counter, gauge
from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.errors import RequestFailed
from kvferry.core.scheduler.scheduler import MatchResult, Miss, OffloadScheduler
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult

_log = logging.getLogger(__name__)

MAX_ERRORS = 10
"""Offloading is switched off after this many unexpected errors within `ERROR_WINDOW_S`."""
ERROR_WINDOW_S = 60.0
DISCARD_EVERY_S = 1.0
"""Interval of retries to discard a state that could not be discarded."""


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """Whether offloading is on, and unexpected errors in kvferry's own code, which requests survive."""

    is_on: bool = gauge(
        "Whether offloading is on; off after repeated errors, until a whole reset, and once the pool's file was "
        "truncated, until a restart",
        "offloading_on",
        default=True,
    )
    reason: str | None = field(
        default=None, metadata={"description": "why offloading is off, and what switches it on; null while it is on"}
    )
    num_errors: int = counter(
        "Unexpected errors in kvferry's own code; each place is logged once, with its traceback", "unexpected_errors"
    )
    last_error: str | None = None


@dataclass(slots=True, eq=False)
class _Wait:
    """One request's wait for a load."""

    request_id: str
    unreported: set[int] | None = None
    """Workers that have its job and have not reported it; None if no worker has a job for it."""


class LoadWaits:
    """Requests that wait for a load, so that each gets exactly one outcome, whatever fails. Thread: engine.

    The outcome is the scheduler's, if it has one. Otherwise a wait fails if no worker gets a job for it, or once all
    workers have reported its job: they write to its device blocks until then.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._waiting: dict[str | None, _Wait] = {}
        self._by_job: dict[int, _Wait] = {}
        """Waits by the number of the job that the workers carry out."""
        self._failed: list[_Wait] = []

    def begin(self, request_id: str) -> None:
        """Record that a request waits for a load from now on."""
        self._waiting[request_id] = _Wait(request_id)

    def cancel(self, request_id: str) -> None:
        """Forget a request, which needs no outcome any more."""
        self._waiting.pop(request_id, None)

    def submit(self, jobs: Sequence[TransferJob]) -> None:
        """Record the load jobs of a plan, which the workers get. Waits without a job fail."""
        # Of a request that was preempted since the last plan, the last job is the one that it waits for.
        for job in {job.request_id: job for job in jobs}.values():
            wait = self._waiting.get(job.request_id)
            if wait is not None and wait.unreported is None:
                wait.unreported = set(range(self._num_workers))
                self._by_job[job.job_id] = wait
        self.fail_unsent()

    def fail_unsent(self) -> None:
        """Have the waits fail in the next `end` for which no worker has a job, as none will get one."""
        self._failed += [wait for wait in self._waiting.values() if wait.unreported is None]

    def has_no_job(self, request_id: str) -> bool:
        """Return whether a request waits and no worker has a job for it."""
        wait = self._waiting.get(request_id)
        return wait is not None and wait.unreported is None

    def any_without_job(self) -> bool:
        """Return whether any request waits without a job, so that the next calls end its wait."""
        return any(wait.unreported is None for wait in self._waiting.values())

    def end(self, results: Sequence[TransferResult], outcomes: Sequence[LoadOutcome]) -> list[LoadOutcome]:
        """Return one outcome for each wait that ends: the scheduler's `outcomes`, then those that fail without one."""
        for result in results:
            wait = self._by_job.get(result.job_id)
            if wait is None or wait.unreported is None:
                continue
            wait.unreported.discard(result.worker)
            if not wait.unreported:
                del self._by_job[result.job_id]
                self._failed.append(wait)
        ended = [outcome for outcome in outcomes if self._waiting.pop(outcome.request_id, None) is not None]
        for wait in self._failed:
            if self._waiting.get(wait.request_id) is wait:
                del self._waiting[wait.request_id]
                ended.append(LoadOutcome(wait.request_id, False, 0, 0))
        self._failed = []
        return ended


class OffloadGuard:
    """The engine's hooks of an `OffloadScheduler`, none of which raises.

    After an exception that has changed no state but that of one request (`RequestFailed`), only this request misses.
    After any other the hook answers "miss" or an empty plan, and `OffloadScheduler.abandon_all` discards the state
    of all requests, which miss to their end: jobs that the workers have keep their blocks until they end and publish
    nothing. Blocks in the pool stay, unless the exception interrupted a change of the pool.
    After `MAX_ERRORS` within `ERROR_WINDOW_S` offloading is off until `resume`.

    Thread: engine, except `guarding`, `record_error`, `count_error`, `status`, `degraded`, `disable` and `resume`,
    which any thread may call.
    """

    def __init__(
        self,
        scheduler: OffloadScheduler,
        num_workers: int,
        errors: ErrorLog,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` must not go back. `wake` has an idle engine take a step. `timer` measures the time in hooks."""
        self.hook_timer = HookTimer(scheduler.balance, timer)
        self._wake = wake
        self._scheduler = scheduler
        self._num_workers = num_workers
        self._errors = errors
        self._clock = clock
        self._switch_lock = threading.Lock()
        self._recent_s: deque[float] = deque(maxlen=MAX_ERRORS)
        self._off_reason: str | None = None
        """Why offloading is off; None while it is on."""
        self._is_disabled = False
        """Whether it is off for the rest of the process."""
        self._waits = LoadWaits(num_workers)
        self._last_sent = 0
        self._unread: list[TransferResult] = []
        self._announced: set[str] = set()
        self._finished: list[str] = []
        self._must_discard = False
        self._is_unusable = False
        self._discarded_s = 0.0

    # --- the engine's hooks; see `OffloadScheduler` -------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """After an error the request is computed without offloading."""
        if self._is_on(now_s):
            self._announced.add(request.request_id)
            with self._hook("on_new_request", now_s):
                self._scheduler.on_new_request(request, now_s)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> MatchResult:
        """After an error the answer is a miss."""
        if self._is_on(now_s):
            with self._hook("match", now_s):
                return self._scheduler.match(request_id, num_computed_tokens, now_s)
        return Miss()

    def boundary(self, request_id: str, now_s: float) -> int:
        """After an error nothing is stored for this boundary."""
        if self._is_on(now_s):
            with self._hook("boundary", now_s):
                return self._scheduler.boundary(request_id)
        return 0

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """A request with tokens to load gets an outcome in every case."""
        if num_loaded_tokens > 0:
            self._waits.begin(request_id)
        if self._is_on(now_s):
            with self._hook("commit", now_s):
                self._scheduler.commit(request_id, block_ids, num_loaded_tokens, now_s)
        else:
            self._waits.fail_unsent()

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """After an error the plan is empty."""
        plan = StepPlan()
        if self._is_on(now_s):
            with self._hook("plan_step", now_s):
                plan = self._scheduler.plan_step(progress, now_s)
        self._last_sent = max((job.job_id for job in plan.jobs), default=self._last_sent)
        self._waits.submit(plan.loads)
        return plan

    def on_step_failed(self, request_ids: Sequence[str], now_s: float, *, fails_stores: bool = False) -> None:
        """After an error the decisions for these requests are discarded with all others."""
        if self._is_on(now_s):
            with self._hook("on_step_failed", now_s):
                self._scheduler.on_step_failed(request_ids, now_s, fails_stores=fails_stores)

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """Called every step; jobs end here also while offloading is off."""
        self._is_on(now_s)
        self._unread += results
        outcomes: list[LoadOutcome] = []
        # Repeated once after an error: results that were read before it are ignored as duplicates.
        for _ in range(2):
            if self._is_unusable:
                break
            with self._hook("on_transfers_finished", now_s):
                outcomes = self._scheduler.on_transfers_finished(self._unread, now_s)
                self._unread = []
                break
        return self._waits.end(results, outcomes)

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """After an error nothing of this request is stored from its old blocks."""
        self._waits.cancel(request_id)
        if self._is_on(now_s):
            with self._hook("on_preempted", now_s):
                self._scheduler.on_preempted(request_id, now_s)

    def on_request_finished(
        self, request_id: str, now_s: float, num_computed_tokens: int | None = None, *, is_aborted: bool = False
    ) -> None:
        """Called also while offloading is off, so that the scheduler forgets the request."""
        self._waits.cancel(request_id)
        if request_id not in self._announced:
            return
        self._announced.discard(request_id)
        self._is_on(now_s)
        if self._is_unusable:
            self._finished.append(request_id)
            return
        with self.hook_timer:
            try:
                self._scheduler.on_request_finished(request_id, now_s, num_computed_tokens, is_aborted=is_aborted)
            except Exception as error:  # noqa: BLE001 - its last blocks are not stored
                self._finished.append(request_id)
                self.fail("on_request_finished", error, now_s)

    def waits_without_job(self, request_id: str) -> bool:
        """Return whether a request waits for a load that no worker has."""
        return self._waits.has_no_job(request_id)

    def has_open_work(self) -> bool:
        """After an error the engine sleeps until the next request."""
        if self._waits.any_without_job():
            return True
        try:
            return not self._is_unusable and self._scheduler.has_open_work()
        except Exception as error:  # noqa: BLE001 - see above
            self.record_error("has_open_work", error)
            return False

    # --- reports of the engine's adapter ------------------------------------------------------------------------

    def fail(self, where: str, error: Exception, now_s: float) -> None:
        """Record an error after which the scheduler may have a wrong view of its requests or blocks."""
        self._count(self._errors.record(where, error))
        self._discard(now_s)

    def fail_request(self, request_id: str, where: str, error: Exception, now_s: float) -> None:
        """Record an error that concerns one request, which is computed without offloading from now on."""
        self._errors.record(where, error)
        if self._is_on(now_s):
            with self._hook(where, now_s):
                self._scheduler.exclude(request_id, where, error)

    def fail_plan(self, jobs: Sequence[TransferJob], now_s: float) -> None:
        """End these jobs of the latest plan as failed: the adapter could not send them to the workers."""
        lost = [TransferResult(job.job_id, rank, "not submitted") for job in jobs for rank in range(self._num_workers)]
        for outcome in self.on_transfers_finished(lost, now_s):
            self._waits.begin(outcome.request_id)
        self._waits.fail_unsent()

    def reset(self, now_s: float) -> None:
        """Drop all blocks and switch offloading on again: the engine's own call for it. See also `resume`."""
        self._is_on(now_s)
        if not self._is_unusable:
            with self._hook("reset", now_s):
                self._scheduler.resets.reset(now_s)
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
            self.record_error(where, error)
            self._wake()
            raise

    def record_error(self, where: str, error: Exception) -> None:
        """Count an unexpected error beside the scheduler: in the engine's adapter or a copy engine."""
        self._count(self._errors.record(where, error))

    def count_error(self, text: str) -> None:
        """Count an unexpected error that another process has logged."""
        self._errors.count_logged(text)
        self._count(text)

    @property
    def status(self) -> OffloadStatus:
        """Whether offloading is on, and the errors so far."""
        reason = self._off_reason
        return OffloadStatus(reason is None, reason, self._errors.count, self._errors.last)

    def degraded(self) -> list[str]:
        """Return why offloading is off; empty while it is on, or disabled, which is reported by its cause."""
        reason = self._off_reason
        if reason is None or self._is_disabled:
            return []
        return [f"offloading is off: {reason}"]

    def disable(self, reason: str) -> None:
        """Switch offloading off for the rest of the process. `reason` includes what to do."""
        self._must_discard = True
        with self._switch_lock:
            self._is_disabled = True
            self._off_reason = reason

    def resume(self) -> None:
        """Switch offloading on again, unless it is disabled."""
        # Set first: every hook reads it before the reason.
        if self._is_unusable:
            self._must_discard = True
        with self._switch_lock:
            self._recent_s.clear()
            was_off = self._off_reason is not None and not self._is_disabled
            if was_off:
                self._off_reason = None
        if was_off:
            _log.warning("offloading is switched on again")

    # --- discarding ---------------------------------------------------------------------------------------------

    @contextmanager
    def _hook(self, where: str, now_s: float) -> Iterator[None]:
        """Suppress an exception of the body, and discard the scheduler's state unless it concerns one request only."""
        with self.hook_timer:
            try:
                yield
            except RequestFailed as failed:
                self._errors.record(where, failed.__cause__ or failed)
            except Exception as error:  # noqa: BLE001 - the engine must not fail
                self.fail(where, error, now_s)

    def _is_on(self, now_s: float) -> bool:
        """Return whether the scheduler may be called. Discards its state first if that is due."""
        if self._must_discard or (self._is_unusable and self._clock() - self._discarded_s >= DISCARD_EVERY_S):
            self._discard(now_s)
        return self._off_reason is None

    def _count(self, text: str) -> None:
        """Count an unexpected error, and switch offloading off if errors repeat."""
        with self._switch_lock:
            now_s = self._clock()
            self._recent_s.append(now_s)
            repeats = len(self._recent_s) == MAX_ERRORS and now_s - self._recent_s[0] <= ERROR_WINDOW_S
        if repeats and self._off_reason is None:
            self._switch_off(f"{MAX_ERRORS} unexpected errors within {ERROR_WINDOW_S:g} s, the last one {text}")
            # Requests go on without calls, and what is known of their blocks becomes stale.
            self._must_discard = True

    def _switch_off(self, reason: str) -> None:
        """Switch offloading off until `resume`, unless it is disabled; log it if it was on."""
        with self._switch_lock:
            was_on = self._off_reason is None
            if not self._is_disabled:
                self._off_reason = f"{reason}; see the log, then POST /admin/v1/reset"
        if was_on:
            _log.error("offloading is switched off: %s; POST /admin/v1/reset switches it on again", reason)

    def _discard(self, now_s: float) -> None:
        self._must_discard = False
        self._discarded_s = self._clock()
        self._waits.fail_unsent()
        try:
            for error in self._scheduler.abandon_all(now_s, self._last_sent):
                self._errors.record("abandon_all", error)
            self._is_unusable = False
            while self._finished:
                # The scheduler still knows the request if the call failed, and ignores it otherwise.
                self._scheduler.on_request_finished(self._finished[-1], now_s, is_aborted=True)
                self._finished.pop()
        except Exception as error:  # noqa: BLE001 - the scheduler is not called until its state can be discarded
            self._is_unusable = True
            # Retried after `DISCARD_EVERY_S`, not at every hook: device blocks may be held until it succeeds.
            self._switch_off(f"its state could not be discarded: {self._errors.record('abandon_all', error)}")
