"""What every answer carries: a request id, safe headers, and a problem document in place of an exception."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from itertools import count
from random import getrandbits

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.app.api.headers import values_of
from kvferry.app.api.problems import Problem
from kvferry.app.api.raw_ids import MAX_ID_CHARS

REQUEST_ID_PATTERN = re.compile(rf"[\x20-\x7e]{{1,{MAX_ID_CHARS}}}")

_Header = tuple[bytes, bytes]

# Names are in lower case, as ASGI has them.
_ID = b"x-request-id"
_TYPE = b"content-type"
_ON_EVERY_ANSWER: list[_Header] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]

_log = logging.getLogger(__name__)


def is_request_id(text: str) -> bool:
    """Whether a client's `X-Request-ID` is taken over: 1 to 512 printable ASCII characters."""
    return REQUEST_ID_PATTERN.fullmatch(text) is not None


class Envelope:
    """Outermost ASGI middleware.

    A missing or unusable `X-Request-ID` is replaced, in the scope's headers too, so that everything behind sees the one
    id that the answer names. An exception is logged once with that id and answered with a 500 without traceback; after
    the answer has begun, the server breaks the connection, which is all that is left to say.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._draw_id = _request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _settle_request_id(scope, self._draw_id)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = complete_headers(message["headers"], message["status"], request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as exc:  # noqa: BLE001  the last resort: no exception may reach a client or end the server
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"], exc_info=exc)
            if not started:
                problem = Problem(500, "an unexpected error, logged with this request's id")
                await problem.response(scope)(scope, receive, send_with_headers)


def _request_ids() -> Callable[[], str]:
    """What draws an id for each call. Drawn once, then counted: ids have to differ, not to be hard to guess."""
    prefix, numbers = f"{getrandbits(96):024x}", count(1)
    return lambda: f"{prefix}{next(numbers):08x}"


def _settle_request_id(scope: Scope, draw_id: Callable[[], str]) -> str:
    """Return the request id: the client's if usable, else a new one, which also replaces the header."""
    sent = values_of(scope, _ID)
    if len(sent) == 1 and is_request_id(sent[0]):
        request_id = sent[0]
    else:
        request_id = draw_id()
        others = [header for header in scope["headers"] if header[0] != _ID]
        scope["headers"] = [*others, (_ID, request_id.encode("ascii"))]
    scope.setdefault("state", {})["request_id"] = request_id
    return request_id


def complete_headers(headers: Iterable[_Header], status: int, request_id: str) -> list[_Header]:
    """An answer's headers, names in lower case, and those of every answer that it lacks."""
    dropped = _TYPE if status == 204 else None
    own = [header for header in headers if header[0] != dropped]
    names = {name for name, _ in own}
    added = [(_ID, request_id.encode("ascii")), *_ON_EVERY_ANSWER]
    return [*own, *(header for header in added if header[0] not in names)]
