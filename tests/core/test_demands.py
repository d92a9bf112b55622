"""Stores on demand: what only the device has, and its own prefix cache cannot use, is stored for who waits for it."""

from __future__ import annotations

import pytest

from kvferry.core.cost_model import EXPLORE_EVERY, MIN_SAMPLES, LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.policy import RequestPolicy
from kvferry.core.stats import PromptTokens
from tests.core.test_bounds import pin_all
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest
from tests.harness.toy_ledger import NoLedger
from tests.harness.toy_requests import answer, request

WINDOWED = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 9))
PROMPT_TOKENS = 5 * BLOCK_SIZE
DEMANDED = "waited for blocks that only the device had"


def engine_without_windows(num_slots: int = 64, num_blocks: int = 64, **options) -> ToyEngine:
    """A lazy engine whose device never finds a window, as vLLM's does not at most places, and so has no hits."""
    engine = ToyEngine(
        num_slots,
        num_blocks,
        store_mode=StoreMode.LAZY,
        watermark_blocks=1,
        **{"specs": WINDOWED, "cost_model": LoadOrCompute(LoadDecision.ALWAYS), **options},
    )
    engine.step_s = 0.1
    cache = engine.device.cache
    engine.device.cache = lambda group, *block: None if engine.groups[group].reach_tokens else cache(group, *block)
    return engine


def served(engine: ToyEngine, name: str) -> PromptTokens:
    return engine.offload.requests.find(name, engine.now_s).prompt_tokens


def wait_for_stores(engine: ToyEngine, name: str = "again", **fields) -> None:
    """Add the request of `answer` once more, and take the step in which the stores that it waits for begin."""
    engine.add(request(name, 5, **fields))
    engine.step()


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
@pytest.mark.parametrize("specs", [WINDOWED, WINDOWED[1:]], ids=["full and windows", "windows"])
def test_blocks_that_only_the_device_has_are_stored_and_loaded(specs, blocks_per_slot) -> None:
    engine = engine_without_windows(specs=specs, blocks_per_slot=blocks_per_slot)
    answer(engine, "first", 6)
    assert engine.offload.snapshot().store.stored == 0
    answer(engine, "again", 6)
    assert served(engine, "again").host_hit == 6 * BLOCK_SIZE
    engine.check_idle()


def test_blocks_that_left_before_those_on_the_device_are_loaded_together() -> None:
    engine = ToyEngine(64, 64, store_mode=StoreMode.LAZY, cost_model=LoadOrCompute(LoadDecision.ALWAYS))
    first = answer(engine, "first", 3)
    engine.step(copy=True)
    engine.set_mode(StoreMode.EAGER)
    answer(engine, "longer", 5)
    engine.set_mode(StoreMode.LAZY)
    engine.device.forget(engine.device.cached[0, first.block_hashes[0]])
    answer(engine, "again", 5)
    assert served(engine, "again").host_hit == PROMPT_TOKENS


def test_blocks_computed_twice_at_once_are_stored_and_loaded() -> None:
    engine = engine_without_windows()
    for name in ("first", "second"):
        engine.add(request(name, 5))
    engine.run()
    answer(engine, "again", 5)
    assert served(engine, "again").host_hit == PROMPT_TOKENS
    engine.check_idle()


def test_blocks_computed_again_after_the_device_forgot_them_are_stored_and_loaded() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    engine.device.forget_all()
    answer(engine, "second", 5)
    answer(engine, "again", 5)
    assert served(engine, "second").host_hit == 0
    assert served(engine, "again").host_hit == PROMPT_TOKENS
    engine.check_idle()


@pytest.mark.parametrize("blocks_per_slot", [1, 2, 4])
def test_slot_is_loaded_when_another_request_parts_within_it(blocks_per_slot: int) -> None:
    engine = ToyEngine(
        64,
        64,
        store_mode=StoreMode.LAZY,
        specs=WINDOWED,
        blocks_per_slot=blocks_per_slot,
        watermark_blocks=1,
        cost_model=LoadOrCompute(LoadDecision.ALWAYS),
    )
    first, cache = request("first", 8), engine.device.cache
    # The device finds no window behind the fifth block.
    engine.device.cache = lambda group, block_hash, block: (
        cache(group, block_hash, block) if group == 0 or block_hash in first.block_hashes[:5] else None
    )
    tokens = [*range(PROMPT_TOKENS), *range(900, 900 + PROMPT_TOKENS)]
    for one in (first, ToyRequest("parting", tokens, len(tokens), 1)):
        engine.add(one)
        engine.run()
        engine.check()
    assert served(engine, "parting").device_hit == PROMPT_TOKENS
    answer(engine, "again", 8)
    assert served(engine, "again").host_hit == 3 * BLOCK_SIZE
    engine.check_idle()


def test_request_waits_for_blocks_whose_store_is_in_flight() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    wait_for_stores(engine)
    (job_id,) = engine.copies.open
    engine.add(request("third", 5))
    engine.step()
    assert list(engine.copies.open) == [job_id]
    assert engine.requests["again"].state == engine.requests["third"].state == "waiting"
    engine.end_job(job_id)
    engine.run()
    assert served(engine, "again").host_hit == served(engine, "third").host_hit == PROMPT_TOKENS
    engine.check_idle()


def test_request_when_stores_take_longer_than_computing_computes() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    wait_for_stores(engine)
    while "again" in engine.requests:
        engine.step()
    (job_id,) = engine.copies.open
    engine.end_job(job_id)
    assert served(engine, "again").recomputed == PROMPT_TOKENS + 1
    engine.check_idle()


def test_request_when_demanded_stores_fail_computes() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    wait_for_stores(engine)
    for job_id in list(engine.copies.open):
        engine.end_job(job_id, error="injected")
    engine.run()
    assert served(engine, "again").recomputed == PROMPT_TOKENS + 1
    engine.check_idle()


def test_request_when_the_pool_has_no_space_for_demanded_blocks_computes() -> None:
    engine = engine_without_windows(num_slots=8)
    engine.set_mode(StoreMode.EAGER)
    answer(engine, "other", 8, first=5000)
    pin_all(engine)
    engine.set_mode(StoreMode.LAZY)
    answer(engine, "first", 5)
    answer(engine, "again", 5)
    assert served(engine, "again").recomputed == PROMPT_TOKENS + 1


def test_demand_of_more_than_half_the_pool_is_not_made() -> None:
    engine = engine_without_windows(num_slots=12)
    answer(engine, "first", 5)
    answer(engine, "again", 5)
    assert not engine.events[DEMANDED]
    assert served(engine, "again").recomputed == PROMPT_TOKENS + 1


def test_blocks_taken_in_the_step_of_the_demand_are_stored_ahead_of_it() -> None:
    engine = engine_without_windows(num_blocks=26)
    answer(engine, "first", 5)
    engine.add(request("again", 5))
    engine.add(request("other", 5, first=5000))
    engine.run()
    assert served(engine, "again").host_hit == PROMPT_TOKENS
    assert engine.offload.snapshot().store.skipped["left_device"] == 0
    engine.check_idle()


def test_request_that_ends_while_it_waits_demands_nothing() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    engine.add(request("again", 5))
    plan = engine.offload.plan_step
    engine.offload.plan_step = lambda *args: (engine.finish(engine.requests["again"]), plan(*args))[1]
    assert not engine.step().stores
    engine.offload.plan_step = plan
    engine.check_idle()


@pytest.mark.parametrize("policy", [RequestPolicy(load=False), RequestPolicy(store=False)], ids=["load", "store"])
def test_nothing_is_demanded_where_the_policy_disables(policy) -> None:
    engine = engine_without_windows(settings=policy)
    answer(engine, "first", 5)
    answer(engine, "again", 5)
    assert not engine.events[DEMANDED]
    engine.check_idle()


def test_nothing_is_demanded_while_stores_are_paused() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    engine.offload.pause_stores(True)
    answer(engine, "again", 5)
    assert not engine.events[DEMANDED]
    engine.check_idle()


def test_demand_when_abandoned_is_forgotten() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    engine.ledger = NoLedger(engine)
    engine.add(request("again", 5))
    plan = engine.offload.plan_step
    engine.offload.plan_step = lambda *args: (engine.discard(), plan(*args))[1]
    assert not engine.step().stores
    engine.offload.plan_step = plan
    engine.run()
    engine.check_idle()


def test_demanded_blocks_keep_their_place_in_the_free_queue() -> None:
    engine = engine_without_windows()
    answer(engine, "first", 5)
    before = list(engine.device.free)
    wait_for_stores(engine)
    engine.end_job(next(iter(engine.copies.open)))
    assert list(engine.device.free) == before


def test_blocks_taken_in_the_step_before_the_match_are_stored_and_loaded() -> None:
    engine = ToyEngine(
        64, 24, store_mode=StoreMode.LAZY, watermark_blocks=1, cost_model=LoadOrCompute(LoadDecision.ALWAYS)
    )
    engine.step_s = 0.1
    answer(engine, "first", 5)
    answer(engine, "second", 5, first=5000)
    engine.add(request("other", 15, first=9000))
    engine.add(request("again", 5))
    engine.run()
    tokens = served(engine, "again")
    assert tokens.host_hit > 0
    assert tokens.host_hit + tokens.device_hit == PROMPT_TOKENS
    engine.check_idle()


def test_demand_when_loading_is_slower_than_computing_is_not_made() -> None:
    cost_model = LoadOrCompute()
    for _ in range(MIN_SAMPLES):
        cost_model.bytes_rate.observe(1, 1000.0)
        cost_model.tokens_rate.observe(1000, 0.1)
    engine = engine_without_windows(cost_model=cost_model)
    for number in range(EXPLORE_EVERY + 1):
        answer(engine, f"r{number}", 5)
    assert not engine.events[DEMANDED]
    assert engine.offload.snapshot().load.declined == 0


def peak_of_held_blocks(engine: ToyEngine) -> int:
    """Run until all requests are answered; return the most device blocks that demands held after a step."""
    most = 0
    while not engine.is_idle():
        engine.step()
        most = max(most, engine.offload._lazy.num_demanded)
        while engine.copies.open:
            engine.end_job(next(iter(engine.copies.open)))
        engine.deliver([])
    engine.check_idle()
    return most


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_demands_of_many_requests_hold_a_share_of_the_free_blocks(blocks_per_slot: int) -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=144, blocks_per_slot=blocks_per_slot)
    for number in range(7):
        answer(engine, f"first{number}", 6, first=5000 * number)
    for number in range(7):
        engine.add(request(f"again{number}", 6, first=5000 * number))
    assert 0 < peak_of_held_blocks(engine) <= 36
    hits = [served(engine, f"again{number}").host_hit for number in range(7)]
    assert hits == [6 * BLOCK_SIZE] * 7


def test_demand_of_more_than_the_share_is_made_in_parts() -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=200)
    answer(engine, "first", 60)
    engine.add(request("again", 60))
    assert 0 < peak_of_held_blocks(engine) <= 50
    assert served(engine, "again").host_hit == 60 * BLOCK_SIZE


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_demand_of_blocks_in_use_is_not_bounded_by_the_free_ones(blocks_per_slot: int) -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=136, blocks_per_slot=blocks_per_slot)
    engine.add(request("first", 40, max_tokens=99))
    engine.step(200)
    # The default wait ends before a second part could be stored.
    engine.step_s = 1.1
    engine.add(request("again", 40))
    while "again" in engine.requests:
        engine.step(200, copy=True)
    assert engine.requests["first"].state == "running"
    assert served(engine, "again").host_hit == 40 * BLOCK_SIZE
    engine.run()
    engine.check_idle()


def test_demand_that_would_wait_for_others_too_long_is_dropped() -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=120)
    for number in range(7):
        answer(engine, f"first{number}", 5, first=5000 * number)
    for number in range(7):
        engine.add(request(f"again{number}", 5, first=5000 * number))
    engine.step()
    num_demanded = engine.offload._lazy.num_demanded
    while engine.requests:
        engine.step()
    assert engine.offload._lazy.num_demanded == num_demanded > 0
    assert all(served(engine, f"again{number}").recomputed == PROMPT_TOKENS + 1 for number in range(7))
    while engine.copies.open:
        engine.end_job(next(iter(engine.copies.open)))
    engine.check_idle()


def test_demands_of_requests_that_ended_hold_no_share() -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=147)
    for number in range(3):
        answer(engine, f"first{number}", 18, first=5000 * number)
    ended = [request(f"ended{number}", 18, first=5000 * number) for number in range(2)]
    for one in ended:
        engine.add(one)
    plan = engine.offload.plan_step
    engine.offload.plan_step = lambda *args: ([engine.finish(one) for one in ended], plan(*args))[1]
    assert not engine.step().stores
    engine.offload.plan_step = plan
    answer(engine, "again", 18, first=10_000)
    assert served(engine, "again").host_hit == 18 * BLOCK_SIZE


def test_requests_of_one_prefix_share_a_demand() -> None:
    engine = engine_without_windows(num_slots=256, num_blocks=100)
    answer(engine, "first", 18)
    for number in range(5):
        engine.add(request(f"again{number}", 18))
    assert 0 < peak_of_held_blocks(engine) <= 25
    assert all(served(engine, f"again{number}").recomputed == 1 for number in range(5))
    assert engine.offload.snapshot().store.stored == 20
