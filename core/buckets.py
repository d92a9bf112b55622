"""Buckets: a table of fixed size from marks to numbers, which looks up a whole batch in a dozen NumPy calls.

A bucket is one cache line: eight checks (16 bits of a mark, 16 of the table's generation), then eight numbers. Nothing
ever grows, keys are not kept, and to forget everything is to begin a generation. What finds its bucket full, about one
in a thousand, is spilled into a dictionary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.arrays import counting, zeros_on_lines
from core.marks import Marks

Numbers = NDArray[np.int64]

_WAYS = 8
_LINE = 2 * _WAYS
_MEAN_FILL = 3
_MIN_BITS = 4
_GENERATION_BITS = 16
_GENERATIONS = 1 << _GENERATION_BITS
_COUNT_BITS = 32
_IN_LOW_BITS = np.uint32(_GENERATIONS - 1)
_CHECK, _HALF = np.dtype("<u4"), np.dtype("<u2")
_NONE = np.zeros(1, dtype=np.bool_)
_FIRST_WAY = np.array([8 - byte.bit_length() if byte else 0 for byte in range(256)], dtype=np.int64)
"""Of a bucket's flags, packed into a byte, the first that is set."""


class Buckets:
    """Numbers below `size` by their marks: a mark has at most one number, and a number at most one mark."""

    def __init__(self, size: int, marks: NDArray[np.uint64], places: NDArray[np.uint32]) -> None:
        """`marks` and `places` are columns over the numbers that their owner lends.

        The owner sets a number's mark before the number is claimed, and keeps it until it is removed; the places are
        for this table's use.
        """
        bits = max((max(size, 1) // _MEAN_FILL).bit_length(), _MIN_BITS)
        self._num_buckets = 1 << bits
        self._shift = np.uint64(64 - bits)
        self._nowhere = self._num_buckets * _LINE
        self._cells = zeros_on_lines(self._nowhere + 1, _CHECK)
        self._lines = self._cells[: self._nowhere].reshape(self._num_buckets, _LINE)
        self._marks = marks
        self._places = places
        self._spilled: dict[int, int] = {}
        # How many of a bucket's marks were spilled, behind the generation, so that hardly a miss has to ask.
        self._spills = np.zeros(self._num_buckets, dtype=np.int64)
        self._generation = 1
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_held

    def find(self, marks: Marks) -> Numbers:
        """The number of each mark, -1 where there is none."""
        count = len(marks)
        buckets, checks = self._address(marks)
        lines = self._lines.take(buckets, axis=0)
        flags = np.packbits(lines[:, :_WAYS] == checks[:, None])
        num_flagged = int(np.count_nonzero(flags))
        if num_flagged:
            at = counting(count) * _LINE + _FIRST_WAY[flags]
            numbers: Numbers = lines.reshape(-1)[at + _WAYS].astype(np.int64)
            found = self._marks[numbers] == marks
            if num_flagged < count:
                found &= flags != 0
            if int(np.count_nonzero(found)) == count:
                return numbers
            numbers[~found] = -1
            unsure = (flags != 0) & ~found
        else:
            numbers = np.full(count, -1)
            unsure = _NONE
        if self._spilled:
            unsure = unsure | (self._may_be_spilled(buckets) & (numbers < 0))
        for i in unsure.nonzero()[0].tolist():
            # Another mark has the same check, or the bucket was full.
            numbers[i] = self._find_one(int(marks[i]), int(buckets[i]), int(checks[i]))
        return numbers

    def claim(self, marks: Marks, numbers: Numbers) -> NDArray[np.bool_]:
        """Give each mark its number, unless it has one; which were given. Of equal marks the first counts."""
        count = len(marks)
        buckets, checks = self._address(marks)
        lines = self._lines.take(buckets, axis=0)[:, :_WAYS]
        free = np.packbits((lines & _IN_LOW_BITS) != self._generation)
        easy = (free != 0) & (np.packbits(lines == checks[:, None]) == 0)
        if self._spilled:
            easy &= ~self._may_be_spilled(buckets)
        num_easy = int(np.count_nonzero(easy))
        if num_easy == count:
            won = self._put(numbers, buckets, checks, free)
        else:
            won = np.zeros(count, dtype=np.bool_)
            won[easy] = self._put(numbers[easy], buckets[easy], checks[easy], free[easy])
        if int(np.count_nonzero(won)) < count:
            for i in (~won).nonzero()[0].tolist():
                won[i] = self._claim_one(int(marks[i]), int(numbers[i]), int(buckets[i]), int(checks[i]))
        self._num_held += int(np.count_nonzero(won))
        return won

    def remove(self, numbers: Numbers) -> None:
        """Take out numbers that have a mark here."""
        places = self._places[numbers]
        self._cells[places] = 0
        self._num_held -= len(numbers)
        if self._spilled:
            for number in numbers[places == self._nowhere].tolist():
                mark = int(self._marks[number])
                del self._spilled[mark]
                self._spills[mark >> int(self._shift)] -= 1

    def clear(self) -> None:
        """Forget every mark. What stays behind is of an older generation, and swept before its generation returns."""
        chunk = -(-self._num_buckets // (_GENERATIONS - 1))
        start = self._generation * chunk
        self._lines[start - chunk : start] = 0
        self._spills[start - chunk : start] = 0
        self._generation = self._generation % (_GENERATIONS - 1) + 1
        self._spilled = {}
        self._num_held = 0

    # --- inside -------------------------------------------------------------------------------------------------

    def _address(self, marks: Marks) -> tuple[Numbers, NDArray[np.uint32]]:
        """The bucket and the check of each mark."""
        checks = marks.astype(_CHECK)
        checks.view(_HALF)[::2] = self._generation
        return (marks >> self._shift).view(np.int64), checks

    def _may_be_spilled(self, buckets: Numbers) -> NDArray[np.bool_]:
        """Whether marks of these buckets were spilled in this generation."""
        maybe: NDArray[np.bool_] = self._spills[buckets] > self._generation << _COUNT_BITS
        return maybe

    def _put(
        self, numbers: Numbers, buckets: Numbers, checks: NDArray[np.uint32], free: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Enter numbers at the first free place of their buckets; of several at one place the first stays."""
        places = buckets * _LINE + _FIRST_WAY[free]
        backwards = places[::-1]
        self._cells[backwards] = checks[::-1]
        self._cells[backwards + _WAYS] = numbers[::-1]
        won: NDArray[np.bool_] = self._cells[places + _WAYS] == numbers
        self._places[numbers] = places
        return won

    def _find_one(self, mark: int, bucket: int, check: int) -> int:
        line: list[int] = self._lines[bucket].tolist()
        for way in range(_WAYS):
            if line[way] == check and int(self._marks[line[way + _WAYS]]) == mark:
                return line[way + _WAYS]
        return self._spilled.get(mark, -1)

    def _claim_one(self, mark: int, number: int, bucket: int, check: int) -> bool:
        if self._find_one(mark, bucket, check) >= 0:
            return False
        for way, held in enumerate(self._lines[bucket, :_WAYS].tolist()):
            if held & (_GENERATIONS - 1) != self._generation:
                place = bucket * _LINE + way
                self._cells[place] = check
                self._cells[place + _WAYS] = number
                self._places[number] = place
                return True
        none = self._generation << _COUNT_BITS
        self._spills[bucket] = max(int(self._spills[bucket]), none) + 1
        self._spilled[mark] = number
        self._places[number] = self._nowhere
        return True
