"""The curve of reuse distances, beside brute-force LRU caches and all keys, and its memory."""

from __future__ import annotations

import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.curve import ReuseCurve
from kvferry.core.pool.events import RequestBlocks
from tests.harness.effort import examples
from tests.harness.tier_slots import ORIGIN

TOKENS = 16
SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 60, 100)


def request(keys: Sequence[bytes], num_storable: int | None = None) -> RequestBlocks:
    """A request whose prompt has a token more than these blocks."""
    num_storable = len(keys) if num_storable is None else num_storable
    return RequestBlocks(1.0, 1, ORIGIN, list(keys), len(keys) * TOKENS + 1, 1, num_storable, 0)


def chain(conversation: int, length: int) -> list[bytes]:
    """The keys of a conversation; two of three share their first two blocks."""
    first = 0 if conversation % 3 else conversation
    return [b"%d/%d" % (first if number < 2 else conversation, number) for number in range(length)]


def lru_units(requests: Sequence[RequestBlocks], size: int) -> int:
    """Units that an LRU cache finds; those of a prompt's end are dropped first."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for one in requests:
        hittable = one.keys[: (one.num_prompt_tokens - 1) // TOKENS]
        hits = next((i for i, key in enumerate(hittable) if key not in cache), len(hittable))
        found += hits
        for key in reversed(one.keys[: max(one.num_storable, hits)]):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > size:
            cache.popitem(last=False)
    return found


def units(curve: ReuseCurve, rate: float) -> float:
    return rate * curve.prompt_tokens / TOKENS


@settings(max_examples=examples(300), deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=60),
    max_storable=st.integers(0, 9),
    per_call=st.integers(1, 5),
    max_keys=st.sampled_from([240, 1 << 12]),
)
def test_curve_of_all_keys_equals_lru_caches_of_each_size(
    turns: list[tuple[int, int]], max_storable: int, per_call: int, max_keys: int
) -> None:
    requests = [request(chain(one, length), min(max_storable, length)) for one, length in turns]
    # The smaller one numbers its stamps anew, and all of its keys fit.
    curve = ReuseCurve(TOKENS, max_keys)
    curve.near_units = 120
    for start in range(0, len(requests), per_call):
        curve.record(requests[start : start + per_call])
    assert curve.sampled_share == 1
    assert curve.prompt_tokens == sum(one.num_prompt_tokens for one in requests)
    for size in SIZES:
        assert units(curve, curve.hit_rate(size)) == pytest.approx(lru_units(requests, size)), size
    assert units(curve, curve.ceiling()) == pytest.approx(lru_units(requests, 10_000))


def conversations(seed: int, count: int, num_live: int = 300) -> list[RequestBlocks]:
    """Turns of conversations, half of which begin with one system prompt of 20 blocks."""
    rng = random.Random(seed)
    live: list[list[bytes]] = []
    requests = []
    for number in range(count):
        if len(live) < num_live:
            live.append([b"system/%d" % i for i in range(20)] if rng.random() < 0.5 else [])
        keys = live.pop(rng.randrange(len(live)))
        keys = [*keys, *(b"%d/%d" % (number, i) for i in range(rng.randint(4, 30)))]
        requests.append(request([key.ljust(16) for key in keys]))
        if len(keys) < 150:
            live.append(keys)
    return requests


@pytest.mark.parametrize(("max_keys", "bound"), [(1 << 14, 0.01), (1 << 12, 0.03)])
def test_curve_of_a_sample_is_close_to_that_of_all_keys(max_keys: int, bound: float) -> None:
    requests = conversations(1, 3000)
    exact, sampled = ReuseCurve(TOKENS), ReuseCurve(TOKENS, max_keys)
    for curve in (exact, sampled):
        curve.near_units = 40_000
        for start in range(0, len(requests), 16):
            curve.record(requests[start : start + 16])
    assert (exact.sampled_share, sampled.sampled_share < 0.4) == (1, True)
    for size in (500, 1000, 2000, 4000, 8000, 16_000, 32_000):
        assert sampled.hit_rate(size) == pytest.approx(exact.hit_rate(size), abs=bound), size
    assert sampled.ceiling() == pytest.approx(exact.ceiling(), abs=bound)


def test_curve_of_a_small_cache_stays_exact_however_many_keys_pass() -> None:
    requests = conversations(2, 6000, num_live=30)
    exact, bounded = ReuseCurve(TOKENS), ReuseCurve(TOKENS, 1 << 14)
    for curve in (exact, bounded):
        # A quarter of the keys that the bounded one remembers.
        curve.near_units = 4000
        for start in range(0, len(requests), 16):
            curve.record(requests[start : start + 16])
    assert bounded.sampled_share == 1
    for size in (100, 500, 1000, 2000, 4000):
        assert bounded.hit_rate(size) == pytest.approx(exact.hit_rate(size), abs=0.002), size
    # Those beyond are a sample, whose hits are few here.
    assert bounded.ceiling() == pytest.approx(exact.ceiling(), abs=0.02)


def test_reuse_beyond_the_sizes_of_interest_counts_in_the_ceiling() -> None:
    curve, rng = ReuseCurve(TOKENS, 1 << 12), random.Random(3)
    curve.near_units = 100
    prompts = [[b"%06d/%d" % (number, i) for i in range(10)] for number in range(1000)]
    for number in (*range(1000), *(rng.randrange(1000) for _ in range(3000))):
        curve.record([request(prompts[number])])
    # Each prompt but the first 1,000 was seen before, and hardly one within 100 blocks.
    assert curve.ceiling() == pytest.approx(3000 * 10 * TOKENS / curve.prompt_tokens, abs=0.02)
    assert curve.hit_rate(100) < 0.03
    assert curve.hit_rate(10_000) == pytest.approx(curve.ceiling(), abs=0.02)


def test_curve_when_cleared_forgets_uses_and_when_restarted_counts() -> None:
    curve = ReuseCurve(TOKENS, 1 << 12)
    curve.record([request(chain(1, 8))] * 2)
    assert units(curve, curve.hit_rate(8)) == 8
    curve.clear()
    curve.record([request(chain(1, 8))])
    assert units(curve, curve.hit_rate(8)) == 8
    curve.restart()
    assert (curve.prompt_tokens, curve.hit_rate(8), curve.ceiling()) == (0, 0, 0)
    curve.record([request(chain(1, 8))])
    assert units(curve, curve.ceiling()) == 8


def test_a_prompt_shorter_than_a_unit_counts_its_tokens() -> None:
    curve = ReuseCurve(TOKENS)
    curve.record([RequestBlocks(1.0, 1, ORIGIN, [], 5, 1, 0, 0)] * 2)
    assert (curve.prompt_tokens, curve.ceiling()) == (10, 0)


def test_a_request_of_more_units_than_are_remembered_counts_its_beginning() -> None:
    curve = ReuseCurve(TOKENS, 1 << 10)
    keys = [b"%06d" % number for number in range(3000)]
    for _ in range(3):
        curve.record([request(keys)])
    assert curve.prompt_tokens == 3 * (3000 * TOKENS + 1)
    assert 0 < curve.ceiling() <= 2 / 3


def test_memory_is_bounded_however_many_keys_pass() -> None:
    curve, rng = ReuseCurve(TOKENS), random.Random(4)
    curve.near_units = 10_000_000
    curve.record([request([b"x"])])
    tracemalloc.start()
    try:
        for _ in range(400):
            curve.record([request([rng.randbytes(33) for _ in range(1000)])])
        assert curve.sampled_share < 0.4
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20, peak
