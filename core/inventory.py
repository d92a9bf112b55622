"""What is in the pool, for those who look at it beside the engine: listings, the map, and the rows that changed.

Everything is read in batches, each copied under the lock, so that a look at ten million slots never holds it for long.
"""

from __future__ import annotations

from threading import RLock

import numpy as np
from numpy.typing import NDArray

from core.events import SlotRows
from core.slots import BATCH_SLOTS, SlotState, SlotTable
from core.transfers import NO_SLOTS, Slots

_SCAN_SLOTS = 1 << 16
_READY = int(SlotState.READY)


class Inventory:
    """A reader of the slot table. `dirty_rows` is for one caller; the rest may be called from any thread."""

    def __init__(self, table: SlotTable, lock: RLock) -> None:
        """`lock` is the manager's, which guards the table."""
        self._table = table
        self._lock = lock
        self._dirty_cursor = 0

    def list_blocks(self, start_slot: int, limit: int) -> SlotRows:
        """Up to `limit` ready slots from `start_slot` on, in the order of their numbers."""
        chosen: list[Slots] = []
        missing = limit
        start = start_slot
        while missing > 0 and start < self._table.end_slot:
            with self._lock:
                states = self._table.current_states(start, start + BATCH_SLOTS)
            ready = (states == _READY).nonzero()[0][:missing] + start
            chosen.append(ready)
            missing -= len(ready)
            start += BATCH_SLOTS
        slots = np.concatenate(chosen) if chosen else NO_SLOTS
        with self._lock:
            return self._table.rows(slots[self._table.is_ready(slots)])

    def slot_states(self) -> NDArray[np.uint8]:
        """The state of every slot, a `SlotState` a byte. Not one moment's, since it is read in batches."""
        states = np.empty(self._table.end_slot, dtype=np.uint8)
        for start in range(0, len(states), BATCH_SLOTS):
            with self._lock:
                end = min(start + BATCH_SLOTS, len(states))
                states[start:end] = self._table.current_states(start, end)
        return states

    def dirty_rows(self, limit: int) -> SlotRows | None:
        """Up to `limit` rows that changed since they were last asked for, or None; each is told once a change."""
        slots = self._next_dirty(limit)
        if not len(slots):
            return None
        with self._lock:
            self._table.dirty[slots] = False
            return self._table.rows(slots)

    def mark_all_dirty(self) -> None:
        """Have every row told again, for a store that lost its own."""
        self._table.dirty[: self._table.last_end_slot] = True

    def _next_dirty(self, limit: int) -> Slots:
        """Look once round the dirty bits from where the last look ended. Bits set meanwhile are found next time."""
        # Rows of slots that are no more have to go, too.
        num_slots = self._table.last_end_slot
        looked = 0
        while looked < num_slots:
            start = self._dirty_cursor
            end = min(start + _SCAN_SLOTS, num_slots)
            # A copy, for others write meanwhile, and NumPy refuses to look for what changes under it.
            found = self._table.dirty[start:end].copy().nonzero()[0][:limit] + start
            looked += end - start
            self._dirty_cursor = (int(found[-1]) + 1 if len(found) == limit else end) % num_slots
            if len(found):
                return found
        return NO_SLOTS
