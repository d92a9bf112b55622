"""The policy `hazard`: LRU at first, then by what it has learned; rates and remembered keys against plain models."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from itertools import compress

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.app.replay.core_replay import Replay, Setup, count_blocks, replayed
from kvferry.app.replay.trace import sample_trace
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.learning import NUM_AGES, NUM_CLASSES, UNKNOWN, Comparison, Rates, UsedKeys
from kvferry.core.pool.eviction.native import ENTERED, HITS, USES
from kvferry.core.pool.index import hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.slots import SlotTable
from kvferry.core.transfers import NO_SLOTS
from tests.harness.pool_blocks import held, keys, load, store


def index(rates: Rates, number: int, age_s: float) -> float:
    """The index of a class at one age."""
    return float(rates.orders[1][number, np.searchsorted(2.0 ** (np.arange(23) / 2), age_s, "right")])


def enter(rates: Rates, classes: NDArray[np.int64], ages: NDArray[np.int64]) -> None:
    """Count blocks of these classes that have reached these ages."""
    for number, age in zip(classes, ages, strict=True):
        rates.counts[ENTERED, number, : age + 1] += 1


def use(rates: Rates, classes: NDArray[np.int64], ages: NDArray[np.int64], on_device: bool = False) -> None:
    """Count blocks that were used again at these ages."""
    for kind in (USES,) if on_device else (USES, HITS):
        np.add.at(rates.counts[kind], (classes, ages), 1)


def run_request(manager: OffloadManager, first: int, count: int, num_output_tokens: int, now_s: float) -> None:
    """A request that uses these keys, stores those that are missing, and ends."""
    manager.record_uses(keys(first, count), now_s)
    load(manager, list(compress(keys(first, count), held(manager, keys(first, count)))))
    store(manager, keys(first, count))
    manager.record_end(keys(first, count), num_output_tokens, now_s)
    manager.record_request(now_s)


def test_before_it_has_learned_it_evicts_as_lru() -> None:
    managers = [OffloadManager(60, 64, eviction_policy=name) for name in ("lru", "hazard")]
    rng = random.Random(5)
    for step in range(150):
        first, count, output = rng.randrange(40) * 5, rng.randint(1, 9), rng.choice([1, 100, 1000])
        for manager in managers:
            run_request(manager, first, count, output, float(step))
        assert held(managers[0], keys(0, 250)) == held(managers[1], keys(0, 250)), f"step {step}"


def converse(policy: str) -> tuple[int, int]:
    """Conversations with long answers go on a minute later, in the middle of short requests that never do.

    Returns the blocks of second turns that were found, and all of them.
    """
    manager = OffloadManager(400, 64, eviction_policy=policy)
    found = total = 0
    for second in range(1500):
        run_request(manager, 10**6 + 8 * second, 8, 10, float(second))
        if second % 3 == 0:
            run_request(manager, 4 * second, 4, 600, second + 0.5)
            if second > 60:
                again = keys(4 * (second - 60), 4)
                if second > 900:
                    found, total = found + sum(held(manager, again)), total + 4
                run_request(manager, 4 * (second - 60), 4, 10, second + 0.7)
    return found, total


def test_it_keeps_blocks_of_the_kind_that_is_used_again() -> None:
    found_by_lru, total = converse("lru")
    found, _ = converse("hazard")
    assert found_by_lru < total // 10
    assert found > total * 9 // 10


def test_conversations_of_which_any_goes_on_are_found_as_by_lru() -> None:
    trace = sample_trace(1)
    num_blocks = count_blocks(trace)
    setup = Setup(num_blocks // 20, num_blocks * 2 // 5)
    lru, hazard = (Replay(replace(setup, policy=name)).run(replayed(trace)).hit_percent for name in ("lru", "hazard"))
    assert hazard > lru - 0.5


def test_uses_that_the_device_serves_do_not_keep_blocks() -> None:
    rates = Rates()
    classes, at_once, later = np.repeat([0, 1], 500), np.full(500, 6), np.full(500, 12)
    enter(rates, classes, np.concatenate((at_once, later)))
    # One class is used again early, while the device has its blocks, the other one late.
    use(rates, classes[:500], at_once, on_device=True)
    use(rates, classes[500:], later)
    rates.refresh()
    assert index(rates, 1, 1.0) > 2 * index(rates, 0, 1.0)


def test_blocks_in_front_of_others_are_worth_as_much_as_these() -> None:
    rates = Rates()
    classes, ages = np.repeat([0, 4, 8], 500), np.full(1500, 6)
    enter(rates, classes, ages)
    for number, num_uses in ((0, 300), (4, 450), (8, 200)):
        use(rates, classes[classes == number][:num_uses], ages[:num_uses])
    rates.refresh()
    # Blocks with more hits come first in prompts, and those used later are at least as far in front.
    values = rates.orders[1][:12:4]
    assert (np.diff(values, axis=0) >= 0).all()
    assert (np.diff(values, axis=1) <= 0).all()
    assert values[0, 0] < values[1, 0] == values[2, 0]


def test_index_of_a_constant_rate_is_that_rate_at_every_age() -> None:
    rates, rng = Rates(), np.random.default_rng(3)
    rate = 0.01
    lives = rng.exponential(1 / rate, 20_000)
    ages = np.searchsorted(2.0 ** (np.arange(23) / 2), lives, "right")
    classes = np.full(len(lives), 5)
    enter(rates, classes, ages)
    use(rates, classes, ages)
    rates.refresh()
    assert rates.is_known
    for age_s in (0.5, 3.0, 20.0, 100.0):
        assert index(rates, 5, age_s) == pytest.approx(rate, rel=0.25), age_s
    # Nothing is known of the others, so that they are like all.
    assert index(rates, 6, 20.0) == pytest.approx(index(rates, UNKNOWN, 20.0), rel=0.25)


def test_index_before_the_usual_time_of_the_next_use_is_constant() -> None:
    rates = Rates()
    classes = np.zeros(1000, dtype=np.int64)
    at_a_minute = np.full(1000, 12)
    enter(rates, classes, at_a_minute)
    use(rates, classes[:500], at_a_minute[:500])
    rates.refresh()
    early, late, after = (index(rates, 0, age_s) for age_s in (1.0, 50.0, 500.0))
    assert early == late > after


@pytest.mark.parametrize(("num_held", "is_better"), [(620, False), (500, True)])
def test_index_is_better_only_where_the_order_of_use_loses(num_held: int, is_better: bool) -> None:
    used, rates, comparison = UsedKeys(4000, sample_bits=0), Rates(), Comparison()
    for now_s in range(3000):
        # A loop over 300 keys, with as many that never come again: by use, keys are held for half of `num_held`.
        names = [now_s % 300, 1000 + now_s]
        hashes = hash_keys([name.to_bytes(9, "big") for name in names])
        used.record_uses(hashes, float(now_s), rates)
        used.record_output(hashes, 1, rates)
        used.sweep(float(now_s), rates)
        if rates.count_request():
            known = used.by_age(float(now_s))
            comparison.refresh(rates, used.take_hits(), known, float(num_held))
            assert is_better or not comparison.is_better, now_s
    assert comparison.is_better == is_better


@pytest.mark.parametrize("seed", range(5))
def test_used_keys_are_those_of_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 64
    used, rates = UsedKeys(capacity), Rates()
    model: OrderedDict[int, list[int]] = OrderedDict()
    for step in range(400):
        names = rng.sample(range(200), rng.randint(1, 12))
        hashes = hash_keys([name.to_bytes(9, "big") for name in names])
        used.record_uses(hashes, float(step), rates)
        # Of one request, the keys that were known are older than the new ones, and those with higher hashes are older.
        known = set(model)
        in_order = [name for _, name in sorted(zip(hashes.tolist(), names, strict=True), reverse=True)]
        for name in sorted(in_order, key=lambda name: name not in known):
            model[name] = [model.pop(name)[0] + 1 if name in known else 0, step]
        while len(model) > capacity:
            model.popitem(last=False)
        if rng.random() < 0.2:
            used.sweep(float(step), rates)
        if rng.random() < 0.01:
            used.reset()
            model.clear()
        everything = hash_keys([name.to_bytes(9, "big") for name in range(200)])
        numbers = used.find(everything)
        for name, number in enumerate(numbers.tolist()):
            assert (number >= 0) == (name in model)
            if number >= 0:
                assert [int(used.records["num_hits"][number]), used.records["last_s"][number]] == model[name]


def test_no_more_blocks_are_used_again_than_have_reached_an_age() -> None:
    rng = random.Random(8)
    used, rates = UsedKeys(2000), Rates()
    now_s = 0.0
    for _ in range(500):
        now_s += rng.expovariate(0.2)
        hashes = hash_keys([rng.randrange(3000).to_bytes(9, "big") for _ in range(20)])
        used.record_uses(hashes, now_s, rates)
        used.record_output(hashes, rng.randrange(4), rates)
        used.sweep(now_s, rates)
        assert (rates.counts[HITS] <= rates.counts[ENTERED] + 1e-9).all()
        assert (np.diff(rates.counts[ENTERED], axis=1) <= 1e-9).all()
    assert rates.counts[HITS].sum() > 0
    assert rates.counts[ENTERED].shape == (NUM_CLASSES, NUM_AGES)


def test_answers_that_end_after_old_counts_lost_weight_take_back_what_is_left() -> None:
    used, rates = UsedKeys(10_000), Rates()
    requests = [hash_keys([(number * 100 + i).to_bytes(9, "big") for i in range(100)]) for number in range(50)]
    for hashes in requests:
        used.record_uses(hashes, 0.0, rates)
    num_sampled = rates.counts[ENTERED].sum()
    assert num_sampled > 0
    for _ in range(1000):
        if rates.count_request():
            rates.refresh()
    for hashes in requests:
        used.record_output(hashes, 1, rates)
    assert (rates.counts[ENTERED] >= 0).all()
    assert (rates.counts[ENTERED][0, 0], rates.counts[ENTERED][1, 0]) == (0, num_sampled / 4)


class PlainKeys:
    """Used keys one by one, without a limit: [time of use, hits, output, bucket, weight of the use]."""

    def __init__(self) -> None:
        self.keys: dict[int, list[float]] = {}
        self.entered, self.uses, self.hits = np.zeros((3, NUM_CLASSES, NUM_AGES))

    def class_of(self, key: int) -> int:
        _, num_hits, output, _, _ = self.keys[key]
        return 4 * sum(num_hits >= bound for bound in (1, 2, 4)) + int(output)

    def count_age(self, key: int, now_s: float) -> int:
        one = self.keys[key]
        before = int(one[3])
        one[3] = max(before, sum(now_s - one[0] >= 2 ** (number / 2) for number in range(23)))
        self.entered[self.class_of(key), before + 1 : int(one[3]) + 1] += 1
        return int(one[3])

    def use(self, key: int, now_s: float, on_device: bool) -> None:
        if key in self.keys:
            age = self.count_age(key, now_s)
            self.uses[self.class_of(key), age] += 1
            self.hits[self.class_of(key), age] += not on_device
            one = self.keys[key]
            self.keys[key] = [now_s, one[1] + 1, one[2], 0, 1]
        else:
            self.keys[key] = [now_s, 0, 0, 0, 1]
        self.entered[self.class_of(key), 0] += 1

    def end(self, keys: list[int], output: int) -> None:
        for key in keys:
            one = self.keys[key]
            self.entered[self.class_of(key), : int(one[3]) + 1] -= one[4]
            one[2] = output
            self.entered[self.class_of(key), : int(one[3]) + 1] += one[4]

    def decay(self) -> None:
        for counts in (self.entered, self.uses, self.hits):
            counts /= 2
        for one in self.keys.values():
            one[4] /= 2


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_classes_are_those_of_keys_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    used, rates, model = UsedKeys(2000, sample_bits=0), Rates(), PlainKeys()
    now_s = 0.0
    for step in range(1, 601):
        now_s += rng.expovariate(0.2)
        names = rng.sample(range(400), rng.randint(1, 12))
        hashes = hash_keys([name.to_bytes(9, "big") for name in names])
        num_on_device = rng.randint(0, len(names))
        used.record_uses(hashes[:num_on_device], now_s, rates, on_device=True)
        used.record_uses(hashes[num_on_device:], now_s, rates)
        for at, name in enumerate(names):
            model.use(name, now_s, at < num_on_device)
        output = rng.randrange(4)
        used.record_output(hashes, output, rates)
        model.end(names, output)
        if rng.random() < 0.1:
            used.sweep(now_s, rates)
            while used._swept:
                used.sweep(now_s, rates)
            for name in model.keys:
                model.count_age(name, now_s)
        if rates.count_request():
            rates.refresh()
        if step % 500 == 0:
            model.decay()
        assert (rates.counts[ENTERED] == model.entered).all()
        assert (rates.counts[USES] == model.uses).all()
        assert (rates.counts[HITS] == model.hits).all()
        assert used.classes(used.find(hashes)).tolist() == [model.class_of(name) for name in names]
    assert rates.is_known


def victims_one_by_one(policy: HazardPolicy, count: int) -> list[int]:
    """Return the slots that are evicted next, by the index of the oldest candidate of each class alone."""
    found: list[int] = []
    for queues in zip(*(segment.queues for segment in policy._segments), strict=True):
        waiting = [queue.peek_oldest(queue.length).tolist() for queue in queues]
        latest = -1
        while any(waiting) and len(found) < count:
            worth = {
                number: (index(policy._rates, number, policy._now_s - used_s), used_s, number != latest)
                for number, slots in enumerate(waiting)
                if slots
                for used_s in [float(policy._used_s[slots[0]])]
            }
            latest = min(worth, key=worth.__getitem__)
            found.append(waiting[latest].pop(0))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_victims_are_those_with_the_lowest_index_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(300, 64)
    table.uniform_class = None
    policy = HazardPolicy(table)
    free = list(range(300))
    # Few different values, so that classes are often worth the same.
    policy._rates.orders[1] = [[rng.randrange(4) / 4 for _ in range(NUM_AGES)] for _ in range(NUM_CLASSES + 1)]
    policy._rates.is_known = True
    policy._comparison.is_better = True
    candidates: list[int] = []
    for step in range(300):
        now_s = float(step)
        names = rng.sample(range(1000), min(rng.randint(1, 20), len(free)))
        slots = np.array([free.pop() for _ in names], dtype=np.int64)
        hashes = hash_keys([name.to_bytes(9, "big") for name in names])
        policy.record_uses(hashes, now_s, on_device=False)
        if names:
            table.hashes[slots] = hashes
            table.classes[slots] = rng.randrange(3)
            policy.admit(slots)
            candidates += slots.tolist()
        policy.record_end(hashes, slots, rng.choice([10, 100, 300, 900]), now_s)
        protected = np.array(rng.sample(candidates, min(len(candidates), rng.choice([0, 0, 3]))), dtype=np.int64)
        policy.touch(protected)
        assert len(policy) == len(candidates)
        count = rng.choice([0, 1, 5, 25, 200])
        expected = victims_one_by_one(policy, len(candidates))
        expected = [slot for slot in expected if slot not in protected.tolist()][:count]
        victims = policy.take_victims(np.zeros(count, dtype=np.uint64), NO_SLOTS, protected).tolist()
        if not len(protected):
            assert victims == expected, f"step {step}"
        assert not set(victims) & set(protected.tolist())
        assert len(victims) == len(expected)
        candidates = [slot for slot in candidates if slot not in set(victims)]
        free += victims
        assert len(policy) == len(candidates)
