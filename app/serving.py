"""A server of the admin API, whichever process it is in: made, given its port, and stopped in order."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn

from kvferry.app.api.app import create_app
from kvferry.app.api.context import AdminContext
from kvferry.app.server_config import BACKLOG, server_config
from kvferry.app.starting import StartRefused

GRACE_S = 5
"""How long answers under way may take once the service is told to stop; then they are aborted, and told so."""
ABORT_S = 5


class PortTaken(StartRefused):
    """Another socket listens on the port."""


class Served(Protocol):
    """Whatever can be served: a process of our own, or kvferry in an engine's."""

    def context(self, closing: Callable[[], bool]) -> AdminContext: ...
    def abort_requests(self) -> None: ...


class Server(uvicorn.Server):
    """A server that ends what is under way by itself and leaves the rest of the process to close in order."""

    def __init__(self, config: uvicorn.Config, abort: Callable[[], None]) -> None:
        """`abort` has the engine end its requests; their answers then end like any other."""
        super().__init__(config)
        self._abort = abort

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second; uvicorn would raise the signal again behind our back."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish for a while, then abort them."""
        aborter = asyncio.get_running_loop().call_later(GRACE_S, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            aborter.cancel()


def make_server(process: Served) -> Server:
    """A server for this process's API, which runs until its `should_exit` is set."""
    servers: list[Server] = []
    context = process.context(closing=lambda: bool(servers) and servers[0].should_exit)
    config = server_config(create_app(context), GRACE_S + ABORT_S, retry_after_s=context.retry_after_s)
    servers.append(Server(config, process.abort_requests))
    return servers[0]


def listen(host: str, port: int) -> socket.socket:
    """Take the port first: a second service on it must find out before it loads a model.

    Raises:
        PortTaken: another socket has the port.
        StartRefused: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named in full: without the protocol asyncio would not switch off Nagle's delay, which costs 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        refused = PortTaken if error.errno == errno.EADDRINUSE else StartRefused
        raise refused(
            f"KVFERRY_HOST={host} KVFERRY_PORT={port} cannot be listened on: {error.strerror or error}; "
            "stop what holds it, or set KVFERRY_PORT to another (0 takes a free one)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listening socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
