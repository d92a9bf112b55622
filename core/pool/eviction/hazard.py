"""Hazard eviction policy: learns when blocks are used again, and evicts those of the class whose memory pays least.

Blocks are in classes by their hits so far and the length of the latest answer behind them. The class whose oldest block
has the lowest index loses it (`learning.py`). Until enough was seen, and where the index does not find more than the
order of use, it is LRU. Priority classes are above it: a lower one is evicted first.

Uses are learned from all prompts, whatever served them: keys on the device, in the pool and in neither count. But a use
that the device serves is no hit: a copy in the pool brings nothing until the device has lost the block. Keys that were
evicted are remembered for as long as four times as many as the pool has slots were not used since.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.eviction.learning import (
    AGE_BOUNDS_S,
    CLASS_OF_HITS,
    NUM_CLASSES,
    UNKNOWN,
    Comparison,
    KeysByAge,
    Rates,
    UsedKeys,
    class_of_output,
)
from kvferry.core.pool.eviction.lru import Segment, peek_oldest
from kvferry.core.pool.eviction.native import candidate_functions
from kvferry.core.pool.index import Numbers
from kvferry.core.pool.native import QUEUE_COLUMNS, KeyHashes, queue_functions
from kvferry.core.pool.slots import RecencyQueue, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_AS_KEYS_S = -1.0
"""Passed instead of a time of use: that of the key."""
_REMEMBERED = 5
"""Keys that are remembered for each slot: those in the pool, and four times as many."""
_HELD_REFRESHES = 4
"""Refreshes over which what the latest victim shows is averaged, about."""


class HazardPolicy:
    """The policy `hazard`. Without records of uses it is LRU."""

    name = "hazard"

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        # Compiled functions find a candidate's queue by its priority class and its class.
        self._queues = np.zeros((len(PRIORITY_CLASS), NUM_CLASSES + 1, QUEUE_COLUMNS), dtype=np.int64)
        self._segments = [Segment(table, self._queues[:, number]) for number in range(NUM_CLASSES + 1)]
        self._class_of = np.full(table.max_slots, UNKNOWN, dtype=np.uint8)
        """Class of each candidate, and of slots that are pinned."""
        self._used_s = np.zeros(table.max_slots)
        """When the block of each candidate was last used, as far as known, else when it became one."""
        self._keys = UsedKeys(_REMEMBERED * max(table.num_slots, table.target_slots))
        self._rates = Rates()
        self._comparison = Comparison()
        self._victim = UNKNOWN, 0.0
        """Class and time of use of the latest victim."""
        self._num_held = 0.0
        """Keys that the cache holds, the device's included in lazy mode, as the latest victims show."""
        self._now_s = 0.0
        self._native = candidate_functions()
        links = table.older, table.newer, self._queues, table.classes, self._class_of
        self._candidates = *links, self._used_s
        self._relink = partial(queue_functions()[0], *links)

    def import_order(self, candidates: Segment) -> None:
        """See `EvictionPolicy`."""
        self._segments[UNKNOWN].join(candidates)

    def export_order(self) -> Segment:
        """See `EvictionPolicy`."""
        first, *others = self._segments
        for other in others:
            first.join(other)
        return first

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    def record_uses(self, hashes: KeyHashes, now_s: float, on_device: bool) -> None:
        """Record that a request uses these keys, which the device has, or else the pool or neither."""
        self._now_s = now_s
        self._keys.record_uses(hashes, now_s, self._rates, on_device)

    def record_end(self, hashes: KeyHashes, candidates: Slots, num_output_tokens: int, now_s: float) -> None:
        """Record the length of the answer to a request with these keys; `candidates` hold some of them."""
        self._now_s = now_s
        self._keys.record_output(hashes, class_of_output(num_output_tokens), self._rates)
        if self._rates.is_known and len(candidates):
            numbers = self._keys.find(self._table.hashes[candidates])
            is_moved = self._keys.classes(numbers) != self._class_of[candidates]
            moved = candidates[is_moved]
            if len(moved):
                self.remove(moved)
                self._append(moved, now_s, numbers[is_moved])

    def record_request(self, now_s: float) -> None:
        """Record that a request has ended, after all of its keys were recorded."""
        self._keys.sweep(now_s, self._rates)
        if self._rates.count_request():
            known = self._keys.by_age(now_s)
            self._num_held += (self._rank_of_victim(known, now_s) - self._num_held) / _HELD_REFRESHES
            self._comparison.refresh(self._rates, self._keys.take_hits(), known, self._num_held)

    def admit(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._append(slots, _AS_KEYS_S)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._append(slots, self._now_s)

    def queue_of(self, slot: int) -> RecencyQueue:
        """See `EvictionPolicy`."""
        return self._segments[int(self._class_of[slot])].queue_of(slot)

    def touch(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self.remove(slots)
        self._append(slots, self._now_s)

    def reorder(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._relink(slots, True, True)

    def remove(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._relink(slots, True, False)

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots) -> Slots:
        """See `EvictionPolicy`."""
        count = len(wanted) - len(free)
        if count <= 0:
            return NO_SLOTS
        if len(protected):
            self.remove(protected)
        victims: Slots = np.empty(count, dtype=np.int64)
        num_taken = self._native.take(*self._candidates, self._order, AGE_BOUNDS_S, self._now_s, victims)
        if num_taken:
            self._victim = self._class_of[victims[num_taken - 1]], self._used_s[victims[num_taken - 1]]
        if len(protected):
            self._relink(protected, False, True)
        return victims[:num_taken]

    def peek_victims(self, count: int) -> Slots:
        """See `EvictionPolicy`."""
        queues: list[RecencyQueue] = []
        for of_class in zip(*(segment.queues for segment in self._segments), strict=True):
            values = self._values_of_oldest(of_class)
            queues += [of_class[number] for number in sorted(values, key=values.__getitem__)]
        return peek_oldest(queues, count)

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `EvictionPolicy`. Uses of keys so far are forgotten, and what was learned from them is not."""
        keys = UsedKeys(_REMEMBERED * num_slots)

        def apply() -> object:
            old, self._keys = self._keys, keys
            return old

        return apply

    def reset(self) -> None:
        """See `EvictionPolicy`. What was learned is kept."""
        for segment in self._segments:
            segment.reset()
        self._keys.reset()

    def _append(self, slots: Slots, used_s: float, numbers: Numbers | None = None) -> None:
        """Make slots the most recent of their classes, used at this time or, with `_AS_KEYS_S`, when their keys were.

        `numbers` are of the keys, if they were looked up.
        """
        if numbers is None:
            numbers = self._keys.find(self._table.hashes[slots])
        self._native.classify(
            *(self._keys.records, CLASS_OF_HITS, numbers, slots, self._class_of, self._used_s),
            *(UNKNOWN, self._rates.is_known, used_s, self._now_s),
        )
        self._relink(slots, False, True)

    @property
    def _order(self) -> NDArray[np.float64]:
        """Return the present order, see `Rates.orders`."""
        order: NDArray[np.float64] = self._rates.orders[int(self._comparison.is_better)]
        return order

    def _rank_of_victim(self, known: KeysByAge, now_s: float) -> float:
        """Return how many keys the present order puts before the latest victim."""
        of_victim, used_s = self._victim
        age_s = now_s - used_s
        values, value = known.values(self._order), self._order[of_victim, np.searchsorted(AGE_BOUNDS_S, age_s, "right")]
        are_before = (values > value) | (values == value) & (known.ages_s < age_s)
        return float(are_before.sum() * known.weight)

    def _values_of_oldest(self, queues: tuple[RecencyQueue, ...]) -> dict[int, tuple[float, float]]:
        """Return, for each class with candidates, the index of its oldest one and when that was used."""
        values: dict[int, tuple[float, float]] = {}
        for number, queue in enumerate(queues):
            if queue.length:
                used_s = float(self._used_s[queue.oldest])
                age = np.searchsorted(AGE_BOUNDS_S, self._now_s - used_s, "right")
                values[number] = float(self._order[number, age]), used_s
        return values
