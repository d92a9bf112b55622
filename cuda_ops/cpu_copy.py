"""The CPU copy engine: one thread that gathers and scatters whole blocks with vectorised copies.

Rows are moved through a buffer that stays in the processor's cache, since NumPy either gathers or scatters in one
native call but not both. The calls run without the interpreter's lock, so the engine computes meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from core.transfers import BlockIds, Direction, Slots, TransferJob, TransferResult
from cuda_ops.host_pool import HostPool

_log = logging.getLogger(__name__)

_STAGE_BYTES = 256 << 10


class CpuCopyEngine:
    """A `CopyEngine` for device blocks in host memory."""

    def __init__(
        self,
        groups: Sequence[NDArray[np.uint8]],
        pool: HostPool,
        on_finished: Callable[[], None],
        worker: int = 0,
        blocks_per_slot: int = 1,
    ) -> None:
        """`groups` has the blocks of each, `[num_blocks, block_bytes]` of bytes, contiguous by row.

        `on_finished` is called on the copy thread after each job; it may only notify.
        """
        for group, blocks in enumerate(groups):
            if blocks.shape[1] * blocks_per_slot > pool.slot_bytes:
                raise ValueError(
                    f"{blocks_per_slot} blocks of group {group} have {blocks.shape[1] * blocks_per_slot:,} bytes, "
                    f"which do not fit a slot of {pool.slot_bytes:,}"
                )
        self._blocks_per_slot = blocks_per_slot
        self._groups = [_as_rows(blocks, blocks.shape[1]) for blocks in groups]
        self._pool = pool
        self._on_finished = on_finished
        self._worker = worker
        self._stage = np.empty(max(_STAGE_BYTES, *(rows.dtype.itemsize for rows in self._groups)), dtype=np.uint8)
        self._jobs: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()
        self._results: deque[TransferResult] = deque()
        self._lock = threading.Lock()
        self._current: TransferJob | None = None
        self._closed = False
        self._thread = self._start()

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`. A job that can no longer be carried out fails at once."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
                return
        self._end(job, "the copy engine is closed")

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        if not self._thread.is_alive() and not self._closed:
            self._revive()
        results: list[TransferResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._thread.is_alive() and not self._closed

    def close(self) -> None:
        """See `CopyEngine`. Waits for the job under way, whose bytes may not be freed under it."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        if self._current is not None:
            self._end(self._current, "the copy thread died")
        self._fail_queued("the copy engine was closed before the job started")

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="kvferry-copy", daemon=True)
        thread.start()
        return thread

    def _revive(self) -> None:
        """The thread has died: what it had taken on has provably stopped, so it fails, and a new thread goes on."""
        _log.error("the copy thread died; its jobs fail and it is started again")
        if self._current is not None:
            self._end(self._current, "the copy thread died")
            self._current = None
        self._fail_queued("the copy thread died")
        self._thread = self._start()

    def _fail_queued(self, error: str) -> None:
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                self._end(job, error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._current = job
            if self._closed:
                self._end(job, "the copy engine was closed before the job started")
                continue
            started_s = time.perf_counter()
            error: str | None = None
            try:
                self._copy(job)
            except Exception as failure:  # noqa: BLE001 - whatever went wrong, the job must end
                _log.exception("%s job %d failed", job.direction, job.job_id)
                error = f"{type(failure).__name__}: {failure}"
            self._end(job, error, time.perf_counter() - started_s)

    def _end(self, job: TransferJob, error: str | None, seconds: float = 0.0) -> None:
        self._current = None
        num_bytes = 0 if error else sum(len(run) * self._groups[run.group].dtype.itemsize for run in job.runs)
        self._results.append(TransferResult(job.job_id, self._worker, error, num_bytes, seconds))
        self._on_finished()

    def _copy(self, job: TransferJob) -> None:
        for run in job.runs:
            if not len(run.block_ids) == len(run.slots) == len(run.parts):
                raise ValueError(f"{len(run.block_ids)} blocks for {len(run.slots)} slots and {len(run.parts)} parts")
            if len(run) and not 0 <= run.parts.min() <= run.parts.max() < self._blocks_per_slot:
                raise IndexError(f"parts {run.parts} are not all among the {self._blocks_per_slot} of a slot")
            for part in range(self._blocks_per_slot):
                here = slice(None) if self._blocks_per_slot == 1 else np.flatnonzero(run.parts == part)
                self._copy_part(job.direction, self._groups[run.group], part, run.block_ids[here], run.slots[here])

    def _copy_part(
        self, direction: Direction, blocks: NDArray[np.void], part: int, block_ids: BlockIds, slots: Slots
    ) -> None:
        """Copy blocks that lie at one place in each of their slots."""
        start, row_bytes = part * blocks.dtype.itemsize, blocks.dtype.itemsize
        for extent, rows, chosen in self._pool.extents_of(slots):
            host = _as_rows(extent[:, start : start + row_bytes], row_bytes)
            if direction is Direction.STORE:
                self._move(blocks, block_ids[chosen], host, rows)
            else:
                self._move(host, rows, blocks, block_ids[chosen])

    def _move(
        self,
        source: NDArray[np.void],
        source_rows: NDArray[np.int64],
        target: NDArray[np.void],
        target_rows: NDArray[np.int64],
    ) -> None:
        """Copy rows of one array to rows of another; an index out of range raises before anything is copied."""
        for rows, table in ((source_rows, source), (target_rows, target)):
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
                raise IndexError(f"rows {rows.min()} to {rows.max()} are not all among the {len(table)} there are")
        row_bytes = source.dtype.itemsize
        step = len(self._stage) // row_bytes
        stage = self._stage[: step * row_bytes].view(source.dtype)
        for start in range(0, len(source_rows), step):
            part = source_rows[start : start + step]
            staged = stage[: len(part)]
            # Checked above; "raise" would make NumPy copy through one more buffer.
            np.take(source, part, out=staged, mode="clip")
            target[target_rows[start : start + step]] = staged


def _as_rows(table: NDArray[np.uint8], row_bytes: int) -> NDArray[np.void]:
    """A table of bytes as a vector of rows that are copied whole; rows may lie apart, but each is contiguous."""
    return table.view(f"V{row_bytes}")[:, 0]
