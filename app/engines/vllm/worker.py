"""Worker side of the connector: submits the jobs of each step to the rank's copy engine and reports their ends.

Every job ends, and the end of every load is reported to vLLM exactly once: a request whose load is never reported waits
forever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.app.engines.vllm.copies import RankCopies
from kvferry.app.engines.vllm.metadata import IDLE_WAIT_S, ResizeCommand, ResizeResult, StepMetadata, WorkerReports
from kvferry.app.guard import ErrorLog, GuardedCopies, HookTimer
from kvferry.core.stats import BalanceCounts
from kvferry.core.transfers import Direction, TransferJob, TransferResult

_log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Time limit for open jobs before the KV caches are released; jobs that take longer fail."""
_MAX_ERRORS = 20
"""Limit of error texts queued for the scheduler; further errors are only in this rank's log."""


class ConnectorWorker:
    """Jobs and reports of one worker rank. Thread: the worker's, except the callback passed in `attach`."""

    def __init__(self, rank: int, *, stores: bool = True) -> None:
        """Create a worker without a copy engine.

        Args:
            rank: Number of the rank.
            stores: False if another rank stores identical bytes. Such a rank reports each store as done, and its loads
                with 0 bytes, so that the bytes of a block are counted once.
        """
        self._rank = rank
        self._stores = stores
        self._copies: RankCopies | None = None
        self._guarded: GuardedCopies | None = None
        self._errors = ErrorLog()
        self._error_texts: list[str] = []
        self._resize_results: list[ResizeResult] = []
        self._polled: list[TransferResult] = []
        self._ended = threading.Event()
        self._copied_ahead: StepMetadata | None = None
        self._unsaved: dict[int, TransferJob] = {}
        """Stores of the latest step that have not started."""
        self._open: dict[int, TransferJob] = {}
        # The connector takes and clears these attributes, so that no exception loses a report that vLLM gets once.
        self.finished_recving: set[str] = set()
        self.failed_recving: set[str] = set()
        self.reports = WorkerReports()
        self._balance = BalanceCounts()

    def attach(self, make_copies: Callable[[Callable[[], None]], RankCopies]) -> None:
        """Create the copy engine; its argument must be called when a job or a resize command has ended."""
        self._copies = make_copies(self._ended.set)
        self._guarded = GuardedCopies(
            self._copies, self.record_error, HookTimer(self._balance, time.perf_counter), self._rank
        )

    def record_error(self, where: str, error: Exception) -> None:
        """Log an unexpected error and queue it for the scheduler's count."""
        text = self._errors.record(where, error)
        if len(self._error_texts) < _MAX_ERRORS:
            self._error_texts.append(f"rank {self._rank}: {text}")

    def copy_ahead(self, step: StepMetadata) -> None:
        """Store blocks that this step reuses, before the step writes to them."""
        self._copied_ahead = step
        self._start_unsaved()
        for job in step.stores_ahead:
            self._store(job, ahead=True)

    def start_loads(self, step: StepMetadata) -> None:
        """Start the step's loads and resize commands, and report its failed loads."""
        self._start_unsaved()
        self._unsaved = {job.job_id: job for job in step.stores}
        if step.stores_ahead and step is not self._copied_ahead:
            self.fail_jobs("start_load_kv", step.stores_ahead, RuntimeError("vLLM did not call handle_preemptions"))
        for request_id in step.failed_loads:
            self.finished_recving.add(request_id)
            self.failed_recving.add(request_id)
        for job in step.loads:
            self._submit(job)
        for command in step.resizes:
            self._resize(command)

    def start_stores(self, step: StepMetadata) -> None:
        """Start the step's stores; the copy engine reads after the compute that is already queued."""
        for job in step.stores:
            self._store(job)

    def fail_jobs(
        self, where: str, jobs: Sequence[TransferJob], error: Exception, failed_loads: Sequence[str] = ()
    ) -> None:
        """Report jobs that were not submitted because of an exception as failed, and the loads of these requests."""
        self.record_error(where, error)
        self.finished_recving.update(failed_loads)
        self.failed_recving.update(failed_loads)
        for job in jobs:
            if job.job_id not in self._open:
                self._open[job.job_id] = job
                self._end(TransferResult(job.job_id, self._rank, f"not submitted: {error}"))

    def collect(self, step: StepMetadata) -> None:
        """Add requests whose loads have ended to `finished_recving`, and to `failed_recving` if they failed."""
        self._poll()
        if step.is_idle and self._must_wait():
            self._ended.wait(IDLE_WAIT_S)
            self._ended.clear()
            self._poll()

    def collect_reports(self) -> None:
        """Add results of resize commands and errors to `reports`."""
        results = self._resize_results
        if self._copies is not None:
            results = results + self._copies.extents.take_results()
        self._resize_results = []
        self.reports.resizes += results
        self.reports.errors += self._error_texts
        self._error_texts = []
        if self.reports:
            self.reports.hook_s, self._balance.hook_s = self._balance.hook_s, 0.0

    def release_caches(self) -> None:
        """Wait for open jobs and stop accessing the KV caches; see `RankCopies`. Called between two steps."""
        if self._copies is None:
            return
        if not self._copies.wait(tuple(self._open), DRAIN_S):
            _log.warning("KV caches released: jobs not finished within %.0f s fail", DRAIN_S)
        self._copies.release_caches()

    def restore_caches(self) -> None:
        """Access the KV caches again; see `RankCopies`. Called between two steps."""
        if self._copies is not None:
            self._copies.restore_caches()

    def close(self) -> None:
        """Close the copy engine."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _must_wait(self) -> bool:
        """Return whether work is open and there is nothing to report."""
        if self._copies is None or self.reports.results or self.finished_recving or self._copies.extents.has_results:
            return False
        return bool(self._open) or self._copies.extents.is_busy

    def _start_unsaved(self) -> None:
        """Start the stores of the step before, if vLLM did not call `wait_for_save`.

        vLLM's first model runner calls it on the last pipeline stage only, where it decodes speculatively. The blocks
        are held, so that no step has written to them since.
        """
        for job in list(self._unsaved.values()):
            self._store(job)

    def _store(self, job: TransferJob, *, ahead: bool = False) -> None:
        if self._stores:
            self._submit(job, ahead=ahead)
        else:
            self._open[job.job_id] = job
            self._end(TransferResult(job.job_id, self._rank))

    def _submit(self, job: TransferJob, *, ahead: bool = False) -> None:
        self._open[job.job_id] = job
        self._unsaved.pop(job.job_id, None)
        if self._guarded is None:
            self._end(TransferResult(job.job_id, self._rank, "not submitted: the KV caches were never registered"))
        elif ahead:
            self._guarded.submit_ahead(job)
        else:
            self._guarded.submit(job)

    def _resize(self, command: ResizeCommand) -> None:
        if self._copies is None:
            return
        try:
            self._copies.extents.submit(command)
        except Exception as error:  # noqa: BLE001 - the scheduler waits for a result
            self.record_error("resize command", error)
            self._resize_results.append(ResizeResult(command.number, self._rank, f"rank {self._rank}: {error}"))

    def _poll(self) -> None:
        if self._guarded is not None:
            self._polled += self._guarded.poll()
        while self._polled:
            self._end(self._polled[0])
            del self._polled[0]

    def _end(self, result: TransferResult) -> None:
        job = self._open.pop(result.job_id, None)
        self._unsaved.pop(result.job_id, None)
        if job is None:
            return
        if not self._stores:
            result = replace(result, num_bytes=0)
        self.reports.results.append(result)
        if job.direction is Direction.LOAD and job.request_id is not None:
            self.finished_recving.add(job.request_id)
            if result.error is not None:
                self.failed_recving.add(job.request_id)


def step_metadata(metadata: Any) -> StepMetadata:
    """Return the metadata that vLLM passed for this step, or empty metadata."""
    return metadata if isinstance(metadata, StepMetadata) else StepMetadata()
