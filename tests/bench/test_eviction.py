"""The replay of traces beside two independent models: two LRU queues, and all ways to keep blocks."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations

import pytest

from bench.eviction import optimum
from kvferry.app.replay.core_replay import Replay, Setup, count_blocks, full_ids, replayed
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest, sample_trace
from kvferry.core.engine_api import StoreMode


def hit_percent_of_two_queues(trace: Sequence[TraceRequest], device_blocks: int, pool_blocks: int) -> float:
    """Percent of prompt tokens found with eager stores and LRU, one request after another.

    Each queue has the block that is dropped next in front. A request's blocks become the most recent, its first one
    the most recent of all, and none of them is dropped for another.
    """
    device: OrderedDict[int, None] = OrderedDict()
    pool: OrderedDict[int, None] = OrderedDict()
    num_hit = num_prompt = 0
    for request in trace:
        ids = full_ids(request)
        loadable = ids[: (request.input_length - 1) // TRACE_BLOCK_TOKENS]
        found = next((at for at, one in enumerate(loadable) if one not in device), len(loadable))
        loaded = next((at for at, one in enumerate(loadable[found:]) if one not in pool), len(loadable) - found)
        num_hit += (found + loaded) * TRACE_BLOCK_TOKENS
        num_prompt += request.input_length

        shared = ids[:found]
        for one in shared:
            del device[one]
        num_tokens = request.input_length + request.output_length
        num_blocks = -(-num_tokens // TRACE_BLOCK_TOKENS)
        while len(device) + num_blocks > device_blocks:
            device.popitem(last=False)
        # Answers, which nothing finds again, are dropped from the most recent end like the rest.
        num_computed = num_tokens - 1 if request.output_length else num_tokens
        answer = [-1 - 1000 * num_prompt - at for at in range(num_computed // TRACE_BLOCK_TOKENS - len(ids))]
        for one in reversed([*ids, *answer]):
            # A second copy of a block that the device holds further behind is not kept.
            device.setdefault(one)

        for one in ids:
            pool.pop(one, None)
        while len(pool) + len(ids) > pool_blocks:
            pool.popitem(last=False)
        pool.update(dict.fromkeys(reversed(ids)))
    return 100 * num_hit / num_prompt


@pytest.mark.parametrize(("seed", "device", "pool"), [(1, 0.05, 0.1), (2, 0.05, 0.4), (3, 0.2, 0.1)])
def test_eager_lru_agrees_with_two_queues(seed: int, device: float, pool: float) -> None:
    trace = sample_trace(seed)
    num_blocks = count_blocks(trace)
    setup = Setup(round(device * num_blocks), round(pool * num_blocks))
    tokens = Replay(setup).run(replayed(trace))
    expected = hit_percent_of_two_queues(trace, setup.device_blocks, setup.pool_slots)
    assert tokens.hit_percent == pytest.approx(expected, abs=0.1)
    assert 0 < tokens.hit_percent < optimum(trace, setup.device_blocks + setup.pool_slots)


def test_lazy_mode_finds_more_in_a_small_pool() -> None:
    trace = sample_trace(4)
    num_blocks = count_blocks(trace)
    sizes = round(0.1 * num_blocks), round(0.1 * num_blocks)
    lazy = Replay(Setup(*sizes, mode=StoreMode.LAZY, watermark_blocks=16)).run(replayed(trace))
    assert lazy.hit_percent > Replay(Setup(*sizes)).run(replayed(trace)).hit_percent


def most_hits(trace: Sequence[Sequence[int]], num_blocks: int, kept: frozenset[int] = frozenset()) -> int:
    """Return the most blocks that can be found, trying each choice of blocks to keep after each request."""
    if not trace:
        return 0
    ids, rest = trace[0], trace[1:]
    found = next((at for at, one in enumerate(ids) if one not in kept), len(ids))
    known = sorted(kept.union(ids))
    choices = combinations(known, min(num_blocks, len(known)))
    return found + max(most_hits(rest, num_blocks, frozenset(choice)) for choice in choices)


@pytest.mark.parametrize("seed", range(20))
def test_optimum_is_what_the_best_choice_finds(seed: int) -> None:
    rng = random.Random(seed)
    trees = [[tree * 10 + depth for depth in range(3)] for tree in range(3)]
    prompts = [rng.choice(trees)[: rng.randint(1, 3)] for _ in range(6)]
    num_blocks = rng.randint(1, 3)
    # One token more than the blocks, so that the last of them counts.
    trace = [
        TraceRequest(0.0, len(ids) * TRACE_BLOCK_TOKENS + 1, 1, (*ids, 1000 + number))
        for number, ids in enumerate(prompts)
    ]
    expected = TRACE_BLOCK_TOKENS * most_hits(prompts, num_blocks)
    assert optimum(trace, num_blocks) == pytest.approx(100 * expected / sum(one.input_length for one in trace))
