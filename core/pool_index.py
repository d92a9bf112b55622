"""The pool's index: the one in force, and what takes its place at a reset, or when the pool grows.

Neither an old index nor a new one is worked through at once: keys move, and memory is freed, a batch at a time.
"""

from __future__ import annotations

from threading import RLock

from core.index import KeyIndex, MovingIndex
from core.slots import BATCH_SLOTS, SlotState, SlotTable


class PoolIndex:
    """`current` is the index in force; it is looked up anew each time, since a call of this object may replace it."""

    def __init__(self, table: SlotTable, lock: RLock) -> None:
        """`lock` is the manager's, which guards the table and the index in force."""
        self.current = KeyIndex(table.num_slots)
        self._table = table
        self._lock = lock
        self._buried: list[KeyIndex] = []
        self._next_moved = 0

    @property
    def is_spreading(self) -> bool:
        """Whether keys are on their way to an index for more slots."""
        return isinstance(self.current, MovingIndex)

    def spread(self, num_slots: int) -> bool:
        """Have an index that is made for so many slots: keys move a batch a call; True while there is more to do."""
        with self._lock:
            index, table = self.current, self._table
            if not isinstance(index, MovingIndex):
                if index.is_small_for(num_slots):
                    self.current, self._next_moved = MovingIndex(index, KeyIndex(num_slots)), 0
                return self.current is not index
            start = self._next_moved
            self._next_moved = min(start + BATCH_SLOTS, table.end_slot)
            slots = (table.current_states(start, self._next_moved) == SlotState.READY).nonzero()[0] + start
            index.move(table.keys[slots].tolist(), slots.tolist())
            if self._next_moved < table.end_slot:
                return True
            if len(index.old):
                self._next_moved = 0
                return True
            self.current = index.new
        # Only here the old one goes, with what memory its dictionaries still have.
        return False

    def begin_epoch(self) -> None:
        """Forget every key, in O(1). Called under the lock."""
        self._buried.append(self.current)
        self.current = KeyIndex(self._table.num_slots)

    def bury(self) -> bool:
        """Free the memory of an index that a reset left behind, a batch a call; True while there is more to do.

        Off the engine's path: freeing all keys of a large pool at once would stop every thread meanwhile.
        """
        with self._lock:
            if not self._buried:
                return False
            # The oldest: resets add behind it, so that it is still the first once it is empty.
            shards = self._buried[0].shards()
        if not shards:
            with self._lock:
                del self._buried[0]
                return bool(self._buried)
        shard = shards[-1]
        for _ in range(min(BATCH_SLOTS, len(shard))):
            shard.popitem()
        if not shard:
            shards.pop()
        return True
