"""Bodies: JSON only, of bounded size, read in bounded time, and read before anything acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth import ENGINE_PREFIX
from app.api.headers import values_of
from app.api.problems import Problem

MAX_ADMIN_BODY_BYTES = 1 << 20
MAX_ENGINE_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 30.0
MAX_HELD_BYTES = 256 << 20
"""Limit of all bodies together that are held for requests under way."""


class ClientGoneError(Exception):
    """The client went while sending its body."""


class Bodies:
    """ASGI middleware that reads a body whole, refuses what is no JSON (415) or too large (413), and replays it.

    The body is kept in `scope["state"]["body"]` for the audit trail.
    """

    def __init__(self, app: ASGIApp, closing: Callable[[], bool], timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Bodies that have not arrived once `closing` is true (503), or within `timeout_s` (408), are refused."""
        self._app = app
        self._closing = closing
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = values_of(scope, b"content-length")
        if lengths in ([], ["0"]) and not values_of(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        held = bytearray()
        try:
            await self._read_and_call(scope, receive, send, lengths, held)
        finally:
            self._held_bytes -= len(held)

    async def _read_and_call(
        self, scope: Scope, receive: Receive, send: Send, lengths: list[str], held: bytearray
    ) -> None:
        try:
            body = await self._read(scope, receive, lengths, held)
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

    async def _read(self, scope: Scope, receive: Receive, lengths: list[str], held: bytearray) -> bytes:
        limit_bytes = MAX_ENGINE_BODY_BYTES if scope["path"].startswith(ENGINE_PREFIX) else MAX_ADMIN_BODY_BYTES
        too_large = Problem(413, f"the body is larger than {limit_bytes} bytes")
        # The server has checked the length's form; what it cannot be is larger than anything sensible.
        if any(length.isdecimal() and int(length) > limit_bytes for length in lengths):
            raise too_large
        if "".join(values_of(scope, b"content-type")[:1]).split(";")[0].strip().lower() != "application/json":
            raise Problem(415, "bodies must be sent as Content-Type: application/json")
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._receive(receive, held):
                    if len(held) > limit_bytes:
                        raise too_large
                    # The connection wakes a waiting request once when the server begins to stop.
                    if self._closing():
                        raise Problem(503, "the service is stopping, and the body has not arrived")
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        if len(held) > limit_bytes:
            raise too_large
        return bytes(held)

    async def _receive(self, receive: Receive, held: bytearray) -> bool:
        """Append the next part of a body, and return whether more follows."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        if self._held_bytes + len(part) > MAX_HELD_BYTES:
            raise Problem(503, "too many bytes of request bodies are held already", headers={"Retry-After": "1"})
        self._held_bytes += len(part)
        held += part
        return bool(message.get("more_body", False))
