"""Admission: a block is stored from its n-th offer on, so that blocks used once do not evict blocks in use.

Offers are counted instead of lookups, which stop at their first miss.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import KeyHashes, resident_zeros

_COUNT_BITS = 6
_COUNT = np.uint8((1 << _COUNT_BITS) - 1)
_STAMPS = np.uint8(3)
MAX_THRESHOLD = int(_COUNT)
_ROWS = 2
_CELLS_PER_SLOT = 8
_MIN_BITS = 12
_RESIZED_CELLS = 1 << 16
"""Cells that are copied at once, so that other threads do not wait long for the interpreter."""
_SECOND_SPREAD = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF_BITS = np.uint64(32)


class Admission:
    """The threshold in force, and the filter with the counts, which is made when it is first needed."""

    def __init__(self, num_slots: int, threshold: int) -> None:
        self._num_slots = num_slots
        self._filter: AdmissionFilter | None = None
        self.set_threshold(threshold)

    def set_threshold(self, threshold: int) -> None:
        """Store a block from its offer of this number on; with 1 offers are not counted."""
        if not 1 <= threshold <= MAX_THRESHOLD:
            raise ValueError(f"store_threshold={threshold} has to be between 1 and {MAX_THRESHOLD}")
        if threshold > 1 and self._filter is None:
            self._filter = AdmissionFilter(self._num_slots)
        self.threshold = threshold
        self.is_counting = threshold > 1

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`. Offers meanwhile are not counted."""
        old = self._filter
        resized = None if old is None else old.resized(num_slots)

        def put_in_force() -> object:
            self._num_slots = num_slots
            if self._filter is old:
                self._filter = resized
            return old

        return put_in_force

    def admits(self, hashes: KeyHashes) -> NDArray[np.bool_]:
        """Return which of these keys are stored if they are offered now."""
        if self._filter is None:
            return np.ones(len(hashes), dtype=np.bool_)
        admitted: NDArray[np.bool_] = self._filter.counts(hashes) >= self.threshold - 1
        return admitted

    def count(self, hashes: KeyHashes) -> None:
        """Count an answered offer of distinct keys."""
        if self._filter is not None:
            self._filter.count(hashes)


class AdmissionFilter:
    """Recent offers of each key, in a count-min sketch of 16 to 32 bytes a slot.

    Keys share counters by chance, and a key's count is the smaller one of two. So it is never too small, and too large
    for 1% to 3% of keys, which are then stored one offer too early. A period has as many offers as there are slots;
    keys that were not offered in this period or the last one have count 0. A counter has the number of its period,
    modulo four, in its high bits, and a few are cleared with every offer before a number is used again.
    """

    def __init__(self, num_slots: int) -> None:
        bits = max((_CELLS_PER_SLOT * num_slots - 1).bit_length(), _MIN_BITS)
        self._num_cells = 1 << bits
        self._num_slots = num_slots
        self._shift = np.uint64(64 - bits)
        cells: NDArray[np.uint8] = resident_zeros(_ROWS * self._num_cells, np.dtype(np.uint8))
        self._rows = cells.reshape(_ROWS, self._num_cells)
        self._stamp = np.uint8(0)
        self._num_offers = 0
        self._num_cleared = 0

    def resized(self, num_slots: int) -> AdmissionFilter:
        """Return a filter for another number of slots with the same counts, in time proportional to both."""
        other = AdmissionFilter(num_slots)
        grows = other._num_cells >= self._num_cells
        few, many = (self, other) if grows else (other, self)
        ratio = many._num_cells // few._num_cells
        # The cell of a hash is its high bits: one cell is several adjacent ones in a larger filter.
        for start in range(0, few._num_cells, _RESIZED_CELLS):
            end = min(start + _RESIZED_CELLS, few._num_cells)
            one, several = few._rows[:, start:end, None], many._rows[:, start * ratio : end * ratio]
            several = several.reshape(_ROWS, end - start, ratio)
            if grows:
                several[:] = one
            else:
                # The largest count wins, so that none is ever too small.
                best = self._live(several).argmax(axis=2)[:, :, None]
                one[:] = np.take_along_axis(several, best, axis=2)
        other._stamp = self._stamp
        other._num_offers = self._num_offers * num_slots // self._num_slots
        other._num_cleared = other._num_cells * other._num_offers // num_slots
        return other

    def counts(self, hashes: KeyHashes) -> NDArray[np.uint8]:
        """Return the count of each key."""
        first, second = (self._live(row[cells]) for row, cells in zip(self._rows, self._cells(hashes), strict=True))
        return np.minimum(first, second)

    def count(self, hashes: KeyHashes) -> None:
        """Count an offer of distinct keys."""
        stamp = self._stamp << _COUNT_BITS
        raised = stamp | (np.minimum(self.counts(hashes), MAX_THRESHOLD - 1) + np.uint8(1))
        for row, cells in zip(self._rows, self._cells(hashes), strict=True):
            row[cells] = stamp | self._live(row[cells])
            np.maximum.at(row, cells, raised)
        self._move_on(len(hashes))

    def _cells(self, hashes: KeyHashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        other = (hashes ^ hashes >> _HALF_BITS) * _SECOND_SPREAD
        return (hashes >> self._shift).view(np.int64), (other >> self._shift).view(np.int64)

    def _live(self, counters: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the counts, 0 for counters older than the last period."""
        return np.where((self._stamp - (counters >> _COUNT_BITS)) & _STAMPS <= 1, counters & _COUNT, np.uint8(0))

    def _move_on(self, num_offers: int) -> None:
        """Clear the same share of the counters as the share of the period that is over."""
        while num_offers:
            some = min(num_offers, self._num_slots - self._num_offers)
            num_offers -= some
            self._num_offers += some
            end = self._num_cells * self._num_offers // self._num_slots
            part = self._rows[:, self._num_cleared : end]
            part[self._live(part) == 0] = 0
            self._num_cleared = end
            if self._num_offers == self._num_slots:
                self._stamp = (self._stamp + np.uint8(1)) & _STAMPS
                self._num_offers = self._num_cleared = 0
