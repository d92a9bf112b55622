"""Prefetches: blocks that only tiers have come into the pool before anybody asks for them, within their limits.

The toy engine compares every block that it reads with what it has to hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import RequestFilter
from kvferry.core.scheduler.prefix_query import PrefixQuery
from kvferry.core.tiers.base import TierJob, TierResetResult, TierResult
from tests.core.test_tiers import engine_with, engine_with_stored, forget, keys, request, serve, settle, use
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_tiers import TIMEOUT_S, ToyTier

WINDOW = GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 2 * BLOCK_SIZE + 1)


def ask(engine: ToyEngine, num_blocks: int, family: int = 1) -> PrefixQuery:
    """A closed query of the prompt that the engine's tiers have."""
    query = engine.offload.query_prefix(request("q", num_blocks, family=family).block_hashes)
    query.ask_tiers(engine.now_s)
    while not query.has_answers():
        engine.deliver([])
    query.close()
    return query


def prefetch(engine: ToyEngine, num_blocks: int, *names: str) -> int | None:
    return engine.offload.tiers.prefetches.begin(ask(engine, num_blocks), names or ("disk",), engine.now_s)


def num_in_pool(engine: ToyEngine, num_blocks: int) -> int:
    return ask(engine, num_blocks).close().pool // BLOCK_SIZE


@pytest.mark.parametrize("specs", [None, (GroupSpec(BLOCK_SIZE, 64), WINDOW)])
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_prefetched_prompt_is_a_hit_in_the_pool(specs: tuple[GroupSpec, ...] | None, blocks_per_slot: int) -> None:
    options = {} if specs is None else {"specs": specs, "null_block": 0}
    engine = engine_with_stored(blocks=6, num_slots=128, blocks_per_slot=blocks_per_slot, **options)
    assert prefetch(engine, 6)
    settle(engine)
    assert num_in_pool(engine, 6) == 6
    found = serve(engine, request("later", 6))
    assert (found.host_hit, found.tier_hit) == (6 * BLOCK_SIZE, {})
    assert (use(engine).promoted, use(engine).promotions_failed) == (0, 0)
    assert use(engine).prefetched > 0
    engine.check_idle()
    assert engine.manager.counts().pinned == 0


def test_prefetch_takes_only_what_the_pool_lacks_from_the_tiers_that_are_named() -> None:
    engine = engine_with_stored("fast", "slow", blocks=6)
    serve(engine, request("part", 2))
    assert prefetch(engine, 6, "slow") == 4
    settle(engine)
    assert (use(engine, "fast").prefetched, use(engine, "slow").prefetched) == (0, 4)
    assert prefetch(engine, 6, "slow") == 0
    engine.check_idle()


class AnonymousTier(ToyTier):
    """A tier that does not store which request a block is from."""

    def poll(self) -> list[TierResult | TierResetResult]:
        return [replace(each, origins=()) if isinstance(each, TierResult) else each for each in super().poll()]


def test_prefetched_block_without_a_known_origin_matches_every_reset() -> None:
    engine = engine_with_stored(blocks=6, open_tier=AnonymousTier)
    assert prefetch(engine, 6) == 6
    settle(engine)
    assert num_in_pool(engine, 6) == 6
    engine.reset(RequestFilter(tenant="any"), ["host"])
    settle(engine)
    assert num_in_pool(engine, 6) == 0
    engine.check_idle()


def test_prefetch_of_more_than_an_eighth_of_the_pool_loads_nothing() -> None:
    engine = engine_with_stored(blocks=9, num_slots=64)
    first, whole = ask(engine, 6), ask(engine, 9)
    disk = engine.tiers["disk"]
    disk.due = lambda number: False
    assert engine.offload.tiers.prefetches.begin(whole, ["disk"], engine.now_s) is None
    assert engine.offload.tiers.prefetches.begin(first, ["disk"], engine.now_s) == 6
    # What is being loaded is not loaded twice.
    assert engine.offload.tiers.prefetches.begin(first, ["disk"], engine.now_s) == 0
    assert engine.offload.tiers.prefetches.begin(whole, ["disk"], engine.now_s) is None
    disk.due = lambda number: True
    settle(engine)
    assert prefetch(engine, 9) == 3
    settle(engine)
    assert num_in_pool(engine, 9) == 9
    engine.check_idle()


def test_prefetches_at_once_load_all_of_their_blocks_or_none() -> None:
    engine = engine_with_stored("fast", "slow", blocks=6)
    serve(engine, request("other", 5, family=2))
    forget(engine)
    for key in keys(6, first=3):
        del engine.tiers["fast"].blocks[key]
    first, second = ask(engine, 6), ask(engine, 5, family=2)
    prefetches, numbers = engine.offload.tiers.prefetches, list[int | None]()
    load = engine.tiers["fast"].load

    def load_between(job: TierJob) -> None:
        load(job)
        if not numbers:
            numbers.append(prefetches.begin(second, ["slow"], engine.now_s))

    engine.tiers["fast"].load = load_between
    assert prefetches.begin(first, ["fast", "slow"], engine.now_s) == 6
    assert numbers == [None]
    settle(engine)
    assert prefetches.begin(second, ["slow"], engine.now_s) == 5
    settle(engine)
    engine.check_idle()


def test_prefetch_when_the_tier_does_not_answer_ends_with_the_jobs_limit() -> None:
    engine = engine_with_stored(blocks=6)
    query = ask(engine, 6)
    engine.tiers["disk"].due = lambda number: False
    assert engine.offload.tiers.prefetches.begin(query, ["disk"], engine.now_s) == 6
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    assert (use(engine).prefetched, use(engine).promotions_failed, use(engine).timed_out) == (0, 6, 1)
    engine.tiers["disk"].due = lambda number: True
    assert prefetch(engine, 6) == 6
    settle(engine)
    assert num_in_pool(engine, 6) == 6
    engine.check_idle()


@pytest.mark.parametrize("match", [None, RequestFilter(request="r")])
def test_prefetched_blocks_that_a_reset_drops_meanwhile_stay_away(match: RequestFilter | None) -> None:
    engine = engine_with_stored(blocks=6)
    assert prefetch(engine, 6) == 6
    engine.reset(match)
    settle(engine)
    assert use(engine).prefetched == 0
    assert num_in_pool(engine, 6) == 0
    engine.check_idle()


def test_prefetch_when_the_pool_has_no_space_loads_fewer_blocks() -> None:
    engine = engine_with("disk", num_slots=16)
    serve(engine, request("r", 2))
    forget(engine)
    query = ask(engine, 2)
    serve(engine, request("other", 15, family=2))
    held = engine.offload.query_prefix(request("other", 15, family=2).block_hashes).close().pool // BLOCK_SIZE
    pin = engine.manager.pin(engine.manager.lookup(request_keys(engine, held)))
    assert engine.offload.tiers.prefetches.begin(query, ["disk"], engine.now_s) == 16 - held
    settle(engine)
    engine.manager.unpin(pin)
    engine.check_idle()


def request_keys(engine: ToyEngine, num_blocks: int) -> list[bytes]:
    return [block_hash + b"\0" for block_hash in request("other", 15, family=2).block_hashes[:num_blocks]]


def test_prefetch_after_an_unexpected_error_leaves_nothing_behind() -> None:
    engine = engine_with_stored(blocks=6)
    assert prefetch(engine, 6) == 6
    engine.discard()
    settle(engine)
    assert use(engine).prefetched == 0
    assert prefetch(engine, 6) == 6
    settle(engine)
    assert num_in_pool(engine, 6) == 6
    engine.check_idle()


def test_prefetch_of_a_repeated_hash_reserves_one_slot() -> None:
    engine = engine_with_stored(blocks=6)
    (first,) = request("q", 1).block_hashes
    query = engine.offload.query_prefix([first] * 6)
    query.ask_tiers(engine.now_s)
    while not query.has_answers():
        engine.deliver([])
    query.close()
    assert engine.offload.tiers.prefetches.begin(query, ["disk"], engine.now_s) == 1
    assert engine.manager.counts().free == engine.manager.num_slots - 1
    settle(engine)
    assert use(engine).prefetched == 1
    engine.check_idle()


def test_prefetch_is_possible_again_after_an_error_at_the_end_of_one() -> None:
    engine = engine_with_stored(blocks=6)
    assert prefetch(engine, 6) == 6

    def fail(event: object) -> None:
        raise RuntimeError("a sink failed, says the test")

    engine.manager.sink = fail
    with pytest.raises(RuntimeError, match="a sink failed"):
        settle(engine)
    engine.manager.sink = None
    engine.discard()
    settle(engine)
    assert prefetch(engine, 6) == 6
    settle(engine)
    assert num_in_pool(engine, 6) == 6


def test_prefetch_in_lazy_mode_reads_no_block_of_the_engine() -> None:
    engine = engine_with_stored(blocks=6, store_mode=StoreMode.LAZY, num_slots=64, num_blocks=200, watermark_blocks=200)
    for family in range(2, 8):
        serve(engine, request(f"other{family}", 15, family=family))
    query = ask(engine, 6)
    assert not engine.manager.counts().free

    def changed() -> None:
        raise RuntimeError("the engine's thread changed it, says the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.device, "free_blocks", changed)
        assert engine.offload.tiers.prefetches.begin(query, ["disk"], engine.now_s) == 6
    settle(engine)
    engine.check_idle()
