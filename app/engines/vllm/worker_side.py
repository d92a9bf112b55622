"""A worker's half: the jobs of each step go to its copy engine, and what became of them goes back in vLLM's own words.

Every job ends, and every load that ends is told to vLLM once: a request whose load is never reported waits for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from app.engines.vllm.copies import Copies
from app.engines.vllm.metadata import IDLE_WAIT_S, StepOrders, StepReports
from core.transfers import Direction, TransferJob, TransferResult

_log = logging.getLogger(__name__)


class WorkerSide:
    """On the worker's thread, but for `wake`, which the copy engine calls."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._copies: Copies | None = None
        self._ended = threading.Event()
        self._open: dict[int, TransferJob] = {}
        self._results: list[TransferResult] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def attach(self, make_copies: Callable[[Callable[[], None]], Copies]) -> None:
        """Make the copy engine; it calls what it is given whenever a job has ended, or an order of another size."""
        self._copies = make_copies(self._ended.set)

    def start_loads(self, orders: StepOrders) -> None:
        """Start this step's loads, and what the pool is to come to. Requests whose load is lost have failed already."""
        if self._copies is not None:
            for order in orders.sizes:
                self._copies.extents.submit(order)
        for request_id in orders.lost:
            self._received.add(request_id)
            self._failed.add(request_id)
        for job in orders.loads:
            self._submit(job)

    def start_stores(self, orders: StepOrders) -> None:
        """Start this step's stores, after its compute was queued: copy engines read behind that."""
        for job in orders.stores:
            self._submit(job)

    def collect(self, orders: StepOrders) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended since the last call, and those among them whose load failed."""
        self._poll()
        if orders.is_idle and self._is_waiting():
            self._ended.wait(IDLE_WAIT_S)
            self._ended.clear()
            self._poll()
        received, failed = self._received, self._failed
        self._received, self._failed = set(), set()
        return received, failed

    def take_reports(self) -> StepReports | None:
        """What has ended since the last call."""
        sizes = [] if self._copies is None else self._copies.extents.take_reports()
        if not self._results and not sizes:
            return None
        results, self._results = self._results, []
        return StepReports(results, sizes)

    def close(self) -> None:
        """Stop copying."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _is_waiting(self) -> bool:
        """Whether something is under way, and nothing is to be told."""
        if self._copies is None or self._results or self._received or self._copies.extents.has_reports:
            return False
        return bool(self._open) or self._copies.extents.is_busy

    def _submit(self, job: TransferJob) -> None:
        self._open[job.job_id] = job
        try:
            if self._copies is None:
                raise RuntimeError("the KV caches were never registered")
            self._copies.submit(job)
        except Exception as error:  # noqa: BLE001 - whatever it was, the job must end
            _log.exception("the copy engine refused %s job %d", job.direction, job.job_id)
            self._end(TransferResult(job.job_id, self._rank, f"not submitted: {error}"))

    def _poll(self) -> None:
        if self._copies is not None:
            for result in self._copies.poll():
                self._end(result)

    def _end(self, result: TransferResult) -> None:
        job = self._open.pop(result.job_id, None)
        if job is None:
            return
        self._results.append(result)
        if job.direction is Direction.LOAD and job.request_id is not None:
            self._received.add(job.request_id)
            if result.error is not None:
                self._failed.add(job.request_id)


def orders_of(metadata: Any) -> StepOrders:
    """The step's orders as vLLM handed them over; none where it has none."""
    return metadata if isinstance(metadata, StepOrders) else StepOrders()
