"""A table of fixed size from marks to numbers, which works on a whole batch in one native call.

A cell is a mark and its number; a mark is in the first free cell from the one on that its high bits name. Nothing ever
grows, no key is kept, what is taken out leaves no trace, and to forget everything is to begin a generation: cells of
an older one are free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.arrays import touched_zeros
from kvferry.core.compiled import compiled
from kvferry.core.marks import Marks

Numbers = NDArray[np.int64]

_CELL = np.dtype([("mark", np.uint64), ("entry", np.uint64)])
"""The entry is a number below, and the generation above."""
_NUMBER_BITS = 32
_GENERATIONS = 1 << _NUMBER_BITS
_MIN_BITS = 4


class MarkTable:
    """Numbers from 0 to 2**32 - 1 by their marks: a mark has at most one number."""

    def __init__(self, size: int, marks: Marks) -> None:
        """Room for the marks of `size` numbers or more: at most two cells in three are taken. Takes its memory at once.

        `marks` is a column over the numbers that their owner lends. A number's mark is set before it is claimed, and
        kept until it is removed.
        """
        bits = max((max(size, 1) * 3 // 2).bit_length(), _MIN_BITS)
        self.size = (1 << bits) * 2 // 3
        self._marks = marks
        self._cells: NDArray[np.uint64] = touched_zeros(1 << bits, _CELL).view(np.uint64).reshape(-1, 2)
        self._shift = 64 - bits
        self._generation = 1
        self._num_held = 0
        self._native = _native()

    def __len__(self) -> int:
        return self._num_held

    def find(self, marks: Marks) -> tuple[Numbers, int]:
        """The number of each mark, -1 where there is none; and how many have one."""
        numbers: Numbers = np.empty(len(marks), dtype=np.int64)
        return numbers, self._native.find(self._cells, self._shift, self._generation, marks, numbers)

    def claim(self, numbers: Numbers) -> Numbers:
        """Give the mark of each number to it, unless it has another; the number that each of these marks has then.

        Of equal marks the first counts. A mark has none (-1) if there were more marks than there is room for.
        """
        holders: Numbers = np.empty(len(numbers), dtype=np.int64)
        room = self.size - self._num_held
        self._num_held += self._native.claim(
            self._cells, self._shift, self._generation, self._marks, numbers, room, holders
        )
        return holders

    def remove(self, numbers: Numbers) -> None:
        """Take out those of these numbers that have their mark."""
        self._num_held -= self._native.remove(self._cells, self._shift, self._generation, self._marks, numbers)

    def clear(self) -> None:
        """Forget every mark, in O(1)."""
        self._generation += 1
        self._num_held = 0
        if self._generation == _GENERATIONS:
            self._cells[:] = 0
            self._generation = 1


class _Native(NamedTuple):
    find: Callable[..., int]
    claim: Callable[..., int]
    remove: Callable[..., int]


@functools.cache
def _native() -> _Native:
    """The methods of these names, on the cells of a table. The interpreter's lock is kept: they take a microsecond."""
    from numba import types

    cells_type, number, unsigned = types.uint64[:, ::1], types.int64, types.uint64
    column = types.uint64[::1]
    # Whatever lies behind each other in an array may be given.
    given_marks = types.Array(types.uint64, 1, "A", readonly=True)
    given_numbers = types.Array(types.int64, 1, "A", readonly=True)
    table = (cells_type, unsigned, unsigned)

    @compiled(number(*table, given_marks, types.int64[::1]))
    def find(cells: Marks, shift: np.uint64, generation: np.uint64, marks: Marks, numbers: Numbers) -> int:
        last, one, above = np.uint64(len(cells) - 1), np.uint64(1), np.uint64(_NUMBER_BITS)
        num_found = 0
        for i in range(len(marks)):
            at = marks[i] >> shift
            numbers[i] = -1
            while cells[at, 1] >> above == generation:
                if cells[at, 0] == marks[i]:
                    numbers[i] = np.int64(cells[at, 1] & np.uint64(_GENERATIONS - 1))
                    num_found += 1
                    break
                at = (at + one) & last
        return num_found

    @compiled(number(*table, column, given_numbers, number, types.int64[::1]))
    def claim(
        cells: Marks,
        shift: np.uint64,
        generation: np.uint64,
        marks: Marks,
        numbers: Numbers,
        room: int,
        holders: Numbers,
    ) -> int:
        last, one, above = np.uint64(len(cells) - 1), np.uint64(1), np.uint64(_NUMBER_BITS)
        added = 0
        for i in range(len(numbers)):
            mark = marks[numbers[i]]
            at = mark >> shift
            holders[i] = -1
            while cells[at, 1] >> above == generation:
                if cells[at, 0] == mark:
                    holders[i] = np.int64(cells[at, 1] & np.uint64(_GENERATIONS - 1))
                    break
                at = (at + one) & last
            if holders[i] < 0 and added < room:
                cells[at, 0] = mark
                cells[at, 1] = generation << above | np.uint64(numbers[i])
                holders[i] = numbers[i]
                added += 1
        return added

    @compiled(number(*table, column, given_numbers))
    def remove(cells: Marks, shift: np.uint64, generation: np.uint64, marks: Marks, numbers: Numbers) -> int:
        last, one, above = np.uint64(len(cells) - 1), np.uint64(1), np.uint64(_NUMBER_BITS)
        removed = 0
        for i in range(len(numbers)):
            mark = marks[numbers[i]]
            at = mark >> shift
            while cells[at, 1] >> above == generation and cells[at, 0] != mark:
                at = (at + one) & last
            if cells[at, 1] != generation << above | np.uint64(numbers[i]):
                continue
            removed += 1
            hole = at
            at = (at + one) & last
            # Whoever would not be found behind the hole moves into it, and leaves one.
            while cells[at, 1] >> above == generation:
                home = cells[at, 0] >> shift
                if (at - home) & last >= (at - hole) & last:
                    cells[hole, 0] = cells[at, 0]
                    cells[hole, 1] = cells[at, 1]
                    hole = at
                at = (at + one) & last
            cells[hole, 1] = np.uint64(0)
        return removed

    return _Native(find, claim, remove)
