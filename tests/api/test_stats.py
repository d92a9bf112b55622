from __future__ import annotations

import json
import re
import threading
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from kvferry.app.api.context import EngineInfo
from kvferry.app.api.routes.stats import Stats, take_stats
from kvferry.app.pool.recovery import WarmStart
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service


def check_fields(text: str) -> None:
    """Check that an answer has every field of its description, of the described type, and no other."""
    described = Stats.model_validate_json(text, strict=True)
    assert json.loads(described.model_dump_json()) == json.loads(text)


def check_identities(stats: dict[str, Any]) -> None:
    tokens, store, pool = stats["prompt_tokens"], stats["store"], stats["pool"]
    served = tokens["device_hit"] + tokens["host_hit"] + sum(tokens["tier_hit"].values()) + tokens["recomputed"]
    assert tokens["total"] == served
    assert tokens["recomputed"] == sum(sum(part.values()) for part in stats["missed_tokens"].values())
    answered = store["stored"] + sum(store["skipped"].values()) + store["failed"] + store["in_flight"]
    assert store["offered"] == answered
    assert pool["slots"] == pool["free"] + pool["ready"] + pool["storing"]
    assert pool["loading"] <= pool["ready"]
    assert pool["pinned"] <= pool["ready"]


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


def test_stats_with_odd_names_equal_the_snapshot_and_context(fresh: Service) -> None:
    scheduler, store = fresh.context.scheduler, fresh.context.store
    started = WarmStart(3, 2, {"truncated": 1}, "model was 'a' and is \"b\\c\"", 0.25)
    engine = EngineInfo("it's", '50% of "C:\\models"', "cpu", 16, 1, 1)
    context = replace(fresh.context, engine=engine, warm_start=started, started_s=1000.0)
    with fresh.client() as client:
        for number in range(4):
            fresh.engine.run(LoopRequest(f"one{number}", 64, seed=number % 3))
        fresh.settle()
        client.post("/admin/v1/reset", json={}).raise_for_status()
    scheduler.live().prompt_tokens.tier_hit['100% "names"'] = 7
    written = json.loads(take_stats(context, 1010.5).model_dump_json())
    snapshot = scheduler.snapshot()
    sections = ("requests", "prompt_tokens", "missed_tokens", "store", "load", "evictions")
    assert snapshot.evictions.by_reason
    assert snapshot.store.stored
    assert written == {
        "time": "1970-01-01T00:16:50.500Z",
        "uptime_s": 10.5,
        "epoch": snapshot.epoch,
        "engine": asdict(engine),
        "pool": {"kind": "pinned", **asdict(snapshot.pool)},
        **{name: asdict(getattr(snapshot, name)) for name in sections},
        "tiers": {},
        "offloading": asdict(context.guard.status),
        "journal": asdict(store.journal_stats()) | {"lag_s": written["journal"]["lag_s"]},
        "recovery": asdict(started),
    }


def test_the_identities_hold_at_any_moment_under_load(fresh: Service) -> None:
    stop = threading.Event()

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            tokens = 16 * (number % 37)
            fresh.engine.run(LoopRequest(f"r{number}", tokens, seed=number % 11, num_output_tokens=number % 50))
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
        fresh.engine.run(LoopRequest("one", 64))
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
