"""What slow or malformed requests do to the server before an application has them."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from contextlib import ExitStack, suppress

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.calls import Bodies
from kvferry.app.service.server import ROUTE_THREADS, raise_file_limit
from kvferry.app.service.timed_heads import TimedHeads
from tests.harness.http_server import ClosingFlag, Running, serve
from tests.harness.waiting import DEADLINE_S, wait_until

SOON_S = 1.0
"""Limit of heads and bodies, in which those that a test sends at once arrive on a busy machine."""
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without reading the body."""
    status = 200 if scope["method"] in ("GET", "POST") else 405
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"xx"})


class SoonHeads(TimedHeads):
    head_s = SOON_S


def connect(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S)


def read_all(raw: socket.socket) -> bytes:
    """Everything that arrives until the server closes the connection."""
    received = bytearray()
    with suppress(ConnectionError):
        while piece := raw.recv(65536):
            received += piece
    return bytes(received)


def test_requests_sent_byte_by_byte_or_at_once_are_answered_in_order() -> None:
    with serve(app) as running, connect(running) as raw:
        for number in range(len(GET) + 2):
            raw.sendall((GET + b"\r\n")[number : number + 1])
        raw.sendall((GET + b"\r\n") * 50 + GET + b"Connection: close\r\n\r\n")
        assert read_all(raw).count(b"HTTP/1.1 200") == 52


@pytest.mark.parametrize("sent", [b"", b"GET", GET, GET + b"\r\n" + GET], ids=["nothing", "word", "line", "second"])
def test_a_connection_without_a_complete_head_is_closed(sent: bytes) -> None:
    with serve(app, http=SoonHeads) as running, connect(running) as raw:
        raw.sendall(sent)
        assert read_all(raw).count(b"HTTP/1.1") == (1 if sent.count(b"\r\n\r\n") else 0)


def test_a_head_that_trickles_is_closed_though_bytes_arrive() -> None:
    with serve(app, http=SoonHeads) as running, connect(running) as raw:
        raw.sendall(GET)
        raw.settimeout(SOON_S / 20)
        closed = False
        for _ in range(1000):
            try:
                raw.sendall(b"X: y\r\n")
                closed = raw.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
            break
        assert closed


def test_a_second_head_that_trickles_is_closed_after_one_answer() -> None:
    with serve(app, http=SoonHeads) as running, connect(running) as raw:
        raw.sendall(GET + b"\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        raw.sendall(GET)
        assert read_all(raw) == b""


def test_an_answer_that_takes_longer_than_a_head_may_is_sent() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(2 * SOON_S)
        await app(scope, receive, send)

    with serve(slow, http=SoonHeads) as running, connect(running) as raw:
        raw.sendall(GET + b"Connection: close\r\n\r\n")
        assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_arrive_is_refused_in_time() -> None:
    closing = ClosingFlag()
    with serve(with_state(Bodies(app, closing, SOON_S)), closing) as running, connect(running) as raw:
        raw.sendall(POST)
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_a_body_that_has_not_arrived_does_not_hold_a_stop() -> None:
    closing = ClosingFlag()
    with serve(with_state(Bodies(app, closing)), closing) as running, connect(running) as raw:
        raw.sendall(POST)
        wait_until(lambda: bool(running.server.server_state.tasks), "the request has begun")
        running.server.should_exit = True
        assert raw.recv(100).startswith(b"HTTP/1.1 503")


def with_state(inner: ASGIApp) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        await inner(scope, receive, send)

    return run


def test_routes_on_threads_in_a_burst_run_few_at_once() -> None:
    lock, may_end, running_at_once = threading.Lock(), threading.Event(), [0]

    def work() -> None:
        with lock:
            running_at_once.append(running_at_once[-1] + 1)
        may_end.wait(DEADLINE_S)
        with lock:
            running_at_once.append(running_at_once[-1] - 1)

    async def threaded(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(work)
        await app(scope, receive, send)

    with serve(threaded) as running, ExitStack() as stack:
        sent = [stack.enter_context(connect(running)) for _ in range(4 * ROUTE_THREADS)]
        for raw in sent:
            raw.sendall(GET + b"Connection: close\r\n\r\n")
        wait_until(lambda: len(running.server.server_state.tasks) == len(sent), "all have begun")
        wait_until(lambda: running_at_once[-1] >= ROUTE_THREADS, "some run")
        may_end.set()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in sent)
    assert max(running_at_once) == ROUTE_THREADS


def test_malformed_requests_cost_one_log_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serve(app) as running:
        for _ in range(20):
            with connect(running) as raw:
                raw.sendall(b"nonsense\r\n\r\n")
                assert read_all(raw).startswith(b"HTTP/1.1 400")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1


def test_many_half_open_connections_let_a_request_through() -> None:
    with serve(app) as running, ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(running)).sendall(GET)
        with connect(running) as raw:
            raw.sendall(GET + b"Connection: close\r\n\r\n")
            assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_the_file_limit_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
