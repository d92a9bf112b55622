"""Segments: the slots that may be evicted, in queues that outlive the policy that picks from them.

A pool has two segments, each with a queue for every priority class. A policy decides what they mean; the next policy
finds them as they are, so that an exchange moves no slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.recency import NUMBER_SHIFT, RecencyQueue
from kvferry.core.slots import SlotTable
from kvferry.core.transfers import Slots

_NUM_CLASSES = len(PRIORITY_CLASS)
_FIRST = 1 << NUMBER_SHIFT
_SECOND = 1 + _NUM_CLASSES << NUMBER_SHIFT
"""Positions of the first segment's queues are between these two, those of the second one's from here on."""


class Segment:
    """Slots in the order of their use, by priority class. A slot is in one segment at most."""

    def __init__(self, table: SlotTable, index: int) -> None:
        """Segment 0 or 1 of a table, whose `queued_at` only these two may use."""
        self._classes = table.classes
        self._positions = table.queued_at
        self._index = index
        first_number = 1 + index * _NUM_CLASSES
        self.queues = [RecencyQueue(table.queued_at, first_number + number) for number in range(_NUM_CLASSES)]

    def __len__(self) -> int:
        return sum([queue.num_live for queue in self.queues])

    def append(self, slots: Slots) -> None:
        """Put slots that are in no segment at the most recent end, the first of them as the most recent."""
        uniform = self._classes.uniform
        if uniform is not None:
            self.queues[uniform].append(slots)
        else:
            for queue, part in self._by_class(slots):
                queue.append(part)

    def touch(self, slots: Slots) -> None:
        """Move slots of this segment to the most recent end, the first of them as the most recent."""
        uniform = self._classes.uniform
        if uniform is not None:
            self.queues[uniform].touch(slots)
        else:
            for queue, part in self._by_class(slots):
                queue.touch(part)

    def remove(self, slots: Slots) -> None:
        """Take slots of this segment out."""
        uniform = self._classes.uniform
        if uniform is not None:
            self.queues[uniform].remove(slots)
        else:
            for queue, part in self._by_class(slots):
                queue.remove(part)

    def clear(self) -> None:
        """Forget every slot, in O(1)."""
        for queue in self.queues:
            queue.clear()

    def expect(self, slots: Slots) -> None:
        """Note on slots that are in no segment that this is the one they shall go to."""
        self._positions[slots] = _SECOND if self._index else _FIRST

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these slots, all in one of the two segments or expected there, are this one's."""
        positions = self._positions[slots]
        held: NDArray[np.bool_] = positions >= _SECOND if self._index else positions < _SECOND
        return held

    def _by_class(self, slots: Slots) -> list[tuple[RecencyQueue, Slots]]:
        classes = self._classes.column[slots]
        return [(queue, slots[classes == index]) for index, queue in enumerate(self.queues)]
