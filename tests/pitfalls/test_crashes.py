"""Failures that ended others' engines, and what happens here instead. Each test names the threads about it."""

from __future__ import annotations

import pytest

from kvferry.core.engine_api import StepProgress
from kvferry.core.policy import RequestPolicy
from kvferry.core.scheduler.scheduler import Hit
from tests.harness.toy_engine import BLOCK_SIZE, Habits, ToyEngine
from tests.harness.toy_requests import answer, findable, request, store_and_turn_over


@pytest.mark.parametrize("policy", ["arc", "lru"])
def test_hit_found_at_lookup_is_kept_until_allocation(policy: str) -> None:
    """vllm#39702, vllm#43884, vllm#50454, vllm#54914, vllm#52170: it was evicted, and an assertion ended the engine."""
    engine = ToyEngine(num_slots=8, num_blocks=64, eviction_policy=policy)
    answer(engine, "first", 4)
    engine.device.forget_all()
    waiting = request("waiting", 4)
    engine.add(waiting)
    waiting.state = "found, and not allocated yet"
    assert engine.offload.match("waiting", 0, engine.now_s) == Hit(4 * BLOCK_SIZE)
    for number in range(1, 6):
        engine.add(request(f"filler{number}", 4, first=1000 * number))
        for _ in range(4):
            engine.step(copy=True)
    assert engine.offload.snapshot().evictions.total >= 12, "the others fought for the other half of the pool"
    waiting.state = "waiting"
    engine.run()
    assert engine.offload.requests.find("waiting", engine.now_s).prompt_tokens.host_hit == 4 * BLOCK_SIZE
    engine.check_idle()


def test_hit_whose_block_was_dropped_becomes_shorter() -> None:
    """vllm#39702: what was dropped by hand between look-up and allocation is computed, and nothing fails."""
    engine = ToyEngine(num_slots=8, num_blocks=64)
    first = answer(engine, "first", 4)
    engine.device.forget_all()
    second = request("second", 4)
    engine.add(second)
    assert engine.offload.match("second", 0, engine.now_s) == Hit(4 * BLOCK_SIZE)
    assert engine.manager.drop_key(first.block_hashes[2] + b"\0", engine.now_s)
    assert engine.offload.match("second", 0, engine.now_s) == Hit(2 * BLOCK_SIZE)
    engine.run()
    assert engine.offload.requests.find("second", engine.now_s).prompt_tokens.host_hit == 2 * BLOCK_SIZE
    engine.check_idle()


@pytest.mark.parametrize("ends", [False, True])
def test_preempted_request_is_resumed_or_ends_with_jobs_in_flight(ends: bool) -> None:
    """vllm#46014: its store was still in flight, and an assertion ended the engine."""
    engine = ToyEngine(num_slots=4, num_blocks=64)
    engine.add(request("r", 6, max_tokens=20))
    (store,) = engine.step().stores
    assert store.num_blocks == 4, "two blocks found no room, and would be offered again"
    for _ in range(3):
        engine.preempt(engine.requests["r"])
        engine.device.forget_all()
        engine.check()
        if ends:
            engine.finish(engine.requests["r"])
            break
        engine.step()
        engine.check()
        assert engine.requests["r"].state == "running"
    engine.end_job(store.job_id)
    engine.run()
    engine.check_idle()
    assert engine.offload.snapshot().store.stored == 4
    if ends:
        assert not engine.step().stores, "what it held before it was preempted is gone"


def test_request_preempted_while_loading_is_resumed_before_it_ends() -> None:
    """vllm#46014: the same with a load under way, whose blocks are others by then."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    (load,) = engine.step().loads
    engine.preempt(engine.requests["second"])
    engine.step()
    engine.end_job(load.job_id)
    engine.run()
    engine.check_idle()
    assert engine.offload.requests.find("second", engine.now_s).prompt_tokens.total == 21


def test_block_is_offered_with_key_block_id_and_computed_tokens() -> None:
    """vllm#52807: token progress ran ahead of the block ids known so far."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    one = request("r", 6)
    engine.add(one)
    engine.admit(one)
    table, num_tokens = one.tables[0], one.num_tokens
    stored = []
    for known, tokens in ((2, num_tokens), (4, 3 * BLOCK_SIZE + 3), (4, num_tokens), (7, num_tokens)):
        plan = engine.offload.plan_step([StepProgress("r", [table[:known]], tokens)], engine.now_s)
        stored.append(sum(job.num_blocks for job in plan.stores))
    assert stored == [2, 1, 1, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prompt_only", [False, True])
def test_an_engine_that_plans_ahead_of_its_results_stores_each_block_once(
    asynchronous: bool, prompt_only: bool
) -> None:
    """vllm#52807: with asynchronous scheduling the next step is planned before the tokens of this one are known."""
    settings = RequestPolicy(offload_prompt_only=prompt_only)
    engine = ToyEngine(num_slots=64, num_blocks=64, habits=Habits(asynchronous=asynchronous), settings=settings)
    one = answer(engine, "r", 2, max_tokens=3 * BLOCK_SIZE)
    store = engine.offload.snapshot().store
    # The last token that was chosen is never computed.
    full = (one.num_tokens - 1) // BLOCK_SIZE
    kept_back = full - 2 if prompt_only else 0
    assert (store.offered, store.stored, store.skipped["prompt_only"]) == (full, full - kept_back, kept_back)
    assert findable(engine, one) == full - kept_back
