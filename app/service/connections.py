"""HTTP/1.1 connections with limits on head size, head time, idle time, unread output and number of connections."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvferry.app.api.calls import complete_headers, is_request_id
from kvferry.app.api.errors import BUSY, RETRY_AFTER_S, Problem
from kvferry.app.callers import caller_of
from kvferry.app.logs import RateLimitedLogger
from kvferry.app.service.acceptor import HEALTH_CHECK
from kvferry.app.service.turns import Turns

_log = logging.getLogger(__name__)
_BLANK_LINE = re.compile(rb"\n\r?\n")
_COMPLETION_PATH = "/v1/completions"
_COMPLETIONS = (b"POST /v1/completions ", b"POST /v1/chat/completions ")
_LENGTH = re.compile(rb"\n(?:content-length:[ \t]*([0-9]{1,8})[ \t]*(?=\r?\n)|transfer-encoding:)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"\nx-request-id:([^\r\n]*)(?=\r?\n)", re.IGNORECASE)
REQUESTS_PER_ITERATION = 4
"""Requests that start in one iteration of the event loop at most; each takes the loop about a millisecond."""
STARTING_S = 0.002
"""Time after which an iteration starts no other queued request: one whose body is parsed may take several times it."""
REFUSALS_PER_ITERATION = 64
MAX_TINY_CHUNKS = 1024
CHUNK_BYTES = 128
"""A chunked body may have `MAX_TINY_CHUNKS`, and one more for each `CHUNK_BYTES`: parsing a tiny chunk takes as long as
parsing a large one."""
RetryAfter = Callable[[str], int | None]
SHORT_WAIT_S = 1.0
"""A connection that has waited for less may have received a request that is not read yet."""


def never_busy(client: str) -> None:
    """Refuse no completion."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one server's connections.

    `stall_s` bounds how long a client may leave output unread; `keep_alive_s` how long a connection may be idle.
    """

    max_connections: int
    head_bytes: int = 64 << 10
    header_lines: int = 128
    head_s: float = 10.0
    keep_alive_s: float = 5.0
    stall_s: float = 30.0


class _Phase(Enum):
    """State of a connection. In all but ANSWER the server waits for the client."""

    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    REST = auto()
    """The response is complete, but not the request body, which is read and discarded."""
    STALLED = auto()
    IDLE = auto()
    CLOSING = auto()


class Connections:
    """The connections of one server: those that wait for their client, and those whose next request is queued.

    Client addresses take turns with their queued requests. Only a few requests start in each iteration of the event
    loop, so that thousands that arrive at once do not delay health checks and responses under way.
    """

    def __init__(self, limits: ConnectionLimits, retry_after_s: RetryAfter = never_busy) -> None:
        self.limits = limits
        self.retry_after_s = retry_after_s
        self._waiting: dict[HttpConnection, float] = {}
        self._queued: Turns[HttpConnection] = Turns()
        self._quota = REQUESTS_PER_ITERATION
        self._is_scheduled = False
        self._seldom = RateLimitedLogger(_log)

    def set_waiting(self, connection: HttpConnection, waiting: bool) -> None:
        """Record that a connection waits for its client from now on, or that it does not."""
        self._waiting.pop(connection, None)
        if waiting:
            self._waiting[connection] = connection.loop.time()

    def make_room(self, newest: HttpConnection, num_open: int) -> None:
        """Close a connection if there are too many with a new one.

        It is the connection that has waited longest for its client, or, if that is a short time and requests are
        queued, the connection of the request queued last, of the address that has queued the most.
        """
        if num_open <= self.limits.max_connections:
            return
        reason = f"more than {self.limits.max_connections} connections are open"
        longest = next((one for one in self._waiting if one is not newest), newest)
        since_s = self._waiting.get(longest)
        has_waited = since_s is not None and newest.loop.time() - since_s > SHORT_WAIT_S
        if has_waited or not self._queued:
            self.drop(longest, reason)
        else:
            last = self._queued.take_of_most(newest=True)
            self.log(reason)
            last.refuse(503, f"{reason}: try again later", {"Retry-After": str(RETRY_AFTER_S)})

    def may_start(self, connection: HttpConnection) -> bool:
        """Return whether the next request of a connection may start now; otherwise the request is queued."""
        if self._quota > 0 and not self._queued:
            self._quota -= 1
            self._schedule(connection.loop)
            return True
        self._queued.add(connection.caller, connection)
        self._schedule(connection.loop)
        return False

    def discard_queued(self, connection: HttpConnection) -> None:
        """Forget the queued request of a connection, if there is one."""
        self._queued.discard(connection.caller, connection)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._begin_iteration, loop)

    def _begin_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a few queued requests."""
        self._is_scheduled = False
        self._quota = REQUESTS_PER_ITERATION
        num_refused, begun_s = 0, loop.time()
        while self._queued and self._quota > 0 and num_refused < REFUSALS_PER_ITERATION:
            if loop.time() - begun_s > STARTING_S:
                break
            if self._queued.take_oldest().start_queued():
                self._quota -= 1
            else:
                num_refused += 1
        if self._queued or self._quota < REQUESTS_PER_ITERATION:
            self._schedule(loop)

    def drop(self, connection: HttpConnection, reason: str) -> None:
        """Close a connection at once; unsent output is discarded."""
        self.log(reason)
        connection.abort()

    def log(self, reason: str) -> None:
        """Log why a connection is closed, at most once a minute."""
        self._seldom.log(logging.WARNING, "closed", "HTTP connection closed: %s", reason)


class _Parser(h11.Connection):
    """h11's parser, which also refuses complete heads that are too large or have too many lines, before parsing."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._tail = b""
        self._may_hold_head = False
        self._num_chunks = 0
        self._body_bytes = 0

    def has_next_request(self) -> bool:
        """Return whether the complete head of a request that has not begun has been received."""
        return self._held_head()[1] is not None

    def is_health_check(self) -> bool:
        """Return whether the input that is not parsed yet starts with a health check."""
        return self.trailing_data[0].startswith(HEALTH_CHECK)

    def held_completion(self) -> bytes | None:
        """Return the head of the next request if it is a completion whose body has been received."""
        held, blank_line = self._held_head()
        if blank_line is None or not held.startswith(_COMPLETIONS):
            return None
        head = held[: blank_line.end()]
        lengths = _LENGTH.findall(head)
        # Unread input would reset the connection when it is closed after the response.
        is_whole = len(lengths) == 1 and lengths[0] and len(head) + int(lengths[0]) <= len(held)
        return head if is_whole else None

    def _held_head(self) -> tuple[bytes, re.Match[bytes] | None]:
        """Return the input that is not parsed yet, and the match of the end of a complete head in it."""
        if not self._may_hold_head or self.their_state is not h11.IDLE:
            return b"", None
        held, _ = self.trailing_data
        blank_line = _BLANK_LINE.search(held)
        if blank_line is None:
            self._may_hold_head = False
            self._tail = held[-2:]
        return held, blank_line

    def receive_data(self, data: bytes) -> None:
        """Record whether a head may be complete now; each byte is searched once."""
        if not self._may_hold_head:
            searched = self._tail + data
            self._may_hold_head = _BLANK_LINE.search(searched) is not None
            self._tail = searched[-2:]
        super().receive_data(data)

    def next_event(self) -> Any:
        """Return the next event. Raises `h11.RemoteProtocolError` for input that is malformed or beyond the limits."""
        held, blank_line = self._held_head()
        if blank_line is not None and (
            blank_line.end() > self._limits.head_bytes
            or held.count(b"\n", 0, blank_line.start()) > self._limits.header_lines
        ):
            raise h11.RemoteProtocolError("request head too large")
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._num_chunks > MAX_TINY_CHUNKS + self._body_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("chunks too small")
        return event


class HttpConnection(H11Protocol):
    """A connection that is closed when its client keeps the server waiting for too long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        kept: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._kept = kept
        self._limits = kept.limits
        self.conn: _Parser = _Parser(kept.limits)
        self._head_begun = True
        self._is_queued = False
        self.caller = ""
        """The client's address, as `caller_of` counts it."""
        self._phase: _Phase | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and close another one if there are too many."""
        super().connection_made(transport)
        self.caller = caller_of("" if self.client is None else self.client[0])
        self._update()
        self._kept.make_room(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._kept.set_waiting(self, False)
        self._kept.discard_queued(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close at once; unsent output is discarded."""
        self.connections.discard(self)
        self._kept.set_waiting(self, False)
        self._kept.discard_queued(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse and dispatch."""
        self._head_begun = True
        super().data_received(data)
        self._update()

    def handle_events(self) -> None:
        """Parse and dispatch received requests; any but a health check may be queued first."""
        if self._is_queued:
            # Bounds the memory of input; until then a connection that the client closes is noticed.
            self.flow.pause_reading()
            return
        if self.conn.has_next_request() and not self.conn.is_health_check():
            if self._refuse_completion():
                return
            if not self._kept.may_start(self):
                self._is_queued = True
                return
        super().handle_events()

    def start_queued(self) -> bool:
        """Parse and dispatch the request that was queued, or return False if it is refused or its client has gone."""
        self._is_queued = False
        if self.transport.is_closing() or self._refuse_completion():
            self._update()
            return False
        self.flow.resume_reading()
        super().handle_events()
        self._update()
        return True

    def _refuse_completion(self) -> bool:
        """Answer a completion with 429 while the engine accepts none, before it is parsed."""
        retry_after_s = self._kept.retry_after_s(self.caller)
        head = None if retry_after_s is None else self.conn.held_completion()
        if head is None:
            return False
        self._kept.log("the engine accepts no completions")
        ids = [one.strip(b" \t").decode("latin-1") for one in _REQUEST_ID.findall(head)]
        request_id = ids[0] if len(ids) == 1 and is_request_id(ids[0]) else None
        self.refuse(429, BUSY, {"Retry-After": str(retry_after_s)}, path=_COMPLETION_PATH, request_id=request_id)
        return True

    def on_response_complete(self) -> None:
        """Start the next request, if it has been received."""
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """Called when the client does not read as fast as output is written."""
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        """Called when the client has read most of the output."""
        super().resume_writing()
        self._update()

    def shutdown(self) -> None:
        """Close when idle; a request that waits for its body is notified."""
        super().shutdown()
        if self._phase is _Phase.BODY:
            self.cycle.message_event.set()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a problem document if no response has begun, and close."""
        self._kept.log("malformed HTTP, or a request head that is too large")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        limits = self._limits
        too_large = f"a head of more than {limits.head_bytes} bytes or {limits.header_lines} lines"
        self.refuse(400, f"Malformed HTTP/1.1 request, or {too_large}, or more than {MAX_TINY_CHUNKS} tiny chunks.")

    def refuse(
        self,
        status: int,
        detail: str,
        own_headers: Mapping[str, str] | None = None,
        *,
        path: str = "",
        request_id: str | None = None,
    ) -> None:
        """Answer with a problem document, and close. Requires: no response has begun."""
        request_id = request_id or uuid.uuid4().hex
        problem = Problem(status, detail, headers=own_headers)
        answer = problem.response({"path": path, "state": {"request_id": request_id}})
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())]
        headers = complete_headers(answer.raw_headers, status, request_id)
        for name, value in (*self.server_state.default_headers, *headers, (b"connection", b"close")):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", bytes(answer.body))))
        self.transport.close()
        self._is_queued = False
        self._update()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; output that the client has left unread is discarded."""
        if self._is_queued:
            return
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def _phase_now(self) -> _Phase:
        if self.transport.is_closing():
            return _Phase.CLOSING
        if self.flow.write_paused:
            return _Phase.STALLED
        if self._is_queued:
            return _Phase.ANSWER
        is_reading_body = self.conn.their_state is h11.SEND_BODY
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_begun = False
            return _Phase.BODY if is_reading_body else _Phase.ANSWER
        if is_reading_body:
            return _Phase.REST
        return _Phase.HEAD if self._head_begun else _Phase.IDLE

    def _update(self) -> None:
        """Start the timer of the connection's phase when that has changed."""
        phase = self._phase_now()
        if phase is self._phase:
            return
        self._phase = phase
        self._kept.set_waiting(self, phase is not _Phase.ANSWER)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limits = self._limits
        if phase is _Phase.HEAD:
            self._drop_in(limits.head_s, f"no complete request head within {limits.head_s:g} s")
        elif phase is _Phase.REST:
            self._drop_in(limits.head_s, f"request body not complete {limits.head_s:g} s after its response")
        elif phase in (_Phase.STALLED, _Phase.CLOSING):
            self._drop_in(limits.stall_s, f"the client did not read for {limits.stall_s:g} s")
        elif phase is _Phase.IDLE:
            self._timer = self.loop.call_later(limits.keep_alive_s, self.timeout_keep_alive_handler)

    def _drop_in(self, delay_s: float, reason: str) -> None:
        self._timer = self.loop.call_later(delay_s, self._kept.drop, self, reason)
