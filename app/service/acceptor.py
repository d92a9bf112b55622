"""Acceptance of connections: all that arrive, of which few are opened per iteration of the event loop."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.app.callers import caller_of
from kvferry.app.logs import RateLimitedLogger
from kvferry.app.service.turns import Turns

_log = logging.getLogger(__name__)
HEALTH_CHECK = b"GET /healthz "
ACCEPTS_PER_ITERATION = 256
OPENED_PER_ITERATION = 2
"""Connections opened per iteration, besides health checks; each takes the loop about half a millisecond."""
RETRY_S = 1.0
"""Pause after an error of the system, such as too many open files."""


class Acceptor:
    """Accepts the connections of a listening socket, and opens each with a protocol of its own.

    A burst waits here as plain sockets, so that nothing is behind it in the queue of the system. Health checks are
    opened at once. Of the others that have sent something, client addresses take turns, and the newest connection of an
    address is the first: one that arrives after a burst does not wait for it. Silent ones are opened in their order,
    until they send something.
    """

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], H11Protocol], max_waiting: int) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._waiting: Turns[socket.socket] = Turns()
        self._silent: dict[int, tuple[socket.socket, str]] = {}
        """Connections that have sent nothing, by file descriptor, each with its client's address."""
        self._received = select.epoll()
        """Those of `_silent` that have sent something since."""
        self._is_scheduled = False
        self._is_closed = False
        self._opening: set[asyncio.Task[None]] = set()
        self._seldom = RateLimitedLogger(_log)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more, and close the connections that are not opened yet."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        while self._waiting:
            self._waiting.take_newest().close()
        while self._silent:
            self._take_silent().close()
        self._received.close()

    async def wait_closed(self) -> None:
        """Wait until no connection is being opened."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                accepted, (address, *_) = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                continue
            except OSError as error:
                self._seldom.log(logging.ERROR, "accept", "connections cannot be accepted: %s", error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_S, self._resume)
                break
            accepted.setblocking(False)
            self._sort(accepted, caller_of(address))
        self._schedule()

    def _sort(self, accepted: socket.socket, caller: str) -> None:
        """Open a connection that starts with a health check, and have others wait, unless the client sends nothing."""
        begin: bytes | None = None
        try:
            begin = accepted.recv(len(HEALTH_CHECK), socket.MSG_PEEK)
        except BlockingIOError:
            pass
        except OSError:
            begin = b""
        if begin == HEALTH_CHECK:
            self._open(accepted)
            return
        if begin == b"":
            accepted.close()
            return
        if begin:
            self._waiting.add(caller, accepted)
        else:
            self._silent[accepted.fileno()] = accepted, caller
            self._received.register(accepted, select.EPOLLIN)
        if len(self._waiting) + len(self._silent) > self._max_waiting:
            self._drop_one()

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _schedule(self) -> None:
        if (self._waiting or self._silent) and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._open_some)

    def _take_silent(self) -> socket.socket:
        """Remove and return the oldest silent connection. Requires: there is one."""
        accepted, _ = self._silent.pop(next(iter(self._silent)))
        self._received.unregister(accepted)
        return accepted

    def _sort_received(self) -> None:
        """Sort the silent connections that have sent something again: a request often follows its connection."""
        for descriptor, _ in self._received.poll(0, ACCEPTS_PER_ITERATION):
            accepted, caller = self._silent.pop(descriptor)
            self._received.unregister(descriptor)
            self._sort(accepted, caller)

    def _open_some(self) -> None:
        self._is_scheduled = False
        if self._silent:
            self._sort_received()
        for _ in range(OPENED_PER_ITERATION):
            if self._waiting:
                self._open(self._waiting.take_newest())
            if self._silent:
                self._open(self._take_silent())
        self._schedule()

    def _drop_one(self) -> None:
        """Close the oldest silent connection, or the oldest of the address that has the most, whichever are more."""
        is_silent = len(self._silent) >= self._waiting.num_of_most()
        dropped = self._take_silent() if is_silent else self._waiting.take_of_most(newest=False)
        dropped.close()
        reason = f"more than {self._max_waiting} connections wait to be opened"
        self._seldom.log(logging.WARNING, "dropped", "HTTP connection closed: %s", reason)

    def _open(self, accepted: socket.socket) -> None:
        """Open a connection, unless its client has disconnected."""
        if _has_gone(accepted):
            accepted.close()
            return
        task = self._loop.create_task(self._connect(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            _, protocol = await self._loop.connect_accepted_socket(self._make_protocol, accepted)
        except OSError as error:
            accepted.close()
            _log.debug("connection lost before it was opened: %s", error)
            return
        if self._is_closed:
            # The server has told its connections that it closes, but not this one.
            protocol.shutdown()


def _has_gone(accepted: socket.socket) -> bool:
    poll = select.poll()
    poll.register(accepted, select.POLLRDHUP)
    return bool(poll.poll(0))
