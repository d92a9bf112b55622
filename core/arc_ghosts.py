"""ARC's two ghost lists: the marks of what was evicted from either segment, in order, found in O(1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.mark_table import MarkTable, Numbers
from kvferry.core.marks import Marks
from kvferry.core.recency import NUMBER_SHIFT, RecencyQueue

RECENT, FREQUENT = 0, 1


class ArcGhosts:
    """At most `capacity` ghosts in both lists together. A ghost goes by a number while it is remembered."""

    def __init__(self, capacity: int) -> None:
        self._marks = np.zeros(capacity, dtype=np.uint64)
        self._positions = np.zeros(capacity, dtype=np.int64)
        self._table = MarkTable(capacity, self._marks)
        self._lists = [RecencyQueue(self._positions, 1), RecencyQueue(self._positions, 2)]
        self._returned = np.empty(capacity, dtype=np.int64)
        self._num_returned = 0
        self._frontier = 0

    def count(self, which: int) -> int:
        """How many ghosts one of the lists has."""
        return self._lists[which].num_live

    def find(self, marks: Marks) -> Numbers:
        """The ghosts that have these marks, -1 where there is none."""
        return self._table.find(marks)[0]

    def list_of(self, ghosts: Numbers) -> NDArray[np.int64]:
        """Which list each of these ghosts is in."""
        lists: NDArray[np.int64] = (self._positions[ghosts] >> NUMBER_SHIFT) - 1
        return lists

    def remove(self, ghosts: Numbers) -> None:
        """Forget ghosts, each named once."""
        lists = self.list_of(ghosts)
        for which, queue in enumerate(self._lists):
            queue.remove(ghosts[lists == which])
        self._give_back(ghosts)

    def add(self, evicted: Sequence[Marks], limits: Sequence[int]) -> None:
        """Remember for each list what was evicted, in that order, and forget its oldest ghosts beyond its limit."""
        added = []
        for which, marks in enumerate(evicted):
            excess = self.count(which) + len(marks) - limits[which]
            if excess > 0:
                oldest = self._lists[which].take_oldest(excess)
                self._give_back(oldest)
                marks = marks[excess - len(oldest) :]
            added.append(marks)
        # Only now, for one list may grow by what the other one lost.
        for queue, marks in zip(self._lists, added, strict=True):
            if not len(marks):
                continue
            ghosts = self._take(len(marks))
            self._marks[ghosts] = marks
            won = self._table.claim(ghosts) == ghosts
            if int(np.count_nonzero(won)) < len(ghosts):
                # A key may be evicted twice, if it was stored twice at once.
                self._return(ghosts[~won])
                ghosts = ghosts[won]
            queue.append(ghosts[::-1])

    def clear(self) -> None:
        """Forget every ghost, in O(1)."""
        self._table.clear()
        for queue in self._lists:
            queue.clear()
        self._num_returned = self._frontier = 0

    def _give_back(self, ghosts: Numbers) -> None:
        self._table.remove(ghosts)
        self._return(ghosts)

    def _return(self, numbers: Numbers) -> None:
        self._returned[self._num_returned : self._num_returned + len(numbers)] = numbers
        self._num_returned += len(numbers)

    def _take(self, count: int) -> Numbers:
        returned = min(count, self._num_returned)
        self._num_returned -= returned
        numbers: Numbers = self._returned[self._num_returned : self._num_returned + returned].copy()
        if returned == count:
            return numbers
        fresh = np.arange(self._frontier, self._frontier + count - returned)
        self._frontier += count - returned
        return np.concatenate((numbers, fresh)) if returned else fresh
