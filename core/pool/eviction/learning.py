"""What the policy `hazard` learns: at which ages blocks of each class are used again, and what order follows from it.

From the rates of uses follows, for every class and age, the most hits a second of occupied memory that keeping such a
block can bring, over all times for which it could be kept: the index of Gittins (1979) for a hazard rate. Candidates of
a class leave from the oldest one on, and a block is of no use without those in front of it, so that the index does not
rise with age, nor fall with hits.

The rates are those of few requests, whose blocks are used together, and of blocks as if they were independent. So both
orders, by the index and by use, are judged by what each would have held of the keys that were used next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.eviction.native import ENTERED, HITS, KEY_RECORD, USES, key_functions
from kvferry.core.pool.index import HashTable, Numbers
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import RecencyQueue

_HIT_BOUNDS = np.array([1, 2, 4])
_OUTPUT_BOUNDS = np.array([32, 256, 512])
"""Numbers of hits, and tokens of an answer, at which the next class begins."""
_NUM_OUTPUTS = len(_OUTPUT_BOUNDS) + 1
NUM_CLASSES = (len(_HIT_BOUNDS) + 1) * _NUM_OUTPUTS
CLASS_OF_HITS = (np.searchsorted(_HIT_BOUNDS, np.arange(256), "right") * _NUM_OUTPUTS).astype(np.uint8)
UNKNOWN = NUM_CLASSES
"""Class of blocks of which nothing is known, such as those that another policy left: it has the rates of all."""
AGE_BOUNDS_S = 2.0 ** (np.arange(23) / 2)
"""Ages at which the next bucket begins: half octaves from a second to 34 minutes. The last bucket has no end."""
NUM_AGES = len(AGE_BOUNDS_S) + 1
_WIDTHS_S = np.diff(np.concatenate(([0.0], AGE_BOUNDS_S, AGE_BOUNDS_S[-1:] * 2**0.5)))
_SAMPLE_BITS = 4
"""Rates are learned from the keys whose hash begins with so many zero bits: one of 16."""
_REFRESH_REQUESTS = 50
_SWEPT_KEYS = 512
"""Sampled keys whose ages are updated at most at the end of a request; if they are fewer, all are between refreshes."""
_DECAY_REQUESTS = 500
_DECAY = 0.5
_PRIOR_ENTRIES = 20.0
"""Blocks of all classes that are added to each class, so that a class of which little is known is like all others."""
_COUNTED_KEYS = 4000
"""Keys that are looked at, at most about, to find out what a cache holds."""
_TRIAL_DECAY, _TRIAL_DEVIATIONS = 0.97, 0.5
"""Weight that gains keep at each refresh, and standard deviations of them by which the index has to be better."""
_MIN_TRIALS = 4.5
"""Weight of all gains before which they show no deviation: a few of one sign, which chance makes too, would suffice."""
_MIN_ENTRIES, _MIN_USES = 200, 20
"""Sampled uses, and sampled blocks used again, before which the policy is LRU."""


def class_of_output(num_tokens: int) -> int:
    """Return the class of an answer's length."""
    return int(np.searchsorted(_OUTPUT_BOUNDS, num_tokens, "right"))


class Rates:
    """Uses by class and age, and the index that follows from them."""

    def __init__(self) -> None:
        self.counts = np.zeros((3, NUM_CLASSES, NUM_AGES))
        """Sampled blocks by kind of count, class and age bucket."""
        self.orders: NDArray[np.float64] = np.zeros((2, NUM_CLASSES + 1, NUM_AGES))
        """Values that candidates are compared by, `[2, class, age bucket]`: zeros, which leave them in the order of
        their use, and the index, `UNKNOWN` included."""
        self._num_requests = 0
        self.num_decays = 0
        """How often old counts have lost weight."""
        self.is_known = False
        """Whether enough was learned."""

    def count_request(self) -> bool:
        """Count a request that has ended, and return whether `refresh` is due."""
        self._num_requests += 1
        return self._num_requests % _REFRESH_REQUESTS == 0

    def refresh(self) -> None:
        """Compute the index again. Every `_DECAY_REQUESTS` requests, old counts lose weight."""
        self._compute_index()
        if self._num_requests % _DECAY_REQUESTS == 0:
            self.counts *= _DECAY
            self.num_decays += 1

    @property
    def native(self) -> tuple[NDArray[np.float64], int, NDArray[np.uint8], NDArray[np.float64]]:
        """Return arguments of the functions of `key_functions`."""
        return self.counts, self.num_decays, CLASS_OF_HITS, AGE_BOUNDS_S

    def _compute_index(self) -> None:
        """Compute the index: the most hits for a second of memory, over all times to keep a block from each age on."""
        if not self.is_known and (
            self.counts[ENTERED, :, 0].sum() < _MIN_ENTRIES or self.counts[USES].sum() < _MIN_USES
        ):
            return
        self.is_known = True
        use_rates, hit_rates = self._rates_of(USES), self._rates_of(HITS)
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
        # A class is evicted from its oldest block on. A block is worth no more than it was at any age before, as those
        # that would have been evicted then did not get older, and no less than those behind it, which have fewer hits.
        index: NDArray[np.float64] = np.minimum.accumulate(best, axis=1)
        by_hits = index[:NUM_CLASSES].reshape(-1, _NUM_OUTPUTS, NUM_AGES)
        np.maximum.accumulate(by_hits, axis=0, out=by_hits)
        self.orders = np.stack((np.zeros_like(index), index))

    def _rates_of(self, kind: int) -> NDArray[np.float64]:
        """Return the share of the blocks that reach each bucket that these counts are, by class, and last of all."""
        counts, entered = self.counts[kind], self.counts[ENTERED]
        of_all = (counts.sum(axis=0) + 0.01) / (entered.sum(axis=0) + 1)
        rates = (counts + _PRIOR_ENTRIES * of_all) / (entered + _PRIOR_ENTRIES)
        return np.vstack([rates, of_all]).clip(0.0, 1.0)


class KeysByAge(NamedTuple):
    """Classes and ages of keys, each of which stands for `weight` keys."""

    classes: NDArray[np.uint8]
    ages_s: NDArray[np.float64]
    weight: float

    def values(self, order: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values that an order gives them, see `Rates.orders`."""
        values: NDArray[np.float64] = order[self.classes, np.searchsorted(AGE_BOUNDS_S, self.ages_s, "right")]
        return values


class Comparison:
    """Comparison of the index with the order of use.

    Both orders are judged by hits of sampled keys: from one refresh of the index to the next, each holds what it puts
    before the key that was the first one too many at the refresh.
    """

    def __init__(self) -> None:
        self._index = np.zeros((NUM_CLASSES + 1, NUM_AGES))
        self._least_value = -np.inf
        """Value of the first key that is too many, by the index."""
        self._most_age_by_index_s = self._most_age_by_use_s = np.inf
        """Age of the first key that is too many."""
        self._gain = self._squares = self._num_trials = 0.0
        self.is_better = False
        """Whether the index finds more than the order of use."""

    def refresh(self, rates: Rates, hits: KeysByAge, known: KeysByAge, num_held: float) -> None:
        """Refresh the index, judge both orders, and determine what each holds until the next refresh.

        Args:
            rates: The rates that the index follows from.
            hits: Sampled keys that were hit since the latest refresh, as they were before.
            known: A part of the keys that prompts used, as they are now.
            num_held: Number of keys that the cache holds.
        """
        rates.refresh()
        self._judge(hits)
        if rates.is_known and len(known.classes):
            self._settle(known, rates.orders[1], num_held)

    def _judge(self, hits: KeysByAge) -> None:
        values, ages_s = hits.values(self._index), hits.ages_s
        in_index = (values > self._least_value) | (values == self._least_value) & (ages_s <= self._most_age_by_index_s)
        gain = int(np.count_nonzero(in_index)) - int(np.count_nonzero(ages_s <= self._most_age_by_use_s))
        self._gain = self._gain * _TRIAL_DECAY + gain
        self._squares = self._squares * _TRIAL_DECAY + gain**2
        self._num_trials = self._num_trials * _TRIAL_DECAY + (gain != 0)
        is_beyond_chance = self._gain > _TRIAL_DEVIATIONS * self._squares**0.5
        self.is_better = is_beyond_chance and self._num_trials >= _MIN_TRIALS

    def _settle(self, known: KeysByAge, index: NDArray[np.float64], num_held: float) -> None:
        values, place = known.values(index), int(num_held / known.weight)
        self._index = index
        if place >= len(values):
            self._least_value, self._most_age_by_index_s, self._most_age_by_use_s = -np.inf, np.inf, np.inf
            return
        # Of keys with one index the younger ones are kept.
        first = np.lexsort((known.ages_s, -values))[place]
        self._least_value, self._most_age_by_index_s = values[first], known.ages_s[first]
        self._most_age_by_use_s = np.sort(known.ages_s)[place]


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
        self._order = RecencyQueue(self.records["older"], self.records["newer"])
        self._capacity = capacity
        self._num_given = 0
        """Numbers that were given since the latest reset; the first so many."""
        self._swept = 0
        self._hits: list[tuple[NDArray[np.uint8], NDArray[np.float64]]] = []
        """Classes and ages of sampled keys that were hit, at their use."""
        self._native = key_functions()
        self._mask = ((1 << sample_bits) - 1) << (64 - sample_bits)
        """Bits of a hash of which a sampled one has none."""
        self._all = self.records, self._hashes, self._mask

    def find(self, hashes: KeyHashes) -> Numbers:
        """Return the number of each key, -1 for unknown ones."""
        return self._table.find_hashes(hashes)

    def classes(self, numbers: Numbers) -> NDArray[np.uint8]:
        """Return the class of the key with each number, `UNKNOWN` for -1."""
        classes = np.empty(len(numbers), dtype=np.uint8)
        self._native.classes(self.records, CLASS_OF_HITS, numbers, UNKNOWN, classes)
        return classes

    def record_uses(self, hashes: KeyHashes, now_s: float, rates: Rates, on_device: bool = False) -> None:
        """Record a use of keys by one request, all of which the device holds, or none."""
        # More than the table holds would displace each other.
        hashes = np.sort(hashes[: self._capacity // 2])
        numbers = self.find(hashes)
        new, classes, ages_s = np.empty_like(hashes), np.empty(len(hashes), np.uint8), np.empty(len(hashes))
        num_known, num_new, num_hits = self._native.use(
            *(*self._all, *rates.native, hashes, numbers, now_s, not on_device, new, classes, ages_s)
        )
        if num_hits:
            self._hits.append((classes[:num_hits].copy(), ages_s[:num_hits].copy()))
        self._order.touch(numbers[:num_known])
        if num_new:
            self._enter_keys(new[:num_new], now_s, rates)

    def record_output(self, hashes: KeyHashes, output: int, rates: Rates) -> None:
        """Set the class of the answer behind these keys, which are in the order of their request."""
        self._native.set_output(*self._all, *rates.native, self.find(hashes), output, _DECAY)

    def take_hits(self) -> KeysByAge:
        """Return the sampled keys that were hit since the last call, as they were before these uses."""
        classes, ages_s = zip((np.empty(0, np.uint8), np.empty(0)), *self._hits, strict=True)
        self._hits = []
        return KeysByAge(np.concatenate(classes), np.concatenate(ages_s), 1.0)

    def by_age(self, now_s: float) -> KeysByAge:
        """Return a part of the keys, as they are now."""
        records = self.records[: self._num_given : self._num_given // _COUNTED_KEYS + 1]
        classes = CLASS_OF_HITS[records["num_hits"]] + records["output"]
        return KeysByAge(classes, now_s - records["last_s"], self._num_given / max(len(records), 1))

    def sweep(self, now_s: float, rates: Rates) -> None:
        """Count the ages that some of the sampled keys have reached."""
        num_swept = min(_SWEPT_KEYS << self._sample_bits, self._num_given // _REFRESH_REQUESTS + 1)
        end = min(self._swept + num_swept, self._num_given)
        self._native.count_ages(*self._all, *rates.native, self._swept, end, now_s)
        self._swept = end if end < self._num_given else 0

    def reset(self) -> None:
        """Forget all keys, in O(1)."""
        self._table.reset()
        self._order.reset()
        self._hits = []
        self._num_given = self._swept = 0

    def _enter_keys(self, hashes: KeyHashes, now_s: float, rates: Rates) -> None:
        """Enter keys that are not in the table, instead of those that were not used for longest."""
        num_fresh = min(len(hashes), self._capacity - self._num_given)
        numbers = np.arange(self._num_given, self._num_given + num_fresh)
        self._num_given += num_fresh
        if num_fresh < len(hashes):
            reused = self._order.take_oldest(len(hashes) - num_fresh)
            self._table.remove(reused)
            numbers = np.concatenate((numbers, reused)) if num_fresh else reused
        self._native.begin(*self._all, *rates.native, numbers, hashes, num_fresh, now_s)
        self._table.claim(numbers)
        self._order.append(numbers)
