"""A tier whose calls run on a thread of its own, one at a time, in the order in which they were made.

Tiers of other packages are called through it, so that a call that blocks delays that tier only, never the engine thread
or a thread that holds the manager lock. One that declares `nonblocking = True` is waited for, shortly, where an answer
is needed at once.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.app.threads import WatchedThread
from kvferry.app.tiers.job_queue import JobKind
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.tiers.base import Tier, TierContext, TierCounts, TierJob, TierRequest, TierResetResult, TierResult

_log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 1024
"""Calls that may wait for the tier's thread; jobs beyond are refused, other calls raise `TierCallFailed`."""
RETRY_RESET_S = 1.0
"""Interval between attempts of a reset that the tier refused with an exception."""
_RESETS = ("reset", "drop")
"""Calls that are repeated until they succeed."""
ANSWER_S = 0.01
"""Time that a tier that declares `nonblocking` has to return from `on_new_request`."""
POLL_S = 1.0
"""Interval between polls of a tier that has nothing to do."""
FAILURE_S = 60.0
"""How long `health` shows a failed call, unless the same call succeeds before."""


class TierCallFailed(RuntimeError):
    """A call was not queued, a queued call raised, or a job to cancel has begun and uses its slots until its result.

    `poll` raises it once when a method begins to fail, and while the tier's `poll` fails.
    """


@dataclass(slots=True, eq=False)
class _Job:
    """A look-up, store or load that has no result yet. The result of a discarded one says no for every key."""

    number: int
    kind: JobKind
    num_keys: int
    submitted_s: float
    started_s: float | None = None
    is_discarded: bool = False
    is_canceled: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the tier that waits for its thread. Only look-ups, stores and loads have a `job`."""

    method: str
    run: Callable[[], object]
    job: _Job | None = None
    has_returned: bool = False


class QueuedTier:
    """A `Tier` whose methods return at once and have another tier's methods called later, in order.

    - Results of `poll`, `health` and `counts` are those that the thread fetched last.
    - `on_new_request` returns the level that the tier returned last for any request, at first `level`. A tier that
      `is_nonblocking` is waited for, but not while a call of it takes longer than `ANSWER_S`.
    - `cancel` removes a job that has not begun. If it has begun, `cancel` is passed on ahead of all waiting calls and
      raises `TierCallFailed`: the caller keeps the slots until the job's result, which comes when the tier's own
      `cancel` has returned.
    - A reset ends all jobs that have not begun, and discards the results of the others. While it fails, or a drop of
      keys, it is tried again, no call is passed on, and jobs are refused.
    - A job whose call raised is canceled and ends with no for every key. A request whose `on_new_request` raised is not
      known to the tier: jobs for it end with no for every key.
    """

    def __init__(
        self,
        open_tier: Callable[[TierContext], Tier],
        context: TierContext,
        level: Level = Level.BLOCK,
        max_waiting_calls: int = MAX_WAITING_CALLS,
        *,
        is_nonblocking: bool = False,
    ) -> None:
        """Open a tier on the caller's thread, with a context whose slots and notifications pass through this object."""
        self._name = context.name
        self._notify = context.on_finished
        self._slots = context.slots
        self._level = level
        self._max_waiting = max_waiting_calls
        self._is_nonblocking = is_nonblocking
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._open: dict[int, _Job] = {}
        self._resets: set[int] = set()
        self._retry_at_s: float | None = None
        self._unknown_requests: set[str] = set()
        self._results: deque[TierResult | TierResetResult] = deque()
        self._running: tuple[str, float] | None = None
        self._is_poll_due = True
        self._failures: dict[str, Failure] = {}
        """The latest failure of each method that fails."""
        self._unreported: dict[str, str] = {}
        self._counts = TierCounts()
        self._health: Sequence[str] = ()
        self._num_dropped = 0
        self._num_failed = 0
        self._refreshed_s = -float("inf")
        self._is_closed = False
        self._has_no_slots = False
        self._close_error: BaseException | None = None
        self._tier = open_tier(replace(context, slots=self, on_finished=self._request_poll))
        self._timeout_s = float(self._tier.timeout_s)
        self._thread = WatchedThread(f"kvferry-tier-{self._name}", self._run, "the tier is not called")
        self._thread.start()

    @property
    def timeout_s(self) -> float:
        """See `kvferry.core.tiers.base.Tier`."""
        return self._timeout_s

    # --- requests and jobs --------------------------------------------------------------------------------------

    def on_new_request(self, request: TierRequest) -> Level:
        """See the class. Raises `TierCallFailed`."""
        with self._changed:
            call = _Call("on_new_request", lambda: self._announce(request))
            self._put(call)
            if self._is_nonblocking and not self._runs_longer(time.monotonic(), ANSWER_S):
                self._changed.wait_for(lambda: call.has_returned, ANSWER_S)
            return self._level

    def on_request_finished(self, request_id: str) -> None:
        """See `kvferry.core.tiers.base.Tier`. Always queued: there is one call for each announced request."""
        with self._changed:
            self._calls.append(_Call("on_request_finished", lambda: self._finish_request(request_id)))
            self._changed.notify_all()

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """See `kvferry.core.tiers.base.Tier`."""
        self._submit(JobKind.LOOK_UP, number, len(keys), lambda: self._tier.look_up(number, keys))

    def store(self, job: TierJob) -> None:
        """See `kvferry.core.tiers.base.Tier`. Refused blocks count as dropped."""
        self._submit(JobKind.STORE, job.number, len(job), lambda: self._pass_on(job, self._tier.store))

    def load(self, job: TierJob) -> None:
        """See `kvferry.core.tiers.base.Tier`. Refused blocks count as failed."""
        self._submit(JobKind.LOAD, job.number, len(job), lambda: self._pass_on(job, self._tier.load))

    def cancel(self, number: int) -> None:
        """See the class. Raises `TierCallFailed`."""
        with self._changed:
            job = self._open.get(number)
            if job is None:
                return
            if job.started_s is None:
                self._remove_waiting(lambda waiting: waiting is job)
                return
            if not job.is_canceled:
                job.is_canceled = job.is_discarded = True
                self._calls.appendleft(_Call("cancel", partial(self._cancel, job)))
                self._changed.notify_all()
            if job.kind is not JobKind.LOOK_UP:
                raise TierCallFailed(f"job {number} is in progress; its slots are in use until it ends")

    def drop(self, number: int, keys: Sequence[Key]) -> None:
        """See `kvferry.core.tiers.base.Tier`. Raises `TierCallFailed`."""
        with self._changed:
            self._put(_Call("drop", lambda: self._tier.drop(number, keys)))
            self._resets.add(number)

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """See the class. Raises `TierCallFailed`."""
        with self._changed:
            for removed in self._remove_waiting(lambda job: True):
                self._results.append(_refusal(removed))
            for job in self._open.values():
                job.is_discarded = True
            self._results = deque(_discarded(result) for result in self._results)
            self._put(_Call("reset", lambda: self._tier.reset(number, match)))
            self._resets.add(number)

    # --- results ------------------------------------------------------------------------------------------------

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """See `kvferry.core.tiers.base.Tier`. Raises `TierCallFailed`; no result is lost by that."""
        self._thread.start()
        with self._changed:
            if self._open or self._resets:
                self._is_poll_due = True
                self._changed.notify_all()
            errors, self._unreported = self._unreported, {}
            if "poll" in self._failures:
                errors["poll"] = self._failures["poll"].text
            if errors:
                raise TierCallFailed("; ".join(errors.values()))
            results, self._results = self._results, deque()
            return results

    def health(self) -> Sequence[str]:
        """See `kvferry.core.tiers.base.Tier`."""
        with self._changed:
            now_s = time.monotonic()
            reasons = [failure.text for failure in self._failures.values() if now_s - failure.since_s < FAILURE_S]
            if self._running is not None and self._is_hung(now_s):
                method, since_s = self._running
                reasons.append(f"its call {method} has not returned for {now_s - since_s:.0f} s, so it gets no jobs")
            return [*reasons, *self._thread.degraded(), *self._health]

    def counts(self) -> TierCounts:
        """See `kvferry.core.tiers.base.Tier`."""
        with self._changed:
            counts = self._counts
            return replace(counts, dropped=counts.dropped + self._num_dropped, failed=counts.failed + self._num_failed)

    def close(self, timeout_s: float) -> None:
        """Close the tier behind the calls that wait, jobs excepted; abandon it if that takes too long.

        A call that hangs is abandoned with its thread: it can get no bytes of slots from the context any more.
        Raises what the tier's `close` raised.
        """
        deadline_s = time.monotonic() + timeout_s
        self._thread.start()
        with self._changed:
            self._is_closed = True
            self._thread.closing.set()
            self._remove_waiting(lambda job: True)
            closing = _Call("close", lambda: self._tier.close(max(deadline_s - time.monotonic(), 0.0)))
            self._calls.append(closing)
            self._changed.notify_all()
        has_ended = self._thread.close(timeout_s)
        self._has_no_slots = True
        with self._changed:
            # A call that returns after this is followed by `close` alone.
            self._calls = deque(call for call in self._calls if call is closing)
            method = "close" if self._running is None else self._running[0]
        if not has_ended:
            _log.warning("tier %s: thread did not end at shutdown, in or before call: %s", self._name, method)
        if self._close_error is not None:
            raise TierCallFailed(f"close failed: {_text_of(self._close_error)}") from self._close_error

    # --- queueing; requires: self._changed held -----------------------------------------------------------------

    def _put(self, call: _Call) -> None:
        if self._is_closed:
            raise TierCallFailed(f"{call.method} is not passed on: the tier is closed")
        if len(self._calls) >= self._max_waiting:
            raise TierCallFailed(f"{call.method} is not passed on: {len(self._calls)} calls wait for the tier")
        self._calls.append(call)
        self._changed.notify_all()

    def _submit(self, kind: JobKind, number: int, num_keys: int, run: Callable[[], object]) -> None:
        job = _Job(number, kind, num_keys, time.monotonic())
        with self._changed:
            is_full = self._is_closed or len(self._calls) >= self._max_waiting
            if is_full or self._retry_at_s is not None or self._is_hung(time.monotonic()):
                self._refuse(job)
                return
            self._open[job.number] = job
            self._put(_Call(kind.name.lower(), run, job))

    def _refuse(self, job: _Job) -> None:
        self._num_dropped += job.num_keys if job.kind is JobKind.STORE else 0
        self._num_failed += job.num_keys if job.kind is JobKind.LOAD else 0
        self._results.append(_refusal(job))

    def _remove_waiting(self, is_meant: Callable[[_Job], bool]) -> list[_Job]:
        """Take jobs that have not begun out of the queue."""
        removed = [call.job for call in self._calls if call.job is not None and is_meant(call.job)]
        self._calls = deque(call for call in self._calls if call.job is None or not is_meant(call.job))
        for job in removed:
            del self._open[job.number]
        return removed

    def _is_hung(self, now_s: float) -> bool:
        return self._runs_longer(now_s, self._timeout_s)

    def _runs_longer(self, now_s: float, limit_s: float) -> bool:
        return self._running is not None and now_s - self._running[1] > limit_s

    def _end(self, job: _Job) -> None:
        """End a job with no for every key, unless the tier's result has come."""
        if self._open.get(job.number) is job:
            del self._open[job.number]
            self._results.append(_refusal(job))

    # --- Thread: the tier's own ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._make_next_call():
                continue
        except BaseException:
            with self._changed:
                self._running = None
                # Results that were fetched may be lost.
                self._unreported["thread"] = "its thread died"
            raise

    def _make_next_call(self) -> bool:
        """Wait for a call and make it, and poll; return True once the tier is closed."""
        call = self._next_call()
        if call is not None:
            self._execute(call)
            if call.method == "close":
                return True
        self._fetch(has_changed=call is not None)
        return False

    def _next_call(self) -> _Call | None:
        """Wait for a call, or for the time to poll: then None."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                is_reset = bool(self._calls) and self._calls[0].method in _RESETS and not self._is_closed
                wait_s = max((self._retry_at_s or 0.0) - now_s, 0.0) if is_reset else 0.0
                if self._calls and not wait_s:
                    call = self._calls.popleft()
                    if call.job is not None:
                        call.job.started_s = now_s
                    return call
                if self._is_poll_due or not self._changed.wait(min(wait_s, POLL_S) or POLL_S):
                    return None

    def _execute(self, call: _Call) -> None:
        error = self._try(call.method, call.run)
        with self._changed:
            call.has_returned = True
            self._changed.notify_all()
        if error is not None and call.job is not None:
            # The tier may have taken the job before it raised.
            self._try("cancel", partial(self._cancel, call.job))
        if call.method in _RESETS:
            with self._changed:
                self._retry_at_s = None
                if error is not None and not self._is_closed:
                    self._retry_at_s = time.monotonic() + RETRY_RESET_S
                    self._calls.appendleft(call)
        if call.method == "close":
            self._close_error = error

    def _fetch(self, *, has_changed: bool) -> None:
        """Poll the tier, and have `counts` and `health` agree with the results before these are handed out."""
        fetched: list[TierResult | TierResetResult] = []
        with self._changed:
            self._is_poll_due = False
        self._try("poll", lambda: fetched.extend(_checked(self._tier.poll())))
        now_s = time.monotonic()
        if fetched or has_changed or now_s - self._refreshed_s >= POLL_S:
            self._try("counts", self._refresh_counts)
            self._try("health", self._refresh_health)
            self._refreshed_s = now_s
        with self._changed:
            is_awaited = [self._take(result) for result in fetched]
        if any(is_awaited):
            self._notify()

    def _take(self, result: TierResult | TierResetResult) -> bool:
        """Pass a result on; True if a request may wait for it. Requires: self._changed held."""
        if isinstance(result, TierResetResult):
            if result.number in self._resets:
                self._resets.remove(result.number)
                self._results.append(result)
            return True
        job = self._open.get(result.number)
        if job is None or job.started_s is None:
            return False
        del self._open[job.number]
        if job.is_discarded:
            self._results.append(_refusal(job))
        else:
            waited_s = job.started_s - job.submitted_s
            self._results.append(replace(result, seconds=result.seconds + waited_s))
        return job.kind is not JobKind.STORE

    def _try(self, method: str, run: Callable[[], object]) -> BaseException | None:
        """Call the tier without any lock; return what it raised."""
        with self._changed:
            self._running = (method, time.monotonic())
        error: BaseException | None = None
        try:
            run()
        except BaseException as raised:  # noqa: BLE001 - the tier's thread must not end
            error = raised
        with self._changed:
            self._running = None
            if error is None:
                self._failures.pop(method, None)
            else:
                self._record_failure(method, error)
        return error

    def _record_failure(self, method: str, error: BaseException) -> None:
        """Show a failure in `health`, and have `poll` raise it if it is new or a result may be lost with it."""
        text = f"{method} failed: {_text_of(error)}"
        if method not in self._failures or method == "poll":
            self._unreported[method] = text
        self._failures[method] = Failure(FailureCause.BROKEN, text, time.monotonic())

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """See `kvferry.core.tiers.base.SlotBytes`. A call that hangs until the tier is closed gets no bytes."""
        if self._has_no_slots:
            raise RuntimeError(f"slot {slot} cannot be accessed: the tier is closed")
        return self._slots.views(slot, num_bytes)

    # --- what is called on it -----------------------------------------------------------------------------------

    def _announce(self, request: TierRequest) -> None:
        try:
            level = Level(self._tier.on_new_request(request))
        except BaseException:
            self._unknown_requests.add(request.request_id)
            raise
        with self._changed:
            self._level = level

    def _finish_request(self, request_id: str) -> None:
        if request_id in self._unknown_requests:
            self._unknown_requests.remove(request_id)
        else:
            self._tier.on_request_finished(request_id)

    def _pass_on(self, job: TierJob, call: Callable[[TierJob], object]) -> None:
        """Pass a store or load on, or end it if the tier does not know its request."""
        if job.request_id not in self._unknown_requests:
            call(job)
            return
        with self._changed:
            opened = self._open.get(job.number)
            if opened is not None:
                del self._open[job.number]
                self._refuse(opened)

    def _cancel(self, job: _Job) -> None:
        self._tier.cancel(job.number)
        with self._changed:
            self._end(job)

    def _refresh_counts(self) -> None:
        self._counts = self._tier.counts()

    def _refresh_health(self) -> None:
        self._health = list(self._tier.health())

    def _request_poll(self) -> None:
        """Have the tier polled: it has something new. Any thread."""
        with self._changed:
            self._is_poll_due = True
            self._changed.notify_all()


def _text_of(error: BaseException) -> str:
    """Type and message of an exception whose `__str__` may raise."""
    return traceback.format_exception_only(error)[0].strip()


def _refusal(job: _Job) -> TierResult:
    return TierResult(job.number, np.zeros(job.num_keys, dtype=np.bool_), seconds=time.monotonic() - job.submitted_s)


def _discarded(result: TierResult | TierResetResult) -> TierResult | TierResetResult:
    """Return a result that fails every key."""
    if isinstance(result, TierResetResult):
        return result
    return TierResult(result.number, np.zeros(len(result.ok), dtype=np.bool_), seconds=result.seconds)


def _checked(results: Sequence[TierResult | TierResetResult]) -> Sequence[TierResult | TierResetResult]:
    """Return the results that a tier's `poll` returned. Raises `TypeError` for one with a wrong type."""
    for one in results:
        if not isinstance(one, (TierResult, TierResetResult)):
            raise TypeError(f"poll: expected TierResult or TierResetResult, got {type(one).__name__}")
        if not isinstance(one.number, (int, np.integer)):
            raise TypeError(f"poll: {type(one).__name__}.number: expected int, got {type(one.number).__name__}")
        if isinstance(one, TierResult):
            if not isinstance(one.ok, np.ndarray) or one.ok.dtype != np.bool_:
                raise TypeError(f"poll: TierResult.ok: expected an array of bool, got {_type_of(one.ok)}")
            if not isinstance(one.seconds, (int, float)):
                raise TypeError(f"poll: TierResult.seconds: expected float, got {type(one.seconds).__name__}")
    return results


def _type_of(value: object) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
