"""Shadow caches: plain models without sampling, full replays of a trace, and samples beside everything."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agents import agent_trace
from bench.eviction import Replay, Setup, count_blocks, replayed
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, request_blocks, sample_trace
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import RequestBlocks
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.index import hash_keys
from kvferry.core.shadow.caches import (
    MAX_KEYS,
    POLICIES,
    Configuration,
    Estimate,
    FrequentKeys,
    ShadowCaches,
    ShadowSetup,
)
from tests.harness.effort import examples

TOKENS = 16
MAX_TURNS = 4
MIB = 1 << 20


def estimate(caches: ShadowCaches, policy: str, mode: StoreMode, num_slots: int) -> Estimate:
    return caches.estimates()[caches.configurations.index(Configuration(policy, mode, num_slots))]


def request(keys: Sequence[bytes], time_s: float = 0.0, num_output_tokens: int = 1) -> RequestBlocks:
    """A request whose prompt has a token more than these blocks, all of which can be hits."""
    return RequestBlocks(time_s, list(keys), len(keys) * TOKENS + 1, num_output_tokens, len(keys), 0)


def chain(conversation: int, length: int) -> list[bytes]:
    """The keys of a conversation; two of three share their first block."""
    first = 0 if conversation % 3 else conversation
    return [b"%d/0" % first, *(b"%d/%d" % (conversation, number) for number in range(1, length))][:length]


def found_by_queues(requests: Sequence[Sequence[bytes]], device_slots: int, pool_slots: int, lazy: bool) -> int:
    """Blocks that a device and a pool find, with LRU; the block that is dropped next is in front of each queue."""
    device: OrderedDict[bytes, None] = OrderedDict()
    pool: OrderedDict[bytes, None] = OrderedDict()
    copies: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for keys in requests:
        on_device = next((i for i, key in enumerate(keys) if key not in device), len(keys))
        held = next((i for i, key in enumerate(keys) if i >= on_device and key not in pool | copies), len(keys))
        found += held
        for key in reversed(keys):
            device[key] = None
            device.move_to_end(key)
        left = [device.popitem(last=False)[0] for _ in range(max(len(device) - device_slots, 0))]
        if lazy:
            for key in reversed(keys[:held]):
                if key in pool or key in copies:
                    pool.pop(key, None)
                    copies[key] = None
                    copies.move_to_end(key)
            for key in left:
                if key not in pool and key not in copies and len(pool) + len(copies) == pool_slots:
                    (copies or pool).popitem(last=False)
                copies.pop(key, None)
                pool[key] = None
                pool.move_to_end(key)
        else:
            for key in reversed(keys):
                pool[key] = None
                pool.move_to_end(key)
            while len(pool) > pool_slots:
                pool.popitem(last=False)
    return found


def test_every_eviction_policy_is_simulated() -> None:
    assert sorted(POLICIES) == sorted(EVICTION_POLICIES), "`auto` and the curves would leave one out"


@settings(max_examples=examples(200), deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=80),
    device_slots=st.integers(6, 20),
    pool_slots=st.sampled_from([24, 40]),
    lazy=st.booleans(),
)
def test_lru_without_sampling_is_that_of_plain_queues(
    turns: list[tuple[int, int]], device_slots: int, pool_slots: int, lazy: bool
) -> None:
    requests = [chain(conversation, length) for conversation, length in turns]
    # The whole trace fits into the numbers, so that no key is forgotten.
    caches = ShadowCaches(ShadowSetup(pool_slots, device_slots, TOKENS))
    for keys in requests:
        caches.record(request(keys))
    mode = StoreMode.LAZY if lazy else StoreMode.EAGER
    num_prompt_tokens = sum(len(keys) * TOKENS + 1 for keys in requests)
    for num_slots in (pool_slots // 4, pool_slots, 2 * pool_slots):
        found = found_by_queues(requests, device_slots, num_slots, lazy)
        rate = estimate(caches, "lru", mode, num_slots).hit_rate
        assert rate == pytest.approx(found * TOKENS / num_prompt_tokens), num_slots


@pytest.mark.parametrize(
    ("policy", "mode", "bound"),
    [
        ("lru", StoreMode.EAGER, 0.1),
        ("arc", StoreMode.EAGER, 0.5),
        ("lru", StoreMode.LAZY, 1.5),
        ("hazard", StoreMode.LAZY, 1.5),
    ],
)
def test_caches_are_close_to_full_replays_of_a_trace(policy: str, mode: StoreMode, bound: float) -> None:
    trace = sample_trace(1)
    num_blocks = count_blocks(trace)
    # As high as the most blocks that a step takes, since these are stored ahead in any case.
    device_slots, pool_slots, watermark = num_blocks // 6, num_blocks // 6, 96
    caches = ShadowCaches(ShadowSetup(pool_slots, device_slots, TRACE_BLOCK_TOKENS, watermark))
    for one in request_blocks(trace):
        caches.record(one)
    full = Replay(Setup(device_slots, pool_slots, policy, mode, watermark)).run(replayed(trace)).hit_percent
    assert 100 * estimate(caches, policy, mode, pool_slots).hit_rate == pytest.approx(full, abs=bound)


def test_hazard_after_few_requests_does_not_evict_otherwise_than_lru() -> None:
    # Nothing is better than the order of use here, and two refreshes of the index happen to look otherwise.
    caches = ShadowCaches(ShadowSetup(121, 121, TRACE_BLOCK_TOKENS, 64))
    for one in request_blocks(sample_trace(36)):
        caches.record(one)
    for mode, num_slots in {one[1:] for one in caches.configurations}:
        hazard, lru = (estimate(caches, policy, mode, num_slots) for policy in ("hazard", "lru"))
        assert hazard.hit_rate == lru.hit_rate


def conversations(seed: int, count: int) -> list[RequestBlocks]:
    """Turns of conversations, half of which begin with one system prompt of 20 blocks."""
    rng = random.Random(seed)
    live: list[list[bytes]] = []
    requests = []
    for number in range(count):
        if len(live) < 300:
            live.append([b"system/%d" % i for i in range(20)] if rng.random() < 0.5 else [])
        keys = live.pop(rng.randrange(len(live)))
        keys = [*keys, *(b"%d/%d" % (number, i) for i in range(rng.randint(4, 30)))]
        requests.append(request(keys, float(number), rng.choice([10, 100, 400, 900])))
        if len(keys) < 150:
            live.append(keys)
    return requests


def test_bars_of_a_sample_cover_what_all_keys_show() -> None:
    covered = total = 0
    for seed in range(2):
        requests = conversations(seed, 600)
        exact, sampled = (ShadowCaches(ShadowSetup(1000, 500, TOKENS), keys) for keys in (MAX_KEYS, 5000))
        assert exact.share == 1
        assert sampled.share < 0.5
        for one in requests:
            exact.record(one)
            sampled.record(one)
        for truth, guess in zip(exact.estimates(), sampled.estimates(), strict=True):
            covered += guess.low <= truth.hit_rate <= guess.high
            total += 1
            assert guess.hit_rate == pytest.approx(truth.hit_rate, abs=0.04)
    assert covered > total * 0.8


def test_sample_of_agents_is_close_to_all_keys() -> None:
    requests = list(request_blocks(agent_trace(1, 1000)))
    exact, sampled = (ShadowCaches(ShadowSetup(480, 240, TRACE_BLOCK_TOKENS), keys) for keys in (MAX_KEYS, 2500))
    assert sampled.share < 0.5
    for one in requests:
        exact.record(one)
        sampled.record(one)
    # The keys of a project come to occur in so many requests that they are simulated all.
    for truth, guess in zip(exact.estimates(), sampled.estimates(), strict=True):
        assert guess.hit_rate == pytest.approx(truth.hit_rate, abs=0.03)


def test_bars_of_a_few_requests_in_a_large_pool_cover_everything() -> None:
    caches = ShadowCaches(ShadowSetup(10_000_000, 1000, TOKENS))
    prompt = [b"%d" % i for i in range(40)]
    for number in range(3):
        caches.record(request(prompt, float(number)))
    # Hardly any of these keys is in the sample: the curves show nothing, and two of three prompts were hits.
    low, high = estimate(caches, "lru", StoreMode.EAGER, 10_000_000)[1:]
    assert low <= 2 / 3 <= high


def test_memory_is_bounded_however_large_the_pool_is() -> None:
    caches = ShadowCaches(ShadowSetup(100_000_000, 1_000_000, TOKENS))
    assert caches.num_bytes < 64 * MIB
    for one in conversations(1, 50):
        caches.record(one)
    assert caches.num_bytes < 64 * MIB
    assert 0 <= estimate(caches, "lru", StoreMode.EAGER, 100_000_000).hit_rate <= 1


def test_requests_when_a_day_has_passed_are_not_counted_any_more() -> None:
    caches = ShadowCaches(ShadowSetup(8, 4, TOKENS))
    for hour in (0, 1, 20, 24):
        caches.record(request([b"1"], 3600.0 * hour))
    assert (caches.since_s, caches.totals[0]) == (3600, 3 * (TOKENS + 1))


def test_more_keys_than_are_remembered_are_forgotten_in_order() -> None:
    caches = ShadowCaches(ShadowSetup(8, 4, TOKENS), max_keys=64)
    rng = random.Random(4)
    for number in range(600):
        caches.record(request(chain(rng.randrange(200), rng.randint(1, 40)), float(number)))
    sizes = caches._rows[2]
    assert (sizes >= -1e-6).all()
    for row, one in enumerate(caches.configurations):
        lists = caches._rows[0]["list"][row]
        resident = (lists == 1) | ((lists >= 2) & (lists < (4 if one.eviction_policy == "arc" else 32)))
        assert caches._records["cost"][resident].sum() <= one.num_slots * caches.share + 1e-6


def test_a_request_with_more_keys_than_numbers_is_simulated_in_part() -> None:
    caches = ShadowCaches(ShadowSetup(2, 1, TOKENS))
    for number in range(3):
        caches.record(request([b"%d" % i for i in range(100)], float(number)))
    assert caches.totals[0] == 3 * (100 * TOKENS + 1)
    assert 0 < estimate(caches, "lru", StoreMode.EAGER, 4).hit_rate < 0.1


def test_keys_that_many_requests_begin_with_are_found() -> None:
    frequent, rng = FrequentKeys(), random.Random(6)
    system = [b"system/%d" % i for i in range(60)]
    for number in range(400):
        keys = [b"%d/%d" % (number, i) for i in range(100)]
        if rng.random() < 0.3:
            keys = system + keys
        num_found = frequent.count(hash_keys([key.ljust(12) for key in keys]))
    assert frequent.count(hash_keys([key.ljust(12) for key in [*system, b"other"]])) == 60
    assert frequent.count(hash_keys([b"new/%d" % i for i in range(10)])) == 0
    assert num_found in (0, 60)
