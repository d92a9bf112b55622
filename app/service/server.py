"""HTTP servers of a process: the one that serves the admin API, and the one that answers during a start."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.app import create_app
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem
from kvferry.app.service.connections import ConnectionLimits, Connections, HttpConnection, RetryAfter, never_busy
from kvferry.app.service.startup import StartProgress
from kvferry.core.errors import StartError

GRACE_S = 5
"""Time that responses under way get when the service stops; then their requests are aborted."""
ABORT_S = 5
MAX_CONNECTIONS = 4096
BACKLOG = 4096
"""Connections that wait to be accepted. Linux drops others, whose clients retry only after a second."""
_REPLACED_WARNINGS = (
    # The API logs these responses itself, with the request's id.
    "ASGI callable returned without completing response.",
    # A client could repeat these without end; the connection logs malformed requests once a minute.
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
)


class PortTaken(StartError):
    """Another socket listens on the port."""


class Served(Protocol):
    """A process that has an admin API: `kvferry serve`, or the process of another engine."""

    def context(self, closing: Callable[[], bool]) -> AdminContext: ...
    def abort_requests(self) -> None: ...


class Server(uvicorn.Server):
    """A server that aborts requests when it stops, and does not raise signals again."""

    def __init__(self, config: uvicorn.Config, abort: Callable[[], None]) -> None:
        """`abort` has the engine end its requests; their responses then end like any other."""
        super().__init__(config)
        self._abort = abort

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second. uvicorn would raise the signal again after the stop."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for responses under way, then abort them."""
        aborter = asyncio.get_running_loop().call_later(GRACE_S, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            aborter.cancel()


def make_server(process: Served) -> Server:
    """Return a server of a process's API, which runs until its `should_exit` is set."""
    servers: list[Server] = []
    context = process.context(closing=lambda: bool(servers) and servers[0].should_exit)
    config = server_config(create_app(context), GRACE_S + ABORT_S, retry_after_s=context.retry_after_s)
    servers.append(Server(config, process.abort_requests))
    return servers[0]


@contextmanager
def answering(listener: socket.socket, progress: StartProgress) -> Iterator[None]:
    """Answer probes on a thread, and all other requests with 503, while the body runs."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _start_response(Request(scope), progress)(scope, receive, send)

    server = uvicorn.Server(server_config(answer))
    # The server closes its socket, and the next server needs the listener.
    sockets = [listener.dup()]
    thread = threading.Thread(target=lambda: server.run(sockets=sockets), name="kvferry-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _start_response(request: Request, progress: StartProgress) -> Response:
    if request.url.path == "/healthz":
        return JSONResponse({"status": "ok"})
    if request.url.path == "/readyz":
        return JSONResponse({"ready": False, "reasons": [progress.reason], "degraded": []}, 503)
    return Problem(503, progress.reason, slug="starting", headers={"Retry-After": "1"}).response(request.scope)


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port, before a model is loaded, so that a second service on it fails early.

    Raises:
        PortTaken: Another socket has the port.
        StartError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is stated: without it asyncio would not switch off Nagle's delay, which costs 40 ms per response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        refused = PortTaken if error.errno == errno.EADDRINUSE else StartError
        raise refused(
            f"KVFERRY_HOST={host} KVFERRY_PORT={port} cannot be listened on: {error.strerror or error}; "
            "stop the process that has it, or set KVFERRY_PORT to another (0 takes a free one)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Some systems forbid a soft limit as high as the hard one.
        return soft
    return hard


def connection_limits() -> ConnectionLimits:
    """Return the limits for this process; connections get at most half of its file descriptors."""
    max_files = raise_file_limit()
    if max_files == resource.RLIM_INFINITY:
        return ConnectionLimits(MAX_CONNECTIONS)
    return ConnectionLimits(min(MAX_CONNECTIONS, max(1, max_files // 2)))


def _is_not_replaced(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_REPLACED_WARNINGS)


def server_config(
    app: ASGIApp,
    grace_s: int | None = None,
    limits: ConnectionLimits | None = None,
    retry_after_s: RetryAfter = never_busy,
) -> uvicorn.Config:
    """Return a configuration that leaves logging as it is.

    Args:
        app: The application to serve.
        grace_s: Time that requests under way get when the server stops; None waits for all of them.
        limits: Limits of connections; None for those of this process.
        retry_after_s: When a client address should send a completion again; None where it may now.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_not_replaced)
    limits = limits or connection_limits()
    return uvicorn.Config(
        app,
        http=partial(HttpConnection, kept=Connections(limits, retry_after_s)),  # type: ignore[arg-type]  # called like the class
        ws="none",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        backlog=BACKLOG,
        # Each connection has its own timer of idle time, which also discards output that is left unread.
        timeout_keep_alive=int(limits.keep_alive_s) + 1,
        # Otherwise any client on this machine could set the address in the audit by X-Forwarded-For.
        proxy_headers=False,
    )
