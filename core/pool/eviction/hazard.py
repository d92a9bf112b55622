"""Hazard eviction policy: learns when blocks are used again, and evicts those of the class whose memory pays least.

Blocks are in classes by their hits so far and the length of the latest answer behind them. For each class the policy
counts at which ages blocks are used again, and how many reach each age unused. From these rates it computes, for every
class and age, the most hits a second of occupied memory that keeping such a block can bring, over all times for which
it could be kept: the index of Gittins (1979) for a hazard rate. The class whose oldest block has the lowest index loses
it. Until enough was seen it is LRU. Priority classes are above it: a lower one is evicted first.

Uses are learned from all prompts, whatever served them: keys on the device, in the pool and in neither count. But a use
that the device serves is no hit: a copy in the pool brings nothing until the device has lost the block. Keys that were
evicted are remembered for as long as four times as many as the pool has slots were not used since.

A block is kept at least as long as those behind it in its request, which cannot be found without it: when the request
ends, it gets the class of the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.eviction.lru import Ranks, Segment, peek_oldest
from kvferry.core.pool.eviction.native import KEY_RECORD, candidate_functions, key_functions, rate_functions
from kvferry.core.pool.index import HashTable, Numbers
from kvferry.core.pool.native import QUEUE_COLUMNS, KeyHashes, queue_functions
from kvferry.core.pool.slots import RecencyQueue, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_HIT_BOUNDS = np.array([1, 2, 4])
_OUTPUT_BOUNDS = np.array([32, 256, 512])
"""Numbers of hits, and tokens of an answer, at which the next class begins."""
_NUM_OUTPUTS = len(_OUTPUT_BOUNDS) + 1
NUM_CLASSES = (len(_HIT_BOUNDS) + 1) * _NUM_OUTPUTS
_CLASS_OF_HITS = (np.searchsorted(_HIT_BOUNDS, np.arange(256), "right") * _NUM_OUTPUTS).astype(np.uint8)
UNKNOWN = NUM_CLASSES
"""Class of blocks of which nothing is known, such as those that another policy left: it has the rates of all."""
_AGE_BOUNDS_S = 2.0 ** (np.arange(23) / 2)
"""Ages at which the next bucket begins: half octaves from a second to 34 minutes. The last bucket has no end."""
NUM_AGES = len(_AGE_BOUNDS_S) + 1
_WIDTHS_S = np.diff(np.concatenate(([0.0], _AGE_BOUNDS_S, _AGE_BOUNDS_S[-1:] * 2**0.5)))
_AS_KEYS_S = -1.0
"""Passed instead of a time of use: that of the key."""
_REMEMBERED = 5
"""Keys that are remembered for each slot: those in the pool, and four times as many."""
_SAMPLE_BITS = 4
"""Rates are learned from the keys whose hash begins with so many zero bits: one of 16."""
_SWEPT_KEYS = 512
"""Sampled keys whose ages are updated at the end of a request: the others follow at the ends of the next ones."""
_REFRESH_REQUESTS = 50
_DECAY_REQUESTS = 500
_DECAY = 0.5
_PRIOR_ENTRIES = 20.0
"""Blocks of all classes that are added to each class, so that a class of which little is known is like all others."""
_MIN_ENTRIES, _MIN_USES = 200, 20
"""Sampled uses, and sampled blocks used again, before which the policy is LRU."""


def class_of_output(num_tokens: int) -> int:
    """Return the class of an answer's length."""
    return int(np.searchsorted(_OUTPUT_BOUNDS, num_tokens, "right"))


class HazardPolicy:
    """The policy `hazard`. Without records of uses it is LRU."""

    name = "hazard"
    learns = True

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
        """See `LearningPolicy`."""
        self._now_s = now_s
        self._keys.record_uses(hashes, now_s, self._rates, on_device)

    def record_end(self, hashes: KeyHashes, candidates: Slots, num_output_tokens: int, now_s: float) -> None:
        """See `LearningPolicy`."""
        self._now_s = now_s
        self._keys.record_output(hashes, class_of_output(num_output_tokens), self._rates)
        if self._rates.is_known and len(candidates):
            numbers = self._keys.find(self._table.hashes[candidates])
            is_moved = self._keys.eviction_classes(numbers) != self._class_of[candidates]
            moved = candidates[is_moved]
            if len(moved):
                self.remove(moved)
                self._append(moved, now_s, numbers[is_moved])

    def record_request(self, now_s: float) -> None:
        """See `LearningPolicy`."""
        self._keys.sweep(now_s, self._rates)
        self._rates.count_request()

    def admit(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._append(slots, _AS_KEYS_S)

    def add(self, slots: Slots) -> None:
        """See `EvictionPolicy`."""
        self._append(slots, self._now_s)

    def put_back(self, slots: Slots, ranks: Ranks) -> None:
        """See `EvictionPolicy`."""
        for segment, part in self._by_class(slots):
            segment.put_back(part, ranks)

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
        num_taken = self._native.take(*self._candidates, self._rates.indices, _AGE_BOUNDS_S, self._now_s, victims)
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
            *(self._keys.records, numbers, slots, self._class_of, self._used_s),
            *(UNKNOWN, self._rates.is_known, used_s, self._now_s),
        )
        self._relink(slots, False, True)

    def _by_class(self, slots: Slots) -> Iterator[tuple[Segment, Slots]]:
        """Yield the segments of these candidates, each with its part."""
        classes = self._class_of[slots]
        for number in np.unique(classes).tolist():
            yield self._segments[number], slots[classes == number]

    def _values_of_oldest(self, queues: tuple[RecencyQueue, ...]) -> dict[int, tuple[float, float]]:
        """Return, for each class with candidates, the index of its oldest one and when that was used."""
        values: dict[int, tuple[float, float]] = {}
        for number, queue in enumerate(queues):
            if queue.num_live:
                used_s = float(self._used_s[queue.oldest])
                values[number] = self._rates.index(number, self._now_s - used_s), used_s
        return values


class Rates:
    """Uses by class and age, and the index that follows from them."""

    def __init__(self) -> None:
        self._entered = np.zeros((NUM_CLASSES, NUM_AGES))
        """Sampled blocks that reached each bucket unused."""
        self._uses = np.zeros((NUM_CLASSES, NUM_AGES))
        """Sampled blocks that were used again in each bucket."""
        self._hits = np.zeros((NUM_CLASSES, NUM_AGES))
        """Those of these uses that the device did not serve."""
        self._index: NDArray[np.float64] = np.zeros((NUM_CLASSES + 1, NUM_AGES))
        self._num_requests = 0
        self.num_decays = 0
        """How often old counts have lost weight."""
        self.is_known = False
        """Whether enough was learned."""
        self._native = rate_functions()

    def enter(
        self, classes: Numbers, first: Numbers, last: Numbers, weights: NDArray[np.float64] | None = None
    ) -> None:
        """Count blocks of these classes, by their weights, 1 if None, in the buckets after `first` up to `last`."""
        self._native.enter(self._entered, classes, first, last, np.ones(len(classes)) if weights is None else weights)

    def begin(self, classes: Numbers) -> None:
        """Count blocks of these classes that were just used."""
        self._entered[:, 0] += np.bincount(classes, minlength=NUM_CLASSES)

    def hit(self, classes: Numbers, ages: Numbers, on_device: bool = False) -> None:
        """Count blocks that were used again in these buckets. It is no hit if the device served that."""
        cells = np.bincount(classes * NUM_AGES + ages, minlength=NUM_CLASSES * NUM_AGES)
        counts = cells.reshape(NUM_CLASSES, NUM_AGES)
        self._uses += counts
        if not on_device:
            self._hits += counts

    def count_request(self) -> None:
        """Count a request that has ended. Now and then, the index is computed again and old counts lose weight."""
        self._num_requests += 1
        if self._num_requests % _REFRESH_REQUESTS == 0:
            self._refresh()
        if self._num_requests % _DECAY_REQUESTS == 0:
            self._entered *= _DECAY
            self._uses *= _DECAY
            self._hits *= _DECAY
            self.num_decays += 1

    @property
    def indices(self) -> NDArray[np.float64]:
        """Return the index `[class, age bucket]`, `UNKNOWN` included."""
        return self._index

    def best_behind(self, classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return, for blocks in order, the class with the highest index after a use among each and those behind it."""
        best: NDArray[np.uint8] = np.empty(len(classes), dtype=np.uint8)
        self._native.best_behind(self._index, classes, best)
        return best

    def index(self, number: int, age_s: float) -> float:
        """Return the index of a class at one age."""
        return float(self._index[number, np.searchsorted(_AGE_BOUNDS_S, age_s, "right")])

    def _refresh(self) -> None:
        """Compute the index: the most hits for a second of memory, over all times to keep a block from each age on."""
        if not self.is_known and (self._entered[:, 0].sum() < _MIN_ENTRIES or self._uses.sum() < _MIN_USES):
            return
        self.is_known = True
        use_rates, hit_rates = self._rates_of(self._uses), self._rates_of(self._hits)
        unused = np.ones_like(use_rates)
        num_hits, occupied_s, best = np.zeros_like(unused), np.zeros_like(unused), np.zeros_like(unused)
        for age in range(NUM_AGES):
            # Column i is about blocks that are kept from age i on.
            begun, rate = slice(age + 1), use_rates[:, age : age + 1]
            num_hits[:, begun] += unused[:, begun] * hit_rates[:, age : age + 1]
            # A block that is used in this bucket is so, on average, in the middle of it.
            occupied_s[:, begun] += unused[:, begun] * _WIDTHS_S[age] * (1 - rate / 2)
            unused[:, begun] *= 1 - rate
            np.maximum(best[:, begun], num_hits[:, begun] / occupied_s[:, begun], out=best[:, begun])
        self._index = best

    def _rates_of(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of the blocks that reach each bucket that these counts are, by class, and last of all."""
        of_all = (counts.sum(axis=0) + 0.01) / (self._entered.sum(axis=0) + 1)
        rates = (counts + _PRIOR_ENTRIES * of_all) / (self._entered + _PRIOR_ENTRIES)
        return np.vstack([rates, of_all]).clip(0.0, 1.0)


class UsedKeys:
    """The keys that prompts used lately, by their hash: hits, class and time of the latest use. Memory is fixed.

    Each key has a number. When all are taken, those of the keys that were not used for longest are given to new ones.
    """

    def __init__(self, capacity: int, sample_bits: int = _SAMPLE_BITS) -> None:
        """Make room for `capacity` keys; rates are learned from those whose hash begins with so many zero bits."""
        self._sample_bits = sample_bits
        self._hashes = np.zeros(capacity, dtype=np.uint64)
        self.records = np.zeros(capacity, dtype=KEY_RECORD)
        self._table = HashTable(capacity, self._hashes)
        self._eviction_class = self.records["eviction_class"]
        self._order = RecencyQueue(self.records["older"], self.records["newer"])
        self._capacity = capacity
        self._num_given = 0
        """Numbers that were given since the latest reset; the first so many."""
        self._swept = 0
        self._native = key_functions()
        self._mask = ((1 << sample_bits) - 1) << (64 - sample_bits)
        """Bits of a hash of which a sampled one has none."""
        self._all = self.records, self._hashes, self._mask

    @property
    def num_bytes(self) -> int:
        """Return the size of all arrays, about."""
        return self._capacity * (8 + KEY_RECORD.itemsize + 16 * 3 // 2)

    def find(self, hashes: KeyHashes) -> Numbers:
        """Return the number of each key, -1 for unknown ones."""
        return self._table.find_hashes(hashes)

    def eviction_classes(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Return the class by which each number is evicted, as of its latest request that ended; `UNKNOWN` for -1."""
        return np.where(numbers < 0, np.uint8(UNKNOWN), self._eviction_class[numbers])

    def record_uses(self, hashes: KeyHashes, now_s: float, rates: Rates, on_device: bool = False) -> None:
        """Record a use of keys by one request, all of which the device holds, or none."""
        # More than the table holds would displace each other.
        hashes = np.sort(hashes[: self._capacity // 2])
        numbers = self.find(hashes)
        new, out = np.empty_like(hashes), np.empty((4, len(hashes)), dtype=np.int64)
        num_known, num_new, num_sampled = self._native.use(
            *(*self._all, hashes, numbers, now_s, rates.num_decays),
            *(_CLASS_OF_HITS, _AGE_BOUNDS_S, new, out),
        )
        if num_sampled:
            classes, before, ages, classes_after = out[:, :num_sampled]
            rates.enter(classes, before, ages)
            rates.hit(classes, ages, on_device)
            rates.begin(classes_after)
        self._order.touch(numbers[:num_known])
        if num_new:
            self._enter_keys(new[:num_new], now_s, rates)

    def record_output(self, hashes: KeyHashes, output: int, rates: Rates) -> None:
        """Set the class of the answer behind these keys, which are in the order of their request."""
        numbers = self.find(hashes)
        numbers = numbers[numbers >= 0]
        classes, out = np.empty(len(numbers), dtype=np.uint8), np.empty((4, len(numbers)), dtype=np.int64)
        num_sampled = self._native.set_output(
            *self._all, numbers, output, rates.num_decays, _CLASS_OF_HITS, classes, out
        )
        if num_sampled:
            before, after, reached, num_decays = out[:, :num_sampled]
            # They are counted as if they had had the class since their use, with the weight that is left of that.
            weights, first = _DECAY**num_decays, np.full(num_sampled, -1)
            rates.enter(before, first, reached, -weights)
            rates.enter(after, first, reached, weights)
        self._eviction_class[numbers] = rates.best_behind(classes)

    def sweep(self, now_s: float, rates: Rates) -> None:
        """Count the ages that some of the sampled keys have reached."""
        end = min(self._swept + (_SWEPT_KEYS << self._sample_bits), self._num_given)
        hashes, mask = self._hashes[self._swept : end], np.uint64(self._mask)
        self._count_ages(self._swept + np.flatnonzero(hashes & mask == 0), now_s, rates)
        self._swept = end if end < self._num_given else 0

    def reset(self) -> None:
        """Forget all keys, in O(1)."""
        self._table.reset()
        self._order.reset()
        self._num_given = self._swept = 0

    def _count_ages(self, numbers: Numbers, now_s: float, rates: Rates) -> None:
        """Count the buckets that sampled ones of these keys have reached since they were counted last."""
        out = np.empty((3, len(numbers)), dtype=np.int64)
        num_sampled = self._native.count_ages(*self._all, numbers, now_s, _CLASS_OF_HITS, _AGE_BOUNDS_S, out)
        if num_sampled:
            classes, before, ages = out[:, :num_sampled]
            rates.enter(classes, before, ages)

    def _enter_keys(self, hashes: KeyHashes, now_s: float, rates: Rates) -> None:
        """Enter keys that are not in the table, instead of those that were not used for longest."""
        num_fresh = min(len(hashes), self._capacity - self._num_given)
        numbers = np.arange(self._num_given, self._num_given + num_fresh)
        self._num_given += num_fresh
        if num_fresh < len(hashes):
            reused = self._order.take_oldest(len(hashes) - num_fresh)
            self._count_ages(reused, now_s, rates)
            self._table.remove(reused)
            numbers = np.concatenate((numbers, reused)) if num_fresh else reused
        self._hashes[numbers] = hashes
        self._table.claim(numbers)
        self._order.append(numbers)
        num_sampled = self._native.begin(*self._all, numbers, now_s, rates.num_decays)
        if num_sampled:
            rates.begin(np.zeros(num_sampled, dtype=np.int64))
