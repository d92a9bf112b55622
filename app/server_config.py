"""How uvicorn serves in this project: quietly, in a process that it does not own."""

from __future__ import annotations

import logging

import uvicorn
from starlette.types import ASGIApp

from app.api.repeats import RepeatedCalls


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is not about an answer that was broken off: the API says which one, and why."""
    return record.msg != "ASGI callable returned without completing response."


def server_config(app: ASGIApp, grace_s: int | None = None) -> uvicorn.Config:
    """Logging stays ours. A server that is told to stop gives answers under way `grace_s`; None waits for them all."""
    logging.getLogger("uvicorn.error").addFilter(_says_more)
    return uvicorn.Config(
        app,
        http=RepeatedCalls,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        # Else whoever calls from this machine could name any address in X-Forwarded-For, and the audit would say so.
        proxy_headers=False,
    )
