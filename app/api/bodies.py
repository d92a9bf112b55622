"""Bodies: JSON only, of bounded size, read in bounded time, and read before anything acts on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth import ENGINE_PREFIX
from app.api.headers import values_of
from app.api.problems import Problem

MAX_ADMIN_BODY_BYTES = 1 << 20
MAX_ENGINE_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 30.0
LOOK_S = 0.25
"""Whoever waits for a body looks at least so often whether it is worth it."""


class ClientGoneError(Exception):
    """The client went while sending its body."""


class Bodies:
    """ASGI middleware that reads a body whole, refuses what is no JSON (415) or too large (413), and replays it.

    The body is kept in `scope["state"]["body"]` for the audit trail.
    """

    def __init__(self, app: ASGIApp, closing: Callable[[], bool]) -> None:
        """Bodies that have not arrived once `closing` is true are waited for no more (503)."""
        self._app = app
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = values_of(scope, b"content-length")
        if lengths in ([], ["0"]) and not values_of(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive, lengths)
        except Problem as problem:
            await problem.response(scope)(scope, receive, send)
            return
        except ClientGoneError:
            return
        scope["state"]["body"] = body
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, lengths: list[str]) -> bytes:
        limit_bytes = MAX_ENGINE_BODY_BYTES if scope["path"].startswith(ENGINE_PREFIX) else MAX_ADMIN_BODY_BYTES
        too_large = Problem(413, f"the body is larger than {limit_bytes} bytes")
        # The server has checked the length's form; what it cannot be is larger than anything sensible.
        if any(length.isdecimal() and int(length) > limit_bytes for length in lengths):
            raise too_large
        if "".join(values_of(scope, b"content-type")[:1]).split(";")[0].strip().lower() != "application/json":
            raise Problem(415, "bodies must be sent as Content-Type: application/json")
        deadline_s = time.monotonic() + BODY_TIMEOUT_S
        body = bytearray()
        more = True
        while more:
            try:
                async with asyncio.timeout(LOOK_S):
                    message = await receive()
            except TimeoutError:
                self._check(deadline_s)
                continue
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > limit_bytes:
                raise too_large
            more = message.get("more_body", False)
            if more:
                self._check(deadline_s)
        return bytes(body)

    def _check(self, deadline_s: float) -> None:
        """Whether the rest of a body is still worth waiting for."""
        if self._closing():
            raise Problem(503, "the service is stopping, and the body has not arrived")
        if time.monotonic() > deadline_s:
            raise Problem(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
