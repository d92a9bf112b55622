"""A start as others see it: how far it is, and why it is refused. Loading and recovering may take a while."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvferry.app.api.errors import Problem
from kvferry.app.server_config import server_config
from kvferry.cuda_ops.pool.prepare import PoolPhase, PoolProgress

_log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
_TOUCHED = {PoolPhase.TOUCH: "taken", PoolPhase.REGISTER: "pinned"}


class StartRefused(Exception):
    """What was asked for cannot be served; the message says which setting, and what to do."""


class StartProgress:
    """What a start is at. Any thread may ask and tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._stage = "settings are read"
        self._clock = clock
        self._logged_s = clock()

    def note(self, stage: str) -> None:
        """What is being done from now on."""
        self._stage = stage

    def note_pool(self, progress: PoolProgress) -> None:
        """How much of the pool's memory is ready; logged now and then, since a large one takes minutes."""
        done, total = progress.done_bytes, progress.total_bytes
        self.note(f"mapping the pool: {done:,} of {total:,} bytes {_TOUCHED[progress.phase]}")
        now_s = self._clock()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            _log.info("%s", self._stage)

    @property
    def reason(self) -> str:
        """Why the service is not ready."""
        return f"starting: {self._stage}"


@contextmanager
def answering(listener: socket.socket, progress: StartProgress) -> Iterator[None]:
    """Answer probes on a thread, and everybody else that it is too early, for as long as this lasts."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _answer(Request(scope), progress)(scope, receive, send)

    server = uvicorn.Server(server_config(answer))
    # The server closes what it was given, and who comes next needs the socket.
    sockets = [listener.dup()]
    thread = threading.Thread(target=lambda: server.run(sockets=sockets), name="kvferry-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _answer(request: Request, progress: StartProgress) -> Response:
    if request.url.path == "/healthz":
        return JSONResponse({"status": "ok"})
    if request.url.path == "/readyz":
        return JSONResponse({"ready": False, "reasons": [progress.reason], "degraded": []}, 503)
    return Problem(503, progress.reason, slug="starting", headers={"Retry-After": "1"}).response(request.scope)
