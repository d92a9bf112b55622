"""Tiers that receive blocks before their eviction: which they get, when, and that evictions do not change for it."""

from __future__ import annotations

import random

import pytest

from kvferry.core.keys import RequestFilter
from kvferry.core.policy import Level, Override, Priority, TierWait, TierWaitMode
from kvferry.core.pool.events import CacheEvent, EvictionBatch
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.resize import Todo
from kvferry.core.tiers.base import HOST, CascadeWhen
from tests.core.test_tiers import engine_with, forget, keys, request, serve, serve_on, settle, use
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine

NUM_SLOTS = 64
BLOCKS = 4
"""Blocks of each prompt: as many as are written ahead at least."""
NUM_FULL = NUM_SLOTS // BLOCKS
"""Prompts that fill the pool."""


def evicting_engine(*names: str, **options) -> ToyEngine:
    engine = engine_with(*names, num_slots=NUM_SLOTS, **options)
    for name in engine.tiers:
        engine.offload.tiers.cascade_when(name, CascadeWhen.EVICT)
    return engine


def fill(engine: ToyEngine, first: int, end: int) -> None:
    """Serve prompts of these families, each of which the device forgets."""
    for family in range(first, end):
        serve(engine, request(f"r{family}", BLOCKS, family=family))
        engine.device.forget_all()


def families_in(engine: ToyEngine, name: str = "disk") -> set[int]:
    """The families of which a tier has all blocks."""
    blocks = engine.tiers[name].blocks
    return {family for family in range(1, 40) if all(key in blocks for key in keys(BLOCKS, family=family))}


def test_blocks_are_given_before_their_eviction_and_come_back() -> None:
    engine = evicting_engine()
    fill(engine, 1, NUM_FULL)
    assert engine.tiers["disk"].blocks == {}, "nothing is evicted yet"
    fill(engine, NUM_FULL, NUM_FULL + 5)
    assert families_in(engine) == {1, 2, 3, 4, 5, 6}, "four were evicted, twice as many blocks as at once are next"
    assert use(engine).cascades_dropped == 0
    engine.set_override(Override("again", {"tier_wait": TierWait(TierWaitMode.WAIT_COMPLETE)}, 1e9))
    assert serve(engine, request("again", BLOCKS, family=1)).tier_hit == {"disk": BLOCKS * BLOCK_SIZE}
    assert not engine.tiers["disk"].wrongs


def test_blocks_that_are_used_again_and_again_are_not_given() -> None:
    engine = evicting_engine()
    for number in range(40):
        serve(engine, request(f"hot{number}", BLOCKS, family=1))
        serve(engine, request(f"cold{number}", BLOCKS, family=2 + number))
        engine.device.forget_all()
    assert 1 not in families_in(engine)
    assert use(engine).cascaded < (40 - NUM_FULL + 4) * BLOCKS, "each cold block once"


def test_blocks_that_the_tier_holds_are_not_given_again() -> None:
    engine = evicting_engine()
    fill(engine, 1, NUM_FULL + 3)
    serve(engine, request("again", BLOCKS, family=1))
    given = use(engine).cascaded
    engine.device.forget_all()
    # Family 1 has come from the tier; its second eviction costs nothing.
    fill(engine, 40, 40 + NUM_FULL)
    assert use(engine).cascaded - given == NUM_FULL * BLOCKS


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_evictions_are_those_of_a_pool_without_tiers(policy: str) -> None:
    def evictions(*names: str) -> list[list[bytes]]:
        found: list[list[bytes]] = []

        def sink(event: CacheEvent) -> None:
            if isinstance(event, EvictionBatch):
                found.append(list(event.rows.keys))

        engine = ToyEngine(24, 64, tiers=names, eviction_policy=policy, sink=sink)
        for name in names:
            engine.offload.tiers.cascade_when(name, CascadeWhen.EVICT)
            # Pool and tier are compared by what the pool evicts: nothing comes from the tier.
            engine.tiers[name].loses = lambda key: True
        engine.step_s = 0.01
        draws = random.Random(1)
        for number in range(60):
            family = min(draws.randint(1, 12), draws.randint(1, 12))
            priority = draws.choice([Priority.LOW, Priority.NORMAL])
            engine.set_override(Override(f"r{number}", {"priority": priority}, 1e9))
            serve_on(engine, request(f"r{number}", draws.randint(1, BLOCKS), family=family))
            settle(engine, 2)
            engine.device.forget_all()
            for name in names:
                # Nothing comes back.
                engine.tiers[name].blocks.clear()
        return found

    assert evictions("disk") == evictions()


def test_block_that_is_used_while_it_is_written_is_not_the_next_victim() -> None:
    engine = evicting_engine()
    tier = engine.tiers["disk"]
    fill(engine, 1, NUM_FULL)
    tier.latency_s = 2.0
    serve_on(engine, request("last", BLOCKS, family=NUM_FULL))
    assert tier.touched_slots
    engine.device.forget_all()
    tier.latency_s = 0.0
    assert serve(engine, request("hit", BLOCKS, family=1)).host_hit == BLOCKS * BLOCK_SIZE
    engine.now_s += 3.0
    settle(engine)
    engine.device.forget_all()
    fill(engine, NUM_FULL + 1, NUM_FULL + 3)
    assert serve(engine, request("hit again", BLOCKS, family=1)).host_hit == BLOCKS * BLOCK_SIZE


def test_slow_tier_holds_a_bounded_number_and_the_rest_is_lost() -> None:
    engine = evicting_engine()
    tier = engine.tiers["disk"]
    fill(engine, 1, NUM_FULL + 1)
    tier.latency_s = 5.0
    for family in range(NUM_FULL + 1, 4 * NUM_FULL):
        serve_on(engine, request(f"r{family}", BLOCKS, family=family))
        assert engine.offload.snapshot().pool.pinned <= NUM_SLOTS // 4
    dropped = use(engine).cascades_dropped
    assert dropped > 0
    engine.now_s += 6.0
    settle(engine)
    num_evicted = engine.offload.snapshot().evictions.by_reason["capacity"]
    num_given = len(tier.blocks)
    assert num_evicted - num_given <= dropped <= num_evicted
    assert engine.offload.snapshot().pool.pinned == 0


@pytest.mark.parametrize("fault", ["dead", "store", "on_new_request"])
def test_tier_in_trouble_costs_hits_only_and_each_block_is_tried_once(fault: str) -> None:
    engine = evicting_engine()
    tier = engine.tiers["disk"]
    tier.dead = fault == "dead"
    tier.raises = {fault} - {"dead"}
    for family in range(1, 3 * NUM_FULL):
        serve_on(engine, request(f"r{family}", BLOCKS, family=family))
    assert use(engine).cascaded + use(engine).cascades_dropped <= 3 * NUM_SLOTS
    assert engine.offload.snapshot().pool.pinned <= NUM_SLOTS // 4


def test_policy_says_which_tiers_receive_blocks_and_what_goes_first() -> None:
    engine = evicting_engine("a", "b")
    engine.set_override(Override("r1", {"tiers": ("a",)}, 1e9))
    engine.set_override(Override("r2", {"tiers": ()}, 1e9))
    engine.set_override(Override("r5", {"priority": Priority.LOW}, 1e9))
    fill(engine, 1, NUM_FULL + 1)
    assert (families_in(engine, "a"), families_in(engine, "b")) == ({5}, {5})
    fill(engine, NUM_FULL + 1, NUM_FULL + 4)
    assert (families_in(engine, "a"), families_in(engine, "b")) == ({1, 3, 4, 5}, {3, 4, 5})


def test_blocks_already_in_the_pool_are_given_for_request_level() -> None:
    engine = evicting_engine()
    engine.set_override(Override("r1", {"tiers": ()}, 1e9))
    engine.set_override(Override("again", {"level": Level.REQUEST}, 1e9))
    fill(engine, 1, 2)
    serve(engine, request("again", BLOCKS, family=1))
    fill(engine, 2, NUM_FULL + 3)
    assert 1 in families_in(engine)


@pytest.mark.parametrize("match", [None, RequestFilter(request="r1")])
@pytest.mark.parametrize("places", [["disk"], [HOST, "disk"]])
def test_blocks_stored_before_a_reset_of_the_tier_are_not_given(match: RequestFilter | None, places: list[str]) -> None:
    engine = evicting_engine()
    fill(engine, 1, 4)
    engine.reset(match, places=places)
    settle(engine)
    fill(engine, 4, 4 + 2 * NUM_FULL)
    assert families_in(engine) & {1, 2, 3} == set()
    assert 4 in families_in(engine)


def test_dropped_block_that_is_being_written_is_gone() -> None:
    engine = evicting_engine()
    tier = engine.tiers["disk"]
    fill(engine, 1, NUM_FULL)
    tier.latency_s = 2.0
    serve_on(engine, request("last", BLOCKS, family=NUM_FULL))
    key = keys(BLOCKS)[0]
    slot = engine.manager.lookup_each([key])[0]
    assert slot in tier.touched_slots
    engine.offload.resets.drop_block(key, engine.now_s)
    engine.now_s += 3.0
    settle(engine)
    assert key not in tier.blocks
    engine.check()


def test_tier_when_detached_while_blocks_are_written_frees_their_slots() -> None:
    engine = evicting_engine()
    tier = engine.tiers["disk"]
    fill(engine, 1, NUM_FULL)
    tier.latency_s = 5.0
    serve_on(engine, request("last", BLOCKS, family=NUM_FULL))
    assert engine.offload.snapshot().pool.pinned > 0
    assert engine.offload.tiers.detach("disk", engine.now_s)
    engine.tiers.pop("disk")
    assert engine.offload.snapshot().pool.pinned == 0
    fill(engine, NUM_FULL + 1, NUM_FULL + 4)
    engine.check()


def test_slots_that_leave_in_a_resize_are_not_given() -> None:
    engine = evicting_engine()
    fill(engine, 1, NUM_FULL)
    tier = engine.tiers["disk"]
    tier.latency_s = 5.0
    engine.resize.request(NUM_SLOTS // 2)
    assert engine.resize.step(engine.now_s) is Todo.AGAIN
    serve_on(engine, request("last", BLOCKS, family=NUM_FULL))
    assert all(slot < NUM_SLOTS // 2 for slot in tier.touched_slots)


def test_pool_that_forgot_everything_goes_on() -> None:
    engine = evicting_engine()
    fill(engine, 1, NUM_FULL + 2)
    forget(engine)
    fill(engine, 20, 20 + NUM_FULL + 3)
    assert {20, 21, 22} <= families_in(engine)
