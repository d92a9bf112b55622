"""The service: one process that serves the engine and its admin API until it is told to stop."""

from __future__ import annotations

import logging
import socket

import uvicorn

from app.api.app import create_app
from app.logs import start_logging
from app.settings import Settings
from app.wiring import Process, StartRefused

_log = logging.getLogger(__name__)

GRACE_S = 5
"""How long answers under way may take once the service is told to stop."""
BACKLOG = 2048


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. Raises `StartRefused`."""
    with start_logging(settings) as logs:
        listener = _listen(settings)
        with listener:
            process = Process(settings, logs)
            try:
                process.start()
                server = _make_server(process)
                _log.info("serving on %s: dashboard /ui/, API /docs", _url_of(listener))
                server.run(sockets=[listener])
            finally:
                process.close()
            _log.info("stopped")
    return 0


def _make_server(process: Process) -> uvicorn.Server:
    servers: list[uvicorn.Server] = []
    app = create_app(process.context(closing=lambda: bool(servers) and servers[0].should_exit))
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    servers.append(uvicorn.Server(config))
    return servers[0]


def _listen(settings: Settings) -> socket.socket:
    """Take the port first: a second service on it must find out before it loads a model."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartRefused(
            f"HOST={settings.host} PORT={settings.port} cannot be listened on: {error.strerror or error}; "
            "stop what holds it, or set PORT to another (0 takes a free one)"
        ) from error
    return listener


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
