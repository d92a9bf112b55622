"""What is in the pool, for those who look at it beside the engine: counts, listings, the map, and rows that changed.

Everything is read in batches, each copied under the lock, so that a look at ten million slots never holds it for long.
"""

from __future__ import annotations

from threading import RLock

import numpy as np
from numpy.typing import NDArray

from kvferry.core.events import SlotRows
from kvferry.core.grants import BlockHold, BlockState
from kvferry.core.keys import Key
from kvferry.core.operator_pins import OperatorPins
from kvferry.core.pins import Pins
from kvferry.core.pool_index import PoolIndex
from kvferry.core.room import Room
from kvferry.core.slots import BATCH_SLOTS, SlotState, SlotTable
from kvferry.core.stats import PoolCounts
from kvferry.core.transfers import NO_SLOTS, Slots

_SCAN_SLOTS = 1 << 16
_READY = int(SlotState.READY)


class Inventory:
    """A reader. `dirty_rows` is for one caller; the rest may be called from any thread."""

    def __init__(
        self, table: SlotTable, index: PoolIndex, room: Room, pins: Pins, operator_pins: OperatorPins, lock: RLock
    ) -> None:
        """`lock` is the manager's, which guards all of it."""
        self._table = table
        self._index = index
        self._room = room
        self._pins = pins
        self._operator_pins = operator_pins
        self._lock = lock
        self._dirty_cursor = 0
        self._live = PoolCounts()

    def counts(self) -> PoolCounts:
        """The pool's slots by state."""
        with self._lock:
            return self.live().copy()

    def live(self) -> PoolCounts:
        """The same without a copy, up to date until the caller lets go of the lock."""
        table, live = self._table, self._live
        slots, free, ready = table.num_present, table.num_free, table.num_ready
        live.slots = slots
        live.wanted_slots = table.wanted_slots
        live.slot_bytes = table.slot_bytes
        live.free = free
        live.ready = ready
        # Held ones among them.
        live.storing = slots - free - ready
        live.loading = self._pins.count_loading()
        live.pinned = ready - len(self._room.policy)
        live.unverified = table.num_unverified
        live.bytes = slots * table.slot_bytes
        live.eviction_policy = self._room.policy.name
        return live

    def find_block(self, key: Key) -> SlotRows | None:
        """The row of one key, or None."""
        with self._lock:
            slot = self._index.get(key)
            return None if slot is None else self._table.rows(np.array([slot]))

    def holds(self, rows: SlotRows) -> list[BlockHold | None]:
        """What each of these blocks is under now; None for one that has left the pool since the rows were copied."""
        with self._lock:
            slots, table = rows.slots, self._table
            here = table.is_ready(slots) & (table.generations[slots] == rows.generations)
            pinned = table.pins[slots] > 0
            loading = np.isin(slots, self._pins.loading_slots())
            until_s = self._operator_pins.until_s(rows.keys)
        states = np.where(loading, BlockState.LOADING, np.where(pinned, BlockState.PINNED, BlockState.READY))
        columns = zip(here.tolist(), states.tolist(), until_s, strict=True)
        return [BlockHold(BlockState(state), until) if there else None for there, state, until in columns]

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
