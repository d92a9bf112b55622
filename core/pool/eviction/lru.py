"""LRU eviction policy: evict the least recently used slot of the lowest priority class that has one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.core.pool.eviction.queue import Segment
from kvferry.core.pool.index import KeyHashes
from kvferry.core.transfers import NO_SLOTS, Slots


class LruPolicy:
    """The policy `lru`. Candidates are in `warm`; those that another policy left in `cold` are evicted before them."""

    name = "lru"

    def import_order(self, full: Segment, empty: Segment) -> None:
        """See `EvictionPolicy`."""
        self.inherit(empty, full)

    def inherit(self, cold: Segment, warm: Segment) -> None:
        """Start with candidates in both segments; all of `cold` are evicted before any of `warm`."""
        self._cold = cold
        self._warm = warm
        self._set_has_cold(len(cold) > 0)

    def __len__(self) -> int:
        return sum([queue.num_live for queue in self._order])

    def admit(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._warm.append(slots)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._warm.append(slots)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        if self._has_cold:
            self.remove(slots)
            self._warm.append(slots)
        else:
            self._warm.touch(slots)

    def reorder(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self.touch(slots)

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        if self._has_cold:
            in_cold = self._cold.holds(slots)
            self._cold.remove(slots[in_cold])
            slots = slots[~in_cold]
        self._warm.remove(slots)

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots, young: int) -> Slots:
        """See `EvictionPolicy`."""
        count = len(wanted) - len(free)
        if len(protected):
            self.remove(protected)
        taken = NO_SLOTS
        for queue in self._order:
            num_next = min(count - len(taken), queue.num_live - young)
            if num_next > 0:
                some = queue.take_oldest(num_next)
                taken = np.concatenate((taken, some)) if len(taken) else some
        if len(protected):
            self._warm.append(protected)
        return taken

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        return next((queue.peek_oldest(count) for queue in self._order if queue.num_live), NO_SLOTS)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        return lambda: None

    def reset(self) -> None:
        """See `EvictionPolicy`."""
        self._cold.reset()
        self._warm.reset()
        self._set_has_cold(False)

    def export_order(self) -> tuple[Segment, Segment]:
        """See `EvictionPolicy`."""
        return self._cold, self._warm

    def merge_segments(self, limit: int) -> bool:
        """Move up to `limit` slots of `warm` behind those of `cold`. Returns whether all are in one segment now."""
        if self._has_cold and len(self._cold):
            for cold, warm in zip(self._cold.queues, self._warm.queues, strict=True):
                moved = warm.take_oldest(limit)
                limit -= len(moved)
                # A batch leaves a queue in the opposite order of its entry.
                cold.append(moved[::-1])
            if len(self._warm):
                return False
            self._cold, self._warm = self._warm, self._cold
        self._set_has_cold(False)
        return True

    def _set_has_cold(self, has_cold: bool) -> None:
        """Set whether `cold` has candidates. Its queue of a class then comes before that of `warm`."""
        self._has_cold = has_cold
        pairs = zip(self._cold.queues, self._warm.queues, strict=True)
        self._order = [queue for pair in pairs for queue in pair] if has_cold else self._warm.queues
