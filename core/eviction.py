"""Eviction policies: of the slots that may go, which goes first.

A policy sees only slots that are ready and that nobody has pinned. Batches come in the order of their request's blocks,
and of a batch that was used at once the last slot goes first, so that prefixes die from their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from core.policy import PRIORITY_CLASS
from core.recency import RecencyQueue
from core.slots import SlotTable
from core.transfers import NO_SLOTS, Slots


class EvictionPolicy(Protocol):
    """The order in which slots go. Every method is O(1) amortized a slot."""

    name: str

    def __len__(self) -> int:
        """How many slots may be evicted."""

    def add(self, slots: Slots) -> None:
        """These slots may go from now on: just published, or no longer pinned. It counts as a use."""

    def remove(self, slots: Slots) -> None:
        """These slots, all of them candidates, are pinned or gone."""

    def touch(self, slots: Slots) -> None:
        """These candidates were used."""

    def peek_victims(self, count: int) -> Slots:
        """Some of the `count` slots that go next, the first to go in front, of one priority class. They stay."""

    def take_victims(self, count: int) -> Slots:
        """Remove and return up to `count` slots in the order in which they shall go."""

    def clear(self) -> None:
        """Forget every slot, in O(1)."""


class LruPolicy:
    """Least recently used first, within the lowest priority class that has any."""

    name = "lru"

    def __init__(self, table: SlotTable) -> None:
        """The slots' priority classes are read while they are candidates, and no others may use `table.queued_at`."""
        self._classes = table.classes
        self._queues = [RecencyQueue(table.queued_at, number) for number in range(len(PRIORITY_CLASS))]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        uniform = self._classes.uniform
        if uniform is not None:
            self._queues[uniform].append(slots)
            return
        for queue, part in self._by_class(slots):
            queue.append(part)

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        uniform = self._classes.uniform
        if uniform is not None:
            self._queues[uniform].remove(slots)
            return
        for queue, part in self._by_class(slots):
            queue.remove(part)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        for queue, part in self._by_class(slots):
            queue.touch(part)

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        return next((queue.peek_oldest(count) for queue in self._queues if len(queue)), NO_SLOTS)

    def take_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        taken = NO_SLOTS
        for queue in self._queues:
            if len(taken) < count and len(queue):
                some = queue.take_oldest(count - len(taken))
                taken = np.concatenate((taken, some)) if len(taken) else some
        return taken

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        for queue in self._queues:
            queue.clear()

    def _by_class(self, slots: Slots) -> list[tuple[RecencyQueue, Slots]]:
        if self._classes.uniform is not None:
            return [(self._queues[self._classes.uniform], slots)]
        classes = self._classes.column[slots]
        return [(queue, slots[classes == index]) for index, queue in enumerate(self._queues)]


EVICTION_POLICIES: dict[str, Callable[[SlotTable], EvictionPolicy]] = {LruPolicy.name: LruPolicy}
"""Every eviction policy by its name in the setting EVICTION_POLICY; each is made for a slot table."""
