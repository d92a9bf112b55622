"""Offers and admission: a block is stored from its n-th offer on, so that blocks used once evict none in use.

Offers are counted instead of lookups, which stop at their first miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import KeyHashes, resident_zeros
from kvferry.core.stats import NotStored
from kvferry.core.transfers import NO_SLOTS, Slots

_COUNT_BITS = 6
_COUNT = np.uint8((1 << _COUNT_BITS) - 1)
_STAMPS = np.uint8(3)
MAX_THRESHOLD = int(_COUNT)
_CELLS_PER_SLOT = 8
_MIN_BITS = 12
_SECOND_SPREAD = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF_BITS = np.uint64(32)


class Reservation(NamedTuple):
    """The slots reserved for a batch of offered keys.

    The first `num_decided` keys are decided: those at the indices `stored_at` got `slots`, to be filled, those at
    `not_admitted_at` were not offered often enough to be stored, and the others were in the pool already. If there are
    keys after them, these found no space, for the reason `refusal`.
    """

    num_decided: int
    stored_at: NDArray[np.int64]
    slots: Slots
    not_admitted_at: NDArray[np.int64] = NO_SLOTS
    refusal: NotStored = NotStored.NO_SPACE


class Admission:
    """The threshold, and recent offers of each key, in a count-min sketch of 16 to 32 bytes a slot.

    The sketch is made when it is first needed, and anew when the pool is resized. Keys share counters by chance, and a
    key's count is the smaller one of two. So it is never too small, and too large for 1% to 3% of keys, which are then
    stored one offer too early. A period has as many offers as there are slots; keys that were not offered in this
    period or the last one have count 0. A counter has the number of its period, modulo four, in its high bits, and a
    few are cleared with every offer before a number is used again.
    """

    def __init__(self, num_slots: int, threshold: int) -> None:
        self._rows: NDArray[np.uint8] | None = None
        self._start(num_slots, None)
        self.set_threshold(threshold)

    def set_threshold(self, threshold: int) -> None:
        """Store a block from its offer of this number on; with 1 offers are not counted."""
        if not 1 <= threshold <= MAX_THRESHOLD:
            raise ValueError(f"store_threshold={threshold} has to be between 1 and {MAX_THRESHOLD}")
        if threshold > 1 and self._rows is None:
            self._start(self._num_slots, _empty_rows(self._num_slots))
        self.threshold = threshold
        self.is_counting = threshold > 1

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`. Counting starts anew."""
        rows = None if self._rows is None else _empty_rows(num_slots)

        def apply() -> object:
            old = self._rows
            if rows is None:
                # Rows that are made meanwhile stay, as they serve any number of slots.
                self._num_slots = num_slots
                return None
            self._start(num_slots, rows)
            return old

        return apply

    def admits(self, hashes: KeyHashes) -> NDArray[np.bool_]:
        """Return which of these keys are stored if they are offered now. Requires: offers are counted."""
        admitted: NDArray[np.bool_] = self.counts(hashes) >= self.threshold - 1
        return admitted

    def counts(self, hashes: KeyHashes) -> NDArray[np.uint8]:
        """Return the count of each key. Requires: offers are counted."""
        first, second = (self._live(row[cells]) for row, cells in self._cells(hashes))
        return np.minimum(first, second)

    def count(self, hashes: KeyHashes) -> None:
        """Count an answered offer of distinct keys. Requires: offers are counted."""
        stamp = self._stamp << _COUNT_BITS
        raised = stamp | (np.minimum(self.counts(hashes), MAX_THRESHOLD - 1) + np.uint8(1))
        for row, cells in self._cells(hashes):
            row[cells] = stamp | self._live(row[cells])
            np.maximum.at(row, cells, raised)
        self._move_on(len(hashes))

    def _start(self, num_slots: int, rows: NDArray[np.uint8] | None) -> None:
        self._num_slots = num_slots
        self._rows = rows
        self._stamp = np.uint8(0)
        self._num_offers = 0
        self._num_cleared = 0

    def _cells(self, hashes: KeyHashes) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """Return both rows, each with the cell of each key."""
        if self._rows is None:
            return []
        shift = np.uint64(64 - (len(self._rows[0]) - 1).bit_length())
        others = (hashes ^ hashes >> _HALF_BITS) * _SECOND_SPREAD
        return [(self._rows[0], (hashes >> shift).view(np.int64)), (self._rows[1], (others >> shift).view(np.int64))]

    def _live(self, counters: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the counts, 0 for counters older than the last period."""
        return np.where((self._stamp - (counters >> _COUNT_BITS)) & _STAMPS <= 1, counters & _COUNT, np.uint8(0))

    def _move_on(self, num_offers: int) -> None:
        """Clear the same share of the counters as the share of the period that is over."""
        while num_offers and self._rows is not None:
            some = min(num_offers, self._num_slots - self._num_offers)
            num_offers -= some
            self._num_offers += some
            end = len(self._rows[0]) * self._num_offers // self._num_slots
            part = self._rows[:, self._num_cleared : end]
            part[self._live(part) == 0] = 0
            self._num_cleared = end
            if self._num_offers == self._num_slots:
                self._stamp = (self._stamp + np.uint8(1)) & _STAMPS
                self._num_offers = self._num_cleared = 0


def _empty_rows(num_slots: int) -> NDArray[np.uint8]:
    """Allocate the two rows of counters. Requires: no lock held."""
    bits = max((_CELLS_PER_SLOT * num_slots - 1).bit_length(), _MIN_BITS)
    cells: NDArray[np.uint8] = resident_zeros(2 << bits, np.dtype(np.uint8))
    return cells.reshape(2, -1)
