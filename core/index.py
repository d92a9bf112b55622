"""Which number holds a key: found by marks, and true by the keys themselves.

Two keys of one mark, which random hashes of 64 bits hardly ever are, do not fit in side by side: the second is not
found, and not taken in. It is one block forgotten, and never another one's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.arrays import counting
from core.keys import Key
from core.mark_table import MarkTable, Numbers
from core.marks import Marks, marks_of

_FIRST_CHUNK, _LAST_CHUNK = 64, 1024


class KeyIndex:
    """Numbers below `size`, such as slots, by their keys."""

    def __init__(self, size: int, keys: NDArray[np.object_], marks: Marks) -> None:
        """`keys` and `marks` are columns over the numbers, which their owner fills in before a number is claimed.

        There they stay until it is removed.
        """
        self._keys = keys
        self._marks = marks
        self._table = MarkTable(size, marks)

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: Key) -> int | None:
        """The number of one key."""
        number = int(self.find([key])[0])
        return None if number < 0 else number

    def find(self, keys: Sequence[Key], marks: Marks | None = None) -> Numbers:
        """The number of each key, -1 where there is none; `marks` if they are known."""
        numbers, num_found = self._table.find(marks_of(keys) if marks is None else marks)
        if not num_found:
            return numbers
        if num_found == len(numbers):
            found_at, asked, held = counting(num_found), keys, self._keys[numbers]
        else:
            found_at = (numbers >= 0).nonzero()[0]
            asked, held = [keys[i] for i in found_at.tolist()], self._keys[numbers[found_at]]
        if held.tolist() != (asked if isinstance(asked, list) else list(asked)):
            for i in found_at.tolist():
                if self._keys[numbers[i]] != keys[i]:
                    numbers[i] = -1
        return numbers

    def find_prefix(self, keys: Sequence[Key]) -> Numbers:
        """The numbers of the leading keys, up to the first key that is missing. Costs the hit, not the question."""
        parts: list[Numbers] = []
        start, chunk = 0, _FIRST_CHUNK
        while start < len(keys) or not parts:
            numbers = self.find(keys[start : start + chunk])
            missing = (numbers < 0).nonzero()[0]
            if len(missing):
                parts.append(numbers[: missing[0]])
                break
            parts.append(numbers)
            start += chunk
            chunk = min(2 * chunk, _LAST_CHUNK)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def claim(self, numbers: Numbers) -> Numbers:
        """Point the key of each number at it unless its mark has a number already; the one that each has then.

        It is -1 where there was no room.
        """
        return self._table.claim(numbers)

    def remove(self, numbers: Numbers) -> None:
        """Take out numbers that are in the index."""
        self._table.remove(numbers)

    def clear(self) -> None:
        """Forget every key, in O(1)."""
        self._table.clear()
