"""LRU: of the lowest priority class that has any, the slot that was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.core.marks import Marks
from kvferry.core.segments import Segment
from kvferry.core.transfers import NO_SLOTS, Slots


class LruPolicy:
    """See `EvictionPolicy`. Candidates are in `warm`; what another policy left in `cold` goes before them."""

    name = "lru"

    def take_over(self, full: Segment, empty: Segment) -> None:
        """See `EvictionPolicy`."""
        self.inherit(empty, full)

    def inherit(self, cold: Segment, warm: Segment) -> None:
        """Start with candidates in both segments; all of `cold` go before any of `warm`."""
        self._cold = cold
        self._warm = warm
        self._look_at_cold(len(cold) > 0)

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

    def make_room(self, wanted: Marks, free: Slots, spared: Slots, young: int) -> Slots:
        """See `EvictionPolicy`."""
        count = len(wanted) - len(free)
        if len(spared):
            self.remove(spared)
        taken = NO_SLOTS
        for queue in self._order:
            room = min(count - len(taken), queue.num_live - young)
            if room > 0:
                some = queue.take_oldest(room)
                taken = np.concatenate((taken, some)) if len(taken) else some
        if len(spared):
            self._warm.append(spared)
        return taken

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        return next((queue.peek_oldest(count) for queue in self._order if queue.num_live), NO_SLOTS)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        return lambda: None

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._cold.clear()
        self._warm.clear()
        self._look_at_cold(False)

    def hand_over(self) -> tuple[Segment, Segment]:
        """See `EvictionPolicy`."""
        return self._cold, self._warm

    def settle(self, limit: int) -> bool:
        """Put up to `limit` slots of the warm segment behind the cold one's; True once all are in one segment."""
        if self._has_cold and len(self._cold):
            for cold, warm in zip(self._cold.queues, self._warm.queues, strict=True):
                moved = warm.take_oldest(limit)
                limit -= len(moved)
                # A batch comes out in the opposite order of that in which it goes in.
                cold.append(moved[::-1])
            if len(self._warm):
                return False
            self._cold, self._warm = self._warm, self._cold
        self._look_at_cold(False)
        return True

    def _look_at_cold(self, has_cold: bool) -> None:
        """Whether there is anything in `cold`; by class, its queues come first."""
        self._has_cold = has_cold
        pairs = zip(self._cold.queues, self._warm.queues, strict=True)
        self._order = [queue for pair in pairs for queue in pair] if has_cold else self._warm.queues
