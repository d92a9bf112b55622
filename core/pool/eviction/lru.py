"""LRU eviction policy, and what every policy consists of: segments of queues in order of use.

An exchange of policies joins queues without moving a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import RecencyQueue, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots


class Segment:
    """Candidates for eviction in the order of their use, in a queue for each priority class.

    A class is evicted once all lower ones are empty, whatever the priority of the request that needs the slots.
    """

    def __init__(self, table: SlotTable, ends: NDArray[np.int64] | None = None) -> None:
        """Make an empty segment; `ends` has the columns of each queue, see `RecencyQueue`."""
        self._table = table
        self.queues = [
            RecencyQueue(table.older, table.newer, None if ends is None else ends[number])
            for number in range(len(PRIORITY_CLASS))
        ]

    def __len__(self) -> int:
        return sum([queue.length for queue in self.queues])

    def append(self, slots: Slots) -> None:
        """Add slots that are in no segment at the most recent end, the first of them as the most recent."""
        uniform = self._table.uniform_class
        if uniform is not None:
            self.queues[uniform].append(slots)
            return
        for queue, part in self._by_class(slots):
            queue.append(part)

    def queue_of(self, slot: int) -> RecencyQueue:
        """Return the queue in which a slot is if it is in this segment."""
        return self.queues[int(self._table.classes[slot])]

    def peek_oldest(self, count: int) -> Slots:
        """Return up to `count` slots in the order of their eviction."""
        return peek_oldest(self.queues, count)

    def touch(self, slots: Slots) -> None:
        """Move slots of this segment to the most recent end, the first of them as the most recent."""
        for queue, part in self._by_class(slots):
            queue.touch(part)

    def remove(self, slots: Slots) -> None:
        """Remove slots of this segment."""
        uniform = self._table.uniform_class
        if uniform is not None:
            self.queues[uniform].remove(slots)
            return
        for queue, part in self._by_class(slots):
            queue.remove(part)

    def join(self, newer: Segment) -> None:
        """Move all slots of another segment to the most recent end, in their order, in O(1)."""
        for queue, other in zip(self.queues, newer.queues, strict=True):
            queue.join(other)

    def reset(self) -> None:
        """Remove all slots, in O(1)."""
        for queue in self.queues:
            queue.reset()

    def _by_class(self, slots: Slots) -> list[tuple[RecencyQueue, Slots]]:
        uniform = self._table.uniform_class
        if uniform is not None:
            return [(self.queues[uniform], slots)]
        classes = self._table.classes[slots]
        return [(queue, slots[classes == index]) for index, queue in enumerate(self.queues)]


def peek_oldest(queues: Iterable[RecencyQueue], count: int) -> Slots:
    """Return up to `count` slots of these queues, which are evicted one after the other."""
    oldest = NO_SLOTS
    for queue in queues:
        if len(oldest) < count and queue.length:
            some = queue.peek_oldest(count - len(oldest))
            oldest = np.concatenate((oldest, some)) if len(oldest) else some
    return oldest


class LruPolicy:
    """The policy `lru`."""

    name = "lru"

    def __init__(self, table: SlotTable) -> None:
        self._candidates = Segment(table)

    def import_order(self, candidates: Segment) -> None:
        """See `EvictionPolicy`."""
        self._candidates = candidates

    def export_order(self) -> Segment:
        """See `EvictionPolicy`."""
        return self._candidates

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._candidates.append(slots)

    admit = add

    def queue_of(self, slot: int) -> RecencyQueue:
        """See `EvictionPolicy`."""
        return self._candidates.queue_of(slot)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._candidates.touch(slots)

    reorder = touch

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._candidates.remove(slots)

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots) -> Slots:
        """See `EvictionPolicy`."""
        count = len(wanted) - len(free)
        if len(protected):
            self._candidates.remove(protected)
        taken = NO_SLOTS
        for queue in self._candidates.queues:
            if len(taken) < count and queue.length:
                some = queue.take_oldest(count - len(taken))
                taken = np.concatenate((taken, some)) if len(taken) else some
        if len(protected):
            self._candidates.append(protected)
        return taken

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        return self._candidates.peek_oldest(count)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        return lambda: None

    def reset(self) -> None:
        """See `EvictionPolicy`."""
        self._candidates.reset()
