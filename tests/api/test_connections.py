"""What hostile or slow clients can do to the server before, while and after it looks at their request."""

from __future__ import annotations

import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.calls import Bodies
from kvferry.app.service.connections import REQUESTS_PER_ITERATION, ConnectionLimits
from kvferry.app.service.server import (
    MAX_CONNECTIONS,
    ROUTE_THREADS,
    connection_limits,
    max_waiting_connections,
    raise_file_limit,
)
from tests.harness.http_server import ClosingFlag, Running, serve
from tests.harness.waiting import DEADLINE_S, wait_until

SOON_S = 0.2
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
LARGE = 64 << 20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a little, or a lot at `/large`, without reading the body."""
    body = b"x" * (LARGE if scope["path"] == "/large" else 2)
    scope.setdefault("state", {})
    headers = [(b"content-length", b"%d" % len(body))]
    status = 200 if scope["method"] in ("GET", "POST") else 405
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body_first(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body", False):
        continue
    await app(scope, receive, send)


@contextmanager
def limited(served: ASGIApp = app, closing: ClosingFlag | None = None, **limits: float) -> Iterator[Running]:
    chosen = ConnectionLimits(**({"max_connections": 100} | limits))  # type: ignore[arg-type]
    with serve(served, closing, chosen) as running:
        yield running


def connect(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S)


def read_all(raw: socket.socket) -> bytes:
    """Everything that arrives until the server closes the connection."""
    received = bytearray()
    with suppress(ConnectionError):
        while piece := raw.recv(65536):
            received += piece
    return bytes(received)


def is_well(running: Running) -> bool:
    with connect(running) as raw:
        raw.sendall(GET + b"Connection: close\r\n\r\n")
        return read_all(raw).startswith(b"HTTP/1.1 200")


def is_refused(running: Running, request: bytes) -> bool:
    with connect(running) as raw:
        with suppress(ConnectionError):
            raw.sendall(request)
        return not read_all(raw).startswith(b"HTTP/1.1 2")


@pytest.mark.parametrize(
    "rest",
    [
        b"X: " + b"y" * (1 << 20),
        b"X: y\r\n" * (1 << 17),
        b"X: " + b"y" * (66 << 10) + b"\r\n\r\n",
        b"X:\r\n" * 200 + b"\r\n",
    ],
    ids=["endless line", "endless lines", "large", "many lines"],
)
def test_a_head_beyond_its_limits_is_refused(rest: bytes) -> None:
    with limited() as running:
        assert is_refused(running, GET + rest)
        assert is_refused(running, b"GET /" + rest[:200_000])
        # Also behind another request on the same connection.
        with connect(running) as raw:
            with suppress(ConnectionError):
                raw.sendall(GET + b"\r\n" + GET + rest)
            assert read_all(raw).count(b"HTTP/1.1 200") <= 1
        assert is_well(running)


@pytest.mark.parametrize(
    ("num_chunks", "chunk_bytes", "is_served"), [(5000, 1, False), (500, 1, True), (5000, 300, True)]
)
def test_body_of_tiny_chunks_when_these_are_many_is_refused(num_chunks: int, chunk_bytes: int, is_served: bool) -> None:
    """Each chunk takes the event loop as long as a large one."""
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = (b"%x\r\n%s\r\n" % (chunk_bytes, b"x" * chunk_bytes)) * num_chunks
    with limited(read_body_first) as running:
        assert is_refused(running, head + chunks + b"0\r\n\r\n") != is_served
        assert is_well(running)


def test_head_of_60_kib_and_100_lines_is_answered() -> None:
    with limited() as running, connect(running) as raw:
        lines = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 600) for number in range(99))
        raw.sendall(GET + lines + b"Connection: close\r\n\r\n")
        assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_requests_sent_byte_by_byte_or_at_once_are_answered_in_order() -> None:
    with limited() as running, connect(running) as raw:
        for number in range(len(GET) + 2):
            raw.sendall((GET + b"\r\n")[number : number + 1])
        raw.sendall((GET + b"\r\n") * 50 + GET + b"Connection: close\r\n\r\n")
        assert read_all(raw).count(b"HTTP/1.1 200") == 52


@pytest.mark.parametrize("sent", [b"", b"GET", GET, GET + b"\r\n" + GET], ids=["nothing", "word", "line", "second"])
def test_a_connection_without_a_complete_head_is_closed(sent: bytes) -> None:
    with limited(head_s=SOON_S, keep_alive_s=SOON_S) as running, connect(running) as raw:
        raw.sendall(sent)
        assert read_all(raw).count(b"HTTP/1.1") == (1 if sent.count(b"\r\n\r\n") else 0)


def test_a_head_that_trickles_is_closed_though_bytes_arrive() -> None:
    with limited(head_s=SOON_S) as running, connect(running) as raw:
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


def test_an_idle_connection_is_closed() -> None:
    with limited(keep_alive_s=SOON_S) as running, connect(running) as raw:
        raw.sendall(GET + b"\r\n")
        assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_end_is_closed_after_its_answer() -> None:
    with limited(head_s=SOON_S) as running, connect(running) as raw:
        raw.sendall(POST)
        assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_arrive_is_refused_in_time() -> None:
    closing = ClosingFlag()
    with limited(with_state(Bodies(app, closing, SOON_S)), closing) as running, connect(running) as raw:
        raw.sendall(POST)
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_a_body_that_has_not_arrived_does_not_hold_a_stop() -> None:
    closing = ClosingFlag()
    with limited(with_state(Bodies(app, closing)), closing) as running, connect(running) as raw:
        raw.sendall(POST)
        wait_until(lambda: bool(running.server.server_state.tasks), "the request has begun")
        running.server.should_exit = True
        assert raw.recv(100).startswith(b"HTTP/1.1 503")


def with_state(inner: ASGIApp) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        await inner(scope, receive, send)

    return run


def test_a_client_that_does_not_read_is_disconnected() -> None:
    with limited(stall_s=SOON_S) as running, connect(running) as raw:
        raw.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(running.server.server_state.connections) == 1, "the connection is open")
        wait_until(lambda: not running.server.server_state.connections, "the connection is closed")
        assert len(read_all(raw)) < LARGE


def test_with_too_many_connections_the_longest_waiting_is_closed() -> None:
    with limited(max_connections=20) as running, ExitStack() as stack:
        held = [stack.enter_context(connect(running)) for _ in range(20)]
        for raw in held[::2]:
            raw.sendall(GET)
        assert all(is_well(running) for _ in range(5))
        more = [stack.enter_context(connect(running)) for _ in range(100)]
        assert is_well(running)
        wait_until(lambda: len(running.server.server_state.connections) <= 20, "there are few connections")
        assert [read_all(raw) for raw in held] == [b""] * 20
        more[-1].sendall(GET + b"Connection: close\r\n\r\n")
        assert read_all(more[-1]).startswith(b"HTTP/1.1 200")


class BlockingApp:
    """Answers, and records the paths in order; `/block` holds the event loop until `released` once more."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.blocked = threading.Semaphore(0)
        self.released = threading.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/block":
            self.blocked.release()
            self.released.acquire(timeout=DEADLINE_S)
        await app(scope, receive, send)


CLOSE = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def burst(
    running: Running,
    served: BlockingApp,
    num_requests: int,
    stack: ExitStack,
    *,
    release: bool = True,
    request: bytes = b"",
) -> list[socket.socket]:
    """Send requests, and a health check last, that the server finds all at once."""
    first = stack.enter_context(connect(running))
    first.sendall(b"GET /block" + CLOSE)
    assert served.blocked.acquire(timeout=DEADLINE_S)
    sent = [stack.enter_context(connect(running)) for _ in range(num_requests)]
    for raw in sent:
        raw.sendall(request or b"GET /work" + CLOSE)
    sent.append(stack.enter_context(connect(running)))
    sent[-1].sendall(b"GET /healthz" + CLOSE)
    if release:
        served.released.release()
    return sent


def test_a_health_check_behind_a_burst_is_answered_among_the_first() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running, ExitStack() as stack:
        answers = [read_all(raw) for raw in burst(running, served, 100, stack)]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert served.paths.index("/healthz") <= 1 + 4 * REQUESTS_PER_ITERATION


def test_request_after_a_burst_does_not_wait_for_the_burst() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running, ExitStack() as stack:
        sent = burst(running, served, 100, stack, release=False)
        sent.append(stack.enter_context(connect(running)))
        sent[-1].sendall(b"GET /last" + CLOSE)
        served.released.release()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in sent)
    assert served.paths.index("/last") <= 2 * REQUESTS_PER_ITERATION


def test_health_check_when_sent_after_it_connects_is_answered_first() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running, ExitStack() as stack:
        sent = burst(running, served, 0, stack, release=False)
        silent = [stack.enter_context(connect(running)) for _ in range(101)]
        sent.append(stack.enter_context(connect(running)))
        sent[-1].sendall(b"GET /block" + CLOSE)
        served.released.release()
        # All are accepted now, and few are opened.
        assert served.blocked.acquire(timeout=DEADLINE_S)
        num_before = len(served.paths)
        for raw in silent[:-1]:
            raw.sendall(GET + b"Connection: close\r\n\r\n")
        silent[-1].sendall(b"GET /healthz" + CLOSE)
        served.released.release()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in sent + silent)
    assert served.paths.index("/healthz", num_before) <= num_before + 4 * REQUESTS_PER_ITERATION


def test_client_addresses_take_turns_in_a_burst() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running, ExitStack() as stack:
        sent = burst(running, served, 50, stack, release=False)
        for _ in range(2):
            address = ("127.0.0.1", running.port)
            sent.append(stack.enter_context(socket.create_connection(address, DEADLINE_S, ("127.0.0.2", 0))))
            sent[-1].sendall(b"GET /other" + CLOSE)
        for _ in range(50):
            sent.append(stack.enter_context(connect(running)))
            sent[-1].sendall(b"GET /work" + CLOSE)
        served.released.release()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in sent)
    assert served.paths[: 2 * REQUESTS_PER_ITERATION].count("/other") == 2


def test_client_addresses_take_turns_with_requests_on_open_connections() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running, ExitStack() as stack:
        opened = [stack.enter_context(connect(running)) for _ in range(50)]
        other = socket.create_connection(("127.0.0.1", running.port), DEADLINE_S, ("127.0.0.2", 0))
        stack.enter_context(other)
        wait_until(lambda: len(running.server.server_state.connections) == 51, "all connections are open")
        blocking = stack.enter_context(connect(running))
        blocking.sendall(b"GET /block" + CLOSE)
        assert served.blocked.acquire(timeout=DEADLINE_S)
        for raw in opened:
            raw.sendall(GET + b"Connection: close\r\n\r\n")
        other.sendall(b"GET /other" + CLOSE)
        served.released.release()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in (*opened, other))
    assert served.paths.index("/other") <= 2 * REQUESTS_PER_ITERATION


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

    with limited(threaded) as running, ExitStack() as stack:
        sent = [stack.enter_context(connect(running)) for _ in range(4 * ROUTE_THREADS)]
        for raw in sent:
            raw.sendall(GET + b"Connection: close\r\n\r\n")
        wait_until(lambda: len(running.server.server_state.tasks) == len(sent), "all have begun")
        wait_until(lambda: running_at_once[-1] >= ROUTE_THREADS, "some run")
        may_end.set()
        assert all(read_all(raw).startswith(b"HTTP/1.1 200") for raw in sent)
    assert max(running_at_once) == ROUTE_THREADS


def test_pipelined_requests_take_turns_with_other_connections() -> None:
    served = BlockingApp()
    with limited(served) as running, ExitStack() as stack:
        many = stack.enter_context(connect(running))
        many.sendall(b"GET /many HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30 + b"GET /block" + CLOSE)
        burst(running, served, 40, stack)
        served.released.release()
        assert read_all(many).count(b"HTTP/1.1 200") == 31


def test_queued_requests_when_their_clients_disconnect_do_not_start() -> None:
    served = BlockingApp()
    with limited(served, max_connections=200) as running:
        with ExitStack() as gone:
            burst(running, served, 100, gone, release=False)
        served.released.release()
        assert is_well(running)
        wait_until(lambda: not running.server.server_state.connections, "all connections are closed")
    assert len(served.paths) < 50


def test_beyond_the_limit_queued_requests_yield_to_a_health_check() -> None:
    served = BlockingApp()
    with limited(served, max_connections=20) as running, ExitStack() as stack:
        answers = [read_all(raw) for raw in burst(running, served, 60, stack)]
        assert answers[-1].startswith(b"HTTP/1.1 200")
        assert is_well(running)


COMPLETION, CHAT = (
    b"POST /v1/%scompletions HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: r 7\r\n" % prefix
    for prefix in (b"", b"chat/")
)


@pytest.mark.parametrize("request_head", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_completions_while_the_engine_takes_none_are_refused_unparsed(request_head: bytes) -> None:
    served = BlockingApp()
    served.released.release()
    limits = ConnectionLimits(max_connections=100)
    with serve(served, None, limits, lambda client: 7 if client == "127.0.0.1" else None) as running:
        with connect(running) as raw:
            raw.sendall(GET + b"\r\n" + request_head + b"Content-Length: 10\r\n\r\n" + b"x" * 10)
            head, _, body = read_all(raw).split(b"HTTP/1.1 ")[-1].partition(b"\r\n\r\n")
        assert head.startswith(b"429 Too Many Requests\r\n")
        headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in head.split(b"\r\n")[1:])}
        assert headers[b"retry-after"] == b"7"
        assert headers[b"x-request-id"] == b"r 7"
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"cache-control"] == b"no-store"
        assert headers[b"connection"] == b"close"
        assert int(headers[b"content-length"]) == len(body)
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert served.paths == ["/"]
        assert is_well(running)
        # Closing these early would lose the response.
        for rest in (
            b"Content-Length: 10\r\n\r\nx",
            b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
        ):
            with connect(running) as raw:
                raw.sendall(request_head + rest)
                assert raw.recv(100).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))


def test_a_burst_of_refused_completions_does_not_delay_other_calls() -> None:
    served, is_busy = BlockingApp(), threading.Event()
    limits = ConnectionLimits(max_connections=200)
    with serve(served, None, limits, lambda _: 1 if is_busy.is_set() else None) as running, ExitStack() as stack:
        sent = burst(running, served, 100, stack, release=False, request=COMPLETION + b"Content-Length: 1\r\n\r\nx")
        is_busy.set()
        served.released.release()
        answers = [read_all(raw) for raw in sent]
        assert all(answer.startswith(b"HTTP/1.1 429") for answer in answers[:-1])
        assert answers[-1].startswith(b"HTTP/1.1 200")
    assert served.paths == ["/block", "/healthz"]


def test_hostile_clients_cost_one_log_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), limited(max_connections=5, head_s=SOON_S) as running, ExitStack() as stack:
        for _ in range(20):
            assert is_refused(running, b"nonsense\r\n\r\n")
            stack.enter_context(connect(running)).sendall(GET)
        assert is_refused(running, GET)
        close = b"Connection: close\r\n\r\n"
        for request in (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
            b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n" + close,
            b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + close,
            b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n" + close,
            GET + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n",
            GET + b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
            GET + b"\r\nnonsense\r\n\r\n",
        ):
            with connect(running) as raw:
                raw.sendall(request)
                read_all(raw)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_the_file_limit_is_raised_and_leaves_room_for_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert 0 < connection_limits().max_connections <= min(MAX_CONNECTIONS, hard // 2)
        assert 0 < max_waiting_connections() <= hard // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
