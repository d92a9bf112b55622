"""Every call before its route: ids, headers, bodies and raw paths by ASGI middleware, parameters by dependencies.

Errors become problem documents. Headers are read from the ASGI scope, whose names are in lower case.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import unquote
from uuid import uuid4

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.app.api.errors import (
    ENGINE_PREFIX,
    UNREADABLE_JSON,
    Problem,
    bad_request,
    busy,
    invalid_field,
    invalid_fields,
)
from kvferry.app.common.call_errors import FieldError

ADMIN_PREFIX = "/admin/v1"
MAX_ID_CHARS = 512
REQUEST_ID_PATTERN = re.compile(rf"[\x20-\x7e]{{1,{MAX_ID_CHARS}}}")
MAX_BODY_BYTES = 16 << 20
MAX_STRUCTURES = 10_000
"""Arrays, objects and fields of an admin call's body: a parser holds the interpreter lock until it has read them all,
and 1 MiB of `[[],[],...` takes a third of a second."""
BODY_TIMEOUT_S = 30.0
CLOSING_POLL_S = 0.25
"""Longest time between checks whether a body that has not arrived must be refused, as the server stops."""

_Header = tuple[bytes, bytes]
_ID = b"x-request-id"
_TYPE = b"content-type"
_COMMON_HEADERS: list[_Header] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_RAW_PREFIXES = ("/admin/v1/requests/", "/admin/v1/sessions/")
# No control, format or line separator characters.
_PRINTABLE = (
    r"[^\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)

_log = logging.getLogger(__name__)


def is_request_id(text: str) -> bool:
    """Return whether a client's `X-Request-ID` is accepted: 1 to 512 printable ASCII characters.

    Clients remove `.` and `..` from paths, so that a request of such an id could not be asked for.
    """
    return REQUEST_ID_PATTERN.fullmatch(text) is not None and text not in (".", "..")


def header_values(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a header; the name is in lower case."""
    return [value.decode("latin-1") for sent, value in scope["headers"] if sent == name]


def complete_headers(headers: Iterable[_Header], status: int, request_id: str) -> list[_Header]:
    """Add the request id and the common headers to a response's headers, which have names in lower case."""
    dropped = _TYPE if status == 204 else None
    own = [header for header in headers if header[0] != dropped]
    names = {name for name, _ in own}
    added = [(_ID, request_id.encode("ascii")), *_COMMON_HEADERS]
    return [*own, *(header for header in added if header[0] not in names)]


class RequestIds:
    """Outermost middleware: request ids, common headers, and unexpected exceptions.

    A missing or invalid `X-Request-ID` is replaced, also in the scope, so that inner middleware and the response have
    one id. An unexpected exception is logged with that id and answered with a 500 without traceback; after the response
    has begun, the server closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _set_request_id(scope)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = complete_headers(message["headers"], message["status"], request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as exc:  # noqa: BLE001  no exception may reach a client or end the server
            _log.exception("request failed: %s: %s %s", request_id, scope["method"], scope["path"], exc_info=exc)
            if not started:
                problem = Problem(500, "an unexpected error, logged with this request's id")
                await problem.response(scope)(scope, receive, send_with_headers)


def _set_request_id(scope: Scope) -> str:
    sent = header_values(scope, _ID)
    if len(sent) == 1 and is_request_id(sent[0]):
        request_id = sent[0]
    else:
        request_id = uuid4().hex
        others = [header for header in scope["headers"] if header[0] != _ID]
        scope["headers"] = [*others, (_ID, request_id.encode("ascii"))]
    scope.setdefault("state", {})["request_id"] = request_id
    return request_id


class Bodies:
    """Middleware that reads a body whole and refuses one that is not JSON (415) or too large (413).

    The body of an audited call is kept in `scope["state"]["body"]`.
    """

    def __init__(self, app: ASGIApp, closing: Callable[[], bool], timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Refuse bodies that have not arrived once `closing` is true (503), or within `timeout_s` (408)."""
        self._app = app
        self._closing = closing
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = header_values(scope, b"content-length")
        if lengths in ([], ["0"]) and not header_values(scope, b"transfer-encoding"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive, lengths)
        except Problem as problem:
            await problem.response(scope)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            if "audit" in scope["state"]:
                scope["state"]["body"] = body
            replay = _replaying(receive, body)
            del body
            await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, lengths: list[str]) -> bytes:
        if any(length.isdecimal() and int(length) > MAX_BODY_BYTES for length in lengths):
            raise _too_large()
        if "".join(header_values(scope, _TYPE)[:1]).split(";")[0].strip().lower() != "application/json":
            raise Problem(415, "bodies must be sent as Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                more_body = True
                while more_body:
                    message = await self._receive(receive)
                    body += message.get("body", b"")
                    more_body = message.get("more_body", False)
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        if b"\0" in body:
            # JSON has none. Parsers would take such a body for UTF-16 or UTF-32.
            raise Problem(400, UNREADABLE_JSON, slug="invalid-json", title="Invalid JSON")
        is_engine_call = scope["path"].startswith(ENGINE_PREFIX)
        if not is_engine_call and sum(map(body.count, b"[{:")) > MAX_STRUCTURES:
            raise Problem(413, f"the body has more than {MAX_STRUCTURES} arrays, objects and fields")
        return bytes(body)

    async def _receive(self, receive: Receive) -> Message:
        """Return the next part of a body. Raises `Problem` once the server stops."""
        while True:
            try:
                async with asyncio.timeout(CLOSING_POLL_S):
                    message = await receive()
            except TimeoutError:
                if self._closing():
                    raise Problem(503, "the service is stopping, and the body has not arrived") from None
            else:
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                return message


def _replaying(receive: Receive, body: bytes) -> Receive:
    """Return a `receive` whose first message is the whole body, which it does not keep: a response may take minutes."""
    parts = [body]

    async def replay() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    return replay


def _too_large() -> Problem:
    return Problem(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


class EngineCalls:
    """Middleware that bounds the requests of open calls to the engine: the one place under `/v1` that answers 429.

    A call has one place from the start, and takes more with `scope["state"]["take_places"]` once its prompts are known.
    """

    def __init__(self, app: ASGIApp, max_running: int, max_waiting: int) -> None:
        self._app = app
        self._max_requests = max_running + max_waiting
        self._setting = f"KVFERRY_MAX_WAITING={max_waiting}"
        self._num_taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(ENGINE_PREFIX):
            await self._app(scope, receive, send)
            return
        num_own = 0

        def take_places(num_more: int) -> None:
            """Take places for more requests of this call. Raises `Problem` if there are not as many."""
            nonlocal num_own
            if num_own + num_more > self._max_requests:
                detail = f"prompt has {num_own + num_more} prompts, more than {self._setting} accepts"
                raise bad_request(detail, "prompt")
            if self._num_taken + num_more > self._max_requests:
                raise busy(f"too many requests are waiting ({self._setting}); try again later")
            num_own += num_more
            self._num_taken += num_more

        try:
            take_places(1)
        except Problem as problem:
            await problem.response(scope)(scope, receive, send)
            return
        scope["state"]["take_places"] = take_places
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_taken -= num_own


class RawPaths:
    """Middleware that routes calls on single requests and sessions by their undecoded path.

    Clients choose these ids, which may hold a slash (sent as %2F) or end in `/policy`; `RequestId` decodes them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_RAW_PREFIXES):
            raw = scope.get("raw_path", b"").decode("ascii", "replace")
            if raw.startswith(_RAW_PREFIXES):
                scope = {**scope, "path": raw}
        await self._app(scope, receive, send)


def _decode_id(
    id: Annotated[  # noqa: A002
        str,
        Path(
            description="the id, percent-encoded; slashes need no encoding",
            # Not validated here, since the path is still percent-encoded.
            json_schema_extra={"minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": f"^{_PRINTABLE}+$"},
        ),
    ],
) -> str:
    try:
        request_id = unquote(id, errors="strict")
    except UnicodeDecodeError:
        raise invalid_field("id", "must be UTF-8, percent-encoded") from None
    if len(request_id) > MAX_ID_CHARS or re.fullmatch(f"{_PRINTABLE}+", request_id) is None:
        raise invalid_field("id", f"must be 1 to {MAX_ID_CHARS} printable characters")
    return request_id


RequestId = Annotated[str, Depends(_decode_id)]


def admin_router(prefix: str = "", tags: list[str | Enum] | None = None) -> APIRouter:
    """Return a router for paths of the admin API.

    Prefix and dependency stand here since `include_router` makes each route anew, for every service. Access needs no
    dependency: the middleware `Auth` has checked it by the method, and lets the read token `GET`.
    """
    return APIRouter(prefix=ADMIN_PREFIX + prefix, tags=tags, dependencies=[Depends(check_query)])


def from_app(name: str) -> Any:
    """Return a dependency on a part of the service: the attribute of this name in the state of its app.

    Routes are made once, for all services of the process. `create_app` sets these attributes for each.
    """

    async def find(request: Request) -> Any:
        # Async, since FastAPI runs a sync dependency on a thread, which costs each call more than this.
        return getattr(request.app.state, name)

    return Depends(find)


async def check_query(request: Request) -> None:
    """Refuse parameters that a route does not have, since a misspelled one would do nothing. Raises `Problem`."""
    sent = Counter(name for name, _ in request.query_params.multi_items())
    if not sent:
        return
    known = dict(_parameters(request.scope["route"]))
    names = f"this call has {', '.join(sorted(known))}" if known else "this call has none"
    errors = [
        FieldError(
            field=name,
            message="must not be repeated" if name in known else f"there is no such query parameter; {names}",
        )
        for name, count in sent.items()
        if name not in known or (count > 1 and not known[name])
    ]
    if errors:
        raise invalid_fields(errors)


def _parameters(route: Any) -> Iterator[tuple[str, bool]]:
    """Yield the name of each query parameter of a route, and whether it may be repeated."""
    for parameter in _query_fields(route.dependant):
        annotation = parameter.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from ((field.alias or name, False) for name, field in annotation.model_fields.items())
        else:
            yield parameter.alias, any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


def _query_fields(dependant: Any) -> Iterator[Any]:
    """Yield the fields of a route and of what it depends on; FastAPI's own function for that is not in all releases."""
    yield from dependant.query_params
    for one in dependant.dependencies:
        yield from _query_fields(one)
