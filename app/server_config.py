"""Configuration of uvicorn for all servers of this project."""

from __future__ import annotations

import logging
import resource
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from kvferry.app.http_protocol import ConnectionLimits, Connections, HttpConnection, RetryAfter, never_busy

MAX_CONNECTIONS = 4096
BACKLOG = 4096
"""Connections that wait to be accepted. Linux drops others, whose clients try again only after a second."""
_REPLACED_WARNINGS = frozenset(
    {
        # The API logs these responses itself, with the request's id.
        "ASGI callable returned without completing response.",
        # A client could repeat it without end; the connection logs malformed requests once a minute.
        "Invalid HTTP request received.",
    }
)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        # Some systems forbid a soft limit as high as the hard one.
        return soft
    return hard


def connection_limits() -> ConnectionLimits:
    """Limits for this process; connections get at most half of its file descriptors."""
    max_files = raise_file_limit()
    if max_files == resource.RLIM_INFINITY:
        return ConnectionLimits(MAX_CONNECTIONS)
    return ConnectionLimits(min(MAX_CONNECTIONS, max(1, max_files // 2)))


def _is_not_replaced(record: logging.LogRecord) -> bool:
    return record.msg not in _REPLACED_WARNINGS


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
        # Else whoever calls from this machine could name any address in X-Forwarded-For, and the audit would say so.
        proxy_headers=False,
    )
