"""How uvicorn serves in this project: quietly, in a process that it does not own."""

from __future__ import annotations

import logging
import uuid

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.api.envelope import complete_headers
from app.api.problems import Problem


class _Connection(HttpToolsProtocol):
    """One whose answer to what is no HTTP is a problem document like all others."""

    def send_400_response(self, msg: str) -> None:
        """Answer in place of uvicorn, and close."""
        request_id = uuid.uuid4().hex
        problem = Problem(400, f"{msg} It has a method, a target or headers that are not those of HTTP/1.1.")
        answer = problem.response({"state": {"request_id": request_id}})
        lines = [STATUS_LINE[400]]
        headers = complete_headers(answer.raw_headers, 400, request_id)
        for name, value in (*self.server_state.default_headers, *headers, (b"connection", b"close")):
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", bytes(answer.body))))
        self.transport.close()


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is not about an answer that was broken off: the API says which one, and why."""
    return record.msg != "ASGI callable returned without completing response."


def server_config(app: ASGIApp, grace_s: int | None = None) -> uvicorn.Config:
    """Logging stays ours. A server that is told to stop gives answers under way `grace_s`; None waits for them all."""
    logging.getLogger("uvicorn.error").addFilter(_says_more)
    return uvicorn.Config(
        app,
        http=_Connection,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        # Else whoever calls from this machine could name any address in X-Forwarded-For, and the audit would say so.
        proxy_headers=False,
    )
