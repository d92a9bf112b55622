"""A queue of slots in order of use, whose every operation is a batch and costs O(1) amortized a slot.

The order is a ring of slot numbers. Using a slot again writes it once more at the tail and leaves its old entry behind
as dead; an entry is alive when the slot still points at that position. Dead entries are passed over when victims are
taken and squeezed out a few at a time, so that no call ever does work in proportion to the pool.

Several queues share one column of positions, since a slot is in one of them at most: each counts from
a base of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.compiled import compiled
from kvferry.core.transfers import Slots

_NOWHERE = 0
"""Position of a slot that is in no queue: no queue has the number 0, so that an untouched column of zeros will do."""
NUMBER_SHIFT = 48
"""A position has the queue's number above this bit; no queue ever comes to count so far."""
_SQUEEZE_CHUNK = 1024
_SQUEEZE_CREDIT = _SQUEEZE_CHUNK // 4
"""One chunk is squeezed for every quarter chunk appended: a pass over the ring ends before the ring is full."""
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
        capacity = 1 << (4 * len(positions) + 2 * _SLACK - 1).bit_length()
        self._mask = capacity - 1
        # Untouched pages of an empty array cost no memory, so the slack of the ring is free until it is used.
        self._ring = np.empty(capacity, dtype=np.int32)
        self._positions = positions
        self._base = (number << NUMBER_SHIFT) + 1
        self._native = _native()
        self.clear()

    def clear(self) -> None:
        """Forget every slot, in O(1)."""
        self._head = self._base
        self._tail = self._base
        self.num_live = 0
        """How many slots are in the queue."""
        self._read = _NOWHERE
        self._write = _NOWHERE
        self._credit = 0

    def append(self, slots: Slots) -> None:
        """Put slots that are not in the queue at its most recent end, the first of them as the most recent."""
        count = len(slots)
        if not count:
            return
        self._native.append(self._ring, self._positions, self._tail, slots)
        self._tail += count
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
        taken: Slots = np.empty(min(count, self.num_live), dtype=np.int64)
        self._head, num_taken = self._native.take(
            self._ring, self._positions, self._head, self._tail, self._read, self._write, taken
        )
        self.num_live -= num_taken
        return taken[:num_taken]

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
            self._write = self._native.squeeze(self._ring, self._positions, self._read, end, self._write)
            self._read = end
            if self._read == self._tail:
                self._tail = self._write
                self._read = self._write = _NOWHERE
                self._credit = 0
                return


class _Native(NamedTuple):
    append: Callable[..., None]
    take: Callable[..., tuple[int, int]]
    squeeze: Callable[..., int]


@functools.cache
def _native() -> _Native:
    """What is done to a ring and a column of positions, which may be part of a table of records."""
    from numba import types

    ring_type, number = types.int32[::1], types.int64
    column, given = types.Array(types.int64, 1, "A"), types.Array(types.int64, 1, "A", readonly=True)

    @compiled(types.void(ring_type, column, number, given))
    def append(ring: NDArray[np.int32], positions: Slots, tail: int, slots: Slots) -> None:
        """Write slots at the tail, the last of them first."""
        mask, last = len(ring) - 1, len(slots) - 1
        for i in range(len(slots)):
            slot = slots[last - i]
            ring[(tail + i) & mask] = slot
            positions[slot] = tail + i

    @compiled(types.UniTuple(number, 2)(ring_type, column, number, number, number, number, types.int64[::1]))
    def take(
        ring: NDArray[np.int32], positions: Slots, head: int, tail: int, read: int, write: int, taken: Slots
    ) -> tuple[int, int]:
        """Fill `taken` with the oldest slots that are alive; the new head, and how many they are."""
        mask = len(ring) - 1
        num_taken = 0
        while num_taken < len(taken) and head != tail:
            if head == write:
                head = read
            slot = ring[head & mask]
            if positions[slot] == head:
                taken[num_taken] = slot
                num_taken += 1
            head += 1
        return head, num_taken

    @compiled(number(ring_type, column, number, number, number))
    def squeeze(ring: NDArray[np.int32], positions: Slots, start: int, end: int, write: int) -> int:
        """Move what is alive from `start` up to `end` behind each other from `write` on; where that ends."""
        mask = len(ring) - 1
        for position in range(start, end):
            slot = ring[position & mask]
            if positions[slot] == position:
                ring[write & mask] = slot
                positions[slot] = write
                write += 1
        return write

    return _Native(append, take, squeeze)
