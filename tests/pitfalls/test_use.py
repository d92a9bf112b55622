"""Failures that made others' offloading useless, though it ran. Each test names the threads about it."""

from __future__ import annotations

import pytest

from kvferry.core.scheduler.scheduler import Hit
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_requests import answer, findable, request, store_and_turn_over


def test_blocks_full_at_request_end_are_stored_and_found() -> None:
    """vllm#53498: keys never registered, and 44% of a finished request's blocks never stored."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    # The device has it all, so no step of the second request fills a block.
    answer(engine, "not stored", 5, kv_transfer_params={"store": False})
    second = request("second", 5)
    engine.add(second)
    assert engine.admit(second)
    engine.finish(second)
    engine.run()
    assert findable(engine, second) == 5
    engine.device.forget_all()
    engine.add(request("third", 5))
    assert engine.offload.match("third", 0, engine.now_s) == Hit(5 * BLOCK_SIZE)


def test_blocks_that_found_no_room_are_not_passed_over() -> None:
    """vllm#27697: progress advanced before the job was queued, and those blocks were lost."""
    engine = ToyEngine(num_slots=12, num_blocks=64)
    store_and_turn_over(engine)
    engine.add(request("loads", 5))
    engine.step()
    assert engine.offload.snapshot().pool.loading == 5
    long = request("long", 9, first=1000, max_tokens=20)
    engine.add(long)
    (first_store,) = engine.step(budget=100).stores
    assert first_store.num_blocks == 7
    for _ in range(5):
        engine.step(budget=1)
    for job_id in list(engine.copies.open):
        engine.end_job(job_id)
    engine.step(budget=100, copy=True)
    assert findable(engine, long) == 9, "none in the middle is missing"
    engine.run()
    engine.check_idle()


def test_stored_blocks_can_be_loaded_while_their_request_still_runs() -> None:
    """vllm#39186: they were invisible until the whole request ended."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    engine.add(request("runs", 5, max_tokens=1000))
    (store,) = engine.step().stores
    assert findable(engine, request("other", 5)) == 0, "not before the copy has ended"
    engine.end_job(store.job_id)
    engine.device.forget_all()
    engine.add(request("other", 5))
    assert engine.offload.match("other", 0, engine.now_s) == Hit(5 * BLOCK_SIZE)
    assert engine.requests["runs"].state == "running"


@pytest.mark.parametrize("policy", ["arc", "lru"])
def test_a_burst_is_stored_without_one_refusal(policy: str) -> None:
    """LMCache 0.5.6 refused 59% of the stores of a burst, since its eviction ran once a second."""
    engine = ToyEngine(num_slots=60, num_blocks=400, eviction_policy=policy)
    engine.step_s = 0.0
    for number in range(100):
        engine.add(request(f"r{number}", 10, first=1000 * number))
        engine.step(budget=100, copy=True)
    engine.run()
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["no_space"]) == (1000, 0)
    assert engine.offload.snapshot().evictions.total == 1000 - 60


def test_stats_contain_prompt_token_sources_and_declined_loads() -> None:
    """vllm-ascend#9261: "only stores, never a load", because the GPU still had it all."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    answer(engine, "first", 5)
    answer(engine, "second", 5)
    snapshot = engine.offload.snapshot()
    assert (snapshot.store.stored, snapshot.load.blocks) == (5, 0)
    assert (snapshot.prompt_tokens.device_hit, snapshot.prompt_tokens.recomputed) == (20, 22)
    engine.device.forget_all()
    answer(engine, "declines", 5, kv_transfer_params={"load": False})
    assert engine.offload.snapshot().load.declined == 5
    answer(engine, "loads", 5, kv_transfer_params={"store": False})
    prompt = engine.offload.requests.find("loads", engine.now_s).prompt_tokens
    assert (prompt.device_hit, prompt.host_hit, prompt.recomputed) == (20, 0, 1), "the request before has computed it"


def test_admission_holds_back_traffic_without_reuse() -> None:
    """vllm#35343, LMCache#970, LMCache#1109: traffic without reuse paid for stores that nobody read."""
    engine = ToyEngine(num_slots=40, num_blocks=64)
    engine.manager.admission.set_threshold(2)
    for number in range(20):
        answer(engine, f"r{number}", 5, first=1000 * number)
    store = engine.offload.snapshot().store
    assert store.skipped["admission"] >= 95, "a key in a hundred may pass for another one"
    assert store.stored + store.skipped["admission"] == 100
    engine.device.forget_all()
    answer(engine, "again", 5, first=19_000)
    assert engine.offload.requests.find("again", engine.now_s).store.stored == 5
