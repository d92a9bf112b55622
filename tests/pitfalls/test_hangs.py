"""Failures that had others' engines wait for ever, or find less and less. Each test names the threads about it."""

from __future__ import annotations

from kvferry.core.scheduler.scheduler import Hit, Miss
from tests.core.test_scheduler import reset_before_commit
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_requests import answer, request, store_and_turn_over


def test_requests_looked_up_and_never_loaded_leave_no_pin() -> None:
    """LMCache#2951, LMCache#1034, LMCache#987, LMCache#2017: pinned for ever; the hit rate fell to 0 over hours."""
    engine = ToyEngine(num_slots=12, num_blocks=64)
    store_and_turn_over(engine)
    for number in range(300):
        name = f"gives up {number}"
        engine.add(request(name, 5))
        engine.requests[name].state = "found"
        assert engine.offload.match(name, 0, engine.now_s) == Hit(5 * BLOCK_SIZE)
        if number % 3:
            engine.preempt(engine.requests[name])
        engine.finish(engine.requests[name])
        assert engine.offload.snapshot().pool.pinned == 0
    engine.check_idle()


def test_store_evicts_or_is_refused_in_the_same_step() -> None:
    """sglang#26357: 768 tokens free, 432,960 evictable, and the engine waited."""
    engine = ToyEngine(num_slots=40, num_blocks=100)
    answer(engine, "old", 20)
    answer(engine, "other", 20, first=1000)
    engine.add(request("new", 30, first=2000))
    plan = engine.step(budget=200)
    assert sum(job.num_blocks for job in plan.stores) == 30, "in the very step that needs it"
    engine.add(request("newest", 30, first=3000))
    plan = engine.step(budget=200)
    assert sum(job.num_blocks for job in plan.stores) == 10, "the rest of the pool is under the first store"
    engine.run()
    assert engine.offload.snapshot().store.skipped["no_space"] == 20
    engine.check_idle()


def test_load_that_cannot_begin_fails_in_the_next_step() -> None:
    """LMCache#2942, vllm#57959: unbounded waits for what would never come."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    store_and_turn_over(engine)
    second = request("second", 5)
    engine.add(second)
    reset_before_commit(engine)
    engine.step()
    assert engine.offload.has_open_work(), "or an idle engine would not ask"
    engine.deliver([])
    assert engine.offload.snapshot().requests.waiting_for_load == 0
    assert engine.offload.match("second", 0, engine.now_s) == Miss()
    engine.run()
    engine.check_idle()
