"""Which slot holds a key, in a pool that may grow: then the index does, a batch at a time."""

from __future__ import annotations

from kvferry.core.change_lock import ChangeLock
from kvferry.core.index import KeyIndex
from kvferry.core.slots import BATCH_SLOTS, SlotTable


class PoolIndex(KeyIndex):
    """The manager's lock guards all of it; only `spread` takes it itself."""

    def __init__(self, table: SlotTable, lock: ChangeLock) -> None:
        super().__init__(table.num_slots, table.keys, table.marks)
        self._slots = table
        self._lock = lock

    def spread(self, num_slots: int) -> bool:
        """Have room for so many slots: a batch goes over at each call; True while there is more to do."""
        if self.is_growing:
            with self._lock:
                replaced = self.move(self._slots.end_slot, BATCH_SLOTS)
            if replaced is None:
                return True
            # Not under the lock, for its memory goes with it.
            del replaced
        if num_slots <= self.room:
            return False
        begin = self.begin_growing(num_slots)
        with self._lock:
            begin()
        return True
