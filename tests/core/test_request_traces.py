"""Stages of requests whose trace is sampled: each is reported when it ends, and the finished request."""

from __future__ import annotations

from kvferry.core.scheduler.requests import RequestView, StageKind, TraceStage
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_requests import request, store_and_turn_over
from tests.harness.toy_tokens import ToyRequest


def traced(name: str, blocks: int) -> tuple[ToyRequest, list[TraceStage | RequestView]]:
    found: list[TraceStage | RequestView] = []
    made = request(name, blocks)
    made.trace = found.append  # type: ignore[attr-defined]
    return made, found


def test_stages_of_a_hit_are_a_match_a_load_and_its_stores(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    second, found = traced("second", 5)
    engine.add(second)
    for _ in range(3):
        engine.step()
    engine.run()
    *stages, view = found
    assert isinstance(view, RequestView)
    assert view.request_id == "second"
    match, load = (stage for stage in stages if stage.kind is not StageKind.STORE)
    assert (match.kind, match.num_lookups, match.num_tokens) == (StageKind.MATCH, 1, load.num_tokens)
    assert (load.kind, load.num_blocks, load.error) == (StageKind.LOAD, 5, None)
    assert match.ended_s == load.began_s < load.ended_s <= view.times.finished_s
    counts = engine.offload.requests.find("second", engine.now_s).store
    assert sum(stage.num_blocks for stage in stages if stage.kind is StageKind.STORE) == counts.stored


def test_store_that_ends_after_its_request_is_reported_after_it(engine: ToyEngine) -> None:
    first, found = traced("first", 3)
    engine.add(first)
    while first.state != "finished":
        engine.step(copy=False)
    assert [type(item) for item in found] == [TraceStage, RequestView]
    engine.run()
    store = found[-1]
    assert isinstance(store, TraceStage)
    assert (store.kind, store.num_blocks, store.error) == (StageKind.STORE, 3, None)
    assert store.ended_s > found[1].times.finished_s


def test_match_of_a_request_that_is_aborted_meanwhile_ends_with_it(engine: ToyEngine) -> None:
    waiting, found = traced("waiting", 3)
    engine.offload.on_new_request(waiting, 10.0)
    for now_s in (11.0, 12.0):
        engine.offload.match("waiting", 0, now_s)
    engine.offload.on_request_finished("waiting", 13.0)
    assert found[:-1] == [TraceStage(StageKind.MATCH, 11.0, 13.0, num_lookups=2)]
    assert isinstance(found[-1], RequestView)
