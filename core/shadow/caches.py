"""Shadow caches: what other pool sizes, eviction policies and store modes would have found, from the keys of requests.

Each combination is simulated with the keys that its slots would hold, and without bytes. In a large pool only the keys
with some hash bits are, in caches that are smaller by the same factor. Hits are prefixes: of the sampled keys of a
request, those before the first one that is missing count, each for all that it stands for. Keys of many requests, such
as system prompts, are simulated all, since a few of them in the sample or not in it would decide the result.

In front of each pool there is the same device: its blocks in the order of their use. Requests are replayed one after
another when they end. Not simulated are priorities of requests, pins, admission, resets, tiers, and a model's groups
besides the first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import RequestBlocks
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.learning import UNKNOWN, Comparison, Rates, UsedKeys, class_of_output
from kvferry.core.pool.eviction.lru import LruPolicy
from kvferry.core.pool.index import HashTable, Numbers, hash_keys
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import RecencyQueue

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes that are simulated, as multiples of the pool."""
MAX_KEYS = 100_000
"""Keys that are simulated at most, in about 420 bytes each for all caches together."""
_KEYS_PER_SLOT = 12
"""Keys that are remembered for each slot of the pool: those of the largest cache, and half as many that it evicted."""
_NUM_GROUPS = 16
"""Groups of sampled keys, whose differences show the error of the sample; keys that are simulated all have one more."""
_STUDENT = 2.13
"""Quantile of Student's t for 95% and as many groups."""
_WILSON = 1.96**2
MODEL_ERRORS = {LruPolicy.name: 0.005, ArcPolicy.name: 0.0075, HazardPolicy.name: 0.015}
"""Half widths of the bars without the error of the sample, as measured: replaying requests one by one leaves out some
things, and in a small cache ARC and above all `hazard`, which learns, decide otherwise than in a large one."""
POLICIES = tuple(MODEL_ERRORS)
"""Simulated policies, in the order of their kinds in `native`. `auto` decides nothing while another one is present."""
LAZY_ERROR = 0.005
"""Added to them in lazy mode, where what leaves the device, and when, depends on the steps of requests that overlap."""
_LEARNED_BITS = 4
_PERIOD_S, _COUNTED_S = 3600.0, 24 * 3600.0
"""Hits are counted by the hour, for a day."""


class Configuration(NamedTuple):
    """One simulated cache."""

    eviction_policy: str
    store_mode: StoreMode
    num_slots: int


class Estimate(NamedTuple):
    """Share of the prompt tokens that a cache, or the device in front of it, would have served, and its 95% bar."""

    hit_rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ShadowSetup:
    """The pool and the device in slots of `slot_tokens` tokens; `watermark_slots` are stored ahead in lazy mode."""

    num_slots: int
    device_slots: int
    slot_tokens: int
    watermark_slots: int = 0


@dataclass(slots=True)
class _Period:
    """Counts of an hour: `found` is `[caches + 1, groups + 1]`, with the device last; `references` is by group."""

    began_s: float
    found: NDArray[np.float64]
    references: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_GROUPS + 1))
    num_sampled_from: int = 0
    """Hittable slots that are not simulated all, whether they are in the sample or not."""
    num_sampled_requests: int = 0
    """Requests with any of these slots in the sample."""
    prompt_tokens: int = 0
    served_tokens: int = 0


class ShadowCaches:
    """Simulated caches of all configurations. One thread calls `record`, any other `estimates` with its own lock."""

    def __init__(self, setup: ShadowSetup, max_keys: int = MAX_KEYS) -> None:
        """Make empty caches for multiples of the pool's size."""
        # Imported here, as it compiles.
        from kvferry.core.shadow import native

        self._native = native
        self.setup = setup
        sizes = [max(round(multiple * setup.num_slots), 1) for multiple in MULTIPLES]
        self.configurations = [
            Configuration(policy, mode, size) for policy, mode, size in product(POLICIES, StoreMode, sizes)
        ]
        wanted = setup.device_slots + _KEYS_PER_SLOT * setup.num_slots
        self.share = min(1.0, max_keys / wanted)
        """Share of the keys that is simulated."""
        self._num_keys = num_keys = min(wanted, max_keys)
        num_rows = len(self.configurations) + 1
        self._records = np.zeros(num_keys, dtype=native.KEY_RECORD)
        self._records["cost"], self._records["hazard_class"], self._records["stamp"] = 1.0, UNKNOWN, -1
        self._rows: tuple[Any, Any, Any, Any] = (
            np.zeros((num_rows, num_keys), dtype=native.PLACE_RECORD),
            np.full((num_rows, native.NUM_LISTS, 2), -1, dtype=np.int64),
            np.zeros((num_rows, native.NUM_LISTS)),
            self._records,
        )
        self._kinds = np.array([POLICIES.index(one.eviction_policy) for one in self.configurations])
        self._are_lazy = np.array([one.store_mode is StoreMode.LAZY for one in self.configurations])
        self._capacities = np.array([one.num_slots * self.share for one in self.configurations])
        self._targets = np.zeros(len(self.configurations))
        # A walk of the free queue goes a quarter beyond the watermark, and the next one begins at the watermark.
        watermark = min(setup.watermark_slots * 9 / 8, setup.device_slots / 2)
        self._device_capacity = (setup.device_slots - watermark) * self.share, watermark * self.share
        self._keys = _Numbering(num_keys)
        self._left = np.zeros(num_keys, dtype=np.int64)
        self._num_requests = 0
        self._last_s = 0.0
        bits = max(_LEARNED_BITS + round(np.log2(self.share)), 0)
        self._used, self._rates = UsedKeys(num_keys, bits), Rates()
        # In lazy mode a cache holds other keys than the device.
        num_held = self._capacities + self._are_lazy * setup.device_slots * self.share
        self._learning = self._kinds == POLICIES.index(HazardPolicy.name)
        self._num_held = num_held[self._learning]
        self._comparison = Comparison(len(self._num_held))
        self._order_numbers = np.zeros(len(self.configurations), dtype=np.int64)
        self._frequent = FrequentKeys() if self.share < 1 else None
        self._sampled_below = round(self.share * (1 << native.SAMPLE_BITS))
        self._periods: deque[_Period] = deque()

    @property
    def num_bytes(self) -> int:
        """Return the size of all arrays."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)] + list(self._rows[:-1])
        return int(sum(array.nbytes for array in arrays)) + self._keys.num_bytes + self._used.num_bytes

    def record(self, *requests: RequestBlocks) -> None:
        """Replay requests that have ended."""
        hashes, end = hash_keys([key for request in requests for key in request.keys]), 0
        for request in requests:
            start, end = end, end + len(request.keys)
            self._replay(request, hashes[start:end])

    def _replay(self, request: RequestBlocks, hashes: KeyHashes) -> None:
        """Replay a request, given the hashes of its keys."""
        period, num_prompt = self._period(request.time_s), request.num_prompt_tokens // self.setup.slot_tokens
        self._last_s = max(self._last_s, request.time_s)
        period.prompt_tokens += request.num_prompt_tokens
        period.served_tokens += request.num_served_tokens
        num_hittable = min((request.num_prompt_tokens - 1) // self.setup.slot_tokens, len(hashes))
        num_frequent = 0 if self._frequent is None else self._frequent.count(hashes[:num_prompt])
        numbers = self._keys.find(hashes)
        chosen, chosen_numbers = np.empty_like(hashes), np.empty_like(numbers)
        are_exact = np.empty(len(hashes), dtype=np.bool_)
        # More than half of the numbers would displace each other.
        count, num_hits, num_stores, num_uses, num_sampled_from, is_sampled = self._native.choose(
            *(hashes, numbers, self._records, _NUM_GROUPS, self._sampled_below),
            *(num_frequent, num_prompt, num_hittable, request.num_storable, self._num_keys // 2),
            *(chosen, chosen_numbers, are_exact),
        )
        period.num_sampled_from += num_sampled_from
        period.num_sampled_requests += is_sampled
        if not count:
            return
        chosen, numbers = chosen[:count], chosen_numbers[:count]
        reused = self._keys.use(chosen, numbers)
        on_device, num_left = self._native.use_device(
            *(*self._rows, chosen, numbers, are_exact, reused, _NUM_GROUPS, self.share),
            *(num_hits, num_stores, request.time_s, self._num_requests, *self._device_capacity),
            *(period.found[-1], period.references, self._left),
        )
        self._learn(chosen[:num_uses], numbers[:num_uses], on_device, request)
        self._native.replay(
            *(*self._rows, self._kinds, self._are_lazy, self._capacities, self._targets),
            *(numbers, on_device, num_hits, num_stores, self._left[:num_left]),
            *(self._rates.orders, self._order_numbers, request.time_s, self._num_requests, period.found),
        )
        self._num_requests += 1

    def estimates(self) -> list[Estimate]:
        """Return the estimate of each configuration."""
        found, total = self._sums()
        return [
            self._estimate(found[row] + found[-1], total, self._model_error(one))
            for row, one in enumerate(self.configurations)
        ]

    @staticmethod
    def _model_error(one: Configuration) -> float:
        return MODEL_ERRORS[one.eviction_policy] + LAZY_ERROR * (one.store_mode is StoreMode.LAZY)

    @property
    def since_s(self) -> float | None:
        """Return when counting began, None before the first request."""
        return self._periods[0].began_s if self._periods else None

    @property
    def span_s(self) -> float:
        """Return the time from the first to the last request that is counted."""
        return self._last_s - self._periods[0].began_s if self._periods else 0.0

    @property
    def totals(self) -> tuple[int, int]:
        """Return the prompt tokens recorded, and those of them that were not computed."""
        _, total = self._sums()
        return total.prompt_tokens, total.served_tokens

    def _sums(self) -> tuple[NDArray[np.float64], _Period]:
        found = np.zeros((len(self.configurations) + 1, _NUM_GROUPS + 1))
        total = _Period(0.0, found)
        for period in list(self._periods):
            found += period.found
            total.references += period.references
            total.num_sampled_from += period.num_sampled_from
            total.num_sampled_requests += period.num_sampled_requests
            total.prompt_tokens += period.prompt_tokens
            total.served_tokens += period.served_tokens
        return found, total

    def _estimate(self, found: NDArray[np.float64], total: _Period, model_error: float) -> Estimate:
        if not total.prompt_tokens:
            return Estimate(0.0, 0.0, 0.0)
        sampled, references = found[:-1], total.references[:-1]
        num_hits, error = float(found[-1]), 0.0
        if references.sum() > 0:
            # Sampled keys that occur more often than expected are the same share of all as of those that were found.
            ratio = float(sampled.sum() / references.sum())
            num_hits += ratio * total.num_sampled_from
            deviations = sampled - ratio * references
            variance = float((deviations**2).sum()) * _NUM_GROUPS / (_NUM_GROUPS - 1) * (1 - self.share)
            error = total.num_sampled_from / float(references.sum()) * variance**0.5
        # A few requests may all be hits, or none, and then their groups do not differ: Wilson's bound for such shares.
        unseen = _WILSON / (total.num_sampled_requests + _WILSON) * total.num_sampled_from * (1 - self.share) ** 0.5
        share = self.setup.slot_tokens / total.prompt_tokens
        rate = num_hits * share
        bar = ((_STUDENT * error * share) ** 2 + (unseen * share) ** 2 + model_error**2) ** 0.5
        return Estimate(rate, max(rate - bar, 0.0), min(rate + bar, 1.0))

    def _period(self, now_s: float) -> _Period:
        periods = self._periods
        if not periods or now_s - periods[-1].began_s >= _PERIOD_S:
            periods.append(_Period(now_s, np.zeros((len(self.configurations) + 1, _NUM_GROUPS + 1))))
            while now_s - periods[0].began_s >= _COUNTED_S:
                periods.popleft()
        return periods[-1]

    def _learn(self, hashes: KeyHashes, numbers: Numbers, on_device: int, request: RequestBlocks) -> None:
        """Learn as the policy `hazard`, for all of its caches together, and set the classes of keys."""
        used, rates, now_s = self._used, self._rates, request.time_s
        if on_device:
            used.record_uses(hashes[:on_device], now_s, rates, on_device=True)
        used.record_uses(hashes[on_device:], now_s, rates)
        known = used.record_output(hashes, class_of_output(request.num_output_tokens), rates)
        used.sweep(now_s, rates)
        if rates.count_request():
            self._comparison.refresh(rates, used.take_hits(), used.by_age(now_s), self._num_held)
            self._order_numbers[self._learning] = self._comparison.are_better
        self._records["hazard_class"][numbers] = used.classes(known) if rates.is_known else UNKNOWN


class _Numbering:
    """Numbers of the keys that were used last, by their hash."""

    def __init__(self, capacity: int) -> None:
        self._hashes = np.zeros(capacity, dtype=np.uint64)
        self._table = HashTable(capacity, self._hashes)
        links = np.zeros((2, capacity), dtype=np.int32)
        self._order = RecencyQueue(*links)
        self._capacity = capacity
        self._num_given = 0
        self.num_bytes = self._hashes.nbytes + links.nbytes + 16 * self._table.size * 3 // 2

    def find(self, hashes: KeyHashes) -> Numbers:
        """Return the number of each key, -1 for those without one."""
        return self._table.find_hashes(hashes)

    def use(self, hashes: KeyHashes, numbers: Numbers) -> Numbers:
        """Give a number to each key that has none, -1, and return those that belonged to other keys before."""
        is_new = numbers < 0
        self._order.touch(numbers[~is_new])
        num_new = int(np.count_nonzero(is_new))
        num_fresh = min(num_new, self._capacity - self._num_given)
        reused = self._order.take_oldest(num_new - num_fresh)
        if num_new:
            self._table.remove(reused)
            fresh = np.arange(self._num_given, self._num_given + num_fresh)
            self._num_given += num_fresh
            numbers[is_new] = new = np.concatenate((fresh, reused)) if num_fresh else reused
            self._hashes[new] = hashes[is_new]
            self._table.claim(new)
            self._order.append(new)
        return reused


class FrequentKeys:
    """Finds the leading keys of a request that occur in more than 1% of the latest requests, in bounded memory."""

    def __init__(self) -> None:
        from kvferry.core.shadow import native

        self._native = native
        self._counts = np.zeros(1 << 18, dtype=np.uint16)
        self._num_requests = 0

    def count(self, hashes: KeyHashes) -> int:
        """Count the keys of a request, and return how many of its first ones are frequent."""
        self._num_requests += 1
        num_frequent = int(self._native.count_frequent(self._counts, hashes, max(self._num_requests / 100, 32)))
        if self._num_requests == 4000:
            self._num_requests //= 2
            self._counts //= 2
        return num_frequent
