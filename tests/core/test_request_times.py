"""When a request arrived, was scheduled, waited for loads and had its first token. A step takes one second here."""

from __future__ import annotations

from kvferry.core.scheduler.requests import RequestTimes
from kvferry.core.stats import Latencies, PromptLength, PromptSource
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_requests import request, store_and_turn_over


def times(engine: ToyEngine, name: str) -> RequestTimes:
    return engine.offload.requests.find(name, engine.now_s).times


def num_first_tokens(engine: ToyEngine) -> dict[str, int]:
    found = engine.offload.snapshot().latencies.first_token
    return {source.value: sum(sum(found[source, length].counts) for length in PromptLength) for source in PromptSource}


def test_times_of_a_computed_prompt_follow_its_steps(engine: ToyEngine) -> None:
    arrived_s = engine.now_s
    engine.add(request("r", 3))
    assert times(engine, "r") == RequestTimes(arrived_s)
    engine.step()
    assert times(engine, "r").scheduled_s == arrived_s + 1
    assert times(engine, "r").computed_s is None
    engine.run()
    found = times(engine, "r")
    assert found.load_s == 0
    assert arrived_s + 1 < found.computed_s <= found.finished_s
    assert num_first_tokens(engine) == {"loaded": 0, "device": 0, "none": 1}


def test_time_of_a_load_ends_with_the_next_step(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    began_s = engine.now_s + 1
    engine.step()
    assert times(engine, "second").load_began_s == began_s
    for _ in range(3):
        engine.step()
    assert times(engine, "second").load_s == 0
    engine.run()
    found = times(engine, "second")
    assert found.scheduled_s == began_s
    assert found.load_s >= 3
    assert found.computed_s > began_s + found.load_s
    latencies = engine.offload.snapshot().latencies
    assert num_first_tokens(engine)["loaded"] == 1
    assert latencies.load_wait.total == found.load_s
    assert latencies.first_token[PromptSource.LOADED, PromptLength.UNDER_1K].total == found.computed_s - found.arrived_s


def test_times_of_a_request_aborted_while_it_loads_count_the_load(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    second = request("second", 5)
    engine.add(second)
    for _ in range(3):
        engine.step()
    engine.finish(second)
    found = times(engine, "second")
    assert found.load_s == 2
    assert found.computed_s is None
    assert found.finished_s == engine.now_s
    engine.run()
    assert sum(num_first_tokens(engine).values()) == num_first_tokens(engine)["none"]


def test_snapshot_of_latencies_does_not_change(engine: ToyEngine) -> None:
    before = engine.offload.snapshot()
    engine.add(request("r", 3))
    engine.run()
    assert sum(before.latencies.first_token[PromptSource.NONE, PromptLength.UNDER_1K].counts) == 0
    assert num_first_tokens(engine)["none"] == 1


def test_first_tokens_are_counted_by_the_length_of_the_prompt() -> None:
    classes = {"<1k": [1, 1023], "1k-8k": [1024, 8191], "8k-32k": [8192, 32767], "32k+": [32768, 1 << 20]}
    for length, prompts in classes.items():
        for num_tokens in prompts:
            latencies = Latencies()
            latencies.count(PromptSource.NONE, num_tokens, 0.0, None, 2.5)
            totals = {kind: one.total for kind, one in latencies.first_token.items() if sum(one.counts)}
            assert totals == {(PromptSource.NONE, PromptLength(length)): 2.5}
