"""Bodies: JSON only, of bounded size, read in bounded time, and read before anything acts on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.app.api.headers import values_of
from kvferry.app.api.problems import ENGINE_PREFIX, RETRY_AFTER_S, Problem

MAX_ADMIN_BODY_BYTES = 1 << 20
MAX_ENGINE_BODY_BYTES = 16 << 20
SMALL_BODY_BYTES = 64 << 10
MAX_LARGE_BODY_BYTES = 128 << 20
"""Memory for bodies that are larger than small while they arrive and until a route takes them."""
BODY_TIMEOUT_S = 30.0


class ClientGoneError(Exception):
    """The client went while sending its body."""


class Bodies:
    """ASGI middleware that reads a body whole, refuses what is no JSON (415) or too large (413), and replays it.

    The body is kept in `scope["state"]["body"]` for the audit trail, but not a body for the engine. Large bodies that
    arrive at once are bounded together (429), so that they cannot take all memory.
    """

    def __init__(self, app: ASGIApp, closing: Callable[[], bool], timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Bodies that have not arrived once `closing` is true (503), or within `timeout_s` (408), are refused."""
        self._app = app
        self._closing = closing
        self._timeout_s = timeout_s
        self._large_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = values_of(scope, b"content-length")
        if lengths in ([], ["0"]) and not values_of(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            await self._serve(scope, receive, send, lengths, body)
        except Problem as problem:
            await problem.response(scope)(scope, receive, send)
        except ClientGoneError:
            return
        finally:
            self._release(body)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, lengths: list[str], body: bytearray) -> None:
        await self._read(scope, receive, lengths, body)
        if not scope["path"].startswith(ENGINE_PREFIX):
            scope["state"]["body"] = bytes(body)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            whole = bytes(body)
            self._release(body)
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, replay, send)

    def _release(self, body: bytearray) -> None:
        """Free the memory of a body, which an answer under way may outlive by minutes."""
        if len(body) > SMALL_BODY_BYTES:
            self._large_bytes -= len(body)
        body.clear()

    def _append(self, body: bytearray, piece: bytes) -> None:
        """Add what arrived to a body, and count it if the body is large."""
        counted = len(body) if len(body) > SMALL_BODY_BYTES else 0
        body += piece
        self._large_bytes += (len(body) if len(body) > SMALL_BODY_BYTES else 0) - counted

    async def _read(self, scope: Scope, receive: Receive, lengths: list[str], body: bytearray) -> None:
        limit_bytes = MAX_ENGINE_BODY_BYTES if scope["path"].startswith(ENGINE_PREFIX) else MAX_ADMIN_BODY_BYTES
        too_large = Problem(413, f"the body is larger than {limit_bytes} bytes")
        # The server has checked the length's form; what it cannot be is larger than anything sensible.
        if any(length.isdecimal() and int(length) > limit_bytes for length in lengths):
            raise too_large
        if "".join(values_of(scope, b"content-type")[:1]).split(";")[0].strip().lower() != "application/json":
            raise Problem(415, "bodies must be sent as Content-Type: application/json")
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._receive(receive, body):
                    if len(body) > limit_bytes:
                        raise too_large
                    # The connection wakes a waiting request once when the server begins to stop.
                    if self._closing():
                        raise Problem(503, "the service is stopping, and the body has not arrived")
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        if len(body) > limit_bytes:
            raise too_large

    async def _receive(self, receive: Receive, body: bytearray) -> bool:
        """Append the next part of a body, and return whether more follows."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._append(body, message.get("body", b""))
        if self._large_bytes > MAX_LARGE_BODY_BYTES and len(body) > SMALL_BODY_BYTES:
            detail = f"large bodies of {MAX_LARGE_BODY_BYTES} bytes in all are arriving already; try again later"
            raise Problem(429, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
        return bool(message.get("more_body", False))
