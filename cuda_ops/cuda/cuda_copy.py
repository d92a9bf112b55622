"""CUDA copy engine: one stream per direction, whose jobs run in order, concurrently with the compute.

`submit` only records an event on the compute stream. Two threads per direction do the rest: one plans a job and queues
its copies behind that event, the other waits for its end. The engine thread neither plans nor waits, the next job is
queued while one runs, and both directions run at once.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import numpy as np

from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import AHEAD_S, OVERTAKEN, JobLedger
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.copy.segments import Int64s, SegmentBuffer, SegmentPlanner
from kvferry.cuda_ops.cuda.driver import CudaDriver, CudaError
from kvferry.cuda_ops.cuda.movers import DmaMover, Mover
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable

_log = logging.getLogger(__name__)

_MAX_ISSUED = 8
"""Jobs per direction that are queued on the device, each with descriptors in page-locked memory; the others wait."""
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A CUDA device that computes.

    Attributes:
        driver: the CUDA driver. Its failures raise `CudaError`.
        index: index as torch counts devices.
        current_stream: returns the handle of the calling thread's compute stream.
    """

    driver: CudaDriver
    index: int
    current_stream: Callable[[], int]


class CudaCopyEngine:
    """A `CopyEngine` for device blocks in the memory of a CUDA device.

    An error that makes the device unusable fails all open and later jobs, and `is_alive` returns False. Any other error
    fails its job only.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        pool: HostPool,
        on_finished: Callable[[], None],
        device: ComputeDevice,
        *,
        worker: int = 0,
        mover: Mover | None = None,
        before: Callable[[TransferJob], None] | None = None,
    ) -> None:
        """Create the streams and start the copy threads.

        Args:
            layout: the device blocks.
            pool: the host pool. `ValueError` if its slots are too small for the layout.
            on_finished: called on a copy thread after each job; may only notify.
            device: the device; its `current_stream` is called in `submit` and `poll`.
            worker: rank reported in results.
            mover: queues the copies of a job; the DMA engines by default.
            before: called on a copy thread before a job's copies are queued; the job fails if it raises.
        """
        self._before = before
        self._planner = SegmentPlanner(layout, pool.slot_bytes)
        # The reference keeps the tensors allocated while this engine may copy.
        self._layout = layout
        self._pool = pool
        self._ledger = JobLedger(worker, on_finished)
        self._driver = driver = device.driver
        self._mover = DmaMover(driver, lambda: pool.is_page_locked) if mover is None else mover
        self._current_stream = device.current_stream
        self._device = driver.device(device.index)
        self._context = driver.retain_context(self._device)
        self._ready_events = _Events(driver, timing=False)
        self._timing_events = _Events(driver, timing=True)
        self._page_locked: deque[int] = deque()
        self._buffers: deque[SegmentBuffer] = deque()
        self._loaded: deque[int] = deque()
        self._lock = threading.Lock()
        self._unusable: str | None = None
        self._closed = False
        self._queues: dict[Direction, _StreamQueue] = {}
        self._ahead: _StreamQueue | None = None
        self._late: int | None = None
        try:
            with driver.current(self._context):
                for direction in Direction:
                    self._queues[direction] = self._new_queue(f"copy-{direction.value}")
        except BaseException:
            self._release()
            raise
        for queue in self._queues.values():
            queue.start()

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`. After `close`, or on an unusable device, the job fails at once."""
        self._ledger.open(job)
        with self._lock:
            error = "the copy engine is closed" if self._closed else self._unusable
            if error is None:
                ready: int | Exception
                try:
                    ready = self._record_compute()
                except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
                    # A copy thread checks whether the device is still usable, because that may block.
                    ready = failure
                self._queues[job.direction].put(_Waiting(job, ready))
                return
        self._ledger.end(job, error)

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`. The job uses a dedicated stream, which the compute stream is made to wait for.

        The caller waits until the copies are queued, not until they have run.
        """
        self._ledger.open(job)
        queued: Future[None] | None = None
        with self._lock:
            error = "the copy engine is closed" if self._closed else self._unusable
            if error is None and self._ledger.has_open(self._late):
                error = OVERTAKEN
            if error is None:
                try:
                    if self._ahead is None:
                        self._ahead = self._start_queue("ahead")
                    stream = self._current_stream()
                    queued = Future()
                    waiting = _Waiting(job, self._record_compute(), queued, stream)
                    self._ahead.put(waiting)
                except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
                    queued, error = None, _describe(failure)
        if queued is None:
            self._ledger.end(job, error)
            return
        try:
            queued.result(AHEAD_S)
        except TimeoutError:
            # A copy of memory that is not page-locked blocks the copy thread until the compute before it has run.
            if queued.cancel() or waiting.release_caller():
                self._late = job.job_id

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`. Work queued later on the current stream is ordered after the loads returned here."""
        results = self._ledger.take_results()
        with self._lock:
            if self._loaded and not self._closed and self._unusable is None:
                try:
                    self._wait_for_loads()
                except Exception as error:  # noqa: BLE001 - the results were removed from the ledger, and must be returned
                    # The host has seen these loads end, and an unusable device fails the next job.
                    _log.warning("compute stream not ordered after finished loads: %s", error)
        return results

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        return self._ledger.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return not self._closed and self._unusable is None and all(queue.is_alive() for queue in self._all_queues())

    def close(self) -> None:
        """See `CopyEngine`. Waits for copies queued on the device, because their memory may be freed afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for queue in self._all_queues():
            for waiting in queue.close():
                self._ledger.end(waiting.job, "the copy engine was closed before the job started")
        for queue in self._all_queues():
            queue.join()
        self._release()

    # ---- on the copy threads -----------------------------------------------------------------------------------------

    def _set_up_thread(self) -> None:
        """Set up a copy thread."""
        try:
            with self._driver.current(self._context):
                self._driver.relax_capture_mode()
        except Exception as error:  # noqa: BLE001 - jobs can be copied all the same
            _log.warning("CUDA graph capture may fail while blocks are copied: %s", error)

    def _enqueue(self, queue: _StreamQueue, waiting: _Waiting) -> _Running | None:
        """Plan a job and queue its copies; return None if the job has ended already."""
        job = waiting.job
        if self._unusable is not None:
            self._ledger.end(job, self._unusable)
            return None
        ready, queued = waiting.ready, waiting.queued
        if isinstance(ready, Exception):
            self._synchronize(queue)
            self._ledger.end(job, _describe(ready))
            return None
        buffer: SegmentBuffer | None = None
        try:
            table = self._pool.hold()
            if self._before is not None:
                self._before(job)
            with self._driver.current(self._context):
                buffer = self._take_buffer()
                segments = self._planner.plan(job, table, buffer, coalesce=True)
                num_bytes = self._planner.num_bytes(job)
                start, end = self._timing_events.acquire(), self._timing_events.acquire()
        except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
            if isinstance(failure, CudaError):
                self._synchronize(queue)
            if buffer is not None:
                self._buffers.append(buffer)
            self._ready_events.release(ready)
            self._ledger.end(job, _describe(failure))
            return None
        running = _Running(job, start, end, buffer, table, num_bytes)
        try:
            with self._driver.current(self._context):
                if queued is not None and not queued.set_running_or_notify_cancel():
                    raise TimeoutError(OVERTAKEN)
                self._driver.wait_event(queue.stream, ready)
                self._driver.record_event(start, queue.stream)
                if len(segments.sizes):
                    self._mover.move(job.direction, segments, queue.stream)
                self._driver.record_event(end, queue.stream)
                if queued is not None:
                    self._driver.wait_event(waiting.compute_stream, end)
                    if not waiting.release_caller():
                        raise TimeoutError(OVERTAKEN)
        except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
            # The failed store is not published, so its blocks may be overwritten now.
            waiting.release_caller()
            # Copies may be queued that read the buffer and the pool.
            self._fail(queue, running, failure)
            return None
        finally:
            self._ready_events.release(ready)
        return running

    def _take_buffer(self) -> SegmentBuffer:
        """Return a free buffer or a new one. Testing for a free one first would race with the other queue."""
        try:
            return self._buffers.pop()
        except IndexError:
            return SegmentBuffer(allocate=self._allocate_page_locked)

    def _allocate_page_locked(self, count: int) -> Int64s:
        """Allocate an array that the device reads in place. Any thread. Requires: context current."""
        address = self._driver.allocate_host(8 * count)
        self._page_locked.append(address)
        return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))

    def _finish(self, queue: _StreamQueue, running: _Running) -> None:
        """Wait until a job's copies have run, and end the job."""
        try:
            with self._driver.current(self._context):
                self._driver.synchronize_event(running.end)
                seconds = self._driver.elapsed_s(running.start, running.end)
        except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
            self._fail(queue, running, failure)
            return
        self._buffers.append(running.buffer)
        self._timing_events.release(running.start)
        if running.job.direction is Direction.LOAD:
            self._loaded.append(running.end)
        else:
            self._timing_events.release(running.end)
        self._ledger.end(running.job, None, running.num_bytes, seconds)

    def _fail(self, queue: _StreamQueue, running: _Running, failure: Exception) -> None:
        """Fail a job whose copies may be queued."""
        self._synchronize(queue)
        self._buffers.append(running.buffer)
        self._timing_events.release(running.start)
        self._timing_events.release(running.end)
        self._ledger.end(running.job, _describe(failure))

    def _end_after_error(self, queue: _StreamQueue, job: TransferJob, failure: BaseException) -> None:
        """Fail a job after an unexpected exception, once none of its copies runs. A job that has ended is unchanged."""
        self._synchronize(queue)
        self._ledger.end(job, _describe(failure))

    def _synchronize(self, queue: _StreamQueue) -> None:
        """Wait without limit, after an error, until nothing runs on the stream.

        A lost device runs nothing. Any other error is retried, because copies may still run.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with self._driver.current(self._context):
                    self._driver.synchronize_stream(queue.stream)
                return
            except Exception as error:  # noqa: BLE001 - copies may still run, whatever failed
                if isinstance(error, CudaError) and error.is_fatal:
                    self._mark_unusable(error)
                    return
                _log.warning("stream state unknown after an error, retried in %.2f s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def _mark_unusable(self, error: CudaError) -> None:
        with self._lock:
            if self._unusable is not None:
                return
            self._unusable = f"CUDA device unusable: {error}"
        _log.error("copy engine stopped: %s; its jobs fail until the process is restarted", error)

    def _all_queues(self) -> list[_StreamQueue]:
        return [*self._queues.values(), *([] if self._ahead is None else [self._ahead])]

    def _new_queue(self, name: str) -> _StreamQueue:
        with self._driver.current(self._context):
            return _StreamQueue(self, name, self._driver.create_stream())

    def _start_queue(self, name: str) -> _StreamQueue:
        queue = self._new_queue(name)
        try:
            queue.start()
        except BaseException:
            with self._driver.current(self._context):
                self._driver.destroy_stream(queue.stream)
            raise
        return queue

    def _record_compute(self) -> int:
        """Record and return an event that completes when the compute queued so far has run."""
        with self._driver.current(self._context):
            stream = self._current_stream()
            ready = self._ready_events.acquire()
            try:
                self._driver.record_event(ready, stream)
            except BaseException:
                self._ready_events.release(ready)
                raise
        return ready

    def _wait_for_loads(self) -> None:
        """Make the compute stream wait for finished loads; those left by an error stay for the next call."""
        with self._driver.current(self._context):
            stream = self._current_stream()
            while self._loaded:
                self._driver.wait_event(stream, self._loaded[0])
                self._timing_events.release(self._loaded.popleft())

    def _release(self) -> None:
        """Release streams, events, memory and the context. Requires: nothing runs. An unusable device may refuse."""
        try:
            with self._driver.current(self._context):
                for queue in self._all_queues():
                    self._driver.destroy_stream(queue.stream)
                self._mover.close()
                while self._page_locked:
                    self._driver.free_host(self._page_locked.popleft())
                self._ready_events.destroy()
                self._timing_events.destroy()
            self._driver.release_context(self._device)
        except CudaError as error:
            _log.warning("CUDA device not released: %s", error)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job without queued copies.

    `ready` is the event that its copies wait for, or the exception that prevented it. The caller of a job ahead of a
    step waits until `queued` ends, or cancels it; its `compute_stream` is made to wait for the copies.
    """

    job: TransferJob
    ready: int | Exception
    queued: Future[None] | None = None
    compute_stream: int = 0

    def release_caller(self) -> bool:
        """End `queued`, and return whether this call did: the caller that gives up, or the copy thread in time."""
        if self.queued is None:
            return False
        try:
            self.queued.set_result(None)
        except InvalidStateError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Running:
    """A job whose copies are queued between the events `start` and `end`. `table` keeps the pool mapped."""

    job: TransferJob
    start: int
    end: int
    buffer: SegmentBuffer
    table: PoolTable
    num_bytes: int


class _StreamQueue:
    """A stream with its queues of waiting and running jobs, and one thread per queue.

    There is one queue per direction, and one for stores ahead of steps.
    """

    def __init__(self, engine: CudaCopyEngine, name: str, stream: int) -> None:
        self.stream = stream
        self._engine = engine
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._running: deque[_Running] = deque()
        self._num_issued = 0
        self._closing = False
        self._all_issued = False
        self._issuer = threading.Thread(target=self._serve_waiting, name=f"kvferry-{name}", daemon=True)
        self._finisher = threading.Thread(target=self._serve_running, name=f"kvferry-{name}-end", daemon=True)

    def start(self) -> None:
        """Start both threads, or raise and leave none."""
        try:
            self._issuer.start()
            self._finisher.start()
        except BaseException:
            self.close()
            raise

    def put(self, waiting: _Waiting) -> None:
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify_all()

    def close(self) -> list[_Waiting]:
        """Accept no more jobs; return those not begun."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return waiting

    def join(self) -> None:
        """Wait until the device has finished all queued jobs."""
        self._issuer.join()
        self._finisher.join()

    def is_alive(self) -> bool:
        return self._issuer.is_alive() and self._finisher.is_alive()

    def _serve_waiting(self) -> None:
        self._engine._set_up_thread()
        while (waiting := self._take_waiting()) is not None:
            running = None
            try:
                running = self._engine._enqueue(self, waiting)
            except BaseException as failure:  # noqa: BLE001 - this job and the next ones must end
                self._force_end(waiting.job, failure)
            finally:
                waiting.release_caller()
            if running is None:
                self._count_end()
                continue
            with self._changed:
                self._running.append(running)
                self._changed.notify_all()
            # A waiting thread must not keep memory mapped that was removed from the pool.
            del running
        with self._changed:
            self._all_issued = True
            self._changed.notify_all()

    def _serve_running(self) -> None:
        self._engine._set_up_thread()
        while (running := self._take_running()) is not None:
            try:
                self._engine._finish(self, running)
            except BaseException as failure:  # noqa: BLE001 - this job and the next ones must end
                self._force_end(running.job, failure)
            self._count_end()
            del running

    def _force_end(self, job: TransferJob, failure: BaseException) -> None:
        """End a job that an exception may have left open: an open job would hold its device blocks forever."""
        _log.error("unexpected error on a copy thread: its job fails", exc_info=failure)
        while True:
            try:
                self._engine._end_after_error(self, job, failure)
                return
            except BaseException:  # noqa: BLE001 - retried
                _log.exception("job on a copy thread not ended, retried in %.2f s", _FIRST_PAUSE_S)
            time.sleep(_FIRST_PAUSE_S)

    def _count_end(self) -> None:
        with self._changed:
            self._num_issued -= 1
            self._changed.notify_all()

    def _take_waiting(self) -> _Waiting | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._waiting and self._num_issued < _MAX_ISSUED))
            if not self._waiting:
                return None
            self._num_issued += 1
            return self._waiting.popleft()

    def _take_running(self) -> _Running | None:
        with self._changed:
            self._changed.wait_for(lambda: self._running or self._all_issued)
            return self._running.popleft() if self._running else None


class _Events:
    """Pool of reusable events of one kind. Any thread. Requires: context current."""

    def __init__(self, driver: CudaDriver, *, timing: bool) -> None:
        self._driver = driver
        self._timing = timing
        self._free: deque[int] = deque()
        self._all: deque[int] = deque()

    def acquire(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            event = self._driver.create_event(timing=self._timing)
            self._all.append(event)
            return event

    def release(self, event: int) -> None:
        self._free.append(event)

    def destroy(self) -> None:
        while self._all:
            self._driver.destroy_event(self._all.popleft())


def _describe(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
