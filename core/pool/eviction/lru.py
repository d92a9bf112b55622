"""LRU eviction policy, and what every policy consists of: queues of slots in order of use, and segments of queues.

Operations take batches and cost O(1) amortized a slot. The order is a ring of slot numbers. Using a slot again writes
it at the tail once more and leaves its old entry dead: an entry is alive while the slot's position is that of the
entry. Dead entries are skipped when victims are taken, and squeezed out a few at a time, so that no call does work in
proportion to the pool.

Several queues share one column of positions, since a slot is in at most one of them: each counts from a base of its
own. The segments outlive the policy that uses them, so that an exchange of policies moves no slot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.native import KeyHashes, queue_functions
from kvferry.core.pool.slots import SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_NOWHERE = 0
"""Position of a slot that is in no queue: no queue has the number 0, so an untouched column of zeros is valid."""
NUMBER_SHIFT = 48
"""A position has the queue's number above this bit, which no queue counts up to."""
_SQUEEZE_CHUNK = 1024
_SQUEEZE_CREDIT = _SQUEEZE_CHUNK // 4
"""One chunk is squeezed for every quarter chunk appended: a pass over the ring ends before the ring is full."""
_SLACK = 4 * _SQUEEZE_CHUNK
"""Dead entries stay while there are about as many as live ones, which bounds how many are skipped."""


class RecencyQueue:
    """Slots from least to most recently used.

    A batch leaves in the opposite order of its entry: a request's blocks enter in order, and its last is evicted first.
    """

    def __init__(self, positions: NDArray[np.int64], number: int = 1) -> None:
        """Make an empty queue.

        Args:
            positions: The column of positions, shared by all queues over the same slots.
            number: A positive number of this queue, which the position of a slot in it contains.
        """
        capacity = 1 << (4 * len(positions) + 2 * _SLACK - 1).bit_length()
        self._mask = capacity - 1
        # Untouched pages of an empty array take no memory.
        self._ring = np.empty(capacity, dtype=np.int32)
        self._positions = positions
        self._base = (number << NUMBER_SHIFT) + 1
        self._append, self._take, self._move = queue_functions()
        self.reset()

    def reset(self) -> None:
        """Remove all slots, in O(1)."""
        self._head = self._base
        self._tail = self._base
        self.num_live = 0
        """Number of slots in the queue."""
        self._read = _NOWHERE
        self._write = _NOWHERE
        self._credit = 0

    def append(self, slots: Slots) -> None:
        """Add slots that are not in the queue at its most recent end, the first of them as the most recent."""
        count = len(slots)
        if not count:
            return
        self._append(self._ring, self._positions, self._tail, slots)
        self._tail += count
        self.num_live += count
        if self._read != _NOWHERE or self._tail - self._head > 2 * self.num_live + _SLACK:
            self._squeeze(count)

    def touch(self, slots: Slots) -> None:
        """Move slots that are in the queue to its most recent end, the first of them as the most recent."""
        self.num_live -= len(slots)
        self.append(slots)

    def remove(self, slots: Slots) -> None:
        """Remove slots that are in the queue."""
        self._positions[slots] = _NOWHERE
        self.num_live -= len(slots)

    def take_oldest(self, count: int) -> Slots:
        """Remove and return up to `count` slots, the least recently used first."""
        # Positions stay, as nothing behind the head is read again.
        taken: Slots = np.empty(min(count, self.num_live), dtype=np.int64)
        self._head, num_taken = self._take(
            self._ring, self._positions, self._head, self._tail, self._read, self._write, taken
        )
        self.num_live -= num_taken
        return taken[:num_taken]

    def peek_oldest(self, count: int) -> Slots:
        """Return the live slots among the `count` oldest entries, oldest first."""
        if self._head == self._write:
            self._head = self._read
        end = min(self._head + count, self._tail)
        if self._head < self._write:
            end = min(end, self._write)
        positions = np.arange(self._head, end)
        entries = self._ring[positions & self._mask]
        alive: Slots = entries[self._positions[entries] == positions].astype(np.int64)
        return alive

    def _squeeze(self, appended: int) -> None:
        """Move live entries towards the head, in proportion to the number appended; see the module's docstring."""
        self._credit += appended
        while self._credit >= _SQUEEZE_CREDIT:
            self._credit -= _SQUEEZE_CREDIT
            if self._read == _NOWHERE:
                self._read = self._write = self._head
            if self._head >= self._write:
                self._read = max(self._read, self._head)
                self._write = max(self._write, self._head)
            end = min(self._read + _SQUEEZE_CHUNK, self._tail)
            self._write = self._move(self._ring, self._positions, self._read, end, self._write)
            self._read = end
            if self._read == self._tail:
                self._tail = self._write
                self._read = self._write = _NOWHERE
                self._credit = 0
                return


_NUM_CLASSES = len(PRIORITY_CLASS)
_FIRST = 1 << NUMBER_SHIFT
_SECOND = 1 + _NUM_CLASSES << NUMBER_SHIFT
"""Positions in queues of the first segment are between these two, those of the second segment from `_SECOND` on."""


class Segment:
    """Candidates for eviction in the order of their use, with one queue for each priority class.

    A pool has two segments; the policy in force defines their meaning. A slot is in at most one of them.
    """

    def __init__(self, table: SlotTable, index: int) -> None:
        """Make segment 0 or 1 of a table, whose column `queued_at` belongs to the two segments."""
        self._table = table
        self._positions = table.queued_at
        self._index = index
        first_number = 1 + index * _NUM_CLASSES
        self.queues = [RecencyQueue(table.queued_at, first_number + number) for number in range(_NUM_CLASSES)]

    def __len__(self) -> int:
        return sum([queue.num_live for queue in self.queues])

    def append(self, slots: Slots) -> None:
        """Add slots that are in no segment at the most recent end, the first of them as the most recent."""
        for queue, part in self._by_class(slots):
            queue.append(part)

    def touch(self, slots: Slots) -> None:
        """Move slots of this segment to the most recent end, the first of them as the most recent."""
        for queue, part in self._by_class(slots):
            queue.touch(part)

    def remove(self, slots: Slots) -> None:
        """Remove slots of this segment."""
        for queue, part in self._by_class(slots):
            queue.remove(part)

    def reset(self) -> None:
        """Remove all slots, in O(1)."""
        for queue in self.queues:
            queue.reset()

    def expect(self, slots: Slots) -> None:
        """Mark slots that are in no segment as belonging to this one; see `holds`."""
        self._positions[slots] = _SECOND if self._index else _FIRST

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which slots are in this segment, or marked by `expect`. All have to be so in one of the two."""
        positions = self._positions[slots]
        held: NDArray[np.bool_] = positions >= _SECOND if self._index else positions < _SECOND
        return held

    def _by_class(self, slots: Slots) -> list[tuple[RecencyQueue, Slots]]:
        uniform = self._table.uniform_class
        if uniform is not None:
            return [(self.queues[uniform], slots)]
        classes = self._table.classes[slots]
        return [(queue, slots[classes == index]) for index, queue in enumerate(self.queues)]


class LruPolicy:
    """The policy `lru`. Candidates are in `warm`; those that another policy left in `cold` are evicted before them."""

    name = "lru"

    def import_order(self, full: Segment, empty: Segment) -> None:
        """See `EvictionPolicy`."""
        self.inherit(empty, full)

    def inherit(self, cold: Segment, warm: Segment) -> None:
        """Start with candidates in both segments; all of `cold` are evicted before any of `warm`."""
        self._cold = cold
        self._warm = warm
        self._set_has_cold(len(cold) > 0)

    def __len__(self) -> int:
        return sum([queue.num_live for queue in self._order])

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._warm.append(slots)

    admit = add

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        if self._has_cold:
            self.remove(slots)
            self._warm.append(slots)
        else:
            self._warm.touch(slots)

    reorder = touch

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        if self._has_cold:
            in_cold = self._cold.holds(slots)
            self._cold.remove(slots[in_cold])
            slots = slots[~in_cold]
        self._warm.remove(slots)

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots) -> Slots:
        """See `EvictionPolicy`."""
        count = len(wanted) - len(free)
        if len(protected):
            self.remove(protected)
        taken = NO_SLOTS
        for queue in self._order:
            num_next = min(count - len(taken), queue.num_live)
            if num_next > 0:
                some = queue.take_oldest(num_next)
                taken = np.concatenate((taken, some)) if len(taken) else some
        if len(protected):
            self._warm.append(protected)
        return taken

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        return next((queue.peek_oldest(count) for queue in self._order if queue.num_live), NO_SLOTS)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        return lambda: None

    def reset(self) -> None:
        """See `EvictionPolicy`."""
        self._cold.reset()
        self._warm.reset()
        self._set_has_cold(False)

    def export_order(self) -> tuple[Segment, Segment]:
        """See `EvictionPolicy`."""
        return self._cold, self._warm

    def merge_segments(self, limit: int) -> bool:
        """Move up to `limit` slots of `warm` behind those of `cold`. Returns whether all are in one segment now."""
        if self._has_cold and len(self._cold):
            for cold, warm in zip(self._cold.queues, self._warm.queues, strict=True):
                moved = warm.take_oldest(limit)
                limit -= len(moved)
                # A batch leaves a queue in the opposite order of its entry.
                cold.append(moved[::-1])
            if len(self._warm):
                return False
            self._cold, self._warm = self._warm, self._cold
        self._set_has_cold(False)
        return True

    def _set_has_cold(self, has_cold: bool) -> None:
        """Set whether `cold` has candidates. Its queue of a class then comes before that of `warm`."""
        self._has_cold = has_cold
        pairs = zip(self._cold.queues, self._warm.queues, strict=True)
        self._order = [queue for pair in pairs for queue in pair] if has_cold else self._warm.queues
