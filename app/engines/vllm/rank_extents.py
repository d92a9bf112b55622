"""A rank's part in another size of the pool: it maps extents and unmaps them, beside the engine, and reports it.

Mapping a large extent takes a while, above all where a device has to know it, so that no step waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from kvferry.app.engines.vllm.metadata import SizeOrder, SizeReport
from kvferry.cuda_ops.affinity import run_on
from kvferry.cuda_ops.host_pool import HostPool

_log = logging.getLogger(__name__)

SETTLE_S = 1.0


class RankExtents:
    """Orders are carried out one after another, on a thread of its own."""

    def __init__(
        self,
        pool: HostPool,
        rank: int,
        settle: Callable[[float], bool],
        on_done: Callable[[], None],
        cpus: Collection[int] | None = None,
    ) -> None:
        """`settle` waits, within seconds, until nobody looks at slots that have left the pool; whether that is so.

        `on_done` is called on that thread whenever there is something to report; it may only notify. The thread runs on
        `cpus`, by default on those of the thread that makes this.
        """
        self._pool = pool
        self._rank = rank
        self._settle = settle
        self._on_done = on_done
        self._reports: deque[SizeReport] = deque()
        self._num_open = 0
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, "kvferry-extents", initializer=run_on, initargs=(cpus,))

    @property
    def is_busy(self) -> bool:
        """Whether an order was given that is not reported yet."""
        return self._num_open > 0

    def submit(self, order: SizeOrder) -> None:
        """Carry out an order that is for this rank."""
        if self._rank not in order.ranks:
            return
        self._num_open += 1
        try:
            self._thread.submit(self._carry_out, order)
        except RuntimeError as error:
            # No thread could be started; the step goes on.
            self._end(order, str(error))

    def take_reports(self) -> list[SizeReport]:
        """The orders that were carried out since the last call."""
        reports: list[SizeReport] = []
        while self._reports:
            reports.append(self._reports.popleft())
        self._num_open -= len(reports)
        return reports

    @property
    def has_reports(self) -> bool:
        """Whether there is something to report."""
        return bool(self._reports)

    def close(self) -> None:
        """Begin nothing more, and wait for what is being done."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    # --- on its thread ------------------------------------------------------------------------------------------

    def _carry_out(self, order: SizeOrder) -> None:
        error: str | None = None
        try:
            self._have(order.num_slots, free=order.free)
        except Exception as failure:  # noqa: BLE001 - whatever it was, whoever ordered it waits for an answer
            error = str(failure) or type(failure).__name__
        self._end(order, error)
        self._on_done()

    def _end(self, order: SizeOrder, error: str | None) -> None:
        rank = self._rank
        self._reports.append(SizeReport(order.number, rank, error if error is None else f"rank {rank}: {error}"))

    def _have(self, num_slots: int, *, free: bool) -> None:
        pool = self._pool
        if num_slots > pool.num_slots:
            pool.add_slots(num_slots - pool.num_slots)
            return
        while not self._settle(SETTLE_S):
            if self._closing.is_set():
                raise RuntimeError("the engine stops")
        pool.remove_extents((pool.num_slots - num_slots) // pool.slots_per_extent, free=free)
