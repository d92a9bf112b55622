"""Log of unexpected errors, and wrappers of event sink and copy engine that record errors instead of raising them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvferry.core.pool.events import CacheEvent, EventSink
from kvferry.core.stats import BalanceCounts
from kvferry.core.transfers import TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import CopyEngine

_log = logging.getLogger(__name__)

_MAX_PLACES = 200
_MAX_TEXT = 300


class ErrorLog:
    """Unexpected errors: counted, and logged with the traceback once per place in the code. Thread: any."""

    def __init__(self) -> None:
        self.count = 0
        self.last: str | None = None
        self._lock = threading.Lock()
        self._places: set[tuple[object, ...]] = set()
        self._unlogged: list[tuple[str, BaseException]] = []

    def count_logged(self, text: str) -> None:
        """Count an error that was logged elsewhere."""
        with self._lock:
            self.count += 1
            self.last = text

    def record(self, where: str, error: BaseException) -> str:
        """Count and log an error that was raised in `where`; return its text without the traceback, limited in length.

        Not under the manager lock, as it may log.
        """
        text = self.queue(where, error)
        self.flush()
        return text

    def queue(self, where: str, error: BaseException) -> str:
        """Count an error as `record` does, and leave logging it to the next `flush`."""
        text = f"{where}: {type(error).__name__}: {_text_of(error)}"[:_MAX_TEXT]
        # Not `traceback.extract_tb`, which reads source files: this may be the engine thread.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (where, type(error), trace and trace.tb_frame.f_code.co_filename, trace and trace.tb_lineno)
        with self._lock:
            self.count += 1
            self.last = text
            if place not in self._places and len(self._places) < _MAX_PLACES:
                self._places.add(place)
                self._unlogged.append((where, error))
        return text

    def flush(self) -> None:
        """Log the errors that were queued."""
        with self._lock:
            unlogged, self._unlogged = self._unlogged, []
        for where, error in unlogged:
            _log.error("unexpected error in %s (logged once per place)", where, exc_info=error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - code of other projects may define it
        return "its text cannot be read"


def guarded_sink(sinks: Sequence[EventSink], errors: ErrorLog) -> EventSink:
    """Return a sink that passes events to others and does not raise: an event that a sink cannot take is missing.

    Requires: manager lock held, in each call of the sink. `ErrorLog.flush` logs its errors.
    """

    def emit(event: CacheEvent) -> None:
        for sink in sinks:
            try:
                sink(event)
            except Exception as error:  # noqa: BLE001 - one event is missing
                errors.queue(f"event {type(event).__name__}", error)

    return emit


class HookTimer:
    """Context manager that adds the time in the engine's hooks to `counts`; of nested hooks the outermost's.

    Thread: engine.
    """

    def __init__(self, counts: BalanceCounts, timer: Callable[[], float]) -> None:
        self._counts = counts
        self._timer = timer
        self._depth = 0
        self._began_s = 0.0

    def add(self, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._counts.hook_s += seconds

    def __enter__(self) -> None:
        if not self._depth:
            self._began_s = self._timer()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.add(self._timer() - self._began_s)


class GuardedCopies:
    """Calls of a `CopyEngine` by the engine thread: they do not raise, and every job ends once.

    A job that `submit` refused has failed. If `poll` raises, or it is unknown whether `submit` refused a job, jobs that
    have ended and are not in the results of the next call have failed. Thread: engine.
    """

    def __init__(
        self,
        inner: CopyEngine,
        record_error: Callable[[str, Exception], object],
        hook_timer: HookTimer,
        worker: int = 0,
    ) -> None:
        """`hook_timer` measures `submit` and `poll`."""
        self._inner = inner
        self._hook_timer = hook_timer
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
        with self._hook_timer:
            refused, self._refused = self._refused, []
            # Checked before `poll`: a job that ends after this is in the next call's results.
            ended = {job_id for job_id in self._doubtful if self._has_ended(job_id)}
            polled: list[TransferResult] = []
            try:
                polled = self._inner.poll()
            except Exception as error:  # noqa: BLE001 - its results are looked for at the next call
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

    def _submit(self, job: TransferJob, submit: Callable[[TransferJob], None]) -> None:
        self._open.add(job.job_id)
        with self._hook_timer:
            try:
                submit(job)
            except Exception as error:  # noqa: BLE001 - reported as the job's result
                self._record_error("submit of the copy engine", error)
                if self._has_ended(job.job_id):
                    self._refused.append(self._failed(job.job_id, f"not submitted: {_text_of(error)}"))
                else:
                    self._doubtful.add(job.job_id)

    def _has_ended(self, job_id: int) -> bool:
        try:
            return self._inner.wait((job_id,), 0.0)
        except Exception as error:  # noqa: BLE001 - checked again at the next call
            self._record_error("wait of the copy engine", error)
            return False

    def _failed(self, job_id: int, error: str) -> TransferResult:
        return TransferResult(job_id, self._worker, error=error)
