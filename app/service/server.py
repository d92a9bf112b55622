"""HTTP servers of a process: the one that serves the admin API, and the one that answers during a start."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from types import FrameType
from typing import Any, Protocol

import anyio
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.calls import RequestIds
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem
from kvferry.app.service.acceptor import Acceptor
from kvferry.app.service.connections import ConnectionLimits, Connections, HttpConnection, RetryAfter, never_busy
from kvferry.app.service.startup import StartProgress
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError

GRACE_S = 5
"""Time that responses under way get when the service stops; then their requests are aborted."""
ABORT_S = 5
MAX_CONNECTIONS = 4096
MAX_WAITING_CONNECTIONS = 8192
ROUTE_THREADS = 4
"""Threads of routes that are not coroutines. Engine thread and event loop compete with them for the interpreter lock,
so more would not serve more; with one, a route that waits for a disk would hold up all others."""
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

    def __init__(self, config: uvicorn.Config, abort: Callable[[], None], metrics: socket.socket | None = None) -> None:
        """Serve `/metrics` alone on the socket `metrics`, which is closed with the others.

        `abort` has the engine end its requests; their responses then end like any other.
        """
        super().__init__(config)
        self._abort = abort
        self._metrics = metrics
        self._metrics_config = copy(config)
        self._metrics_config.app = _only_metrics(config.app)  # type: ignore[arg-type]  # never the name of a module

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second. uvicorn would raise the signal again after the stop."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve the metrics' own address too. Its connections count among those of the server."""
        await super().startup([])
        anyio.to_thread.current_default_thread_limiter().total_tokens = ROUTE_THREADS
        for listener in sockets or ():
            self._accept_from(listener, self.config)
        if self._metrics is not None:
            self._metrics_config.load()
            self._accept_from(self._metrics, self._metrics_config)

    def _accept_from(self, listener: socket.socket, config: uvicorn.Config) -> None:
        protocol: Any = config.http_protocol_class
        make_protocol = partial(protocol, config, self.server_state, self.lifespan.state)
        servers: list[Any] = self.servers
        servers.append(Acceptor(listener, make_protocol, max_waiting_connections()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for responses under way, then abort them."""
        aborter = asyncio.get_running_loop().call_later(GRACE_S, self._abort)
        own = () if self._metrics is None else (self._metrics,)
        try:
            await super().shutdown([*(sockets or ()), *own])
        finally:
            aborter.cancel()


def make_server(process: Served, metrics: socket.socket | None = None) -> Server:
    """Return a server of a process's API, which runs until its `should_exit` is set; see `Server` for `metrics`."""
    # Imported late: importing it builds the routes, which vLLM's ranks and `config check` never serve.
    from kvferry.app.api.app import create_app

    servers: list[Server] = []
    context = process.context(closing=lambda: bool(servers) and servers[0].should_exit)
    app = create_app(context)
    app.state.openapi.start()
    config = server_config(app, GRACE_S + ABORT_S, retry_after_s=context.retry_after_s)
    servers.append(Server(config, process.abort_requests, metrics))
    return servers[0]


@contextmanager
def answering(listener: socket.socket, progress: StartProgress, metrics: socket.socket | None = None) -> Iterator[None]:
    """Answer probes on a thread, and all other requests with 503, while the body runs."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _start_response(Request(scope), progress)(scope, receive, send)

    # The server closes its sockets, and the next server needs them.
    server = Server(server_config(answer), lambda: None, None if metrics is None else metrics.dup())
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
    if request.url.path in ("/readyz", "/health"):
        return JSONResponse({"ready": False, "reasons": [progress.reason], "degraded": []}, 503)
    return Problem(503, progress.reason, slug="starting", headers={"Retry-After": "1"}).response(request.scope)


def _only_metrics(app: ASGIApp) -> ASGIApp:
    """Return an application with the `/metrics` of another, and 404 for all else."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await Problem(404, "this address has /metrics only").response(scope)(scope, receive, send)

    others = RequestIds(refuse)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] == "/metrics" else others)(scope, receive, send)

    return answer


def listen_for_metrics(settings: Settings) -> AbstractContextManager[socket.socket | None]:
    """Listen on the metrics' own address, if they have one. Raises as `listen` does."""
    address = settings.metrics_address
    return nullcontext() if address is None else listen(*address, "METRICS_")


def listen(host: str, port: int, prefix: str = "") -> socket.socket:
    """Listen on a port, before a model is loaded, so that a second service on it fails early.

    Args:
        host: Address or name.
        port: 0 takes a free one.
        prefix: What the names of the settings begin with, for errors.

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
            f"KVFERRY_{prefix}HOST={host} KVFERRY_{prefix}PORT={port} cannot be listened on: "
            f"{error.strerror or error}; "
            f"stop the process that has it, or set KVFERRY_{prefix}PORT to another (0 takes a free one)"
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


def max_waiting_connections() -> int:
    """Return how many accepted connections may wait to be opened: at most a quarter of the file descriptors."""
    max_files = raise_file_limit()
    if max_files == resource.RLIM_INFINITY:
        return MAX_WAITING_CONNECTIONS
    return min(MAX_WAITING_CONNECTIONS, max(1, max_files // 4))


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
