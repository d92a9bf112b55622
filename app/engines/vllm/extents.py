"""The memory of an engine's pool as a whole, while its size changes: what all ranks map, and this process if it does.

To grow, the first rank takes the memory and makes it ready, then the others map it. To shrink, all unmap what goes, and
the first rank, the last to do so, gives it back. Orders and answers travel with the engine's steps, so that an idle
engine is woken for them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from kvferry.app.engines.vllm.metadata import SizeOrder, SizeReport
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory, check_fits, memory_limits, shared_memory_limits
from kvferry.cuda_ops.pool.processors import run_on

_log = logging.getLogger(__name__)


LONG_WAIT_S = 60.0
_RECHECK_S = 1.0
_FIRST = (0,)


class EngineStops(RuntimeError):
    """Nobody carries out orders any more."""


class EngineExtents:
    """A `PoolMemory`. One thread, which is not the engine's, adds and removes slots, and waits for the ranks.

    The engine's thread takes orders and brings reports.
    """

    def __init__(
        self,
        plan: PoolPlan,
        row_bytes: int,
        num_ranks: int,
        mapped: HostPool | None,
        *,
        step: Callable[[], None],
        stopping: threading.Event,
    ) -> None:
        """`mapped` is this process's own view of the pool, if it has one. `step` has an idle engine take one."""
        self.num_slots = plan.num_slots
        self.row_bytes = row_bytes
        self._extent_slots = plan.extent_slots
        self._others = tuple(range(1, num_ranks))
        self._mapped = mapped
        self._step = step
        self._stopping = stopping
        self._changed = threading.Condition()
        self._number = 0
        self._orders: list[SizeOrder] = []
        self._waiting_for: set[int] = set()
        self._errors: list[str] = []

    @property
    def num_bytes(self) -> int:
        """All slots of all ranks together."""
        return self.num_slots * self.row_bytes

    def check_room(self, num_slots: int) -> None:
        """Raise `NotEnoughMemory` if a pool of so many slots does not fit; one that is not larger does."""
        if self._mapped is not None:
            self._mapped.check_room(num_slots)
        elif num_slots > self.num_slots:
            limits = shared_memory_limits(SHARED_MEMORY) if self._others else memory_limits()
            check_fits("KVFERRY_POOL_BYTES", (num_slots - self.num_slots) * self.row_bytes, limits)

    def add_slots(self, num_slots: int) -> None:
        """Have so many more on every rank; on failure nothing has changed. Raises `NotEnoughMemory`, `EngineStops`."""
        wanted = self.num_slots + num_slots
        errors = self._order(wanted, _FIRST)
        if not errors:
            errors = self._order(wanted, self._others)
            if self._mapped is not None:
                try:
                    self._mapped.add_slots(wanted - self._mapped.num_slots)
                except Exception as failure:  # noqa: BLE001 - whatever it was, the ranks have to be told
                    errors.append(f"the engine's own process: {str(failure) or type(failure).__name__}")
            if errors:
                self._go_back()
        if errors:
            raise NotEnoughMemory("; ".join(errors))
        self.num_slots = wanted

    def remove_extents(self, count: int) -> None:
        """Unmap the last extents everywhere, and give their memory back. Raises `EngineStops`, and `RuntimeError` where
        a rank does not let go: then nothing is given back, and it may be tried again."""
        errors = self._let_go(self.num_slots - count * self._extent_slots)
        if errors:
            raise RuntimeError("; ".join(errors))
        self.num_slots -= count * self._extent_slots

    # --- on the engine's thread ---------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether ranks have orders that they have not answered, or are about to be given some."""
        return bool(self._waiting_for)

    def take_orders(self) -> list[SizeOrder]:
        """The orders for this step."""
        if not self._orders:
            return []
        with self._changed:
            orders, self._orders = self._orders, []
        return orders

    def report(self, reports: list[SizeReport]) -> None:
        """What ranks have carried out. Late and repeated reports do no harm."""
        if not reports:
            return
        with self._changed:
            for report in reports:
                if report.number == self._number and report.rank in self._waiting_for:
                    self._waiting_for.discard(report.rank)
                    if report.error is not None:
                        self._errors.append(report.error)
            self._changed.notify_all()

    # --- inside -------------------------------------------------------------------------------------------------

    def _go_back(self) -> None:
        """Unmap what some have mapped: others could not. What fails now stays mapped, unused, until the next size."""
        for error in self._let_go(self.num_slots):
            _log.error("memory of the pool that is not used could not be given back: %s", error)

    def _let_go(self, num_slots: int) -> list[str]:
        """Have everybody map no more than so many slots, and the first rank, at last, give the memory back."""
        mapped = self._mapped
        if mapped is not None:
            mapped.remove_extents(max(mapped.num_slots - num_slots, 0) // self._extent_slots, free=False)
        return self._order(num_slots, self._others) or self._order(num_slots, _FIRST, free=True)

    def _order(self, num_slots: int, ranks: tuple[int, ...], *, free: bool = False) -> list[str]:
        """Have these ranks map so many slots, and wait until all have answered; what went wrong. A pool without the
        engine's steps does not come to another size, and nothing is lost by waiting for them."""
        if not ranks:
            return []
        with self._changed:
            self._number += 1
            self._waiting_for, self._errors = set(ranks), []
            self._orders = [SizeOrder(self._number, num_slots, ranks, free)]
        self._step()
        waited_s = 0.0
        with self._changed:
            while not self._changed.wait_for(lambda: not self._waiting_for, _RECHECK_S):
                if self._stopping.is_set():
                    raise EngineStops("the engine stops")
                waited_s += _RECHECK_S
                if waited_s == LONG_WAIT_S:
                    _log.warning(
                        "ranks %s have not come to %s slots of the pool for %.0f s: they are still taking or freeing "
                        "memory, or the engine takes no steps",
                        ", ".join(map(str, sorted(self._waiting_for))),
                        f"{num_slots:,}",
                        waited_s,
                    )
            return list(self._errors)


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
