"""Which jobs are open, and how they ended: every job ends exactly once, whoever finds out, and some wait for that."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection

from kvferry.core.transfers import TransferJob, TransferResult

_log = logging.getLogger(__name__)


class JobLedger:
    """Any thread may open and end jobs. `on_finished` is told of each end, without the lock, and may only notify."""

    def __init__(self, worker: int, on_finished: Callable[[], None]) -> None:
        self._worker = worker
        self._on_finished = on_finished
        self._open: set[int] = set()
        self._results: deque[TransferResult] = deque()
        self._changed = threading.Condition()

    def open(self, job: TransferJob) -> None:
        """A job was submitted. Raises `ValueError` for one whose number is open."""
        with self._changed:
            if job.job_id in self._open:
                raise ValueError(f"job {job.job_id} is open and cannot be submitted again")
            self._open.add(job.job_id)

    def end(self, job: TransferJob, error: str | None, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """A job has ended; one that had ended before stays as it was."""
        with self._changed:
            if job.job_id not in self._open:
                return
            self._open.remove(job.job_id)
            self._results.append(TransferResult(job.job_id, self._worker, error, num_bytes, seconds))
            self._changed.notify_all()
        try:
            self._on_finished()
        except Exception:  # noqa: BLE001 - the job has ended, and the next ones must
            _log.exception("the end of a transfer could not be told")

    def take_results(self) -> list[TransferResult]:
        """How jobs ended since the last call. Never waits."""
        results: list[TransferResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Wait until none of these jobs is open; whether that came true in time."""
        wanted = set(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: wanted.isdisjoint(self._open), timeout_s)
