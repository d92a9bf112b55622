"""Resize of a pool in use: a state machine, driven in short steps by a thread beside the engine.

The thread calls `step`, and changes the memory of all workers when `step` asks for it:

    grow:    memory is added on every worker, and acknowledged -> the slots are allowed to be allocated, a batch a step
    shrink:  the last slots are not allocated any more -> they are emptied, a batch a step, those in use when they are
             free -> the memory at the end is freed on every worker, and that acknowledged

Another size may be requested at any time. Blocks never move.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvferry.core.keys import Key
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import Slots

PINNED_WAIT_S = 5.0
"""How long a shrink waits for pinned slots. After that their blocks are dropped, and requests that would load one
compute it instead."""


class Todo(Enum):
    """Next action of the thread that drives a resize."""

    NOTHING = "nothing"
    AGAIN = "again"
    """Call `step` at once."""
    LATER = "later"
    """Call `step` later: slots are in use."""
    MEMORY = "memory"
    """Change the memory of every worker to exactly `memory_slots`, then call `acknowledge` or `fail`."""


class PoolResize:
    """A resize of a manager's pool. `request` may be called from any thread; one thread calls the other methods."""

    def __init__(self, manager: OffloadManager, extent_slots: int) -> None:
        """Start with memory for the manager's slots, in extents of `extent_slots`."""
        self.extent_slots = extent_slots
        self._manager = manager
        self.memory_slots = manager.num_slots
        """Slots that memory exists or was requested for."""
        self._is_waiting = False
        """Whether the workers have not acknowledged the memory that was requested."""
        self._planned_slots = manager.num_slots
        """Slots that the structures of `plan_size` are made for."""
        self._since_s: float | None = None
        """When the last slots began to leave; None once the pool has grown since."""
        self._scan_from = self._scan_to = 0
        """The leaving slots that this pass over them has still to empty."""
        self._first_in_use = self._last_in_use = -1
        """Of the slots that this pass found in use; -1 for none."""

    @property
    def is_open(self) -> bool:
        """Whether a resize is in progress."""
        manager, table = self._manager, self._manager.table
        with manager.lock:
            sizes = {table.target_slots, table.num_slots, table.end_slot, self.memory_slots}
            return len(sizes) > 1 or self._is_waiting or manager.index.is_growing

    def in_use(self) -> str:
        """Return the numbers of leaving slots in use, by their use. Any thread."""
        return Inventory(self._manager).describe_leaving()

    def request(self, num_slots: int) -> None:
        """Request a size, in place of the one requested before.

        Raises:
            ValueError: `num_slots` is no multiple of an extent, or more than the manager has columns for.
        """
        most = self._manager.table.max_slots
        if not self.extent_slots <= num_slots <= most or num_slots % self.extent_slots:
            raise ValueError(f"{num_slots:,} slots are no whole extents of {self.extent_slots:,}, up to {most:,}")
        with self._manager.lock:
            self._manager.table.target_slots = num_slots

    def pinned_by_operators(self, num_slots: int) -> list[Key]:
        """Return the blocks pinned by operators that a pool of `num_slots` would lose."""
        return self._manager.operator_pins.in_slots_from(num_slots)

    def step(self, now_s: float) -> Todo:
        """Process at most one batch of slots, and return the next action. Acquires the manager lock."""
        table = self._manager.table
        wanted = table.target_slots
        if self._is_waiting:
            return Todo.MEMORY
        if wanted > table.num_slots:
            return self._grow(wanted)
        if wanted < table.num_slots:
            self._begin_to_shrink(wanted, now_s)
            return Todo.AGAIN
        if table.is_shrinking:
            return self._empty(now_s)
        if self.memory_slots != table.end_slot:
            return self._request_memory(table.end_slot)
        # The index may be growing for a larger pool that was requested before.
        return Todo.AGAIN if self._grow_index(table.num_slots) else Todo.NOTHING

    def acknowledge(self, num_slots: int) -> None:
        """Record that every worker has memory for exactly `num_slots`."""
        if num_slots == self.memory_slots:
            self._is_waiting = False

    def fail(self) -> None:
        """Record that memory could not be allocated: the pool keeps its size, and workers with more free it."""
        table = self._manager.table
        with self._manager.lock:
            if table.target_slots >= self.memory_slots:
                # Fewer slots may have been requested meanwhile, for which there may be memory.
                table.target_slots = table.end_slot
            self._request_memory(table.end_slot)

    # --- inside -------------------------------------------------------------------------------------------------

    def _request_memory(self, num_slots: int) -> Todo:
        self.memory_slots = num_slots
        self._is_waiting = True
        return Todo.MEMORY

    def _grow(self, wanted: int) -> Todo:
        manager, table = self._manager, self._manager.table
        self._since_s = None
        end = min(wanted, self.memory_slots)
        if end == table.num_slots:
            return self._request_memory(wanted)
        if self._planned_slots < end:
            self._resize_columns(wanted)
        if self._grow_index(wanted):
            return Todo.AGAIN
        with manager.changing:
            manager.table.grow(min(end, table.num_slots + table.batch_slots))
        return Todo.AGAIN

    def _begin_to_shrink(self, wanted: int, now_s: float) -> None:
        manager, table = self._manager, self._manager.table
        plan = plan_size(manager, wanted)
        with manager.changing:
            replaced = plan()
            # Slots from this one on are not allocated any more. Free ones count until they are retired.
            table.num_slots = wanted
        del replaced
        self._planned_slots = wanted
        self._since_s = now_s
        self._scan_again(wanted, table.end_slot)

    def _empty(self, now_s: float) -> Todo:
        """Empty a batch of leaving slots; after the last batch, remove the empty extents at the end of the pool."""
        manager, table = self._manager, self._manager.table
        if self._since_s is None:
            # The pool has grown meanwhile, and fewer slots are leaving.
            self._since_s = now_s
            self._scan_again(table.num_slots, table.end_slot)
        if self._scan_from < self._scan_to:
            start, end = self._scan_from, min(self._scan_from + table.batch_slots, self._scan_to)
            drops_pinned = now_s - self._since_s > PINNED_WAIT_S
            left = self._retire(start, end, now_s, drops_pinned=drops_pinned)
            if len(left):
                self._first_in_use = int(left[0]) if self._first_in_use < 0 else self._first_in_use
                self._last_in_use = int(left[-1])
            self._scan_from = end
            return Todo.AGAIN
        first, last = self._first_in_use, self._last_in_use
        end = table.num_slots if first < 0 else (last // self.extent_slots + 1) * self.extent_slots
        if first >= 0:
            self._scan_again(first, last + 1)
        if end < table.end_slot:
            with manager.changing:
                table.truncate(end)
            return self._request_memory(end)
        return Todo.LATER

    def _retire(self, start: int, end: int, now_s: float, *, drops_pinned: bool) -> Slots:
        """Retire those of a batch of leaving slots that are not in use, and return the others.

        With `drops_pinned` pinned blocks are dropped, too: they cannot be found any more, and their slots are freed
        with the last pin or transfer. The bytes of slots in use are not touched in any case.
        """
        manager, table = self._manager, self._manager.table
        with manager.changing:
            ready = table.ready_in(start, end)
            manager.leases.end_with(table.keys[ready].tolist())
            manager.drop(ready if drops_pinned else ready[table.pins[ready] == 0], EvictionReason.SHRINK, now_s)
            return table.retire(start, end)

    def _scan_again(self, start: int, end: int) -> None:
        self._scan_from, self._scan_to = start, end
        self._first_in_use = self._last_in_use = -1

    def _resize_columns(self, num_slots: int) -> None:
        """Resize the structures whose size follows the number of slots."""
        plan = plan_size(self._manager, num_slots)
        with self._manager.changing:
            replaced = plan()
        del replaced
        self._planned_slots = num_slots

    def _grow_index(self, num_slots: int) -> bool:
        """Grow the index to `num_slots`, a batch of entries a call. Returns True while it has to be called again."""
        manager = self._manager
        index = manager.index
        if index.is_growing:
            with manager.changing:
                replaced = index.move(manager.table.end_slot, manager.table.batch_slots)
            if replaced is None:
                return True
            # Freed without the lock.
            del replaced
        if num_slots <= index.size:
            return False
        begin = index.begin_growing(num_slots)
        with manager.changing:
            begin()
        return True


def plan_size(manager: OffloadManager, num_slots: int) -> Callable[[], list[object]]:
    """Allocate the structures for another number of slots. Requires: no lock held.

    The function returned applies them, under the lock and in O(1), and returns what is to be freed without it.
    """
    plans = [part.plan_size(num_slots) for part in (manager.evictor, manager.admission, manager.history)]
    return lambda: [apply() for apply in plans]
