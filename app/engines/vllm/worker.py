"""A worker's half: the jobs of each step go to its copy engine, and what became of them goes back in vLLM's own words.

Every job ends, and every load that ends is told to vLLM once: a request whose load is never reported waits for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.app.engines.vllm.copies import Copies
from kvferry.app.engines.vllm.metadata import IDLE_WAIT_S, SizeOrder, SizeReport, StepOrders, StepReports
from kvferry.app.guard import ErrorLog, GuardedCopies
from kvferry.core.transfers import Direction, TransferJob, TransferResult

_log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long jobs under way may take to end before the KV caches are released; the rest of them fails."""
_MAX_ERRORS = 20
"""Texts of unexpected errors that wait to be sent to the scheduler; further ones are in this rank's log only."""


class ConnectorWorker:
    """On the worker's thread, but for `wake`, which the copy engine calls."""

    def __init__(self, rank: int, *, stores: bool = True) -> None:
        """A rank that does not store, since another one stores the same bytes, reports each store as done, and its
        loads without bytes: those of a block count once."""
        self._rank = rank
        self._stores = stores
        self._copies: Copies | None = None
        self._guarded: GuardedCopies | None = None
        self._errors = ErrorLog()
        self._error_texts: list[str] = []
        self._size_reports: list[SizeReport] = []
        self._polled: list[TransferResult] = []
        self._ended = threading.Event()
        self._copied_ahead: StepOrders | None = None
        self._open: dict[int, TransferJob] = {}
        # The connector takes these by attribute, so that no exception can lose what vLLM has to be told once.
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.reports = StepReports()

    def attach(self, make_copies: Callable[[Callable[[], None]], Copies]) -> None:
        """Make the copy engine; it calls what it is given whenever a job has ended, or an order of another size."""
        self._copies = make_copies(self._ended.set)
        self._guarded = GuardedCopies(self._copies, self.record_error, self._rank)

    def record_error(self, where: str, error: Exception) -> None:
        """Log an unexpected error, and have the scheduler count it."""
        text = self._errors.record(where, error)
        if len(self._error_texts) < _MAX_ERRORS:
            self._error_texts.append(f"rank {self._rank}: {text}")

    def copy_ahead(self, orders: StepOrders) -> None:
        """Copy blocks that the step has given to other requests, before anything of the step writes to them."""
        self._copied_ahead = orders
        for job in orders.ahead:
            self._submit(job, ahead=True)

    def start_loads(self, orders: StepOrders) -> None:
        """Start this step's loads, and what the pool is to come to. Requests whose load is lost have failed already."""
        if orders.ahead and orders is not self._copied_ahead:
            self.jobs_failed("start_load_kv", orders.ahead, RuntimeError("vLLM did not call handle_preemptions"))
        for request_id in orders.lost:
            self.received.add(request_id)
            self.failed.add(request_id)
        for job in orders.loads:
            self._submit(job)
        for order in orders.sizes:
            self._resize(order)

    def start_stores(self, orders: StepOrders) -> None:
        """Start this step's stores, after its compute was queued: copy engines read behind that."""
        for job in orders.stores:
            if self._stores:
                self._submit(job)
            else:
                self._open[job.job_id] = job
                self._end(TransferResult(job.job_id, self._rank))

    def jobs_failed(self, where: str, jobs: Sequence[TransferJob], error: Exception, lost: Sequence[str] = ()) -> None:
        """Starting these jobs raised: those that were not submitted have failed, and the loads of `lost` requests."""
        self.record_error(where, error)
        self.received.update(lost)
        self.failed.update(lost)
        for job in jobs:
            if job.job_id not in self._open:
                self._open[job.job_id] = job
                self._end(TransferResult(job.job_id, self._rank, f"not submitted: {error}"))

    def collect(self, orders: StepOrders) -> None:
        """Add the requests whose loads have ended since the last call to `received`, and to `failed` if they failed."""
        self._poll()
        if orders.is_idle and self._is_waiting():
            self._ended.wait(IDLE_WAIT_S)
            self._ended.clear()
            self._poll()

    def collect_reports(self) -> None:
        """Add what has ended since the last call to `reports`."""
        sizes = self._size_reports
        if self._copies is not None:
            sizes = sizes + self._copies.extents.take_reports()
        self._size_reports = []
        self.reports.sizes += sizes
        self.reports.errors += self._error_texts
        self._error_texts = []

    def release_caches(self) -> None:
        """Let the open jobs end and stop using the KV caches; see `Copies`. Thread: the worker's, between two steps."""
        if self._copies is None:
            return
        if not self._copies.wait(tuple(self._open), DRAIN_S):
            _log.warning("KV caches are released: jobs that take longer than %.0f s fail", DRAIN_S)
        self._copies.release_caches()

    def restore_caches(self) -> None:
        """Use the KV caches again; see `Copies`. Thread: the worker's, between two steps."""
        if self._copies is not None:
            self._copies.restore_caches()

    def close(self) -> None:
        """Stop copying."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _is_waiting(self) -> bool:
        """Whether something is under way, and nothing is to be told."""
        if self._copies is None or self.reports.results or self.received or self._copies.extents.has_reports:
            return False
        return bool(self._open) or self._copies.extents.is_busy

    def _submit(self, job: TransferJob, *, ahead: bool = False) -> None:
        self._open[job.job_id] = job
        if self._guarded is None:
            self._end(TransferResult(job.job_id, self._rank, "not submitted: the KV caches were never registered"))
        elif ahead:
            self._guarded.submit_ahead(job)
        else:
            self._guarded.submit(job)

    def _resize(self, order: SizeOrder) -> None:
        if self._copies is None:
            return
        try:
            self._copies.extents.submit(order)
        except Exception as error:  # noqa: BLE001 - the scheduler waits for an answer
            self.record_error("order of another pool size", error)
            self._size_reports.append(SizeReport(order.number, self._rank, f"rank {self._rank}: {error}"))

    def _poll(self) -> None:
        if self._guarded is not None:
            self._polled += self._guarded.poll()
        while self._polled:
            self._end(self._polled[0])
            del self._polled[0]

    def _end(self, result: TransferResult) -> None:
        job = self._open.pop(result.job_id, None)
        if job is None:
            return
        if not self._stores:
            result = replace(result, num_bytes=0)
        self.reports.results.append(result)
        if job.direction is Direction.LOAD and job.request_id is not None:
            self.received.add(job.request_id)
            if result.error is not None:
                self.failed.add(job.request_id)


def orders_of(metadata: Any) -> StepOrders:
    """The step's orders as vLLM handed them over; none where it has none."""
    return metadata if isinstance(metadata, StepOrders) else StepOrders()
