"""Resizing of the host pool on all ranks of an engine and in the scheduler process.

To grow, the first rank allocates and prepares the memory, then the other ranks map it. To shrink, all processes unmap
the extents, the first rank last, which frees the memory. Commands and results are sent with the engine's steps, so an
idle engine is woken for them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from kvferry.app.engines.vllm.metadata import ResizeCommand, ResizeResult
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory, check_fits, memory_limits, shared_memory_limits
from kvferry.cuda_ops.pool.processors import run_on

_log = logging.getLogger(__name__)

LONG_WAIT_S = 60.0
SETTLE_S = 1.0
_RECHECK_S = 1.0
_FIRST_RANK = (0,)


class EngineExtents:
    """A `PoolMemory` that resizes the pool of all ranks.

    Thread: one thread other than the engine's adds and removes slots and waits for the ranks; the engine thread calls
    `take_commands` and `add_results`.
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
        """Create the memory of a pool that all ranks have mapped.

        Args:
            plan: Extents of the pool.
            row_bytes: Bytes of a slot on all ranks together.
            num_ranks: Number of worker ranks.
            mapped: This process's mapping of the pool, if it has one.
            step: Makes an idle engine take a step.
            stopping: Set when the engine stops.
        """
        self.num_slots = plan.num_slots
        self.row_bytes = row_bytes
        self._extent_slots = plan.extent_slots
        self._other_ranks = tuple(range(1, num_ranks))
        self._mapped = mapped
        self._step = step
        self._stopping = stopping
        self._changed = threading.Condition()
        self._number = 0
        self._commands: list[ResizeCommand] = []
        self._waiting_for: set[int] = set()
        self._errors: list[str] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on all ranks together."""
        return self.num_slots * self.row_bytes

    def check_room(self, num_slots: int) -> None:
        """Raise `NotEnoughMemory` if there is no memory for a larger pool of `num_slots` slots."""
        if self._mapped is not None:
            self._mapped.check_room(num_slots)
        elif num_slots > self.num_slots:
            limits = shared_memory_limits(SHARED_MEMORY) if self._other_ranks else memory_limits()
            check_fits("KVFERRY_POOL_BYTES", (num_slots - self.num_slots) * self.row_bytes, limits)

    def add_slots(self, num_slots: int) -> None:
        """Add slots on every rank; on failure nothing has changed.

        Raises:
            NotEnoughMemory: A rank could not map them.
            RuntimeError: The engine is stopping.
        """
        target = self.num_slots + num_slots
        errors = self._run(target, _FIRST_RANK)
        if not errors:
            errors = self._run(target, self._other_ranks)
            if self._mapped is not None:
                try:
                    self._mapped.add_slots(target - self._mapped.num_slots)
                except Exception as error:  # noqa: BLE001 - the ranks have to unmap the slots again
                    errors.append(f"scheduler process: {_text(error)}")
            if errors:
                # Extents that cannot be unmapped now stay mapped and unused until the next resize.
                for error_text in self._shrink(self.num_slots):
                    _log.error("pool resize: unused memory could not be freed: %s", error_text)
        if errors:
            raise NotEnoughMemory("; ".join(errors))
        self.num_slots = target

    def remove_extents(self, count: int) -> None:
        """Unmap the last `count` extents on every rank and free their memory.

        Raises:
            RuntimeError: A rank could not unmap them, or the engine is stopping. No memory was freed, and the call may
                be repeated.
        """
        target = self.num_slots - count * self._extent_slots
        errors = self._shrink(target)
        if errors:
            raise RuntimeError("; ".join(errors))
        self.num_slots = target

    # --- engine thread ------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether ranks have commands that they have not answered or will get with the next step."""
        return bool(self._waiting_for)

    def take_commands(self) -> list[ResizeCommand]:
        """Return the commands for this step."""
        if not self._commands:
            return []
        with self._changed:
            commands, self._commands = self._commands, []
        return commands

    def add_results(self, results: list[ResizeResult]) -> None:
        """Record results of ranks; late and repeated results are ignored."""
        if not results:
            return
        with self._changed:
            for result in results:
                if result.number == self._number and result.rank in self._waiting_for:
                    self._waiting_for.discard(result.rank)
                    if result.error is not None:
                        self._errors.append(result.error)
            self._changed.notify_all()

    # --- inside -------------------------------------------------------------------------------------------------

    def _shrink(self, num_slots: int) -> list[str]:
        """Unmap all but `num_slots` slots in every process, then free the memory on the first rank; return errors."""
        mapped = self._mapped
        if mapped is not None:
            mapped.remove_extents(max(mapped.num_slots - num_slots, 0) // self._extent_slots, free=False)
        return self._run(num_slots, self._other_ranks) or self._run(num_slots, _FIRST_RANK, free=True)

    def _run(self, num_slots: int, ranks: tuple[int, ...], *, free: bool = False) -> list[str]:
        """Send a command to ranks and wait for all results; return the errors.

        The wait is unbounded: without the engine's steps the pool cannot be resized, and waiting blocks nothing else.
        """
        if not ranks:
            return []
        with self._changed:
            self._number += 1
            self._waiting_for, self._errors = set(ranks), []
            self._commands = [ResizeCommand(self._number, num_slots, ranks, free)]
        self._step()
        waited_s = 0.0
        with self._changed:
            while not self._changed.wait_for(lambda: not self._waiting_for, _RECHECK_S):
                if self._stopping.is_set():
                    raise RuntimeError("the engine is stopping")
                waited_s += _RECHECK_S
                if waited_s == LONG_WAIT_S:
                    _log.warning(
                        "pool resize: waiting for ranks %s to map %s slots for %.0f s; they are still allocating or "
                        "freeing memory, or the engine takes no steps",
                        ", ".join(map(str, sorted(self._waiting_for))),
                        f"{num_slots:,}",
                        waited_s,
                    )
            return list(self._errors)


class RankExtents:
    """Resizes a rank's mapping of the pool: carries out commands one by one on a thread."""

    def __init__(
        self,
        pool: HostPool,
        rank: int,
        wait_for_readers: Callable[[float], bool],
        on_done: Callable[[], None],
        cpus: Collection[int] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            pool: The rank's mapping.
            rank: Number of the rank.
            wait_for_readers: Waits at most some seconds until removed slots are not accessed; returns whether so.
            on_done: Called on the thread when there is a result to report; must not block.
            cpus: CPUs of the thread, by default those of the calling thread.
        """
        self._pool = pool
        self._rank = rank
        self._wait_for_readers = wait_for_readers
        self._on_done = on_done
        self._open: deque[tuple[ResizeCommand, Future[None]]] = deque()
        """Commands that have not been reported, in the order in which they end."""
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, "kvferry-extents", initializer=run_on, initargs=(cpus,))

    @property
    def is_busy(self) -> bool:
        """Whether a command has not been reported yet."""
        return bool(self._open)

    @property
    def has_results(self) -> bool:
        """Whether `take_results` has results to return."""
        return bool(self._open) and self._open[0][1].done()

    def submit(self, command: ResizeCommand) -> None:
        """Queue a command if it is for this rank. Raises `RuntimeError` if the thread cannot be started."""
        if self._rank in command.ranks:
            future = self._thread.submit(self._resize, command.num_slots, free=command.free)
            self._open.append((command, future))
            future.add_done_callback(lambda _: self._on_done())

    def take_results(self) -> list[ResizeResult]:
        """Return the results since the last call."""
        results: list[ResizeResult] = []
        while self.has_results:
            command, future = self._open.popleft()
            if future.cancelled():
                continue
            error = future.exception()
            text = None if error is None else f"rank {self._rank}: {_text(error)}"
            results.append(ResizeResult(command.number, self._rank, text))
        return results

    def close(self) -> None:
        """Cancel queued commands and wait for the current one."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _resize(self, num_slots: int, *, free: bool) -> None:
        """Map exactly `num_slots` slots. Thread: extents."""
        pool = self._pool
        if num_slots > pool.num_slots:
            pool.add_slots(num_slots - pool.num_slots)
            return
        while not self._wait_for_readers(SETTLE_S):
            if self._closing.is_set():
                raise RuntimeError("the engine is stopping")
        pool.remove_extents((pool.num_slots - num_slots) // pool.slots_per_extent, free=free)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
