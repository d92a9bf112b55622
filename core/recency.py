"""A queue of slots in order of use, whose every operation is a batch and costs O(1) amortized a slot.

The order is a ring of slot numbers. Using a slot again writes it once more at the tail and leaves its old entry behind
as dead; an entry is alive when the slot still points at that position. Dead entries are passed over when victims are
taken and squeezed out a few at a time, so that no call ever does work in proportion to the pool.
"""

from __future__ import annotations

import numpy as np

from core.transfers import NO_SLOTS, Slots

_NOWHERE = 0
"""Position of a slot that is in no entry; positions count from 1, so that an untouched column of zeros will do."""
_SQUEEZE_CHUNK = 1024
_SQUEEZE_CREDIT = _SQUEEZE_CHUNK // 4
"""One chunk is squeezed for every quarter chunk appended: a pass over the ring ends before the ring is full."""
_TAKE_CHUNK = 1024
_SLACK = 4 * _SQUEEZE_CHUNK
"""Dead entries are let be while there are about as many as live ones: this bounds what a taker has to pass over."""


class RecencyQueue:
    """Slots from least to most recently used."""

    def __init__(self, num_slots: int) -> None:
        self._capacity = 1 << (4 * num_slots + 2 * _SLACK - 1).bit_length()
        self._mask = self._capacity - 1
        # Untouched pages of an empty array cost no memory, so the slack of the ring is free until it is used.
        self._ring = np.empty(self._capacity, dtype=np.int32)
        self._positions = np.zeros(num_slots, dtype=np.int64)
        self.clear()

    def __len__(self) -> int:
        return self._live

    def clear(self) -> None:
        """Forget every slot, in O(1)."""
        self._head = 1
        self._tail = 1
        self._live = 0
        self._read = _NOWHERE
        self._write = _NOWHERE
        self._credit = 0

    def append(self, slots: Slots) -> None:
        """Put slots that are not in the queue at its most recent end, the last one last."""
        count = len(slots)
        start = self._tail
        positions = np.arange(start, start + count)
        ring_start = start & self._mask
        if ring_start + count <= self._capacity:
            self._ring[ring_start : ring_start + count] = slots
        else:
            self._ring[positions & self._mask] = slots
        self._positions[slots] = positions
        self._tail = start + count
        self._live += count
        if self._read != _NOWHERE or self._tail - self._head > 2 * self._live + _SLACK:
            self._squeeze(count)

    def touch(self, slots: Slots) -> None:
        """Move slots that are in the queue to its most recent end, the last one last."""
        self._live -= len(slots)
        self.append(slots)

    def remove(self, slots: Slots) -> None:
        """Take slots out that are in the queue."""
        self._positions[slots] = _NOWHERE
        self._live -= len(slots)

    def take_oldest(self, count: int) -> Slots:
        """Remove and return up to `count` slots, the least recently used first."""
        found: list[Slots] = []
        wanted = min(count, self._live)
        chunk = wanted
        if wanted:
            # Most often the oldest entries are all alive and in one piece.
            start = self._head & self._mask
            entries = self._ring[start : start + wanted]
            if self._head + wanted <= self._tail and len(entries) == wanted and self._head != self._write:
                slots = entries.astype(np.int64)
                alive_mask = self._positions[slots] == np.arange(self._head, self._head + wanted)
                if np.count_nonzero(alive_mask) == wanted:
                    self._head += wanted
                    self._live -= wanted
                    self._positions[slots] = _NOWHERE
                    return slots
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
            slots = entries[alive].astype(np.int64)
            self._positions[slots] = _NOWHERE
            wanted -= len(slots)
            self._live -= len(slots)
            found.append(slots)
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
