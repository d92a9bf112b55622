"""HTTP/1.1 connections with limits on head size, head time, idle time, unread output and number of connections."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from app.api.envelope import complete_headers
from app.api.problems import Problem
from app.seldom import SeldomLogger

_log = logging.getLogger(__name__)
_BLANK_LINE = re.compile(rb"\n\r?\n")


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
    """The response is complete, the request body is not: it is read and discarded."""
    STALLED = auto()
    IDLE = auto()
    CLOSING = auto()


class Connections:
    """The connections of one server that wait for their client, in the order in which they began to wait."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._waiting: dict[HttpConnection, None] = {}
        self._seldom = SeldomLogger(_log)

    def set_waiting(self, connection: HttpConnection, waiting: bool) -> None:
        """Record that a connection waits for its client from now on, or that it does not."""
        self._waiting.pop(connection, None)
        if waiting:
            self._waiting[connection] = None

    def make_room(self, newest: HttpConnection, num_open: int) -> None:
        """Close the connection that has waited longest if there are too many, or the newest if none waits."""
        if num_open > self.limits.max_connections:
            longest = next((one for one in self._waiting if one is not newest), newest)
            self.drop(longest, f"more than {self.limits.max_connections} connections are open")

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

    def receive_data(self, data: bytes) -> None:
        """Note whether a head may be complete now, so that each byte is searched once."""
        if not self._may_hold_head:
            searched = self._tail + data
            self._may_hold_head = _BLANK_LINE.search(searched) is not None
            self._tail = searched[-2:]
        super().receive_data(data)

    def next_event(self) -> Any:
        """Raises `h11.RemoteProtocolError` for what is malformed or beyond the limits."""
        if self._may_hold_head and self.their_state is h11.IDLE:
            held, _ = self.trailing_data
            blank_line = _BLANK_LINE.search(held)
            if blank_line is None:
                self._may_hold_head = False
                self._tail = held[-2:]
            elif (
                blank_line.end() > self._limits.head_bytes
                or held.count(b"\n", 0, blank_line.start()) > self._limits.header_lines
            ):
                raise h11.RemoteProtocolError("request head too large")
        return super().next_event()


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
        self.conn = _Parser(kept.limits)
        self._head_begun = True
        self._phase: _Phase | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and make room for it."""
        super().connection_made(transport)
        self._update()
        self._kept.make_room(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._kept.set_waiting(self, False)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        self.connections.discard(self)
        self._kept.set_waiting(self, False)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse and dispatch."""
        self._head_begun = True
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Go on with the next request, if it has been received already."""
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
        """Close when idle. A request that waits for its body sees that the server is closing."""
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
        request_id = uuid.uuid4().hex
        limits = self._limits
        too_large = f"a head of more than {limits.head_bytes} bytes or {limits.header_lines} lines"
        detail = f"Malformed HTTP/1.1 request, or {too_large}."
        answer = Problem(400, detail).response({"state": {"request_id": request_id}})
        lines = [b"HTTP/1.1 400 %s\r\n" % HTTPStatus.BAD_REQUEST.phrase.encode()]
        headers = complete_headers(answer.raw_headers, 400, request_id)
        for name, value in (*self.server_state.default_headers, *headers, (b"connection", b"close")):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", bytes(answer.body))))
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; output that the client has left unread is discarded."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def _should_upgrade(self) -> bool:
        """No other protocol is spoken here; uvicorn logs each request for one."""
        return False

    def _phase_now(self) -> _Phase:
        if self.transport.is_closing():
            return _Phase.CLOSING
        if self.flow.write_paused:
            return _Phase.STALLED
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
