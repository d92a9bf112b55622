"""CPU copy engine: threads that copy blocks within host memory, a batch per native call.

The thread that takes a job plans it and cuts it into shares, one per thread, which go to the front of the queue. The
thread that ends the last share ends the job. No thread waits for another.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import AHEAD_S, OVERTAKEN, JobLedger
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.copy.segments import Int64s, SegmentBuffer, SegmentPlanner, Segments
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable
from kvferry.cuda_ops.pool.processors import run_on

_log = logging.getLogger(__name__)

_SHARE_BYTES = 2 << 20
"""Below this size waking another thread costs more than it saves."""
_RECHECK_S = 0.1


class CpuCopyEngine:
    """A `CopyEngine` for device blocks in host memory."""

    def __init__(
        self,
        layout: DeviceLayout,
        pool: HostPool,
        on_finished: Callable[[], None],
        worker: int = 0,
        num_threads: int | None = None,
        cpus: Collection[int] | None = None,
        before: Callable[[TransferJob], None] | None = None,
    ) -> None:
        """Start the copy threads.

        Args:
            layout: the device blocks.
            pool: the host pool. `ValueError` if its slots are too small for the layout.
            on_finished: called on a copy thread after each job; may only notify.
            worker: rank reported in results.
            num_threads: copy threads; by default chosen from the number of processors.
            cpus: processors of the copy threads; by default those of the calling thread.
            before: called on a copy thread before a job's first byte is copied; the job fails if it raises.
        """
        # Imported here, as it imports Numba and compiles, and the command line imports this module, too.
        from kvferry.cuda_ops.copy.segment_copier import copy_segments

        if num_threads is None:
            num_threads = default_threads(len(os.sched_getaffinity(0) if cpus is None else cpus))
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: must be at least 1")
        self._planner = SegmentPlanner(layout, pool.slot_bytes)
        self._pool = pool
        self._ledger = JobLedger(worker, on_finished)
        self._before = before
        self._copy = copy_segments
        self._buffers: deque[SegmentBuffer] = deque()
        self._cpus = cpus
        self._work: deque[TransferJob | _Share] = deque()
        self._ahead: deque[TransferJob] = deque()
        self._late: int | None = None
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [_CopyThread(self._serve, cpus) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`. After `close` the job fails at once."""
        self._ledger.open(job)
        with self._changed:
            if not self._closed:
                self._work.append(job)
                self._changed.notify_all()
                return
        self._ledger.end(job, "the copy engine is closed")

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`. A dedicated thread copies, so that the job does not wait for running ones."""
        self._ledger.open(job)
        with self._changed:
            if self._closed or self._ledger.has_open(self._late):
                self._ledger.end(job, "the copy engine is closed" if self._closed else OVERTAKEN)
                return
            if not any(thread.is_ahead for thread in self._threads):
                thread = _CopyThread(self._serve, self._cpus, is_ahead=True)
                try:
                    thread.start()
                except RuntimeError as failure:
                    # A limit on threads: the next store ahead tries again.
                    self._ledger.end(job, _describe(failure))
                    return
                self._threads.append(thread)
            self._ahead.append(job)
            self._changed.notify_all()
        if not self._ledger.wait((job.job_id,), AHEAD_S):
            with self._changed:
                self._late = job.job_id

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        self._replace_dead_threads()
        return self._ledger.take_results()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._ledger.wait(job_ids, min(max(deadline_s - time.monotonic(), 0.0), _RECHECK_S)):
            self._replace_dead_threads()
            if time.monotonic() >= deadline_s:
                return False
        return True

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """See `CopyEngine`. Waits for running jobs, because their memory may be freed afterwards."""
        with self._changed:
            self._closed = True
            waiting = [work for work in self._work if isinstance(work, TransferJob)]
            shares = [work for work in self._work if isinstance(work, _Share)]
            waiting += self._ahead
            self._ahead.clear()
            self._work = deque(shares)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
            self._fail_work_of(thread)
        while self._work:
            self._fail(self._work.popleft(), "all copy threads died")
        for job in waiting:
            self._ledger.end(job, "the copy engine was closed before the job started")

    # ---- on the copy threads ----------------------------------------------------------------------------------------

    def _serve(self, thread: _CopyThread) -> None:
        """Process work until the engine closes. Thread: copy."""
        while self._serve_one(thread):
            continue

    def _serve_one(self, thread: _CopyThread) -> bool:
        """Process the next work item; return False once there will be no more.

        The reference to the item is dropped before waiting: it would keep memory mapped that was removed from the pool.
        """
        work = self._take(thread)
        if work is None:
            return False
        if isinstance(work, TransferJob):
            try:
                share = self._plan(work, thread)
            except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
                # The shares are queued: the last of them ends the job.
                self._fail(thread.current_work or work, _describe(failure))
                return True
        else:
            share = work
        try:
            targets, sources, sizes = share.segments()
            self._copy(targets, sources, sizes)
        except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
            self._fail(share, _describe(failure))
        else:
            self._end_share(share, None)
        return True

    def _take(self, thread: _CopyThread) -> TransferJob | _Share | None:
        """Take the next work item and record it as `current_work` in one step; None once there will be no more."""
        with self._changed:
            thread.current_work = None
            queue: deque[TransferJob] | deque[TransferJob | _Share] = self._ahead if thread.is_ahead else self._work
            while not queue:
                if self._closed:
                    return None
                self._changed.wait()
                queue = self._ahead if thread.is_ahead else self._work
            thread.current_work = queue.popleft()
            return thread.current_work

    def _plan(self, job: TransferJob, thread: _CopyThread) -> _Share:
        """Plan a job, queue its shares, and take the first one in place of the job."""
        started_s = time.perf_counter()
        if self._before is not None:
            self._before(job)
        try:
            buffer = self._buffers.pop()
        except IndexError:
            # Testing the queue before popping would race with the other threads.
            buffer = SegmentBuffer()
        table = self._pool.hold()
        segments = self._planner.plan(job, table, buffer, coalesce=False)
        num_bytes = self._planner.num_bytes(job)
        count = 1 if thread.is_ahead else max(min(self._num_threads, num_bytes // _SHARE_BYTES), 1)
        plan = _Plan(job, segments, buffer, table, num_bytes, started_s)
        if count == 1:
            thread.current_work = share = _Share(plan, 0, len(segments.sizes))
            plan.open_shares.add((share.start, share.stop))
            return share
        inner = np.searchsorted(np.cumsum(segments.sizes), np.arange(1, count) * (num_bytes // count)).tolist()
        first, *others = (_Share(plan, *cuts) for cuts in pairwise((0, *inner, len(segments.sizes))))
        plan.open_shares.update((share.start, share.stop) for share in (first, *others))
        with self._changed:
            thread.current_work = first
            self._work.extendleft(reversed(others))
            self._changed.notify_all()
        return first

    # ---- how work ends ----------------------------------------------------------------------------------------------

    def _fail(self, work: TransferJob | _Share, error: str) -> None:
        if isinstance(work, TransferJob):
            self._ledger.end(work, error)
        else:
            self._end_share(work, error)

    def _end_share(self, share: _Share, error: str | None) -> None:
        """End a share. Calling it again after an exception is harmless."""
        plan = share.plan
        with self._changed:
            plan.open_shares.discard((share.start, share.stop))
            if error is None and plan.job.job_id == self._late:
                error = OVERTAKEN
            plan.error = plan.error or error
            if plan.open_shares:
                return
            buffer, plan.buffer = plan.buffer, None
        if buffer is not None:
            self._buffers.append(buffer)
        num_bytes = 0 if plan.error else plan.num_bytes
        self._ledger.end(plan.job, plan.error, num_bytes, time.perf_counter() - plan.started_s)

    def _replace_dead_threads(self) -> None:
        """Fail the work of dead threads, which has stopped, and start replacements."""
        if self._closed or all(thread.is_alive() for thread in self._threads):
            return
        for index, thread in enumerate(self._threads):
            if not thread.is_alive():
                _log.error("copy thread died: its work fails, and a new thread is started")
                self._fail_work_of(thread)
                replacement = _CopyThread(self._serve, self._cpus, thread.is_ahead)
                replacement.start()
                self._threads[index] = replacement

    def _fail_work_of(self, thread: _CopyThread) -> None:
        if thread.current_work is not None:
            self._fail(thread.current_work, "the copy thread died")
            thread.current_work = None


class _CopyThread(threading.Thread):
    """A copy thread. `current_work` is still set if the thread died of it.

    With `is_ahead` it takes only jobs that a step waits for.
    """

    def __init__(
        self, serve: Callable[[_CopyThread], None], cpus: Collection[int] | None, is_ahead: bool = False
    ) -> None:
        super().__init__(name="kvferry-ahead" if is_ahead else "kvferry-copy", daemon=True)
        self.is_ahead = is_ahead
        self.current_work: TransferJob | _Share | None = None
        self._serve = serve
        self._cpus = cpus

    def run(self) -> None:
        run_on(self._cpus)
        self._serve(self)


@dataclass(slots=True)
class _Plan:
    """A running job: its segments, and the bounds of its unfinished shares.

    `table` keeps the pool mapped. `buffer` is None once other jobs may use it.
    """

    job: TransferJob
    segments: Segments
    buffer: SegmentBuffer | None
    table: PoolTable
    num_bytes: int
    started_s: float
    open_shares: set[tuple[int, int]] = field(default_factory=set)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """The segments of a plan from `start` to `stop` (exclusive)."""

    plan: _Plan
    start: int
    stop: int

    def segments(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return targets, sources and sizes."""
        device, host, sizes = (array[self.start : self.stop] for array in self.plan.segments)
        return (host, device, sizes) if self.plan.job.direction is Direction.STORE else (device, host, sizes)


def default_threads(num_cpus: int) -> int:
    """Return a quarter of the processors, limited to the number that saturates memory bandwidth."""
    return max(1, min(4, num_cpus // 4))


def _describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
