"""The scheduler and its tiers: who is told of what, what goes down, what comes back, and what trouble costs.

Every block that the toy engine reads is compared with what it has to hold, so a test that runs through has right bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.policy import Level, Override, RequestPolicy
from kvferry.core.pool.events import CacheEvent, EvictionBatch
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.recovery import import_blocks
from kvferry.core.pool.slots import BATCH_SLOTS
from kvferry.core.stats import PromptTokens
from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import NO_SLOTS
from tests.harness.toy_engine import BLOCK_SIZE, SLOT_BYTES, ToyEngine, ToyRequest
from tests.harness.toy_oracle import key_of
from tests.harness.toy_tiers import TIMEOUT_S, ToyTier


def engine_with(*names: str, num_slots: int = 64, num_blocks: int = 64, **options) -> ToyEngine:
    engine = ToyEngine(num_slots, num_blocks, tiers=names or ("disk",), **options)
    # So short that nobody's patience ends within a few steps.
    engine.step_s = 0.01
    return engine


def request(name: str, num_blocks: int, *, family: int = 1, **options) -> ToyRequest:
    """A prompt of whole blocks and one token, as every prompt of its family begins."""
    tokens = [family * 1000 + i for i in range(num_blocks * BLOCK_SIZE)] + [7]
    return ToyRequest(name, tokens, len(tokens), 1, **options)


def keys(num_blocks: int, family: int = 1, first: int = 0) -> list[bytes]:
    about = request("any", num_blocks, family=family)
    group = ToyEngine(1, 1).groups[0]
    return [key_of(about, group, slot) for slot in range(first, num_blocks)]


def serve(engine: ToyEngine, *requests: ToyRequest) -> PromptTokens:
    """Answer requests, wait until the tiers are idle, and return where the last prompt's tokens came from."""
    for each in requests:
        engine.add(each)
    engine.run()
    settle(engine)
    engine.check()
    return prompt_tokens(engine, requests[-1].request_id)


def start(engine: ToyEngine, one: ToyRequest) -> None:
    """Compute a prompt, and leave its stores under way."""
    engine.add(one)
    while one.state == "waiting":
        engine.deliver([])
        engine.step()
    assert engine.copies.open


def serve_on(engine: ToyEngine, *requests: ToyRequest) -> None:
    """Answer requests, and those that there are, without waiting for the tiers in the end."""
    for each in requests:
        engine.add(each)
    while engine.requests:
        engine.deliver([])
        engine.step(copy=True)
    engine.check()


def settle(engine: ToyEngine, steps: int = 5) -> None:
    for _ in range(steps):
        engine.deliver([])
        engine.step(copy=True)


def forget(engine: ToyEngine) -> None:
    """Device and pool forget everything; the tiers do not."""
    engine.device.forget_all()
    engine.reset(places=[HOST])


def engine_with_stored(*names: str, blocks: int = 5, **options) -> ToyEngine:
    """An engine whose tiers have the blocks of a request `r`, which neither device nor pool has."""
    engine = engine_with(*names, **options)
    serve(engine, request("r", blocks))
    forget(engine)
    return engine


def prompt_tokens(engine: ToyEngine, name: str) -> PromptTokens:
    view = engine.offload.requests.find(name, engine.now_s)
    assert view is not None
    return view.prompt_tokens


def use(engine: ToyEngine, name: str = "disk"):
    return engine.offload.snapshot().tiers[name].use


@pytest.mark.parametrize("slots", [64, 3000])
def test_prefix_with_draft_layers_comes_back_but_for_its_last_block(slots: int) -> None:
    blocks = slots * 3 // 8
    engine = engine_with(num_slots=slots, num_blocks=slots, skips_last_block=True)
    serve(engine, request("r", blocks))
    forget(engine)
    assert serve(engine, request("r2", blocks)).tier_hit == {"disk": (blocks - 1) * BLOCK_SIZE}


# --- what tiers are known to hold -------------------------------------------------------------------------------------


def holders(engine: ToyEngine) -> list[list[str]]:
    """The tiers that hold each block of the pool, by slot."""
    return engine.offload.tiers.holders(Inventory(engine.manager).list_blocks(0, 100))


def test_holders_when_a_cascade_ended_are_the_tiers_that_stored() -> None:
    engine = engine_with("fast", "slow")
    engine.tiers["slow"].due = lambda number: False
    serve(engine, request("one", 3))
    assert holders(engine) == [["fast"]] * 3
    engine.offload.tiers.poll(engine.now_s + TIMEOUT_S + 1)
    assert holders(engine) == [["fast"]] * 3
    assert use(engine, "fast").looked_up == 3, "a listing is no look-up"


def test_holders_when_a_tier_was_reset_are_those_that_stored_since() -> None:
    engine = engine_with("fast", "slow")
    serve(engine, request("one", 3))
    assert holders(engine) == [["fast", "slow"]] * 3
    engine.offload.resets.reset(engine.now_s, places=["slow"])
    assert holders(engine) == [["fast"]] * 3
    serve(engine, request("two", 3, family=2))
    assert sorted(map(len, holders(engine))) == [1, 1, 1, 2, 2, 2]


def test_holders_when_a_slot_is_used_again_are_those_of_its_new_block() -> None:
    engine = engine_with("fast")
    serve(engine, request("one", 3))
    forget(engine)
    assert holders(engine) == []
    engine.tiers["fast"].due = lambda number: False
    serve(engine, request("two", 3, family=2))
    assert holders(engine) == [[]] * 3


def test_holders_when_promoted_are_the_tier_that_gave_the_blocks() -> None:
    engine = engine_with("fast")
    serve(engine, request("one", 3))
    forget(engine)
    serve(engine, request("two", 3))
    assert use(engine, "fast").promoted > 0
    assert ["fast"] in holders(engine)


# --- ends of requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", [[], [None], [RequestFilter(request="r")]])
def test_stores_of_a_finished_request_cascade_unless_reset(resets: list[RequestFilter | None]) -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    start(engine, request("r", 3))
    for match in resets:
        engine.reset(match)
    engine.finish(engine.requests["r"])
    settle(engine)
    assert tier.blocks.keys() == (set() if resets else set(keys(3)))
    assert not tier.wrongs


def test_close_sends_nothing_later() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    engine.add(request("r", 3))
    engine.step()
    engine.close()
    engine.run()
    engine.add(request("late", 3))
    engine.run()
    assert not tier.blocks


# --- cascades -------------------------------------------------------------------------------------------------------


def test_stored_blocks_cascade_to_allowed_tiers_only() -> None:
    engine = engine_with("a", "b")
    engine.set_override(Override("only-a", {"tiers": ("a",)}, 1e9))
    engine.set_override(Override("none", {"tiers": ()}, 1e9))
    serve(engine, request("only-a", 2, family=1), request("none", 2, family=2), request("all", 2, family=3))
    assert engine.tiers["a"].blocks.keys() == {*keys(2, family=1), *keys(2, family=3)}
    assert engine.tiers["b"].blocks.keys() == set(keys(2, family=3))


def test_blocks_already_in_the_pool_cascade_at_request_level_only() -> None:
    engine = engine_with("block", "request")
    engine.tiers["request"].level = Level.REQUEST
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    serve(engine, request("first", 3))
    engine.device.forget_all()
    assert serve(engine, request("second", 4)).host_hit == 3 * BLOCK_SIZE
    assert engine.tiers["block"].blocks.keys() == set(keys(4, first=3))
    assert engine.tiers["request"].blocks.keys() == set(keys(4))
    assert not engine.tiers["request"].wrongs


def test_request_level_policy_applies_to_every_tier() -> None:
    engine = engine_with("a", "b")
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    engine.set_override(Override("second", {"level": Level.REQUEST}, 1e9))
    serve(engine, request("first", 3))
    serve(engine, request("second", 3), request("third", 4))
    for tier in engine.tiers.values():
        assert tier.blocks.keys() == set(keys(4))


def test_block_level_policy_does_not_lower_a_tiers_level() -> None:
    engine = engine_with()
    engine.tiers["disk"].level = Level.REQUEST
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    engine.set_override(Override("second", {"level": Level.BLOCK}, 1e9))
    serve(engine, request("first", 3))
    serve(engine, request("second", 3))
    assert engine.tiers["disk"].blocks.keys() == set(keys(3))


def test_blocks_stored_for_another_request_cascade_when_ready() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.level = Level.REQUEST
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    start(engine, request("first", 3))
    start(engine, request("second", 3))
    assert engine.offload.snapshot().store.skipped["in_flight"] == 3, "the device's blocks are shared"
    engine.finish(engine.requests["second"])
    assert not tier.blocks
    engine.run()
    settle(engine)
    assert tier.blocks.keys() == set(keys(3))
    assert not tier.wrongs


def test_store_that_loses_its_key_cascades_at_request_level() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.level = Level.REQUEST
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    start(engine, request("first", 3))
    engine.device.forget_all()
    engine.add(request("second", 3))
    engine.run()
    settle(engine)
    assert engine.offload.snapshot().store.skipped["already_stored"] == 3
    assert tier.blocks.keys() == set(keys(3))


def test_cascades_beyond_a_quarter_of_the_slots_are_dropped() -> None:
    engine = engine_with(num_slots=16)
    tier = engine.tiers["disk"]
    tier.latency_s = 5.0
    serve_on(engine, request("r", 10))
    assert (use(engine).cascaded, use(engine).cascades_dropped) == (4, 6)
    assert engine.offload.snapshot().pool.pinned == 4
    engine.now_s += 6.0
    settle(engine)
    assert tier.blocks.keys() == set(keys(4)), "those that a prefix begins with went first"
    assert engine.offload.snapshot().pool.pinned == 0
    engine.check()


def test_tier_job_that_times_out_is_abandoned_and_its_slots_freed() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.dead = True
    serve_on(engine, request("r", 3))
    assert engine.offload.snapshot().pool.pinned == 3
    engine.now_s += TIMEOUT_S + 1
    engine.expire()
    assert engine.offload.snapshot().pool.pinned == 0
    assert use(engine).timed_out == 2, "the look-up and the store"
    assert "tier disk: gave no answer to a job within 10 s" in engine.offload.tiers.health()
    assert use(engine).problems == len(engine.offload.tiers.health())
    tier.dead = False
    serve(engine, request("s", 3, family=2))
    assert engine.offload.tiers.health() == []


def test_tier_job_when_the_clock_is_set_back_is_abandoned() -> None:
    engine = engine_with()
    engine.now_s += 3600.0
    engine.tiers["disk"].dead = True
    serve_on(engine, request("r", 3))
    engine.offload.tiers.poll(engine.now_s - 3600.0)
    assert engine.offload.snapshot().pool.pinned == 0
    assert use(engine).timed_out == 2, "the look-up and the store"


@pytest.mark.parametrize("method", ["store", "look_up", "load", "poll"])
def test_a_tier_that_raises_costs_the_engine_nothing(method: str) -> None:
    engine = engine_with_stored(blocks=3)
    tier = engine.tiers["disk"]
    tier.raises = {method}
    serve_on(engine, request("s", 4))
    engine.reset(RequestFilter(request="nobody"))
    tier.latency_s = 0.1
    serve_on(engine, request("t", 3, family=3))
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    assert use(engine).errors > 0
    assert any(f"{method} failed" in reason for reason in engine.offload.tiers.health())
    tier.raises, tier.latency_s = set(), 0.0
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    serve(engine, request("u", 3, family=4))
    assert set(keys(3, family=4)) <= tier.blocks.keys()
    engine.now_s += 61.0
    engine.expire()
    assert engine.offload.tiers.health() == [], "a failure that is not seen again is told of for a minute"
    engine.check_idle()


def test_tier_that_cannot_cancel_keeps_its_slots_and_gets_no_jobs() -> None:
    engine = engine_with(num_slots=16)
    tier = engine.tiers["disk"]
    tier.dead = True
    tier.raises = {"cancel"}
    serve_on(engine, request("r", 3))
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    engine.reset()
    assert engine.offload.snapshot().pool.free == 13, "nobody knows whether it still reads these"
    serve_on(engine, request("s", 3, family=2))
    assert use(engine).cascaded == 3
    assert any("1 jobs could not be canceled" in reason for reason in engine.offload.tiers.health())
    engine.check()
    tier.dead = False
    settle(engine)
    engine.check()
    assert engine.offload.snapshot().pool.pinned == 0
    serve(engine, request("t", 3, family=3))
    assert set(keys(3, family=3)) <= tier.blocks.keys(), "once it has, it is used again"


def test_jobs_whose_cancel_waits_in_vain_are_canceled_one_a_poll() -> None:
    engine = engine_with(num_slots=64)
    tier = engine.tiers["disk"]
    tier.dead = True
    for number in range(3):
        serve_on(engine, request(f"r{number}", 3, family=number))
    tier.raises = {"cancel"}
    canceled = []
    for _ in range(5):
        engine.offload.tiers.poll(engine.now_s + TIMEOUT_S + 1)
        canceled.append(use(engine).timed_out)
    assert canceled == [1, 2, 3, 4, 4], "each has waited for a copy that hangs, on the engine's thread"
    tier.dead = False
    settle(engine)
    engine.check_idle()


# --- promotions -----------------------------------------------------------------------------------------------------


def test_block_only_in_a_tier_is_promoted_while_the_request_waits() -> None:
    engine = engine_with_stored()
    serve(engine, request("s", 5))
    assert engine.events["waited for tiers"] >= 2
    counts = prompt_tokens(engine, "s")
    assert (counts.tier_hit, counts.host_hit, counts.recomputed) == ({"disk": 20}, 0, 1)
    assert (use(engine).found, use(engine).promoted) == (5, 5)
    assert engine.offload.snapshot().store.offered == 10, "a promotion is no store"


def test_promotion_when_max_load_tokens_is_less_ends_there() -> None:
    engine = engine_with_stored(settings=RequestPolicy(max_load_tokens=3 * BLOCK_SIZE + 1))
    assert serve(engine, request("s", 5)).tier_hit == {"disk": 3 * BLOCK_SIZE}
    assert use(engine).promoted == 3


def test_block_is_promoted_from_the_first_tier_that_has_it() -> None:
    engine = engine_with_stored("fast", "slow")
    for key in keys(5, first=3):
        del engine.tiers["fast"].blocks[key]
    assert serve(engine, request("s", 5)).tier_hit == {"fast": 12, "slow": 8}


def test_wait_for_a_dead_tier_ends_when_computing_is_faster() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    serve(engine, request("r", 5))
    for _ in range(8):
        engine.offload.cost_model.tokens_rate.observe(1000, 50.0)
    forget(engine)
    tier.dead = True
    engine.add(request("s", 5))
    started_s = engine.now_s
    while engine.requests["s"].state == "waiting":
        engine.step()
        assert engine.now_s - started_s <= 20 * 0.05 + 2 * engine.step_s
    serve_on(engine)
    assert prompt_tokens(engine, "s").recomputed == 21
    assert use(engine).gave_up == 1
    engine.add(request("t", 5, family=2))
    engine.step()
    assert engine.requests["t"].state == "running", "while the tier does not answer nobody waits for it"


def ask_for_the_last_block(engine: ToyEngine, slow: str | None = None) -> None:
    """A request of whose five blocks the pool has four and the tiers all, at 50 ms a token. It has asked the tiers, of
    which one may be slow by then."""
    serve(engine, request("r", 5))
    if slow is not None:
        engine.tiers[slow].latency_s = 10.0
    for _ in range(8):
        engine.offload.cost_model.tokens_rate.observe(1000, 50.0)
    assert engine.manager.drop_key(keys(5)[-1], engine.now_s)
    engine.device.forget_all()
    engine.add(request("s", 5))
    engine.step()
    assert engine.requests["s"].state == "waiting"


@pytest.mark.parametrize(("elapsed_s", "promoted"), [(0.5, 1), (2.0, 0)])
def test_tier_result_is_used_when_it_arrived_in_time(elapsed_s: float, promoted: int) -> None:
    """After half a second: longer than computing what the tier was asked for takes, less than the whole prompt does."""
    engine = engine_with()
    ask_for_the_last_block(engine)
    engine.now_s += elapsed_s
    engine.deliver([])
    serve_on(engine)
    counts = prompt_tokens(engine, "s")
    assert (counts.host_hit, counts.tier_hit) == (16, {"disk": 4} if promoted else {})
    assert (use(engine).promoted, use(engine).gave_up) == (promoted, 1 - promoted)


def test_slow_tier_is_abandoned_and_the_fast_one_used() -> None:
    engine = engine_with("fast", "slow")
    ask_for_the_last_block(engine, slow="slow")
    engine.now_s += 0.5
    engine.deliver([])
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"fast": 4}
    assert (use(engine, "fast").gave_up, use(engine, "slow").gave_up) == (0, 1)


def test_a_tier_whose_answers_come_too_late_is_not_waited_for() -> None:
    engine = engine_with()
    engine.tiers["disk"].latency_s = 2.0
    waited = []
    for number in range(14):
        if number == 12:
            engine.tiers["disk"].latency_s = engine.step_s
        engine.add(request(f"r{number}", 3, family=number + 1))
        engine.step()
        waited.append(engine.requests[f"r{number}"].state == "waiting")
        serve_on(engine)
        engine.now_s += 3.0
        engine.deliver([])
        if number == 11:
            assert use(engine).gave_up == 12, "the others are counted too: the tier is as useless to them"
            assert use(engine).look_up_s > 2.0
    assert waited == [True] * 8 + [False] * 5 + [True], "again once it was fast"


def test_a_tier_whose_loads_would_be_declined_is_not_waited_for() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    forget(engine)
    engine.tiers["disk"].latency_s = engine.step_s
    rates = engine.offload.tiers.clients[0].cost_model
    for _ in range(8):
        rates.bytes_rate.observe(SLOT_BYTES, 10.0)
    waited = []
    for number in range(60):
        for _ in range(8):
            rates.tokens_rate.observe(1000, 50.0)
        engine.add(request(f"s{number}", 5))
        engine.step()
        waited.append(engine.requests[f"s{number}"].state == "waiting")
        serve_on(engine)
        settle(engine)
        forget(engine)
    # Its loads are measured again now and then, and taken again once one of them was fast.
    assert waited == [False] * 31 + [True] * 29
    assert (use(engine).gave_up, use(engine).declined) == (31, 31 * 5)
    assert use(engine).promoted > 0


def measure(engine: ToyEngine, *, load_s: float, compute_s: float = 1.0, look_up_s: float | None = None) -> None:
    """Have the rates be those of a tier that loads five blocks in `load_s`, which are computed in `compute_s`."""
    client = engine.offload.tiers.clients[0]
    for _ in range(64):
        client.cost_model.bytes_rate.observe(5 * SLOT_BYTES, load_s)
        client.cost_model.tokens_rate.observe(5 * BLOCK_SIZE, compute_s)
        if look_up_s is not None:
            client.look_up_rate.observe(1, look_up_s)


def test_a_tier_slower_than_computing_with_its_look_up_is_not_used() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    forget(engine)
    # A load after its look-up takes 1.2 s.
    measure(engine, load_s=0.6, compute_s=1.0, look_up_s=0.6)
    engine.add(request("s", 5))
    engine.step()
    assert engine.requests["s"].state == "running"
    serve_on(engine)
    assert (use(engine).gave_up, use(engine).promoted) == (1, 0)


def test_a_slow_tier_without_the_blocks_is_waited_for_once_in_32_requests() -> None:
    engine = engine_with()
    engine.tiers["disk"].latency_s = engine.step_s
    waited = []
    for number in range(100):
        measure(engine, load_s=10.0)
        engine.add(request(f"s{number}", 5, family=number + 1))
        engine.step()
        waited.append(engine.requests[f"s{number}"].state == "waiting")
        serve_on(engine)
        settle(engine)
    assert [number for number, has_waited in enumerate(waited, 1) if has_waited] == [32, 64, 96]


def test_a_slow_tier_that_answers_early_is_used_once_in_32_requests() -> None:
    engine = engine_with_stored()
    waited = []
    for number in range(100):
        measure(engine, load_s=10.0)
        engine.add(request(f"s{number}", 5))
        engine.deliver([])
        engine.tiers["disk"].latency_s = engine.step_s
        engine.step()
        waited.append(engine.requests[f"s{number}"].state == "waiting")
        serve_on(engine)
        settle(engine)
        engine.tiers["disk"].latency_s = 0.0
        forget(engine)
    assert [number for number, has_waited in enumerate(waited, 1) if has_waited] == [32, 64, 96]


def test_a_fast_tier_is_left_out_for_one_request_in_32_and_no_other() -> None:
    engine = engine_with()
    serve(engine, *(request(f"r{number}", 5, family=number + 1) for number in range(4)))
    forget(engine)
    for number in range(31):
        measure(engine, load_s=0.01)
        serve(engine, request(f"s{number}", 5))
        forget(engine)
    measure(engine, load_s=0.01)
    last = [request(f"t{number}", 5, family=number + 1) for number in range(4)]
    serve(engine, *last)
    assert sum(not prompt_tokens(engine, one.request_id).tier_hit for one in last) == 1


def test_an_early_look_up_that_is_about_to_be_answered_is_waited_for() -> None:
    engine = engine_with_stored()
    engine.tiers["disk"].latency_s = 0.6
    measure(engine, load_s=0.6, look_up_s=0.6)
    engine.add(request("s", 5))
    engine.now_s += 0.6 - 2 * engine.step_s
    engine.step()
    assert engine.requests["s"].state == "waiting"


def test_a_tier_is_waited_for_when_it_loads_the_few_blocks_that_lack() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    engine.device.forget_all()
    assert engine.manager.drop_key(keys(5)[0], engine.now_s)
    measure(engine, load_s=2.0)
    serve(engine, request("s", 5))
    counts = prompt_tokens(engine, "s")
    assert (counts.host_hit, counts.tier_hit) == (16, {"disk": 4})


def test_a_load_that_is_faster_counts_no_look_up_that_has_ended() -> None:
    engine = engine_with_stored()
    for key in keys(5, first=1):
        del engine.tiers["disk"].blocks[key]
    # A block in 80 ms, or 200 to compute.
    measure(engine, load_s=0.4, look_up_s=0.3)
    engine.tiers["disk"].latency_s = 0.3
    engine.add(request("s", 5))
    engine.step()
    assert engine.requests["s"].state == "waiting"
    engine.now_s += 0.3
    engine.tiers["disk"].latency_s = 0.0
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 4}


def test_a_tier_that_is_too_slow_takes_no_hits_from_another() -> None:
    engine = engine_with("fast", "slow")
    serve(engine, request("r", 5))
    forget(engine)
    del engine.tiers["fast"].blocks[keys(5)[-1]]
    measure(engine, load_s=0.01)
    for _ in range(64):
        engine.offload.tiers.clients[1].cost_model.bytes_rate.observe(5 * SLOT_BYTES, 10.0)
    assert serve(engine, request("s", 5)).tier_hit == {"fast": 16}


def test_followers_wait_for_the_request_that_promotes() -> None:
    engine = engine_with_stored()
    tier = engine.tiers["disk"]
    tier.latency_s = 0.05
    for name in ("s", "t", "u"):
        engine.add(request(name, 5))
        engine.step()
        engine.deliver([])
    engine.run()
    assert engine.events["waited for another's promotion"] > 0
    assert use(engine).promoted == 5, "each block came once"
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}
    for name in ("t", "u"):
        counts = prompt_tokens(engine, name)
        assert counts.device_hit + counts.host_hit == 20, "they had it from the one that waited for the tier"


@pytest.mark.parametrize("patch", [{"load": False}, {"store": False}, {"tiers": ()}, {"tiers": ("other",)}])
def test_request_forbidden_by_policy_gets_nothing_from_a_tier(patch: dict) -> None:
    engine = engine_with_stored()
    engine.set_override(Override("s", patch, 1e9))
    before = use(engine).looked_up
    serve(engine, request("s", 5))
    assert use(engine).looked_up == before
    assert prompt_tokens(engine, "s").recomputed == 21


def test_a_promotion_takes_half_the_pool_at_most() -> None:
    engine = engine_with(num_slots=24, num_blocks=40)
    for count in (6, 12, 18):
        serve(engine, request(f"r{count}", count))
    forget(engine)
    assert engine.tiers["disk"].blocks.keys() == set(keys(18))
    assert serve(engine, request("s", 18)).tier_hit == {"disk": 12 * BLOCK_SIZE}


def test_promoted_blocks_are_admitted_and_keep_their_origin() -> None:
    engine = engine_with()
    serve(engine, request("r", 4, tenant="t1"))
    forget(engine)
    engine.manager.admission.set_threshold(63)
    assert serve(engine, request("s", 4, tenant="t1")).tier_hit == {"disk": 16}
    assert engine.reset(RequestFilter(request="s")).dropped_blocks == 0
    assert engine.reset(RequestFilter(request="r"), [HOST]).dropped_blocks == 4


def test_a_tier_that_loses_blocks_gives_a_shorter_hit() -> None:
    engine = engine_with_stored()
    lost = keys(5)[2]
    engine.tiers["disk"].loses = lambda key: key == lost
    counts = serve(engine, request("s", 5))
    assert (counts.tier_hit, counts.recomputed) == ({"disk": 8}, 13)
    assert use(engine).promotions_failed == 1


def test_an_aborted_request_leaves_its_promotion_to_others() -> None:
    engine = engine_with()
    promoting(engine)
    engine.finish(engine.requests["s"])
    settle(engine, 10)
    engine.check()
    engine.check_idle()
    assert serve(engine, request("t", 5)).host_hit == 20


def test_long_prompts_are_looked_up_in_tiers_in_parts() -> None:
    engine = engine_with(num_slots=3000, num_blocks=3000)
    engine.device.forget_all()
    for count in (700, 1400):
        serve(engine, request(f"r{count}", count))
    assert len(engine.tiers["disk"].blocks) == 1400
    forget(engine)
    assert serve(engine, request("s", 1400)).tier_hit == {"disk": 1400 * BLOCK_SIZE}


# --- resets ---------------------------------------------------------------------------------------------------------


def promoting(engine: ToyEngine) -> ToyTier:
    """An engine whose request waits for a promotion that is under way."""
    tier = engine.tiers["disk"]
    serve(engine, request("r", 5))
    forget(engine)
    tier.latency_s = 0.05
    engine.add(request("s", 5))
    while not engine.offload.snapshot().pool.storing:
        engine.deliver([])
        engine.step()
    return tier


@pytest.mark.parametrize("match", [None, RequestFilter(request="r")])
@pytest.mark.parametrize("places", [None, [HOST], ["disk"]])
def test_a_reset_in_the_middle_of_a_promotion_publishes_nothing(
    match: RequestFilter | None, places: Sequence[str] | None
) -> None:
    engine = engine_with()
    promoting(engine)
    engine.reset(match, places)
    engine.check()
    settle(engine, 10)
    engine.run()
    assert engine.events["a reset met a promotion"] == 5
    assert use(engine).promoted == 0
    assert prompt_tokens(engine, "s").recomputed == 21
    settle(engine)
    engine.check_idle()


def test_promotion_of_blocks_not_matched_by_a_reset_completes() -> None:
    engine = engine_with()
    promoting(engine)
    engine.reset(RequestFilter(request="s"), [HOST])
    engine.run()
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}


def test_block_dropped_by_a_reset_is_not_promoted_from_a_tier() -> None:
    engine = engine_with()
    serve(engine, request("r", 5, tenant="t1"), request("other", 5, family=2))
    ticket = engine.reset(RequestFilter(tenant="t1"))
    settle(engine)
    result = engine.offload.resets.tier_results(ticket)["disk"]
    assert result.dropped_blocks == 5
    assert engine.offload.resets.count_open(ticket) == 0
    engine.device.forget_all()
    serve(engine, request("s", 5), request("t", 5, family=2))
    assert prompt_tokens(engine, "s").recomputed == 21
    assert prompt_tokens(engine, "t").host_hit == 20


def test_reset_is_open_until_the_tier_completes_it() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    engine.tiers["disk"].dead = True
    ticket = engine.reset()
    settle(engine)
    assert engine.offload.resets.count_open(ticket) == 1
    engine.tiers["disk"].dead = False
    settle(engine)
    assert engine.offload.resets.count_open(ticket) == 0


def test_tier_that_rejects_a_reset_is_not_used_any_more() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    serve(engine, request("r", 5))
    tier.raises = {"reset"}
    ticket = engine.reset()
    engine.device.forget_all()
    serve_on(engine, request("s", 5))
    assert prompt_tokens(engine, "s").recomputed == 21, "it still has the blocks, and must not bring them"
    assert engine.offload.resets.count_open(ticket) == 1
    assert any("were not accepted" in reason for reason in engine.offload.tiers.health())
    tier.raises = set()
    engine.now_s += 2.0
    serve_on(engine, request("t", 5, family=2))
    assert engine.offload.resets.count_open(ticket) == 1
    assert len(tier.blocks) == 5


@pytest.mark.parametrize("engine", [engine_with("disk"), ToyEngine(4, 4)], ids=["tiers", "none"])
def test_reset_of_an_unknown_tier_is_refused(engine: ToyEngine) -> None:
    before = engine.offload.snapshot()
    with pytest.raises(ValueError, match="no tier called nowhere"):
        engine.offload.resets.reset(engine.now_s, places=[HOST, "nowhere"])
    assert engine.offload.snapshot() == before


def test_reset_by_match_cascades_no_block_it_will_drop() -> None:
    class Meddler:
        """Has a tier ask for blocks in the middle of the search, of which it has not seen the slots yet."""

        def __init__(self) -> None:
            self.meddle = False

        def __call__(self, event: CacheEvent) -> None:
            if isinstance(event, EvictionBatch) and self.meddle:
                self.meddle = False
                state = engine.offload.requests.live.get("late")
                engine.offload._stores.cascades.submit_present([state], keys(2, family=2), engine.now_s)

    sink = Meddler()
    engine = engine_with(sink=sink, num_slots=BATCH_SLOTS + 20)
    tier = engine.tiers["disk"]
    tier.level = Level.REQUEST
    serve(engine, request("r1", 2))
    fillers = [number.to_bytes(16, "big") + b"\0" for number in range(BATCH_SLOTS)]
    filling = engine.manager.prepare_store(fillers, RequestIdentity("filler"), np.arange(BATCH_SLOTS), 1, engine.now_s)
    engine.manager.complete_store(filling.slots, engine.now_s)
    engine.add(request("r2", 2, family=2))
    settle(engine)
    engine.add(request("late", 2, family=2))
    assert (engine.manager.lookup_each(keys(2, family=2)) >= BATCH_SLOTS).all()
    tier.blocks.clear()
    sink.meddle = True
    assert engine.offload.resets.reset(engine.now_s, RequestFilter(request="r*")).dropped_blocks == 4
    assert not sink.meddle
    for _ in range(5):
        engine.offload.on_transfers_finished([], engine.now_s)
    assert not tier.blocks
    assert use(engine).cascades_dropped >= 2


def test_slots_read_by_a_tier_at_a_reset_are_held_until_done() -> None:
    engine = engine_with(num_slots=16)
    tier = engine.tiers["disk"]
    tier.latency_s = 0.5
    serve_on(engine, request("r", 3))
    ticket = engine.reset(places=[HOST])
    engine.check()
    assert engine.manager.counts().storing == 3
    assert engine.offload.resets.count_open(ticket) == 1
    engine.now_s += 1.0
    settle(engine)
    assert engine.manager.counts().storing == 0
    assert tier.blocks.keys() == set(keys(3)), "the tiers were not meant"
    assert not tier.wrongs


def test_a_block_that_an_operator_drops_is_gone_from_the_tiers_too() -> None:
    engine = engine_with()
    serve(engine, request("r", 3))
    assert engine.offload.resets.drop_block(keys(3)[1], engine.now_s).dropped_blocks == 1
    assert keys(3)[1] not in engine.tiers["disk"].blocks
    engine.device.forget_all()
    assert serve(engine, request("s", 3)).host_hit == BLOCK_SIZE


def test_a_dropped_block_that_is_on_its_way_is_not_published() -> None:
    engine = engine_with()
    promoting(engine)
    engine.offload.resets.drop_block(keys(5)[1], engine.now_s)
    engine.run()
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 4}


# --- lazy mode ------------------------------------------------------------------------------------------------------


def test_lazy_blocks_in_the_pool_cascade_at_request_level() -> None:
    engine = engine_with("block", "request", store_mode=StoreMode.LAZY, num_blocks=24, watermark_blocks=24)
    engine.tiers["request"].level = Level.REQUEST
    engine.set_override(Override("first", {"tiers": ()}, 1e9))
    serve(engine, request("first", 4))
    settle(engine)
    assert not any(tier.blocks for tier in engine.tiers.values())
    engine.device.forget_all()
    serve(engine, request("second", 4))
    settle(engine)
    assert prompt_tokens(engine, "second").host_hit == 4 * BLOCK_SIZE
    assert set(keys(4)) <= engine.tiers["request"].blocks.keys()
    assert not engine.tiers["block"].blocks
    assert not engine.tiers["request"].wrongs


@pytest.mark.parametrize("first_may", [False, True])
def test_lazy_blocks_cascade_by_the_most_permissive_request(first_may: bool) -> None:
    engine = engine_with("a", "b", store_mode=StoreMode.LAZY, num_blocks=40, watermark_blocks=8)
    engine.set_override(Override("none" if first_may else "first", {"tiers": ()}, 1e9))
    engine.set_override(Override("first" if first_may else "none", {"tiers": ("a",)}, 1e9))
    serve(engine, request("first", 4))
    serve(engine, request("none", 4))
    assert not any(tier.blocks for tier in engine.tiers.values())
    later = [request(f"same{number}", 4, kv_transfer_params={"load": False}) for number in range(5)]
    for each in later:
        engine.set_override(Override(each.request_id, {"tiers": ("a",)}, 1e9))
    serve(engine, *later)
    for number in range(7):
        serve(engine, request(f"other{number}", 5, family=2 + number, kv_transfer_params={"store": False}))
    settle(engine)
    assert set(keys(4)) <= engine.tiers["a"].blocks.keys()
    assert not engine.tiers["b"].blocks
    assert not any(tier.wrongs for tier in engine.tiers.values())


def test_lazy_request_level_joins_while_its_tier_is_disabled() -> None:
    engine = engine_with(store_mode=StoreMode.LAZY, num_blocks=24, watermark_blocks=24)
    engine.offload.tiers.enable("disk", is_enabled=False)
    serve(engine, request("first", 4))
    engine.set_override(Override("second", {"level": Level.REQUEST}, 1e9))
    serve(engine, request("second", 4, kv_transfer_params={"load": False}))
    engine.offload.tiers.enable("disk", is_enabled=True)
    for number in range(6):
        serve(engine, request(f"other{number}", 5, family=2 + number, kv_transfer_params={"store": False}))
    assert set(keys(4)) <= engine.tiers["disk"].blocks.keys()
    assert not engine.tiers["disk"].wrongs


def test_recovered_blocks_cascade_after_verification_only() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.level = Level.REQUEST
    first = request("first", 3, kv_transfer_params={"load": False})
    engine.add(first)
    for slot, key in enumerate(keys(3)):
        engine.copies.host[0][slot] = engine.truth.of(key)
    counts, times = np.ones(3, dtype=np.int64), np.zeros(3)
    origins, classes = [RequestIdentity("")] * 3, counts.astype(np.uint8)
    blocks = RecoveredBlocks(
        np.arange(3), keys(3), counts, counts * 64, np.arange(3), origins, times, times, counts * 0, classes
    )
    import_blocks(engine.manager, blocks, NO_SLOTS)
    engine.run()
    settle(engine)
    assert engine.offload.snapshot().store.skipped["already_stored"] == 3
    assert not tier.blocks, "nobody has looked at them yet, and the tier would vouch for them"
    engine.device.forget_all()
    assert serve(engine, request("second", 3)).host_hit == 12
    assert tier.blocks.keys() == set(keys(3)), "loaded, and so verified"


def test_promoted_blocks_when_a_tier_names_no_origin_get_the_requests() -> None:
    class NamelessTier(ToyTier):
        def poll(self):
            return [replace(each, origins=()) if hasattr(each, "origins") else each for each in super().poll()]

    engine = engine_with_stored(open_tier=NamelessTier, blocks=4)
    assert serve(engine, request("s", 4)).tier_hit == {"disk": 16}
    assert engine.reset(RequestFilter(request="s"), [HOST]).dropped_blocks == 4
