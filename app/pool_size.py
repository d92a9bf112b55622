"""The pool's size while it runs: another one is checked when it is asked for, and comes about on a thread of its own.

That thread owns the extents: it adds memory and makes it ready, or frees some, away from the engine's thread, and takes
the steps of the resize in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.app.settings.problems import BadSettings, Problem
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.cuda_ops.pool.extents import PoolMemory, PoolPlan, whole_extents
from kvferry.cuda_ops.pool.limits import NotEnoughMemory

_log = logging.getLogger(__name__)

SETTING = "pool_bytes"
BETWEEN_STEPS_S = 0.0001
"""Whoever waits for the manager's lock gets it: a thread that only lets go of it would have it again before them."""
IN_USE_S = 0.05
LONG_WAIT_STEPS = 600
"""So many looks at slots in use, half a minute of them, are worth a line in the log."""
STEP_BYTES = 1 << 30
"""Memory is taken so much at a time, or an extent if that is more: in between, another size may be asked for."""
SETTLE_S = 1.0
TROUBLE_S = 1.0
CLOSE_S = 10.0
SHOWN_PINS = 10


class PinnedBlocks(Exception):
    """A pool of the size that was asked for would lose blocks that operators keep from eviction."""

    def __init__(self, keys: list[bytes]) -> None:
        self.shown = [key.hex() for key in keys[:SHOWN_PINS]]
        self.count = len(keys)
        super().__init__(
            f"{self.count} pinned blocks lie in the part of the pool that would go: take their pins away "
            "(DELETE /admin/v1/blocks/{hash}/pin), or make pool_bytes larger"
        )


class SizeNotPossible(BadSettings):
    """A valid size that the pool of this process cannot have now."""


@dataclass(frozen=True, slots=True)
class ResizeEnd:
    """How a resize ended: with so many slots, `bytes` in all. `error` says why `asked_bytes` could not be had."""

    slots: int
    bytes: int
    asked_bytes: int
    error: str | None


class _Size(NamedTuple):
    """A size that was asked for, and the whole slots in it."""

    num_bytes: int
    num_slots: int


class PoolSize:
    """Any thread may ask; `start` starts the thread that does it, and starts it again if it died."""

    def __init__(
        self,
        resize: PoolResize,
        pool: PoolMemory,
        plan: PoolPlan,
        *,
        settle: Callable[[float], bool],
        wake: Callable[[], None],
        tell: Callable[[ResizeEnd], None],
        guarding: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """`settle` waits, within seconds, until nobody looks at slots that have left the pool; whether that is so.

        `tell` is told how a resize ended, on the thread that does it. `guarding` is the context in which the pool's
        slots are changed.
        """
        self._resize = resize
        self._pool = pool
        self._plan = plan
        self._settle = settle
        self._wake = wake
        self._tell = tell
        self._guarding = guarding
        self._error: str | None = None
        self._checked: _Size | None = None
        self._wanted = _Size(pool.num_bytes, pool.num_slots)
        self._asked = threading.Event()
        self._closing = False
        self._num_waits = 0
        self._thread: threading.Thread | None = None

    def check(self, pool_bytes: int) -> None:
        """Raise `SizeNotPossible` for a size that cannot be, `PinnedBlocks` for one that would lose what is pinned.

        What is good may be begun.
        """
        num_slots, plan, row_bytes = self._slots_for(pool_bytes), self._plan, self._pool.row_bytes
        extent_bytes = plan.extent_slots * row_bytes
        advice = None
        if num_slots < plan.extent_slots:
            advice = f"holds no extent of this pool, which takes {extent_bytes:,} bytes; make it larger"
        elif num_slots > plan.max_slots:
            advice = (
                f"is more than this process can come to have, which is {plan.max_slots * row_bytes:,} bytes; start it "
                "with the new size"
            )
        elif num_slots > self._resize.memory_slots:
            # What is being taken already counts as taken, and is not asked for twice.
            try:
                self._pool.check_room(num_slots)
            except NotEnoughMemory as error:
                advice = str(error)
        if advice is not None:
            raise SizeNotPossible([Problem(SETTING, f"{SETTING}={pool_bytes}: {advice}", advice)])
        pinned = self._resize.pinned_by_operators(num_slots)
        if pinned:
            raise PinnedBlocks(pinned)
        self._checked = _Size(pool_bytes, num_slots)

    def begin(self) -> None:
        """Have the pool come to the size that was checked last, if there is a new one, whatever was wanted before."""
        size, self._checked = self._checked, None
        if size is not None:
            self._wanted = size
            self._resize.request(size.num_slots)
            self._asked.set()

    def reasons(self) -> list[str]:
        """Why a resize does not come to its end, if it has been waiting for long. Any thread."""
        if self._num_waits < LONG_WAIT_STEPS:
            return []
        return [
            f"{SETTING}: the pool is to have {self._wanted.num_slots:,} slots, and still has memory for "
            f"{self._pool.num_slots:,}: of those that are to go these are in use: {self._resize.in_use()}"
        ]

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            _log.error("the thread that changes the pool's size died and is started again")
        self._thread = threading.Thread(target=self._run, name="kvferry-resize", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, wherever a resize is: a kept pool is as large as it came to be."""
        self._closing = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # --- on its thread ------------------------------------------------------------------------------------------

    def _slots_for(self, pool_bytes: int) -> int:
        return whole_extents(pool_bytes // self._pool.row_bytes, self._plan.extent_slots)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception:  # noqa: BLE001 - the pool serves as it is, and the next step may do better
                _log.exception("a step of a resize of the pool failed")
                self._rest(TROUBLE_S)

    def _step(self) -> None:
        with self._guarding("resize"):
            todo = self._resize.step(time.time())
        if todo is Todo.AGAIN:
            time.sleep(BETWEEN_STEPS_S)
        elif todo is Todo.MEMORY:
            # Nothing is waited for any more, and nobody shall read so once the new size can be seen.
            self._num_waits = 0
            self._change_memory(self._resize.memory_slots)
        elif todo is Todo.LATER:
            # Leases and pins run out in steps, which an idle engine takes when it is woken.
            self._wake()
            self._note_wait()
            self._rest(IN_USE_S)
        else:
            self._rest(None)
            return
        if not self._resize.is_open:
            self._end()

    def _rest(self, seconds: float | None) -> None:
        self._asked.wait(seconds)
        self._asked.clear()

    def _note_wait(self) -> None:
        self._num_waits += 1
        if self._num_waits == LONG_WAIT_STEPS:
            _log.warning(
                "the pool still has memory for %s slots: some that are to go are in use, and are waited for: %s",
                f"{self._pool.num_slots:,}",
                self._resize.in_use(),
            )

    def _change_memory(self, num_slots: int) -> None:
        """Have memory for so many slots, which nobody uses yet, or any more."""
        pool = self._pool
        if num_slots > pool.num_slots:
            if not self._add_memory(num_slots):
                return
        elif num_slots < pool.num_slots:
            if not self._settle(SETTLE_S):
                return
            pool.remove_extents((pool.num_slots - num_slots) // self._plan.extent_slots)
        self._resize.acknowledge(num_slots)

    def _add_memory(self, num_slots: int) -> bool:
        """Take memory a few extents at a time, so that a large growth can be stopped; whether it is there.

        Where it cannot be had, or is not wanted any more, what was taken goes back.
        """
        pool, extent_slots = self._pool, self._plan.extent_slots
        had_slots = pool.num_slots
        step_slots = max(STEP_BYTES // (extent_slots * pool.row_bytes), 1) * extent_slots
        while pool.num_slots < num_slots:
            if self._closing:
                return False
            if self._wanted.num_slots < num_slots:
                self._resize.fail()
                return False
            try:
                pool.add_slots(min(step_slots, num_slots - pool.num_slots))
            except Exception as error:  # noqa: BLE001 - whatever it was, the pool stays as it is, and that is told
                self._error = str(error) or type(error).__name__
                _log.error("the pool stays at %s slots: %s", f"{had_slots:,}", self._error)
                self._resize.fail()
                return False
        return True

    def _end(self) -> None:
        error, self._error = self._error, None
        self._num_waits = 0
        num_slots, num_bytes = self._pool.num_slots, self._pool.num_bytes
        _log.info("the host pool has %s slots now, %s bytes", f"{num_slots:,}", f"{num_bytes:,}")
        self._wake()
        self._tell(ResizeEnd(num_slots, num_bytes, self._wanted.num_bytes, error))
