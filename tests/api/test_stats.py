from __future__ import annotations

import json
import re
import threading
import time
from datetime import datetime

import httpx
import pytest
from httpx_sse import connect_sse

from kvferry.app.api.routes.stats import Stats
from tests.harness.identities import check_identities
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service


def check_fields(text: str) -> None:
    """Check that an answer has every field of its description, of the described type, and no other."""
    described = Stats.model_validate_json(text, strict=True)
    assert json.loads(described.model_dump_json()) == json.loads(text)


def test_stats_have_exactly_the_described_fields(fresh: Service) -> None:
    with fresh.client() as client:
        answer = client.get("/admin/v1/stats")
    assert answer.headers["Content-Type"] == "application/json"
    stats = answer.json()
    check_fields(answer.text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stats["time"])
    assert datetime.fromisoformat(stats["time"]).tzinfo is not None
    assert stats["engine"] == {
        "name": "embedded",
        "model": "tiny",
        "device": "cpu",
        "block_size": 16,
        "groups": 1,
        "workers": 1,
    }
    assert stats["pool"]["slots"] == stats["pool"]["free"] == 256
    assert stats["pool"]["bytes"] == 256 * BLOCK_BYTES
    assert stats["uptime_s"] >= 0


def test_uptime_does_not_follow_a_clock_that_is_set_back(fresh: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh.client() as client:
        before_s = client.get("/admin/v1/stats").json()["uptime_s"]
        set_back_s = time.time() - 86400.0
        monkeypatch.setattr(time, "time", lambda: set_back_s)
        after_s = client.get("/admin/v1/stats").json()["uptime_s"]
        metrics = client.get("/metrics").text
    assert after_s > before_s > 0
    (line,) = re.findall(r"^kvferry_uptime_seconds (\S+)$", metrics, re.MULTILINE)
    assert float(line) >= after_s


def test_the_identities_hold_at_any_moment_under_load(fresh: Service) -> None:
    stop = threading.Event()

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            tokens = 16 * (number % 37)
            fresh.engine.answer(LoopRequest(f"r{number}", tokens, seed=number % 11, num_output_tokens=number % 50))
            number += 1

    thread = threading.Thread(target=traffic)
    thread.start()
    finished = set()
    try:
        with fresh.client() as client:
            for number in range(120):
                stats = client.get("/admin/v1/stats").json()
                check_identities(stats)
                finished.add(stats["requests"]["finished"])
                if number % 10 == 9:
                    client.post("/admin/v1/reset", json={"drain_timeout_s": 0})
    finally:
        stop.set()
        thread.join()
    with fresh.client() as client:
        check_identities(client.get("/admin/v1/stats").json())
    assert len(finished) > 10
    assert fresh.engine.failure is None


def test_stats_stream_sends_the_fields_of_stats(fresh: Service) -> None:
    with fresh.client() as client, connect_sse(client, "GET", "/admin/v1/stats/stream?interval_s=0.1") as source:
        assert source.response.headers["Content-Type"].startswith("text/event-stream")
        events = source.iter_sse()
        first = next(events)
        assert first.event == "message"
        check_fields(first.data)
        fresh.engine.answer(LoopRequest("one", 64))
        for event in events:
            stats = json.loads(event.data)
            check_identities(stats)
            if stats["requests"]["finished"] == 1:
                break


@pytest.mark.parametrize("interval", ["0", "0.05", "61", "-1", "nan", "inf", "abc", ""])
def test_the_interval_is_bounded(api: httpx.Client, interval: str) -> None:
    answer = api.get("/admin/v1/stats/stream", params={"interval_s": interval})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["interval_s"]
