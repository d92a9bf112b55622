"""HTTP servers of a process: the one that serves the admin API, and the one that answers during a start."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Protocol

import anyio
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.calls import RequestIds
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem
from kvferry.app.service.startup import StartProgress
from kvferry.app.service.timed_heads import TimedHeads
from kvferry.app.settings import Settings
from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.core.errors import StartError

GRACE_S = 5
"""Time that responses under way get when the service stops; then their requests are aborted."""
ABORT_S = 5
ROUTE_THREADS = 4
"""Threads of routes that are not coroutines. Engine thread and event loop compete with them for the interpreter lock,
so more would not serve more; with one, a route that waits for a disk would hold up all others."""
BACKLOG = 4096
"""Connections that wait to be accepted. Linux drops others, whose clients retry only after a second."""
_log = logging.getLogger(__name__)


class _LimitedWarnings(logging.Filter):
    """Filter of uvicorn's log, whose warnings clients could repeat without end: each is logged once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._limited_log = RateLimitedLogger(_log)

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop warnings, which this module's logger repeats at most once a minute, and what the API logs itself."""
        text = record.getMessage()
        if record.levelno == logging.WARNING:
            self._limited_log.log(logging.WARNING, text, "HTTP server: %s", text)
            return False
        # The API logs these responses itself, with the request's id.
        return not text.startswith("ASGI callable returned without completing response.")


_LIMITED_WARNINGS = _LimitedWarnings()


class PortTaken(StartError):
    """Another socket listens on the port."""


class Served(Protocol):
    """A process that has an admin API: `kvferry serve`, or the process of another engine."""

    def context(self, closing: Callable[[], bool]) -> AdminContext: ...
    def abort_requests(self) -> None: ...


class Server(uvicorn.Server):
    """A server that aborts requests when it stops, and does not raise signals again."""

    def __init__(
        self, app: ASGIApp, grace_s: int, abort: Callable[[], None], metrics: socket.socket | None = None
    ) -> None:
        """Serve `app`, and its `/metrics` alone on the socket `metrics`, which is closed with the others.

        `abort` has the engine end its requests; their responses then end like any other.
        """
        super().__init__(server_config(app, grace_s))
        self._abort = abort
        self._metrics_socket = metrics
        self._metrics = _MetricsServer(server_config(_only_metrics(app), grace_s))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, at once at the second. uvicorn would raise the signal again after the stop."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve the metrics' own address too, in the same event loop."""
        anyio.to_thread.current_default_thread_limiter().total_tokens = ROUTE_THREADS
        if self._metrics_socket is None:
            await super().serve(sockets)
            return
        serving_metrics = asyncio.create_task(self._metrics.serve([self._metrics_socket]))
        try:
            await super().serve(sockets)
        finally:
            self._metrics.should_exit = True
            await serving_metrics

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for responses under way, then abort them."""
        self._metrics.should_exit = True
        aborter = asyncio.get_running_loop().call_later(GRACE_S, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            aborter.cancel()


class _MetricsServer(uvicorn.Server):
    """A server beside another one, which handles the signals of both."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the other server."""
        yield


def make_server(process: Served, metrics: socket.socket | None = None) -> Server:
    """Return a server of a process's API, which runs until its `should_exit` is set; see `Server` for `metrics`."""
    # Imported late: importing it builds the routes, which vLLM's ranks and `config check` never serve.
    from kvferry.app.api.app import create_app

    servers: list[Server] = []
    context = process.context(closing=lambda: bool(servers) and servers[0].should_exit)
    servers.append(Server(create_app(context), GRACE_S + ABORT_S, process.abort_requests, metrics))
    return servers[0]


@contextmanager
def answering(listener: socket.socket, progress: StartProgress, metrics: socket.socket | None = None) -> Iterator[None]:
    """Answer probes on a thread, and all other requests with 503, while the body runs."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _start_response(Request(scope), progress)(scope, receive, send)

    # The server closes its sockets, and the next server needs them.
    server = Server(answer, GRACE_S, lambda: None, None if metrics is None else metrics.dup())
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


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, since each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems forbid a soft limit as high as the hard one.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def server_config(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    """Return a configuration that leaves logging as it is.

    Args:
        app: The application to serve.
        grace_s: Time that requests under way get when the server stops.
    """
    uvicorn_log = logging.getLogger("uvicorn.error")
    if _LIMITED_WARNINGS not in uvicorn_log.filters:
        uvicorn_log.addFilter(_LIMITED_WARNINGS)
    return uvicorn.Config(
        app,
        http=TimedHeads,
        ws="none",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        backlog=BACKLOG,
        # Otherwise any client on this machine could set the address in the audit by X-Forwarded-For.
        proxy_headers=False,
    )
