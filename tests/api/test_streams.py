"""What every stream of server-sent events keeps: tokens, a bound, heartbeats, and an end with the server."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from fastapi import FastAPI
from httpx_sse import connect_sse
from sse_starlette import ServerSentEvent

from kvferry.app.api.auth import NO_TOKEN
from kvferry.app.api.calls import RequestIds
from kvferry.app.api.errors import install_error_handlers
from kvferry.app.api.sse import MustEnd, Streams
from tests.harness.http_server import ClosingFlag, Running, serve
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


@pytest.mark.parametrize("url", [f"{STATS}?interval_s=60", EVENTS])
def test_streams_end_with_the_server(tmp_path: Path, url: str) -> None:
    with start_service(tmp_path) as running, running.client() as client:
        with connect_sse(client, "GET", url) as source:
            events = source.iter_sse()
            next(events)
            running.server.should_exit = True
            assert list(events) == []
        wait_until(lambda: not running.thread.is_alive(), "the server has stopped")


@contextmanager
def streaming(
    event: ServerSentEvent | None, max_streams: int = 1, heartbeat_s: float = 15.0, send_timeout_s: float = 30.0
) -> Iterator[Running]:
    """Serve streams of one event again and again, or of none, at `/`."""
    closing, app = ClosingFlag(), FastAPI()
    streams = Streams(closing, lambda token: True, max_streams)
    streams.heartbeat_s, streams.send_timeout_s = heartbeat_s, send_timeout_s

    async def follow(must_end: MustEnd) -> AsyncGenerator[ServerSentEvent, None]:
        while not must_end():
            await anyio.sleep(0.01)
            if event is not None:
                yield event

    install_error_handlers(app)
    app.get("/")(lambda: streams.open(NO_TOKEN, follow))
    with serve(RequestIds(app), closing) as running:
        yield running


def test_streams_when_at_their_limit_are_503_until_one_ends() -> None:
    with streaming(ServerSentEvent("x"), max_streams=2) as running, running.client() as client:
        with connect_sse(client, "GET", "/") as one, connect_sse(client, "GET", "/") as two:
            # Dropping either iterator would close its stream.
            streams = [one.iter_sse(), two.iter_sse()]
            for stream in streams:
                next(stream)
            with client.stream("GET", "/") as refused:
                assert refused.status_code == 503
                assert refused.headers["Retry-After"]

        def has_room() -> bool:
            with client.stream("GET", "/") as answer:
                return answer.status_code == 200

        wait_until(has_room, "a stream whose client went makes room")


def test_stream_when_idle_sends_heartbeats() -> None:
    with streaming(None, heartbeat_s=0.1) as running, running.client() as client, client.stream("GET", "/") as answer:
        beats = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(beats)[:6], next(beats)[:6]] == [": ping"] * 2


def test_stream_when_its_client_does_not_read_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """A browser on a laptop that sleeps."""
    caplog.set_level(logging.INFO, "kvferry.app")
    with (
        streaming(ServerSentEvent("x" * 200_000), send_timeout_s=0.2) as running,
        socket.create_connection(("127.0.0.1", running.port)) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
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
