"""ARC: adapts between recency and frequency by what it regrets having evicted (Megiddo and Modha, FAST 2003).

Their T1 (seen once lately) is the segment `recent` here, T2 (seen at least twice) is `frequent`, B1 and B2 are the
ghosts of either, and `target` is their p, the size that T1 shall have. In one priority class, and with keys that are
offered one by one, it is their algorithm. Beyond that:

- A pinned slot counts as part of T2, for it was just used, and that is where it comes back to.
- Keys that are offered together are decided in their order, before any of them is stored: none makes room for another,
  and the ghosts among them are not forgotten meanwhile.
- Lower priority classes go first; the choice between T1 and T2 is made within a class.
- When the pool changes its size, the ghosts are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor

import numpy as np

from kvferry.core.arc_ghosts import FREQUENT, RECENT, ArcGhosts
from kvferry.core.marks import Marks
from kvferry.core.segments import Segment
from kvferry.core.slots import SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots


class ArcPolicy:
    """See `EvictionPolicy`. What another policy left counts as seen once."""

    name = "arc"

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._ghosts = ArcGhosts(table.num_slots)

    def take_over(self, full: Segment, empty: Segment) -> None:
        """See `EvictionPolicy`."""
        self._recent = full
        self._frequent = empty
        self._ghosts.clear()
        self.target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def admit(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        recent, frequent = self._split(slots)
        if len(recent):
            self._recent.append(recent)
        if len(frequent):
            self._frequent.append(frequent)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._frequent.append(slots)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self.remove(slots)
        self._frequent.append(slots)

    def reorder(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        recent, frequent = self._split(slots)
        self._recent.touch(recent)
        self._frequent.touch(frequent)

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        recent, frequent = self._split(slots)
        self._recent.remove(recent)
        self._frequent.remove(frequent)

    def make_room(self, wanted: Marks, free: Slots, spared: Slots, young: int) -> Slots:
        """See `EvictionPolicy`."""
        num_recent = len(self._recent)
        spared_recent, spared_frequent = self._split(spared)
        self._recent.remove(spared_recent)
        self._frequent.remove(spared_frequent)
        classes = [
            _Class(max(recent.num_live - young, 0), max(frequent.num_live - young, 0))
            for recent, frequent in zip(self._recent.queues, self._frequent.queues, strict=True)
        ]
        num_answered = min(len(wanted), len(free) + sum(one.recent + one.frequent for one in classes))
        ghosts = self._ghosts.find(wanted[:num_answered])
        came_back = (ghosts >= 0).nonzero()[0]
        if len(came_back):
            # A key that is named twice comes back once.
            came_back = came_back[np.sort(np.unique(ghosts[came_back], return_index=True)[1])]
        returning = ghosts[came_back]
        lists: list[int] = self._ghosts.list_of(returning).tolist() if len(returning) else []
        decision = _Decision(
            self._table.num_slots, self.target, num_recent, [self._ghosts.count(which) for which in (RECENT, FREQUENT)]
        )
        decision.awaited = [lists.count(RECENT), lists.count(FREQUENT)]
        decided = 0
        for position, which in zip(came_back.tolist(), lists, strict=True):
            decision.bring_new(decided, position, len(free), classes)
            decision.bring_back(which, position >= len(free), classes)
            decided = position + 1
        decision.bring_new(decided, num_answered, len(free), classes)
        self.target = decision.target
        if len(returning):
            self._ghosts.remove(returning)
        victims: Slots = self._take(classes, decision.num_ghosts)
        slots = np.concatenate((free, victims))[:num_answered] if len(free) else victims
        self._recent.expect(slots)
        if len(came_back):
            self._frequent.expect(slots[came_back])
        self._recent.append(spared_recent)
        self._frequent.append(spared_frequent)
        return victims

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        first, second = self._recent, self._frequent
        if len(first) <= self.target:
            first, second = second, first
        for queues in zip(first.queues, second.queues, strict=True):
            for queue in queues:
                if queue.num_live:
                    return queue.peek_oldest(count)
        return NO_SLOTS

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        ghosts = ArcGhosts(num_slots)

        def put_in_force() -> object:
            old, self._ghosts = self._ghosts, ghosts
            self.target = min(self.target, float(num_slots))
            return old

        return put_in_force

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._recent.clear()
        self._frequent.clear()
        self._ghosts.clear()
        self.target = 0.0

    def hand_over(self) -> tuple[Segment, Segment]:
        """See `EvictionPolicy`."""
        return self._recent, self._frequent

    def _split(self, slots: Slots) -> tuple[Slots, Slots]:
        """Those of the slots that belong to `recent`, and to `frequent`."""
        if not len(slots):
            return slots, slots
        in_frequent = self._frequent.holds(slots)
        num_frequent = int(np.count_nonzero(in_frequent))
        if not num_frequent:
            return slots, NO_SLOTS
        if num_frequent == len(slots):
            return NO_SLOTS, slots
        return slots[~in_frequent], slots[in_frequent]

    def _take(self, classes: Sequence[_Class], limits: Sequence[int]) -> Slots:
        """Take what was decided out of the segments, and remember it as ghosts, up to `limits` in each list."""
        evicted = []
        for segment, counts in (
            (self._recent, [one.from_recent for one in classes]),
            (self._frequent, [one.from_frequent for one in classes]),
        ):
            parts = [queue.take_oldest(count) for queue, count in zip(segment.queues, counts, strict=True) if count]
            evicted.append(parts[0] if len(parts) == 1 else np.concatenate([NO_SLOTS, *parts]))
        self._ghosts.add([self._table.marks[slots] for slots in evicted], limits)
        return np.concatenate(evicted) if len(evicted[0]) and len(evicted[1]) else evicted[0 if len(evicted[0]) else 1]


@dataclass(slots=True)
class _Class:
    """What may go of one priority class, and what has been decided to go."""

    recent: int
    frequent: int
    from_recent: int = 0
    from_frequent: int = 0

    def take(self, from_recent: int, from_frequent: int) -> None:
        self.recent -= from_recent
        self.frequent -= from_frequent
        self.from_recent += from_recent
        self.from_frequent += from_frequent


@dataclass(slots=True)
class _Decision:
    """Keys of one offer, one after the other, in numbers only: which segment each victim comes from."""

    capacity: int
    target: float
    num_recent: int
    num_ghosts: list[int]
    awaited: list[int] = field(default_factory=lambda: [0, 0])
    """Ghosts of keys that are still to come; they are not forgotten before."""

    def bring_back(self, which: int, replaces: bool, classes: Sequence[_Class]) -> None:
        """A key comes back that was evicted: the list it is found in was too short."""
        here, other = self.num_ghosts[which], self.num_ghosts[1 - which]
        step = max(1.0, other / here)
        if which == RECENT:
            self.target = min(self.target + step, float(self.capacity))
        else:
            self.target = max(self.target - step, 0.0)
        self.num_ghosts[which] -= 1
        self.awaited[which] -= 1
        if replaces:
            one = next(one for one in classes if one.recent or one.frequent)
            prefers_recent = self.num_recent > self.target or (which == FREQUENT and self.num_recent == self.target)
            self._replace(one, 1 if one.recent and (prefers_recent or not one.frequent) else 0, 1)
        self._forget_ghosts()

    def bring_new(self, start: int, end: int, num_free: int, classes: Sequence[_Class]) -> None:
        """Keys number `start` to `end` are not known; those from `num_free` on need somebody to go."""
        if start == end:
            return
        self.num_recent += max(min(end, num_free) - start, 0)
        count = end - max(start, num_free)
        for one in classes:
            some = min(count, one.recent + one.frequent)
            if some <= 0:
                continue
            # T2 gives until T1, which grows by every key, is larger than its target; T1 gives from then on.
            first = min(max(floor(self.target) - self.num_recent + 1, 0), one.frequent, some)
            from_recent = min(some - first, one.recent)
            self._replace(one, from_recent, some)
            self.num_recent += some
            count -= some
        self._forget_ghosts()

    def _replace(self, one: _Class, from_recent: int, count: int) -> None:
        one.take(from_recent, count - from_recent)
        self.num_recent -= from_recent
        self.num_ghosts[RECENT] += from_recent
        self.num_ghosts[FREQUENT] += count - from_recent

    def _forget_ghosts(self) -> None:
        """T1 and its ghosts are at most as many as slots, and so are all ghosts."""
        recent, frequent = self.num_ghosts
        recent -= max(min(self.num_recent + recent - self.capacity, recent - self.awaited[RECENT]), 0)
        frequent -= max(min(recent + frequent - self.capacity, frequent - self.awaited[FREQUENT]), 0)
        self.num_ghosts = [recent, frequent]
