"""Resizing of the pool while it is used: a size is checked when requested, and applied by a thread.

The thread owns the extents: it adds memory and prepares it, or frees memory, and takes the steps of the resize between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from kvferry.app.common.call_errors import Conflict, FieldError
from kvferry.app.common.threads import WatchedThread
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.cuda_ops.pool.extents import PoolMemory, PoolPlan, whole_extents
from kvferry.cuda_ops.pool.limits import NotEnoughMemory

_log = logging.getLogger(__name__)

SETTING = "pool_bytes"
BETWEEN_STEPS_S = 0.0001
"""Pause between steps, so that other threads can acquire the manager lock."""
IN_USE_S = 0.05
SETTLE_S = 1.0
RETRY_S = 1.0
CLOSE_S = 10.0
SHOWN_PINS = 10


class PinnedBlocks(Conflict):
    """A smaller pool would lose blocks that operators pinned."""

    slug, title = "pinned-blocks", "Pinned blocks are in the way"

    def __init__(self, keys: list[bytes]) -> None:
        self.extras = {"pinned": [key.hex() for key in keys[:SHOWN_PINS]], "count": len(keys)}
        super().__init__(
            f"{len(keys)} pinned blocks are in the part of the pool that would be removed: unpin them "
            "(DELETE /admin/v1/blocks/{hash}/pin), or make pool_bytes larger"
        )


class SizeNotPossible(Conflict):
    """A valid size that the pool of this process cannot have now."""

    slug, title = "size-not-possible", "Size not possible"

    def __init__(self, pool_bytes: int, advice: str) -> None:
        self.errors = [FieldError(field=SETTING, message=advice)]
        super().__init__(f"{SETTING}={pool_bytes}: {advice}")


@dataclass(frozen=True, slots=True)
class ResizeEnd:
    """End of a resize: the pool has `slots`, `bytes` in total. `error` is why it does not have `asked_bytes`."""

    slots: int
    bytes: int
    asked_bytes: int
    error: str | None


class PoolResizer:
    """Resizing of one pool. Thread: any, except that the memory is changed on the resizer's own."""

    def __init__(
        self,
        resize: PoolResize,
        pool: PoolMemory,
        plan: PoolPlan,
        *,
        wait_for_readers: Callable[[float], bool],
        wake: Callable[[], None],
        on_end: Callable[[ResizeEnd], None],
        guarding: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        step_bytes: int = 1 << 30,
        long_wait_s: float = 30.0,
    ) -> None:
        """Make a resizer of `pool`.

        Args:
            wait_for_readers: Waits at most some seconds until removed slots are not accessed; returns whether so.
            wake: Has an idle engine take a step.
            on_end: Called on the resizer's thread at the end of a resize.
            guarding: The context in which the pool's slots are changed.
            step_bytes: Memory added per step, or an extent if that is more; then another size can be requested.
            long_wait_s: Wait for slots in use after which a line is logged.
        """
        self._resize = resize
        self._pool = pool
        self._plan = plan
        self._wait_for_readers = wait_for_readers
        self._wake = wake
        self._on_end = on_end
        self._guarding = guarding
        self._step_bytes, self._long_wait_s = step_bytes, long_wait_s
        self._error: str | None = None
        self._checked: tuple[int, int] | None = None
        """Bytes and slots of the size that was checked last, until `begin`."""
        self._target_bytes, self._target_slots = pool.num_bytes, pool.num_slots
        self._requested = threading.Event()
        self._waited_s = 0.0
        self._waits_for_readers = False
        self.thread = WatchedThread("kvferry-resize", self._run, "the pool keeps its size")

    def check(self, pool_bytes: int) -> None:
        """Check a size, which `begin` may apply then.

        Raises:
            SizeNotPossible: This process cannot have a pool of that size.
            PinnedBlocks: The pool would lose blocks that operators pinned.
        """
        num_slots, plan, row_bytes = self._slots_for(pool_bytes), self._plan, self._pool.row_bytes
        extent_bytes = plan.extent_slots * row_bytes
        advice = None
        if num_slots < plan.extent_slots:
            advice = f"holds no extent of this pool, which takes {extent_bytes:,} bytes; make it larger"
        elif num_slots > plan.max_slots:
            advice = (
                f"is more than this process can have, which is {plan.max_slots * row_bytes:,} bytes; restart it "
                "with the new size"
            )
        elif num_slots > self._resize.memory_slots:
            # Memory that is being added is counted already.
            try:
                self._pool.check_room(num_slots)
            except NotEnoughMemory as error:
                advice = str(error)
        if advice is not None:
            raise SizeNotPossible(pool_bytes, advice)
        pinned = self._resize.pinned_by_operators(num_slots)
        if pinned:
            raise PinnedBlocks(pinned)
        self._checked = (pool_bytes, num_slots)

    def begin(self, pool_bytes: int) -> None:
        """Start a resize to `pool_bytes` if that was checked last; it replaces a resize under way.

        After a change that failed, it is called with the size before: then the checked one is forgotten.
        """
        size, self._checked = self._checked, None
        if size is not None and size[0] == pool_bytes:
            self._target_bytes, self._target_slots = size
            self._resize.request(self._target_slots)
            self._requested.set()

    def degraded(self) -> list[str]:
        """Return which slots a resize has been waiting for, if it has waited for long."""
        if self._waited_s < self._long_wait_s:
            return []
        return [
            f"{SETTING}: the resize from {self._pool.num_slots:,} to {self._target_slots:,} slots waits for slots "
            f"in use: {self._in_use()}"
        ]

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Stop the thread; a kept pool keeps the size that a resize has reached."""
        self.thread.closing.set()
        self._requested.set()
        self.thread.close(CLOSE_S)

    # --- thread: resizer ------------------------------------------------------------------------------------------

    def _slots_for(self, pool_bytes: int) -> int:
        return whole_extents(pool_bytes // self._pool.row_bytes, self._plan.extent_slots)

    def _run(self) -> None:
        while not self.thread.closing.is_set():
            try:
                self._step()
            except Exception:  # noqa: BLE001 - the pool is used as it is, and the step is retried
                _log.exception("pool resize: a step failed")
                self._sleep(RETRY_S)

    def _step(self) -> None:
        with self._guarding("resize"):
            todo = self._resize.step(time.time())
        if todo is Todo.AGAIN:
            time.sleep(BETWEEN_STEPS_S)
        elif todo is Todo.MEMORY:
            self._change_memory(self._resize.memory_slots)
        elif todo is Todo.LATER:
            # Leases and pins end in steps, which an idle engine takes when it is woken.
            self._wake()
            self._count_wait(IN_USE_S, for_readers=False)
            self._sleep(IN_USE_S)
        else:
            self._sleep(None)
            return
        if not self._resize.is_open:
            self._end()

    def _sleep(self, seconds: float | None) -> None:
        self._requested.wait(seconds)
        self._requested.clear()

    def _in_use(self) -> str:
        return "removed ones, being read for their checksums" if self._waits_for_readers else self._resize.in_use()

    def _count_wait(self, seconds: float, *, for_readers: bool) -> None:
        was_long = self._waited_s >= self._long_wait_s
        self._waits_for_readers = for_readers
        self._waited_s += seconds
        if self._waited_s >= self._long_wait_s and not was_long:
            _log.warning(
                "pool resize: waiting for slots in use: %s; the pool still has %s slots",
                self._in_use(),
                f"{self._pool.num_slots:,}",
            )

    def _change_memory(self, num_slots: int) -> None:
        """Add or free memory, so that there is memory for `num_slots`; slots that change are not in use."""
        pool = self._pool
        if num_slots < pool.num_slots and not self._wait_for_readers(SETTLE_S):
            self._count_wait(SETTLE_S, for_readers=True)
            return
        # Cleared first, so that `/readyz` does not report a stale wait.
        self._waited_s = 0.0
        if num_slots > pool.num_slots:
            if not self._add_memory(num_slots):
                return
        elif num_slots < pool.num_slots:
            pool.remove_extents((pool.num_slots - num_slots) // self._plan.extent_slots)
        self._resize.acknowledge(num_slots)

    def _add_memory(self, num_slots: int) -> bool:
        """Add memory a few extents at a time, so that a large growth can be stopped; return whether all was added.

        If memory is not available, or a smaller size is requested meanwhile, the resize fails and memory is returned.
        """
        pool, extent_slots = self._pool, self._plan.extent_slots
        had_slots = pool.num_slots
        step_slots = max(self._step_bytes // (extent_slots * pool.row_bytes), 1) * extent_slots
        while pool.num_slots < num_slots:
            if self.thread.closing.is_set():
                return False
            if self._target_slots < num_slots:
                self._resize.fail()
                return False
            try:
                pool.add_slots(min(step_slots, num_slots - pool.num_slots))
            except Exception as error:  # noqa: BLE001 - the pool keeps its size, and the error is reported
                self._error = str(error) or type(error).__name__
                _log.error("pool resize: failed, the pool keeps %s slots: %s", f"{had_slots:,}", self._error)
                self._resize.fail()
                return False
        return True

    def _end(self) -> None:
        error, self._error = self._error, None
        self._waited_s = 0.0
        num_slots, num_bytes = self._pool.num_slots, self._pool.num_bytes
        _log.info("pool resize: the pool has %s slots, %s bytes", f"{num_slots:,}", f"{num_bytes:,}")
        self._wake()
        self._on_end(ResizeEnd(num_slots, num_bytes, self._target_bytes, error))
