"""Copy-engine protocol: jobs are submitted, results are polled, and only `wait` and `submit_ahead` block."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from kvferry.core.transfers import TransferJob, TransferResult

AHEAD_S = 0.5
"""A step waits at most this long for stores ahead of it: many times the copy time of one step's blocks."""
OVERTAKEN = "overtaken: the blocks were not read before the step that overwrites them"


class CopyEngine(Protocol):
    """Executes transfer jobs concurrently with the engine thread.

    Every submitted job ends in exactly one `TransferResult`, also after an exception or a close. A job's blocks and
    slots must stay allocated until its result has been polled.
    """

    def submit(self, job: TransferJob) -> None:
        """Queue a job. Never blocks. On CUDA the copy is ordered after all work queued so far on the current stream."""

    def submit_ahead(self, job: TransferJob) -> None:
        """Copy a store out of blocks that the caller is about to overwrite.

        The blocks are read before any later work of the caller, or of the current stream, starts. Blocks until this
        order is guaranteed, at most `AHEAD_S`. A job without that guarantee fails, and later jobs ahead of a step fail
        at once until it has ended.
        """

    def poll(self) -> list[TransferResult]:
        """Return the results of jobs that ended since the last call. Never blocks."""

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Wait until these jobs have ended, so that `poll` returns their results.

        Returns:
            Whether all ended in time. Jobs that were never submitted count as ended.
        """

    def is_alive(self) -> bool:
        """Return whether jobs still make progress."""

    def close(self) -> None:
        """Finish running jobs, fail those not started, and stop. Results can still be polled."""


_log = logging.getLogger(__name__)


class JobLedger:
    """Set of open jobs, with the results to be polled. Any thread.

    `on_finished` is called at each end, without the lock, and may only notify.
    """

    def __init__(self, worker: int, on_finished: Callable[[], None]) -> None:
        self._worker = worker
        self._on_finished = on_finished
        self._open: set[int] = set()
        self._results: deque[TransferResult] = deque()
        self._changed = threading.Condition()

    def open(self, job: TransferJob) -> None:
        """Add a submitted job. Raises `ValueError` if its number is open."""
        with self._changed:
            if job.job_id in self._open:
                raise ValueError(f"job {job.job_id} is open already")
            self._open.add(job.job_id)

    def end(self, job: TransferJob, error: str | None, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """End a job and store its result. A job that has ended is unchanged."""
        with self._changed:
            if job.job_id not in self._open:
                return
            self._open.remove(job.job_id)
            self._results.append(TransferResult(job.job_id, self._worker, error, num_bytes, seconds))
            self._changed.notify_all()
        try:
            self._on_finished()
        except Exception:  # noqa: BLE001 - the job has ended, and the next ones must
            _log.exception("on_finished callback raised")

    def has_open(self, job_id: int | None) -> bool:
        """Return whether this job is open."""
        return job_id in self._open

    def take_results(self) -> list[TransferResult]:
        """Return the results since the last call. Never blocks."""
        results: list[TransferResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Wait until none of these jobs is open; return whether that happened in time."""
        wanted = set(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: wanted.isdisjoint(self._open), timeout_s)
