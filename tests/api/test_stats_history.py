"""Counters over time, as a dashboard reads them when it is opened."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from kvferry.app.telemetry.history import NUM_MINUTES, NUM_SECONDS
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service

NOON_S = 1_800_000_000.0


def sample(service: Service, times_s: list[float]) -> None:
    """Add one sample per time, as the supervisor does."""
    snapshot = service.engine.offload.snapshot()
    for time_s in times_s:
        service.context.samples.add(snapshot, time_s)


def history(service: Service, **query: object) -> dict[str, Any]:
    answer = service.shared_client.get("/admin/v1/stats/history", params=query)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def columns(answer: dict[str, Any]) -> dict[str, list[Any]]:
    return dict(zip(answer["columns"], map(list, zip(*answer["rows"], strict=True)), strict=True))


def test_history_when_nothing_was_sampled_has_no_rows(fresh: Service) -> None:
    answer = history(fresh)
    assert answer["interval_s"] == 1
    assert answer["rows"] == []


def test_history_of_a_workload_adds_up_to_the_stats(fresh: Service) -> None:
    for number in range(6):
        fresh.engine.answer(LoopRequest(f"one{number}", 64, seed=number % 2))
        fresh.settle()
        sample(fresh, [NOON_S + 1 + number])
    stats = fresh.shared_client.get("/admin/v1/stats").json()
    found = columns(history(fresh))
    assert len(found["time"]) == 6
    assert found["time"][0] == "2027-01-15T08:00:01.000Z"
    tokens = stats["prompt_tokens"]
    assert {name: sum(found[name]) for name in ("device_hit", "host_hit", "recomputed")} == {
        name: tokens[name] for name in ("device_hit", "host_hit", "recomputed")
    }
    assert sum(found["host_hit"]) > 0
    assert sum(found["stored"]) == stats["store"]["stored"] > 0
    assert sum(found["stored_bytes"]) == stats["store"]["bytes"]
    assert sum(found["loaded_bytes"]) == stats["load"]["bytes"]
    assert sum(found["finished"]) == 6
    for source in ("loaded", "device", "none"):
        by_length = {name: sum(found[name]) for name in found if name.startswith(f"first_tokens_{source}.")}
        assert list(by_length) == [f"first_tokens_{source}.{length}" for length in ("<1k", "1k-8k", "8k-32k", "32k+")]
        numbers = sum(found[f"first_tokens_{source}"])
        assert by_length[f"first_tokens_{source}.<1k"] == sum(by_length.values()) == numbers
        seconds = sum(found[f"first_token_s_{source}"])
        assert sum(found[f"first_token_s_{source}.<1k"]) == pytest.approx(seconds)
    assert sum(found["first_tokens_loaded"]) > 0 < sum(found["first_token_s_loaded"])
    total = stats["balance"]["total"]
    assert sum(found["cost_s"]) == pytest.approx(total["cost_s"])
    assert sum(found["load_wait_s"]) == pytest.approx(total["load_wait_s"])
    assert total["load_wait_s"] > 0
    for gauge in ("slots", "free", "ready", "storing", "pinned"):
        assert found[gauge][-1] == stats["pool"][gauge]


def test_history_of_more_than_a_day_is_bounded_and_covers_a_day(fresh: Service) -> None:
    sample(fresh, [NOON_S + second for second in range(86400 + 3600)])
    seconds = history(fresh, window_s=900)
    assert seconds["interval_s"] == 1
    assert len(seconds["rows"]) == NUM_SECONDS
    minutes = history(fresh, window_s=86400)
    assert minutes["interval_s"] == 60
    assert len(minutes["rows"]) == NUM_MINUTES
    times = columns(minutes)["time"]
    assert all(one < other for one, other in itertools.pairwise(times))
    assert len(history(fresh, window_s=901)["rows"]) == 15
    assert len(history(fresh, window_s=30)["rows"]) == 30


def test_history_when_the_clock_is_set_back_goes_on(fresh: Service) -> None:
    sample(fresh, [NOON_S, NOON_S + 1, NOON_S - 3600, NOON_S - 3599])
    assert columns(history(fresh))["time"][-1] == "2027-01-15T07:00:01.000Z"


@pytest.mark.parametrize("window", ["0", "-1", "86401", "nan", "x"])
def test_history_with_a_window_out_of_bounds_is_refused(api: httpx.Client, window: str) -> None:
    answer = api.get("/admin/v1/stats/history", params={"window_s": window})
    assert answer.status_code == 422
    assert "window_s" in answer.text
