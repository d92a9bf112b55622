"""A queue of slots in order of use, whose every operation is a batch and costs O(1) amortized a slot.

The order is a ring of slot numbers. Using a slot again writes it once more at the tail and leaves its old entry behind
as dead; an entry is alive when the slot still points at that position. Dead entries are passed over when victims are
taken and squeezed out a few at a time, so that no call ever does work in proportion to the pool.

Several queues share one column of positions, since a slot is in one of them at most: each counts from
a base of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.transfers import NO_SLOTS, Slots

_NOWHERE = 0
"""Position of a slot that is in no queue: no queue has the number 0, so that an untouched column of zeros will do."""
NUMBER_SHIFT = 48
"""A position has the queue's number above this bit; no queue ever comes to count so far."""
_SQUEEZE_CHUNK = 1024
_SQUEEZE_CREDIT = _SQUEEZE_CHUNK // 4
"""One chunk is squeezed for every quarter chunk appended: a pass over the ring ends before the ring is full."""
_TAKE_CHUNK = 1024
_SLACK = 4 * _SQUEEZE_CHUNK
"""Dead entries are let be while there are about as many as live ones: this bounds what a taker has to pass over."""


class RecencyQueue:
    """Slots from least to most recently used.

    A batch that comes in goes out in the opposite order: blocks of a request come in order, and its end is to go first.
    """

    def __init__(self, positions: NDArray[np.int64], number: int = 1) -> None:
        """`positions` is the column that all queues over the same slots share.

        Each of them has another `number`, from 1 on, which can be read off the position of a slot that is in it.
        """
        self._capacity = 1 << (4 * len(positions) + 2 * _SLACK - 1).bit_length()
        self._mask = self._capacity - 1
        # Untouched pages of an empty array cost no memory, so the slack of the ring is free until it is used.
        self._ring = np.empty(self._capacity, dtype=np.int32)
        self._positions = positions
        self._base = (number << NUMBER_SHIFT) + 1
        self.clear()

    def __len__(self) -> int:
        return self.num_live

    def clear(self) -> None:
        """Forget every slot, in O(1)."""
        self._head = self._base
        self._tail = self._base
        self.num_live = 0
        """How many slots are in the queue, which is its length too."""
        self._read = _NOWHERE
        self._write = _NOWHERE
        self._credit = 0

    def append(self, slots: Slots) -> None:
        """Put slots that are not in the queue at its most recent end, the first of them as the most recent."""
        count = len(slots)
        if not count:
            return
        start = self._tail
        positions = np.arange(start + count - 1, start - 1, -1)
        ring_start = start & self._mask
        if ring_start + count <= self._capacity:
            self._ring[ring_start : ring_start + count] = slots[::-1]
        else:
            self._ring[positions & self._mask] = slots
        self._positions[slots] = positions
        self._tail = start + count
        self.num_live += count
        if self._read != _NOWHERE or self._tail - self._head > 2 * self.num_live + _SLACK:
            self._squeeze(count)

    def touch(self, slots: Slots) -> None:
        """Move slots that are in the queue to its most recent end, the first of them as the most recent."""
        self.num_live -= len(slots)
        self.append(slots)

    def remove(self, slots: Slots) -> None:
        """Take slots out that are in the queue."""
        self._positions[slots] = _NOWHERE
        self.num_live -= len(slots)

    def forget(self, count: int) -> None:
        """So many slots have gone into another queue, which overwrites their position, or will do so at once."""
        self.num_live -= count

    def take_oldest(self, count: int) -> Slots:
        """Remove and return up to `count` slots, the least recently used first."""
        # What is taken keeps its position: nothing behind the head is ever looked at again.
        wanted = min(count, self.num_live)
        head = self._head
        start = head & self._mask
        if wanted and start + wanted <= self._capacity and head + wanted <= self._tail and head != self._write:
            # Most often the oldest entries are all alive and in one piece.
            slots: Slots = self._ring[start : start + wanted].astype(np.int64)
            # As bytes: to compare two short arrays takes five times as long.
            if self._positions[slots].tobytes() == np.arange(head, head + wanted).tobytes():
                self._head += wanted
                self.num_live -= wanted
                return slots
        return self._take_alive(wanted)

    def peek_oldest(self, count: int) -> Slots:
        """Some of the slots that go next, oldest first, as found among the `count` oldest entries, dead or alive."""
        if self._head == self._write:
            self._head = self._read
        end = min(self._head + count, self._tail)
        if self._head < self._write:
            end = min(end, self._write)
        positions = np.arange(self._head, end)
        entries = self._ring[positions & self._mask]
        alive: Slots = entries[self._positions[entries] == positions].astype(np.int64)
        return alive

    def _take_alive(self, wanted: int) -> Slots:
        found: list[Slots] = []
        chunk = wanted
        while wanted > 0:
            if self._head == self._write:
                self._head = self._read
            end = min(self._head + chunk, self._tail)
            chunk = max(2 * chunk, _TAKE_CHUNK)
            if self._head < self._write:
                end = min(end, self._write)
            positions = np.arange(self._head, end)
            entries = self._ring[positions & self._mask]
            alive = (self._positions[entries] == positions).nonzero()[0]
            if len(alive) > wanted:
                alive = alive[:wanted]
                end = self._head + int(alive[-1]) + 1
            self._head = end
            wanted -= len(alive)
            self.num_live -= len(alive)
            found.append(entries[alive].astype(np.int64))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else NO_SLOTS

    def _squeeze(self, appended: int) -> None:
        """Move live entries towards the head in step with what was appended; see the module's docstring."""
        self._credit += appended
        while self._credit >= _SQUEEZE_CREDIT:
            self._credit -= _SQUEEZE_CREDIT
            if self._read == _NOWHERE:
                self._read = self._write = self._head
            if self._head >= self._write:
                self._read = max(self._read, self._head)
                self._write = max(self._write, self._head)
            end = min(self._read + _SQUEEZE_CHUNK, self._tail)
            positions = np.arange(self._read, end)
            entries = self._ring[positions & self._mask]
            alive = entries[self._positions[entries] == positions]
            moved = np.arange(self._write, self._write + len(alive))
            self._ring[moved & self._mask] = alive
            self._positions[alive] = moved
            self._read = end
            self._write += len(alive)
            if self._read == self._tail:
                self._tail = self._write
                self._read = self._write = _NOWHERE
                self._credit = 0
                return
