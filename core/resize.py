"""Resizing the pool while it is used: a few states, driven in short steps by whoever does work beside the engine.

Names only. Whoever drives it asks `step` what is to be done, and sees to the memory, of however many workers:

    grow:    memory is added everywhere, and acknowledged -> the slots are given out, a batch at a time
    shrink:  the last slots are given out no more -> they are emptied, a batch at a time, those in use when they are
             free -> the memory at the end is freed everywhere, and that acknowledged

Another size may be asked for at any moment. Nothing that is in memory moves, and what is elsewhere stays.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvferry.core.keys import Key
from kvferry.core.manager import OffloadManager
from kvferry.core.occupied import SlotUses, uses_of
from kvferry.core.reasons import EvictionReason
from kvferry.core.slots import BATCH_SLOTS, SlotState
from kvferry.core.transfers import Slots

PATIENCE_S = 5.0
"""How long slots that are pinned are waited for. After that their blocks can be found no more, so that it comes to an
end: whoever is about to load one computes it instead."""


class Todo(Enum):
    """What a resize needs next."""

    NOTHING = "nothing"
    AGAIN = "again"
    """`step` at once."""
    LATER = "later"
    """`step` in a while: slots are in use."""
    MEMORY = "memory"
    """There has to be memory for `memory_slots`, no more and no less, everywhere; then that is to be acknowledged."""


class PoolResize:
    """How many slots a manager's pool is to have. `want` may come from any thread; one thread calls the rest."""

    def __init__(self, manager: OffloadManager, extent_slots: int) -> None:
        """The pool is as the manager has it, and there is memory for it, in extents of `extent_slots`."""
        self.extent_slots = extent_slots
        self._manager = manager
        self._memory_slots = manager.num_slots
        self._is_waiting = False
        self._planned = manager.num_slots
        self._since_s: float | None = None
        self._look_from = 0
        self._look_to = 0
        self._last_in_use = -1
        self._first_in_use = -1

    @property
    def memory_slots(self) -> int:
        """Slots that there is memory for, or that memory was asked for."""
        return self._memory_slots

    @property
    def is_open(self) -> bool:
        """Whether there is something to do, or to wait for."""
        manager, table = self._manager, self._manager.table
        with manager.lock:
            sizes = {table.wanted_slots, table.num_slots, table.end_slot, self._memory_slots}
            return len(sizes) > 1 or self._is_waiting or manager.index.is_growing

    def in_use(self) -> SlotUses:
        """What keeps the slots that are to go, and what for. Any thread."""
        table = self._manager.table
        return uses_of(self._manager, table.num_slots, table.end_slot)

    def want(self, num_slots: int) -> None:
        """The pool is to have so many slots, in whole extents. Takes the place of what was wanted before.

        Raises `ValueError` for fewer than an extent, or more than the manager has room for.
        """
        most = self._manager.table.max_slots
        if not self.extent_slots <= num_slots <= most or num_slots % self.extent_slots:
            raise ValueError(f"{num_slots:,} slots are no whole extents of {self.extent_slots:,}, up to {most:,}")
        with self._manager.lock:
            self._manager.table.wanted_slots = num_slots

    def pinned_by_operators(self, num_slots: int) -> list[Key]:
        """The blocks that operators keep from eviction, and that a pool of so many slots would lose."""
        return self._manager.operator_pins.in_slots_from(num_slots)

    def step(self, now_s: float) -> Todo:
        """Do some, a batch of slots at most under the lock, and say what is to be done next."""
        manager, table = self._manager, self._manager.table
        wanted = table.wanted_slots
        if self._is_waiting:
            return Todo.MEMORY
        if wanted > table.num_slots:
            return self._grow(wanted)
        if wanted < table.num_slots:
            self._begin_to_shrink(wanted, now_s)
            return Todo.AGAIN
        if table.is_shrinking:
            return self._empty(now_s)
        if self._memory_slots != table.end_slot:
            return self._ask_for(table.end_slot)
        # Keys may be on their way for a larger pool that is not wanted any more.
        return Todo.AGAIN if manager.index.spread(table.num_slots) else Todo.NOTHING

    def acknowledge(self, num_slots: int) -> None:
        """There is memory for exactly so many slots now."""
        if num_slots == self._memory_slots:
            self._is_waiting = False

    def fail(self) -> None:
        """Memory could not be had: the pool stays as large as it is, and whoever has more lets go of it."""
        table = self._manager.table
        with self._manager.lock:
            if table.wanted_slots >= self._memory_slots:
                # Fewer may have been asked for meanwhile, for which there may be memory.
                table.wanted_slots = table.end_slot
            self._ask_for(table.end_slot)

    # --- inside -------------------------------------------------------------------------------------------------

    def _ask_for(self, num_slots: int) -> Todo:
        self._memory_slots = num_slots
        self._is_waiting = True
        return Todo.MEMORY

    def _grow(self, wanted: int) -> Todo:
        manager, table = self._manager, self._manager.table
        self._since_s = None
        with manager.changing:
            if table.sift(BATCH_SLOTS):
                return Todo.AGAIN
        end = min(wanted, self._memory_slots)
        if end == table.num_slots:
            return self._ask_for(wanted)
        if self._planned < end:
            self._resize_columns(wanted)
        if manager.index.spread(wanted):
            return Todo.AGAIN
        with manager.changing:
            manager.room.grow(min(end, table.num_slots + BATCH_SLOTS))
        return Todo.AGAIN

    def _begin_to_shrink(self, wanted: int, now_s: float) -> None:
        manager, table = self._manager, self._manager.table
        plan = plan_size(manager, wanted)
        with manager.changing:
            replaced = plan()
            table.shrink(wanted)
        del replaced
        self._planned = wanted
        self._since_s = now_s
        self._look_again(wanted, table.end_slot)

    def _empty(self, now_s: float) -> Todo:
        """Empty a batch of what is leaving; at the end of a round cut off what is empty at the end of the pool."""
        manager, table = self._manager, self._manager.table
        if self._since_s is None:
            # It has grown since, and less is leaving than was.
            self._since_s = now_s
            self._look_again(table.num_slots, table.end_slot)
        with manager.changing:
            if table.sift(BATCH_SLOTS):
                return Todo.AGAIN
        if self._look_from < self._look_to:
            start, end = self._look_from, min(self._look_from + BATCH_SLOTS, self._look_to)
            in_use = now_s - self._since_s > PATIENCE_S
            left = self._retire(start, end, now_s, in_use=in_use)
            if len(left):
                self._first_in_use = int(left[0]) if self._first_in_use < 0 else self._first_in_use
                self._last_in_use = int(left[-1])
            self._look_from = end
            return Todo.AGAIN
        first, last = self._first_in_use, self._last_in_use
        end = table.num_slots if first < 0 else (last // self.extent_slots + 1) * self.extent_slots
        if first >= 0:
            self._look_again(first, last + 1)
        if end < table.end_slot:
            with manager.changing:
                table.cut(end)
            return self._ask_for(end)
        return Todo.LATER

    def _retire(self, start: int, end: int, now_s: float, *, in_use: bool) -> Slots:
        """Retire those of a batch of leaving slots that nobody uses, and say which are left.

        With `in_use` those that are pinned are dropped, too: they can be found no more, and are left until the last
        pin or transfer on them ends. No byte of a slot that is read or written is touched in any case.
        """
        manager, table = self._manager, self._manager.table
        with manager.changing:
            ready = (table.current_states(start, end) == SlotState.READY).nonzero()[0] + start
            manager.leaving.drop(ready if in_use else ready[table.pins[ready] == 0], EvictionReason.SHRINK, now_s)
            return table.retire(start, end)

    def _look_again(self, start: int, end: int) -> None:
        self._look_from, self._look_to = start, end
        self._first_in_use = self._last_in_use = -1

    def _resize_columns(self, num_slots: int) -> None:
        """Whatever remembers in proportion to the slots does so from now on for another number of them."""
        plan = plan_size(self._manager, num_slots)
        with self._manager.changing:
            replaced = plan()
        del replaced
        self._planned = num_slots


def plan_size(manager: OffloadManager, num_slots: int) -> Callable[[], list[object]]:
    """Allocate what another number of slots takes, off the lock.

    What is returned puts it in force, under the lock and in O(1), and returns what is to be freed behind the lock.
    """
    plans = [part.plan_size(num_slots) for part in (manager.room, manager.admission, manager.missing)]
    return lambda: [put_in_force() for put_in_force in plans]
