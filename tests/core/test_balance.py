"""What the scheduler counts of cost and gain, and that paused stores are skipped, counted and taken up again."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.core.cost_model import MIN_SAMPLES
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.scheduler.scheduler import Later
from kvferry.core.stats import BalanceCounts
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_requests import answer, request, store_and_turn_over


def balance(engine: ToyEngine) -> BalanceCounts:
    return engine.offload.snapshot().balance


def store_and_measure() -> ToyEngine:
    """An engine that has lost what it stored, and computes a token in 10 s."""
    engine = ToyEngine(num_slots=64, num_blocks=64)
    store_and_turn_over(engine)
    for _ in range(MIN_SAMPLES):
        engine.offload.cost_model.tokens_rate.observe(1000, 10_000.0)
    return engine


def test_load_wait_of_an_answered_request_is_a_cost() -> None:
    engine = store_and_measure()
    engine.add(request("second", 5))
    for _ in range(4):
        engine.step()
    assert balance(engine).load_wait_s == 0, "it has no first token yet"
    engine.run()
    found = balance(engine)
    assert found.load_wait_s == engine.offload.requests.find("second", engine.now_s).times.load_s >= 3
    assert found.cost_s == found.load_wait_s
    assert found.gain_s == pytest.approx(5 * BLOCK_SIZE * 10, rel=0.1)


def test_wait_for_a_load_that_fails_is_a_cost_without_gain() -> None:
    engine = store_and_measure()
    engine.add(request("second", 5))
    engine.step()
    engine.step()
    (job_id,) = engine.copies.open
    engine.end_job(job_id, error="the test's")
    engine.run()
    found = balance(engine)
    assert found.load_wait_s > 0
    assert (found.gain_s, found.unpriced_tokens) == (0, 0)


def test_waits_for_the_load_of_another_request_are_costs() -> None:
    engine = store_and_measure()
    for number in range(3):
        engine.add(request(f"convoy{number}", 5, extra=1 + number))
    engine.step()
    assert engine.offload.match("convoy2", 0, engine.now_s) == Later()
    engine.run()
    times = [engine.offload.requests.find(f"convoy{number}", engine.now_s).times for number in range(3)]
    assert [one.later_s > 0 for one in times] == [False, True, True]
    assert balance(engine).load_wait_s == sum(one.load_s + one.later_s for one in times)


@pytest.mark.parametrize("mode", list(StoreMode))
def test_paused_stores_are_skipped_and_taken_up_again(mode: StoreMode) -> None:
    engine = ToyEngine(64, 16, store_mode=mode, watermark_blocks=1)
    answer(engine, "before", 5)
    engine.offload.pause_stores(True)
    stored = engine.offload.snapshot().store.stored
    for number in range(1, 6):
        answer(engine, f"r{number}", 5, first=1000 * number)
    store = engine.offload.snapshot().store
    assert store.stored == stored
    assert store.skipped["paused"] > 0
    assert store.offered == store.stored + sum(store.skipped.values())
    answer(engine, "again", 5, first=1000)
    assert engine.offload.snapshot().missed_tokens.not_stored["paused"] == 5 * BLOCK_SIZE
    engine.offload.pause_stores(False)
    for number in range(6, 12):
        answer(engine, f"r{number}", 5, first=1000 * number)
    skipped = engine.offload.snapshot().store.skipped["paused"]
    answer(engine, "later", 5, first=6000)
    assert engine.offload.requests.find("later", engine.now_s).prompt_tokens.host_hit == 5 * BLOCK_SIZE
    assert engine.offload.snapshot().store.skipped["paused"] == skipped
    engine.check_idle()


@pytest.mark.parametrize("mode", list(StoreMode))
@pytest.mark.parametrize("num_groups", [1, 2])
def test_counts_add_up_when_stores_are_paused_at_any_time(mode: StoreMode, num_groups: int) -> None:
    specs = [GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 12)][:num_groups]
    engine = ToyEngine(24, 48, store_mode=mode, watermark_blocks=2, specs=specs)
    picks = Random(5)
    for number in range(60):
        engine.add(request(f"r{number}", picks.randrange(1, 7), first=1000 * picks.randrange(8), max_tokens=6))
        engine.offload.pause_stores(picks.random() < 0.5)
        for _ in range(picks.randrange(4)):
            engine.step(copy=picks.random() < 0.5)
    engine.run()
    store = engine.offload.snapshot().store
    assert store.offered == store.stored + sum(store.skipped.values()) + store.failed
    assert 0 < store.skipped["paused"] < store.offered
    assert store.stored > 0
    engine.check_idle()
