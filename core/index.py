"""Which number holds a key: found by marks, and true by the keys themselves.

Two keys of one mark, which random hashes of 64 bits hardly ever are, do not fit in side by side: the second is not
found, and not taken in. It is one block forgotten, and never another one's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.arrays import counting
from kvferry.core.keys import Key
from kvferry.core.mark_table import MarkTable, Numbers
from kvferry.core.marks import Marks, marker, marks_of

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
        # Compiled here, and not by who asks first.
        marker()
        # What is claimed and removed while this one is filled is claimed and removed here, too.
        self._larger: MarkTable | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def room(self) -> int:
        """How many numbers it has room for."""
        return self._table.size

    @property
    def is_growing(self) -> bool:
        """Whether marks are on their way to a larger table."""
        return self._larger is not None

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

    def find_some(self, keys: Sequence[Key]) -> Numbers:
        """The numbers of those of these keys that have one."""
        numbers = self.find(keys)
        return numbers[numbers >= 0]

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
        holders = self._table.claim(numbers)
        if self._larger is not None:
            self._larger.claim(numbers[holders == numbers])
        return holders

    def remove(self, numbers: Numbers) -> None:
        """Take out numbers that are in the index."""
        self._table.remove(numbers)
        if self._larger is not None:
            self._larger.remove(numbers)

    def clear(self) -> None:
        """Forget every key, in O(1)."""
        self._table.clear()
        if self._larger is not None:
            self._larger.clear()

    def begin_growing(self, size: int) -> Callable[[], None]:
        """Allocate room for so many numbers. What is returned has them move there from now on, which `move` does."""
        larger = MarkTable(size, self._marks)

        def begin() -> None:
            self._larger, self._next = larger, 0

        return begin

    def move(self, end: int, limit: int) -> MarkTable | None:
        """Move some of the numbers below `end`, up to `limit` a call, to the larger table.

        Once it has all of them it takes the place of the other one, which is returned: its memory goes with it.
        """
        larger = self._larger
        if larger is None:
            return None
        numbers = np.arange(self._next, min(self._next + limit, end))
        self._next += len(numbers)
        found, _ = self._table.find(self._marks[numbers])
        larger.claim(numbers[found == numbers])
        if self._next < end:
            return None
        replaced, self._table, self._larger = self._table, larger, None
        return replaced
