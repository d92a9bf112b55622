"""Authorization: bearer tokens, or without any, loopback only and no page of another origin."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.calls import header_values
from kvferry.app.api.errors import ENGINE_PREFIX, Problem, method_not_allowed
from kvferry.app.settings.live import LiveSettings
from kvferry.app.settings.types import tokens_of

READ_POSTS = frozenset({"/admin/v1/lookup"})
"""Paths that the read token may also POST to, as they change nothing."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
_TOKEN_FREE_PATHS = OPEN_PATHS | {"/", "/ui"}
"""Besides the dashboard's files, to which these lead."""
READING = ("GET", "HEAD")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?")
_DIGEST_CHARS = 8
_DEFAULT_PORTS = {"http": 80, "https": 443}


class TokenKind(StrEnum):
    """What a caller may do by the token that it sent."""

    ADMIN = "admin"
    READ = "read"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TokenName:
    """Name of the token that a caller sent, for the audit: `admin:1a2b3c4d`, with the start of its SHA-256."""

    kind: TokenKind = TokenKind.NONE
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}" if self.digest else self.kind.value


NO_TOKEN = TokenName()


class Tokens:
    """Tokens of the API that are valid now. Without any, it is open to programs on this machine."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings

    def names(self) -> dict[bytes, TokenName]:
        """Return the name of each token."""
        settings = self._settings.current
        given = ((TokenKind.ADMIN, settings.admin_token), (TokenKind.READ, settings.read_token))
        return {
            _bytes(token): TokenName(kind, hashlib.sha256(_bytes(token)).hexdigest()[:_DIGEST_CHARS])
            for kind, secret in given
            for token in tokens_of(secret)
        }

    @property
    def any_set(self) -> bool:
        """Whether callers must send a token."""
        return bool(self.names())

    def name_of(self, sent: str) -> TokenName | None:
        """Return the name of a token, in a time that does not depend on the value of a token."""
        valid = [name for token, name in self.names().items() if hmac.compare_digest(_bytes(sent), token)]
        return valid[0] if valid else None

    def is_valid(self, name: TokenName) -> bool:
        """Return whether calls with this token are accepted now."""
        return name is NO_TOKEN or name in self.names().values()


async def _caller(request: Request) -> TokenName:
    token: TokenName = request.scope["state"]["token"]
    return token


Caller = Annotated[TokenName, Depends(_caller)]
"""The token of a call, as a parameter of a route."""


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")


class Auth:
    """ASGI middleware that passes a call on or answers 401 or 403."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        page_paths: Collection[str],
        ui_path: str,
        sign_in_page: Callable[[Scope, Problem], Response | None],
    ) -> None:
        """Check `tokens`, except for the dashboard's files below `ui_path`, which have no data.

        `sign_in_page` returns the response to a browser's unauthorized navigation, if any.
        """
        self._app = app
        self._tokens = tokens
        self._page_paths = page_paths
        self._ui_path = ui_path
        self._sign_in_page = sign_in_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS and scope["method"] not in READING:
            # Here, before a body is read and whatever the token, since these paths need none.
            refusal: Problem | None = method_not_allowed(scope["method"], scope["path"], READING)
        else:
            refusal = self._check_token(scope) if self._tokens.any_set else self._check_local(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif refusal.status == 401 and (page := self._sign_in_page(scope, refusal)) is not None:
            await page(scope, receive, send)
        else:
            await refusal.response(scope)(scope, receive, send)

    def _check_token(self, scope: Scope) -> Problem | None:
        sent = header_values(scope, b"authorization")
        name = self._tokens.name_of(sent[0][7:].strip()) if _is_bearer(sent) else None
        scope["state"]["token"] = name or NO_TOKEN
        scope["state"]["authorized"] = name is not None
        is_free = scope["path"] in _TOKEN_FREE_PATHS or scope["path"].startswith(self._ui_path)
        if is_free and scope["method"] in READING:
            return None
        if name is None:
            challenge = 'Bearer realm="kvferry"' + (', error="invalid_token"' if sent else "")
            detail = "send a token: Authorization: Bearer <token>"
            if sent:
                detail = "unknown token: neither KVFERRY_ADMIN_TOKEN nor KVFERRY_READ_TOKEN of the service"
            return Problem(401, detail, headers={"WWW-Authenticate": challenge})
        may_read = scope["method"] in READING or (scope["method"] == "POST" and scope["path"] in READ_POSTS)
        if name.kind is TokenKind.READ and not may_read and not scope["path"].startswith(ENGINE_PREFIX):
            challenge = 'Bearer realm="kvferry", error="insufficient_scope"'
            detail = "the read token does not allow this call, which needs the admin token"
            return Problem(403, detail, headers={"WWW-Authenticate": challenge})
        return None

    def _check_local(self, scope: Scope) -> Problem | None:
        """Refuse web pages while no token is set: those of a rebound name and those of another origin."""
        scope["state"]["token"] = NO_TOKEN
        if scope["path"] in OPEN_PATHS and scope["method"] in READING:
            return None
        hosts = header_values(scope, b"host")
        port = _loopback_port(hosts[0], "http") if len(hosts) == 1 else None
        if port is None:
            return Problem(
                403, "without a token, only loopback is served: the Host header must be localhost or a loopback address"
            )
        for origin in header_values(scope, b"origin"):
            origin_port = _origin_loopback_port(origin)
            # Browsers prevent reading across origins; another local page must not change anything.
            if origin_port is None or (scope["method"] not in READING and origin_port != port):
                return Problem(403, "without a token, calls from the pages of another origin are refused")
        if not self._is_same_origin(scope):
            return Problem(403, "without a token, calls from the pages of another origin are refused")
        scope["state"]["authorized"] = True
        return None

    def _is_same_origin(self, scope: Scope) -> bool:
        """Return whether no browser reports a call by a page of another origin; links to pages may be followed.

        The other page could not read the response, but it could hold streams open.
        """
        if all(site in ("none", "same-origin") for site in header_values(scope, b"sec-fetch-site")):
            return True
        is_link = header_values(scope, b"sec-fetch-mode") == ["navigate"] and header_values(
            scope, b"sec-fetch-dest"
        ) == ["document"]
        return is_link and scope["method"] == "GET" and scope["path"] in self._page_paths


def _is_bearer(sent: list[str]) -> bool:
    return len(sent) == 1 and sent[0][:7].lower() == "bearer "


# Called for every request, mostly with the same few hosts.
@lru_cache(maxsize=64)
def _loopback_port(host: str, scheme: str) -> int | None:
    """Return the port of a Host header that names this machine (by default the scheme's), else None."""
    match = _HOST.fullmatch(host)
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS[scheme]
    return port if port <= 65535 and _is_loopback(match["name"].strip("[]")) else None


def _is_loopback(name: str) -> bool:
    if name.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _origin_loopback_port(origin: str) -> int | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or parts.path or parts.query or parts.fragment:
        return None
    return _loopback_port(parts.netloc, parts.scheme)
