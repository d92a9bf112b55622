"""Load or recompute: by measured rates, with the queue counted in, and now and then the other way to keep measuring."""

from __future__ import annotations

import pytest

from kvferry.core.cost_model import MIN_SAMPLES, LoadDecision, LoadOrCompute
from kvferry.core.policy import RequestPolicy
from kvferry.core.scheduler.scheduler import Hit, Miss
from tests.harness.toy_engine import SLOT_BYTES, Habits, ToyEngine
from tests.harness.toy_requests import answer, request, store_and_turn_over


def measured(bytes_per_s: float, tokens_per_s: float) -> LoadOrCompute:
    cost_model = LoadOrCompute()
    for _ in range(MIN_SAMPLES):
        cost_model.bytes_rate.observe(bytes_per_s, 1.0)
        cost_model.tokens_rate.observe(tokens_per_s, 1.0)
    return cost_model


@pytest.mark.parametrize(
    ("num_loads", "num_steps", "load"), [(0, 0, True), (7, 50, True), (50, 7, True), (8, 8, False)]
)
def test_eight_samples_a_side_are_needed_before_a_hit_is_declined(num_loads: int, num_steps: int, load: bool) -> None:
    cost_model = LoadOrCompute()
    for _ in range(num_loads):
        cost_model.bytes_rate.observe(1, 1.0)
    for _ in range(num_steps):
        cost_model.tokens_rate.observe(10**9, 1.0)
    assert cost_model.should_load(10**9, 0, 1) is load


@pytest.mark.parametrize(
    ("num_bytes", "queued_bytes", "num_tokens", "load"),
    [(1000, 0, 200, True), (1000, 0, 50, False), (1000, 1500, 200, False), (1000, 900, 200, True)],
)
def test_the_faster_side_is_taken_with_the_queue_counted_in(num_bytes, queued_bytes, num_tokens, load) -> None:
    """llm-d-router#2833: every hit was loaded, 17 times slower than recomputing."""
    cost_model = measured(bytes_per_s=1000, tokens_per_s=100)
    assert cost_model.should_load(num_bytes, queued_bytes, num_tokens) is load


def test_one_decision_in_so_many_takes_the_other_side() -> None:
    cost_model = measured(bytes_per_s=1000, tokens_per_s=100)
    taken = [cost_model.should_load(1000, 0, 50) for _ in range(96)]
    assert [number for number, took in enumerate(taken, 1) if took] == [32, 64, 96]


def test_loads_that_were_slow_are_taken_again_once_one_was_fast() -> None:
    """A tier that was slow for minutes: the rate of its latest loads would stay low for 1,000 decisions and more."""
    cost_model = measured(bytes_per_s=1000, tokens_per_s=100)
    for _ in range(100):
        cost_model.bytes_rate.observe(1000, 1.0)
    assert not cost_model.should_load(1000, 0, 50)
    cost_model.bytes_rate.observe(2000, 0.1)
    assert all(cost_model.should_load(1000, 0, 50) for _ in range(20))
    assert not cost_model.should_load(1000, 100_000, 50)
    cost_model.bytes_rate.observe(1000, 1.0)
    assert not cost_model.should_load(1000, 0, 50)


def test_always_means_always() -> None:
    cost_model = measured(bytes_per_s=1, tokens_per_s=10**9)
    cost_model.decision = LoadDecision.ALWAYS
    assert all(cost_model.should_load(10**9, 10**9, 1) for _ in range(64))


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (5, 0.0), (5, -1.0), (-1, 1.0)])
def test_rate_sample_without_amount_or_duration_is_ignored(amount: float, seconds: float) -> None:
    cost_model = measured(1000, 100)
    before = cost_model.bytes_rate.estimate_s(1000)
    cost_model.bytes_rate.observe(amount, seconds)
    assert cost_model.bytes_rate.estimate_s(1000) == before


def test_step_that_outlasts_all_others_does_not_count_unless_most_do() -> None:
    """An engine that is paused, or a clock that is set forward, within a step."""
    rate = measured(1000, 100).tokens_rate
    for _ in range(3):
        rate.observe(100, 3600.0)
    assert rate.estimate_s(100) == pytest.approx(1.0)
    # Neither a step of few tokens nor a long one that computes as many a second is an exception.
    rate.observe(1, 1.0)
    assert rate.estimate_s(801) == pytest.approx(9.0)
    rate.observe(2000, 20.0)
    assert rate.estimate_s(2801) == pytest.approx(29.0)
    for _ in range(20):
        rate.observe(100, 50.0)
    assert (rate.estimate_s(100) or 0) > 20


def test_rate_of_computing_when_the_clock_is_set_forward_stays() -> None:
    engine = ToyEngine(64, 200)
    for number in range(MIN_SAMPLES + 1):
        answer(engine, f"r{number}", 6, first=1000 * number)
    before = engine.offload.snapshot().balance.prefill_tokens_per_s
    engine.add(request("one", 12, first=50_000))
    engine.step()
    engine.now_s += 3600.0
    engine.run()
    assert engine.offload.snapshot().balance.prefill_tokens_per_s == pytest.approx(before, rel=0.1)


def test_a_declined_hit_is_counted_once_and_computed() -> None:
    """llm-d-router#2833: every hit was loaded, 17 times slower than recomputing."""
    engine = ToyEngine(64, 64, settings=RequestPolicy())
    store_and_turn_over(engine)
    for _ in range(MIN_SAMPLES):
        engine.offload.cost_model.bytes_rate.observe(SLOT_BYTES, 1000.0)
        engine.offload.cost_model.tokens_rate.observe(10**6, 1.0)
    engine.add(request("second", 5))
    for _ in range(10):
        assert engine.offload.match("second", 0, engine.now_s) == Miss()
    assert engine.offload.snapshot().pool.pinned == 0
    engine.run()
    snapshot = engine.offload.snapshot()
    assert (snapshot.load.blocks, snapshot.load.declined) == (0, 5)
    assert engine.offload.requests.find("second", engine.now_s).prompt_tokens.recomputed == 21


def test_prefill_and_loads_are_measured_as_they_happen() -> None:
    engine = ToyEngine(64, 200)
    for number in range(MIN_SAMPLES + 1):
        answer(engine, f"r{number}", 6, first=1000 * number)
    cost_model = engine.offload.cost_model
    # The toy's clock moves one second a step, and a step computes at most its budget of 32 tokens.
    assert len(cost_model.tokens_rate) >= MIN_SAMPLES
    assert 0.03 < (cost_model.tokens_rate.estimate_s(1) or 0) < 0.07
    engine.device.forget_all()
    engine.add(request("loads", 6))
    assert isinstance(engine.offload.match("loads", 0, engine.now_s), Hit)
    engine.run()
    assert len(cost_model.bytes_rate) == 1


def test_prefill_is_measured_from_start_to_end_if_planned_ahead() -> None:
    """With asynchronous scheduling the next step is planned as soon as a step has begun, not when it has ended."""
    engine = ToyEngine(64, 200, habits=Habits(asynchronous=True))
    for number in range(MIN_SAMPLES):
        engine.add(request(f"r{number}", 6, first=1000 * number, max_tokens=3))
        engine.step()
        engine.step_s = 0.001
        engine.step()
        engine.step_s = 2.0
        engine.run()
    num_tokens = engine.offload.snapshot().prompt_tokens.recomputed / MIN_SAMPLES
    assert engine.offload.cost_model.tokens_rate.estimate_s(num_tokens) == pytest.approx(2.0)
