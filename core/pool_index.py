"""Which slot holds a key, in a pool that may grow: then its marks go to a larger table, a batch at a time."""

from __future__ import annotations

from threading import RLock

from core.index import KeyIndex
from core.mark_table import MarkTable, Numbers
from core.slots import BATCH_SLOTS, SlotState, SlotTable


class PoolIndex(KeyIndex):
    """The manager's lock guards all of it; only `spread` takes it itself."""

    def __init__(self, table: SlotTable, lock: RLock) -> None:
        super().__init__(table.num_slots, table.keys, table.marks)
        self._slots = table
        self._lock = lock
        # What is claimed and removed meanwhile is claimed and removed here, too.
        self._larger: MarkTable | None = None
        self._next_slot = 0

    @property
    def is_spreading(self) -> bool:
        """Whether marks are on their way to a table for more slots."""
        return self._larger is not None

    def spread(self, num_slots: int) -> bool:
        """Have room for so many slots: a batch goes over at each call; True while there is more to do."""
        larger = self._larger
        if larger is None:
            if num_slots <= self._table.size:
                return False
            # Not under the lock, as its size is that of the pool.
            larger = MarkTable(num_slots, self._marks)
            with self._lock:
                self._larger, self._next_slot = larger, 0
            return True
        with self._lock:
            start, end = self._next_slot, min(self._next_slot + BATCH_SLOTS, self._slots.end_slot)
            slots = (self._slots.current_states(start, end) == SlotState.READY).nonzero()[0] + start
            larger.claim(slots)
            self._next_slot = end
            if end < self._slots.end_slot:
                return True
            replaced, self._table, self._larger = self._table, larger, None
        # Only here, for its memory goes with it.
        del replaced
        return num_slots > larger.size

    def claim(self, numbers: Numbers) -> Numbers:
        """See `KeyIndex`."""
        holders = self._table.claim(numbers)
        if self._larger is not None:
            self._larger.claim(numbers[holders == numbers])
        return holders

    def remove(self, numbers: Numbers) -> None:
        """See `KeyIndex`."""
        self._table.remove(numbers)
        if self._larger is not None:
            self._larger.remove(numbers)

    def clear(self) -> None:
        """See `KeyIndex`."""
        self._table.clear()
        if self._larger is not None:
            self._larger.clear()
