"""Bodies: JSON only, of bounded size, read in bounded time, and read before anything acts on them."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth import ENGINE_PREFIX
from app.api.headers import values_of
from app.api.problems import Problem

MAX_ADMIN_BODY_BYTES = 1 << 20
MAX_ENGINE_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 30.0


class ClientGoneError(Exception):
    """The client went while sending its body."""


class Bodies:
    """ASGI middleware that reads a body whole, refuses what is no JSON (415) or too large (413), and replays it.

    The body is kept in `scope["state"]["body"]` for the audit trail.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = values_of(scope, b"content-length")
        if lengths in ([], ["0"]) and not values_of(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive, lengths)
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


async def _read(scope: Scope, receive: Receive, lengths: list[str]) -> bytes:
    limit_bytes = MAX_ENGINE_BODY_BYTES if scope["path"].startswith(ENGINE_PREFIX) else MAX_ADMIN_BODY_BYTES
    too_large = Problem(413, f"the body is larger than {limit_bytes} bytes")
    # The server has checked the length's form; what it cannot be is larger than anything sensible.
    if any(length.isdecimal() and int(length) > limit_bytes for length in lengths):
        raise too_large
    if "".join(values_of(scope, b"content-type")[:1]).split(";")[0].strip().lower() != "application/json":
        raise Problem(415, "bodies must be sent as Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > limit_bytes:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)
