"""The same bytes again on the same connection: answered without a detour, and just as any call is."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from enum import StrEnum
from itertools import count

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from app.api.envelope import Envelope
from app.api.polled import PolledAnswer, PolledRoute
from app.api.problems import install_problem_handlers
from app.api.repeats import RepeatedCalls
from app.server_config import server_config

from .service import ADMIN, READ, Service
from .serving import DEADLINE_S, Running, serve

PADDING = 50_000


@dataclass
class Counting:
    """An app that counts its answers, and how many calls went all the way to it."""

    numbers: Iterator[int] = field(default_factory=count)
    calls: int = 0
    failing: bool = False

    def body(self) -> bytes:
        if self.failing:
            raise RuntimeError("a secret in a message")
        return json.dumps({"n": next(self.numbers)}).encode()

    def padded(self) -> bytes:
        return self.body().ljust(PADDING)

    def app(self) -> FastAPI:
        app = FastAPI(middleware=[Middleware(Envelope), Middleware(_Counter, counting=self)])
        install_problem_handlers(app)
        router = APIRouter()

        def get_count() -> PolledAnswer:
            return PolledAnswer(self.body, "application/json")

        def get_padded() -> PolledAnswer:
            return PolledAnswer(self.padded, "application/json")

        router.add_api_route("/count", get_count, route_class_override=PolledRoute)
        router.add_api_route("/padded", get_padded, route_class_override=PolledRoute)
        app.include_router(router)
        return app


class _Counter:
    def __init__(self, app: ASGIApp, counting: Counting) -> None:
        self._app = app
        self._counting = counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._counting.calls += 1
        await self._app(scope, receive, send)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes

    @property
    def number(self) -> int:
        assert self.status == 200, self.body
        number: int = json.loads(self.body)["n"]
        return number


def read_answer(reader: io.BufferedIOBase) -> Answer:
    _, status, _ = reader.readline().split(b" ", 2)
    headers = http.client.parse_headers(reader)
    return Answer(int(status), headers, reader.read(int(headers["content-length"])))


class Connection:
    """One connection: bytes are sent as they are given, and answers read one by one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> Answer:
        return read_answer(self._reader)

    def ask(self, call: bytes) -> Answer:
        self.send(call)
        return self.read()

    @property
    def is_closed_by_server(self) -> bool:
        return self._reader.read(1) == b""


@contextmanager
def connected(port: int) -> Iterator[Connection]:
    connection = Connection(port)
    with connection.socket:
        yield connection


def call(path: str = "/count", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: localhost", *headers))
    return head.encode() + b"\r\n" + body


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def running(counting: Counting) -> Iterator[Running]:
    with serve(counting.app()) as running:
        yield running


def test_only_the_first_of_many_goes_all_the_way(counting: Counting, running: Running) -> None:
    with connected(running.port) as connection:
        answers = [connection.ask(call()) for _ in range(20)]
    assert [answer.number for answer in answers] == list(range(20))
    assert counting.calls == 1
    assert len({answer.headers["x-request-id"] for answer in answers}) == 20
    first = answers[0].headers
    assert first["cache-control"] == "no-store"
    assert first["date"]
    for answer in answers:
        told = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
        length = {"content-length": str(len(answer.body))}
        assert told == {name: first[name] for name in told} | length
        assert sorted(answer.headers.keys()) == sorted(first.keys())


def test_the_callers_own_id_comes_back_each_time(counting: Counting, running: Running) -> None:
    with connected(running.port) as connection:
        answers = [connection.ask(call("/count", "X-Request-ID: mine")) for _ in range(3)]
        other = connection.ask(call("/count", "X-Request-ID: another"))
    assert [answer.headers.get_all("x-request-id") for answer in answers] == [["mine"]] * 3
    assert other.headers.get_all("x-request-id") == ["another"]
    assert counting.calls == 2


def test_what_cannot_be_polled_goes_all_the_way_each_time(counting: Counting, running: Running) -> None:
    with connected(running.port) as connection:
        assert [connection.ask(call("/nothing")).status for _ in range(3)] == [404] * 3
        assert [connection.ask(call(method="POST")).status for _ in range(3)] == [405] * 3
    assert counting.calls == 6


def test_a_failure_is_told_and_logged_as_ever_and_passes(
    counting: Counting, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), connected(running.port) as connection:
        assert [connection.ask(call()).number for _ in range(2)] == [0, 1]
        counting.failing = True
        failed = [connection.ask(call()) for _ in range(2)]
        counting.failing = False
        assert [connection.ask(call()).number for _ in range(3)] == [2, 3, 4]
    assert [answer.status for answer in failed] == [500, 500]
    for answer in failed:
        assert b"secret" not in answer.body
        assert any(answer.headers["x-request-id"] in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_a_connection_closes_when_the_caller_says_so(running: Running) -> None:
    with connected(running.port) as connection:
        assert connection.ask(call("/count", "Connection: close")).number == 0
        assert connection.is_closed_by_server
    with connected(running.port) as connection:
        assert connection.ask(b"GET /count HTTP/1.0\r\nHost: localhost\r\n\r\n").number == 1
        assert connection.is_closed_by_server


def test_repeated_calls_keep_a_connection_open_and_idleness_closes_it(running: Running) -> None:
    keep_alive_s = 1
    running.server.config.timeout_keep_alive = keep_alive_s
    with connected(running.port) as connection:
        end_s = time.monotonic() + 2 * keep_alive_s
        numbers = [connection.ask(call()).number]
        while time.monotonic() < end_s:
            numbers.append(connection.ask(call()).number)
        assert numbers == list(range(len(numbers)))
        assert connection.is_closed_by_server


def test_a_caller_that_does_not_read_gets_every_answer_in_the_end(counting: Counting, running: Running) -> None:
    with connected(running.port) as connection:
        assert connection.ask(call("/padded")).number == 0
        # More than the sockets' buffers hold, so the server has to wait for the reader.
        num_calls = 400
        for _ in range(num_calls):
            connection.send(call("/padded"))
        assert [connection.read().number for _ in range(num_calls)] == list(range(1, num_calls + 1))


def test_each_connection_shows_its_own_token(guarded: Service) -> None:
    path = "/admin/v1/stats"
    with connected(guarded.port) as admin, connected(guarded.port) as stranger, connected(guarded.port) as turncoat:
        for _ in range(3):
            assert admin.ask(call(path, f"Authorization: Bearer {ADMIN}")).status == 200
            assert stranger.ask(call(path)).status == 401
            assert stranger.ask(call(path, "Authorization: Bearer wrong")).status == 401
            assert turncoat.ask(call(path, f"Authorization: Bearer {READ}")).status == 200
            assert turncoat.ask(call(path)).status == 401


def test_repeated_statistics_are_of_their_moment(fresh: Service) -> None:
    with fresh.client() as client, connected(fresh.port) as connection:
        for epoch in range(3):
            for path, has_it in (("/admin/v1/stats", f'"epoch":{epoch}'), ("/metrics", f"kvferry_epoch {epoch}.0")):
                assert all(has_it in connection.ask(call(path)).body.decode() for _ in range(3))
            client.post("/admin/v1/reset", json={}).raise_for_status()


class Wire(asyncio.Transport):
    """The socket's end of a connection, which hands pieces over just as they are cut, and writes when it is let."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        config = server_config(app)
        config.load()
        self.written = b""
        self._reading = True
        self._pieces: list[bytes] = []
        self.protocol = RepeatedCalls(config, ServerState(), {}, asyncio.get_running_loop())
        self.protocol.connection_made(self)

    def bring(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._hand_over()

    def _hand_over(self) -> None:
        while self._reading and self._pieces:
            self.protocol.data_received(self._pieces.pop(0))

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        asyncio.get_running_loop().call_soon(self._hand_over)

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        assert not self.protocol.flow.write_paused, "written though the reader has enough"
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class Holding:
    """An app whose one slow answer waits until it is let go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.released = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            await self.released.wait()
        await self._app(scope, receive, send)


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)


CALLS = {
    "plain": call(),
    "named": call("/count", "X-Request-ID: mine"),
    "queried": call("/count?again=1"),
    "with body": call("/count", "Content-Length: 8", body=b"abcd\r\n\r\n"),
    "upgrading": call("/count", "Connection: Upgrade", "Upgrade: h2c"),
    "unknown": call("/nothing"),
    "held": call("/held"),
    "ending like a call": call("/nothing")[:-2] + b"X-Other: " + call(),
    "posted": call("/count", f"Content-Length: {len(call())}", method="POST", body=call()),
}
STATUS = {"unknown": 404, "held": 404, "ending like a call": 404, "posted": 405}


class Then(StrEnum):
    """What happens after a piece was brought."""

    NOTHING = "nothing"
    SETTLE = "settle"
    PAUSE = "writing is paused"
    RESUME = "writing goes on"
    RELEASE = "the held answer is let go"


Turn = tuple[str, int, str | int, Then, Then]

# Calls are more often whole than not, or end with what could be a call.
cuts = st.one_of(st.just("whole"), st.just("tail"), st.integers(0, 60))
turns = st.lists(
    st.tuples(st.sampled_from(sorted(CALLS)), st.integers(1, 3), cuts, st.sampled_from(Then), st.sampled_from(Then)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=1000)
@given(turns)
# A body may look like the call before it.
@example([("plain", 1, "whole", Then.SETTLE, Then.NOTHING), ("posted", 1, "tail", Then.SETTLE, Then.SETTLE)])
# And so may the end of a head, when that call had to wait for its reader and has just been answered.
@example(
    [
        ("unknown", 1, "whole", Then.SETTLE, Then.PAUSE),
        ("plain", 1, "whole", Then.SETTLE, Then.NOTHING),
        ("ending like a call", 1, "tail", Then.RESUME, Then.SETTLE),
    ]
)
# The same call comes amid another, and again at its end.
@example(
    [
        ("with body", 1, 20, Then.SETTLE, Then.NOTHING),
        ("plain", 2, "whole", Then.SETTLE, Then.SETTLE),
        ("plain", 2, 20, Then.SETTLE, Then.SETTLE),
    ]
)
def test_however_calls_come_they_are_answered_in_their_order(
    turns: list[Turn],
) -> None:
    """Each turn brings a call several times, cut in two, and has something happen after each piece."""
    asyncio.run(bring(turns))


async def bring(turns: list[Turn]) -> None:
    holding = Holding(Counting().app())
    wire = Wire(holding)
    for name, times, cut, *thens in turns:
        data = CALLS[name]
        at = {"whole": len(data), "tail": len(data) - len(call())}.get(cut, cut)  # type: ignore[call-overload]
        for _ in range(times):
            for piece, then in zip((data[:at], data[at:]), thens, strict=True):
                if piece:
                    wire.bring(piece)
                await happen(then, wire, holding)
    for then in (Then.RELEASE, Then.RESUME):
        await happen(then, wire, holding)
    for _ in range(sum(times for _, times, *_ in turns)):
        await settle()
    check(io.BytesIO(wire.written), [name for name, times, *_ in turns for _ in range(times)])


async def happen(then: Then, wire: Wire, holding: Holding) -> None:
    if then is Then.PAUSE:
        wire.protocol.pause_writing()
    elif then is Then.RESUME:
        wire.protocol.resume_writing()
    elif then is Then.RELEASE:
        holding.released.set()
    if then is not Then.NOTHING:
        await settle()


def check(written: io.BytesIO, calls: list[str]) -> None:
    expected = count()
    for name in calls:
        answer = read_answer(written)
        assert answer.status == STATUS.get(name, 200), (name, answer)
        if answer.status == 200:
            assert answer.number == next(expected)
        assert (answer.headers["x-request-id"] == "mine") == (name == "named")
    assert written.read() == b""
