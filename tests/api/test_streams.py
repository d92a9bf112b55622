"""What every stream of server-sent events keeps: tokens, a bound, heartbeats, and an end with the server."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from types import ModuleType

import pytest
from httpx_sse import connect_sse

from kvferry.app.api import sse as streams_module
from kvferry.app.api.routes import events as events_module
from kvferry.app.api.routes import stats as stats_module
from kvferry.app.telemetry.events import EventType
from tests.harness.loop_service import READ, Service, start_service
from tests.harness.waiting import wait_until

STATS = "/admin/v1/stats/stream"
EVENTS = "/admin/v1/events"


@pytest.mark.parametrize("url", [STATS, EVENTS])
def test_a_stream_needs_a_token_like_any_get(guarded: Service, url: str) -> None:
    with guarded.client() as stranger:
        assert stranger.get(url).status_code == 401
    with guarded.client(READ) as reader, connect_sse(reader, "GET", url) as source:
        assert source.response.status_code == 200


def test_stats_of_streams_due_together_are_taken_once(fresh: Service) -> None:
    events = stats_module.StatsEvents(fresh.context)
    first = events.take(10.0)
    assert events.take(10.04) == first
    assert json.loads(events.take(10.1))["uptime_s"] > json.loads(first)["uptime_s"]


@pytest.mark.parametrize("url", [f"{STATS}?interval_s=60", EVENTS])
def test_streams_end_with_the_server(tmp_path: Path, url: str) -> None:
    with start_service(tmp_path) as running, running.client() as client:
        with connect_sse(client, "GET", url) as source:
            events = source.iter_sse()
            next(events)
            running.server.should_exit = True
            assert list(events) == []
        wait_until(lambda: not running.thread.is_alive(), "the server has stopped")


@pytest.mark.parametrize(
    ("module", "limit", "url"),
    [(stats_module, "MAX_STREAMS", f"{STATS}?interval_s=0.1"), (events_module, "MAX_WATCHERS", EVENTS)],
)
def test_streams_when_at_their_limit_are_503_until_one_ends(
    module: ModuleType, limit: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 2)
    with start_service(tmp_path) as running, running.client() as client:
        with connect_sse(client, "GET", url) as one, connect_sse(client, "GET", url) as two:
            # Dropping either iterator would close its stream.
            streams = [one.iter_sse(), two.iter_sse()]
            for stream in streams:
                next(stream)
            with client.stream("GET", url) as refused:
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]

        def has_room() -> bool:
            with client.stream("GET", url) as answer:
                return answer.status_code == 200

        wait_until(has_room, "a stream whose client went makes room")


@pytest.mark.parametrize("url", [f"{STATS}?interval_s=60", EVENTS])
def test_stream_when_idle_sends_heartbeats(service: Service, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.1)
    with service.client() as client, client.stream("GET", url) as answer:
        beats = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(beats)[:6], next(beats)[:6]] == [": ping"] * 2


def test_stream_when_its_client_does_not_read_is_closed(
    fresh: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A browser on a laptop that sleeps."""
    monkeypatch.setattr(streams_module, "SEND_TIMEOUT_S", 0.2)
    caplog.set_level(logging.INFO, "kvferry.app")
    feed = fresh.context.feed
    with socket.create_connection(("127.0.0.1", fresh.port)) as client:
        client.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        received = b""
        while b"event: open" not in received:
            received += client.recv(65536)
        for number in range(64):
            feed.changed(EventType.POLICY, {"set": {"x": "x" * 200_000}, "removed": []}, float(number))
        wait_until(lambda: any("does not read" in record.message for record in caplog.records), "it is said")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("url", [f"{STATS}?interval_s=0.1&max_events=3", f"{EVENTS}?max_events=1"])
def test_stream_with_max_events_ends_after_them(service: Service, url: str) -> None:
    with service.client() as client, connect_sse(client, "GET", url) as source:
        assert len(list(source.iter_sse())) == int(url[-1])


@pytest.mark.parametrize("max_events", ["0", "-1", "x", "1.5"])
def test_a_stream_of_no_events_is_refused(service: Service, max_events: str) -> None:
    with service.client() as client:
        for url in (STATS, EVENTS):
            answer = client.get(url, params={"max_events": max_events})
            assert [error["field"] for error in answer.json()["errors"]] == ["max_events"]
