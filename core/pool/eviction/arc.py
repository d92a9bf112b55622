"""ARC eviction policy: balances recency and frequency by the keys it sees again (Megiddo and Modha, FAST 2003).

Their T1 (used once lately) is the segment `recent`, T2 (used at least twice) is `frequent`, B1 and B2 are the ghosts of
each, and `target` is their p, the target size of T1. With one priority class, and keys that are offered one by one, it
is their algorithm. Differences otherwise:

- A pinned slot counts as part of T2, as it was just used, and is added to T2 when it is unpinned.
- Keys that are offered together are decided in their order, before any of them is stored: none is evicted for another,
  and ghosts among them stay meanwhile.
- Lower priority classes are evicted first; the choice between T1 and T2 is made within a class.
- A resize of the pool drops the ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import floor

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.eviction.lru import Segment, peek_oldest
from kvferry.core.pool.index import HashTable, Numbers
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import RecencyQueue, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

RECENT, FREQUENT = 0, 1
"""Numbers of the ghost lists."""


class ArcPolicy:
    """The policy `arc`. Candidates that another policy left count as used once."""

    name = "arc"

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._recent = Segment(table)
        self._frequent = Segment(table)
        self._is_frequent = np.zeros(table.max_slots, dtype=np.bool_)
        """Whether a candidate, or a slot that is being filled, belongs to `frequent`."""
        self._ghosts = ArcGhosts(max(table.num_slots, table.target_slots))
        self.target = 0.0

    def import_order(self, candidates: Segment) -> None:
        """See `EvictionPolicy`."""
        self._recent = candidates
        num_slots = max(self._table.num_slots, self._table.target_slots)
        if self._ghosts.capacity < num_slots:
            # A growth began since this policy was made.
            self._ghosts = ArcGhosts(num_slots)

    def export_order(self) -> Segment:
        """See `EvictionPolicy`."""
        self._recent.join(self._frequent)
        return self._recent

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
        self._is_frequent[slots] = True
        self._frequent.append(slots)

    def queue_of(self, slot: int) -> RecencyQueue:
        """See `EvictionPolicy`."""
        return (self._frequent if self._is_frequent[slot] else self._recent).queue_of(slot)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self.remove(slots)
        self.add(slots)

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

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots) -> Slots:
        """See `EvictionPolicy`."""
        num_recent = len(self._recent)
        protected_recent, protected_frequent = self._split(protected)
        self._recent.remove(protected_recent)
        self._frequent.remove(protected_frequent)
        classes = [
            _Class(recent.length, frequent.length)
            for recent, frequent in zip(self._recent.queues, self._frequent.queues, strict=True)
        ]
        num_served = min(len(wanted), len(free) + sum(one.recent + one.frequent for one in classes))
        ghosts = self._ghosts.find(wanted[:num_served])
        came_back = (ghosts >= 0).nonzero()[0]
        if len(came_back):
            # A key that was offered twice counts once.
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
        decision.bring_new(decided, num_served, len(free), classes)
        self.target = decision.target
        if len(returning):
            self._ghosts.remove(returning)
        victims: Slots = self._take(classes, decision.num_ghosts)
        slots = np.concatenate((free, victims))[:num_served] if len(free) else victims
        self._is_frequent[slots] = False
        self._is_frequent[slots[came_back]] = True
        self._recent.append(protected_recent)
        self._frequent.append(protected_frequent)
        return victims

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        first, second = self._recent, self._frequent
        if len(first) <= self.target:
            first, second = second, first
        return peek_oldest(chain.from_iterable(zip(first.queues, second.queues, strict=True)), count)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`."""
        ghosts = ArcGhosts(num_slots)

        def apply() -> object:
            old, self._ghosts = self._ghosts, ghosts
            self.target = min(self.target, float(num_slots))
            return old

        return apply

    def reset(self) -> None:
        """See `EvictionPolicy`."""
        self._recent.reset()
        self._frequent.reset()
        self._ghosts.reset()
        self.target = 0.0

    def _split(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return the slots in `recent`, and those in `frequent`."""
        if not len(slots):
            return slots, slots
        in_frequent = self._is_frequent[slots]
        num_frequent = int(np.count_nonzero(in_frequent))
        if not num_frequent:
            return slots, NO_SLOTS
        if num_frequent == len(slots):
            return NO_SLOTS, slots
        return slots[~in_frequent], slots[in_frequent]

    def _take(self, classes: Sequence[_Class], limits: Sequence[int]) -> Slots:
        """Remove the decided victims from the segments, and add ghosts of them, up to `limits` in each list."""
        evicted = []
        for segment, counts in (
            (self._recent, [one.from_recent for one in classes]),
            (self._frequent, [one.from_frequent for one in classes]),
        ):
            parts = [queue.take_oldest(count) for queue, count in zip(segment.queues, counts, strict=True) if count]
            evicted.append(parts[0] if len(parts) == 1 else np.concatenate([NO_SLOTS, *parts]))
        self._ghosts.add([self._table.hashes[slots] for slots in evicted], limits)
        return np.concatenate(evicted) if len(evicted[0]) and len(evicted[1]) else evicted[0 if len(evicted[0]) else 1]


@dataclass(slots=True)
class _Class:
    """Candidates of one priority class, and the numbers of victims decided so far."""

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
    """The choice of a segment for each victim of one offer, key by key, in numbers only."""

    capacity: int
    target: float
    num_recent: int
    num_ghosts: list[int]
    awaited: list[int] = field(default_factory=lambda: [0, 0])
    """Ghosts of later keys of the offer, which are not dropped before."""

    def bring_back(self, which: int, replaces: bool, classes: Sequence[_Class]) -> None:
        """Decide for a key that has a ghost: the list that it was evicted from was too short."""
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
        """Decide for keys `start` to `end`, which have no ghosts; those from `num_free` on need victims."""
        if start == end:
            return
        self.num_recent += max(min(end, num_free) - start, 0)
        count = end - max(start, num_free)
        for one in classes:
            some = min(count, one.recent + one.frequent)
            if some <= 0:
                continue
            # Victims come from T2 until T1, which grows by every key, exceeds its target, and from T1 after that.
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
        """Drop ghosts so that T1 and its ghosts are at most as many as slots, and all ghosts too."""
        recent, frequent = self.num_ghosts
        recent -= max(min(self.num_recent + recent - self.capacity, recent - self.awaited[RECENT]), 0)
        frequent -= max(min(recent + frequent - self.capacity, frequent - self.awaited[FREQUENT]), 0)
        self.num_ghosts = [recent, frequent]


class ArcGhosts:
    """The ghost lists B1 and B2: hashes of evicted keys in order, found in O(1). Each ghost has a number."""

    def __init__(self, capacity: int) -> None:
        """Make room for `capacity` ghosts in both lists together."""
        self.capacity = capacity
        self._hashes = np.zeros(capacity, dtype=np.uint64)
        self._which = np.zeros(capacity, dtype=np.uint8)
        older, newer = np.zeros((2, capacity), dtype=np.int32)
        self._table = HashTable(capacity, self._hashes)
        self._lists = [RecencyQueue(older, newer) for _ in (RECENT, FREQUENT)]
        self._unused = RecencyQueue(older, newer)
        """Numbers that were used, and are free again."""
        self._frontier = 0
        """First number that was not used since the latest reset."""

    def count(self, which: int) -> int:
        """Return the number of ghosts in one of the lists."""
        return self._lists[which].length

    def find(self, hashes: KeyHashes) -> Numbers:
        """Return the ghost of each hash, -1 where there is none."""
        return self._table.find_hashes(hashes)

    def list_of(self, ghosts: Numbers) -> NDArray[np.uint8]:
        """Return the list that each ghost is in."""
        return self._which[ghosts]

    def remove(self, ghosts: Numbers) -> None:
        """Drop distinct ghosts."""
        lists = self.list_of(ghosts)
        for which, queue in enumerate(self._lists):
            queue.remove(ghosts[lists == which])
        self._table.remove(ghosts)
        self._unused.append(ghosts)

    def add(self, evicted: Sequence[KeyHashes], limits: Sequence[int]) -> None:
        """Add the evicted hashes to each list, in order, and drop its oldest ghosts beyond its limit."""
        added = []
        for which, hashes in enumerate(evicted):
            excess = self.count(which) + len(hashes) - limits[which]
            if excess > 0:
                oldest = self._lists[which].take_oldest(excess)
                self._table.remove(oldest)
                self._unused.append(oldest)
                hashes = hashes[excess - len(oldest) :]
            added.append(hashes)
        # Only now, as one list may grow by the number that the other one lost.
        for which, hashes in enumerate(added):
            if not len(hashes):
                continue
            ghosts = self._take_unused(len(hashes))
            self._hashes[ghosts] = hashes
            is_new = self._table.claim(ghosts) == ghosts
            if int(np.count_nonzero(is_new)) < len(ghosts):
                # A key that was stored twice at once may be evicted twice.
                self._unused.append(ghosts[~is_new])
                ghosts = ghosts[is_new]
            self._which[ghosts] = which
            self._lists[which].append(ghosts[::-1])

    def reset(self) -> None:
        """Drop all ghosts, in O(1). Ghosts that an exception has lost are available again."""
        self._table.reset()
        for queue in (*self._lists, self._unused):
            queue.reset()
        self._frontier = 0

    def _take_unused(self, count: int) -> Numbers:
        """Return free numbers, those that were used before first."""
        ghosts = self._unused.take_oldest(count)
        missing = count - len(ghosts)
        if missing:
            ghosts = np.concatenate((ghosts, np.arange(self._frontier, self._frontier + missing)))
            self._frontier += missing
        return ghosts
