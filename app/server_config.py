"""How uvicorn serves in this project: quietly, in a process that it does not own."""

from __future__ import annotations

import logging

import uvicorn
from starlette.types import ASGIApp

from app.api.repeats import RepeatedCalls


def server_config(app: ASGIApp, grace_s: int | None = None) -> uvicorn.Config:
    """Logging stays ours. A server that is told to stop gives answers under way `grace_s`; None waits for them all."""
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
