"""HTTP client of the service, for the command line."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from httpx_sse import SSEError, connect_sse

Json = dict[str, Any]

ADMIN = "/admin/v1/"
DONE = "[DONE]"
DEFAULT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0


class ClientError(Exception):
    """A failed call; the message is one line."""


class Unreachable(ClientError):
    """No response, or not in time."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"cannot reach {url}: {reason}")


class Refused(ClientError):
    """An error response. `problem` is its problem document, or one made from a response without one."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        super().__init__(_sentence(status, self.problem))


class OtherVersion(ClientError):
    """An answer without a field that this version reads."""

    def __init__(self, field: str) -> None:
        super().__init__(
            f"the answer has no field {field!r}: the service has another version of kvferry, or is another program; "
            "check its URL, or print answers as they are with --json"
        )


class _Answer(dict[str, Any]):
    """An object of an answer. Raises `OtherVersion` for a missing field."""

    def __missing__(self, field: str) -> Any:
        raise OtherVersion(field)


class KVFerryClient:
    """Client of one kvferry service. A context manager.

    Redirects are not followed, so that the token is sent to no other address. Paths are relative to the admin API, or
    begin with a slash. Calls raise `Unreachable` or `Refused`, and reading a missing field of an answer by `[]` raises
    `OtherVersion`.
    """

    def __init__(self, url: str, token: str | None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Make no call. `url` is as `find_connection` returns it."""
        self.url = url
        self.token = token
        self._http = httpx.Client(
            **http_options(self.url, self.token),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Json:
        """Return the object that a GET is answered with; parameters that are None are left out."""
        return self._call(
            "GET", path, params={name: value for name, value in params.items() if value is not None} or None
        )

    def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Json:
        """Send a body as JSON; return the object of the response, empty for 204."""
        return self._call(method, path, json=body, timeout=timeout_s or self._http.timeout)

    def events(self, path: str, **params: Any) -> Generator[Json, None, None]:
        """Yield the data of server-sent events until the server ends the stream."""
        with self._reaching(), connect_sse(self._http, "GET", _full(path), params=params) as source:
            if not source.response.is_success:
                source.response.read()
                raise refusal(source.response.status_code, source.response.text)
            try:
                for event in source.iter_sse():
                    if event.data:
                        yield _parsed(event.data, 200)
            except SSEError as error:
                raise refusal(source.response.status_code, "") from error

    def _call(self, method: str, path: str, **request: Any) -> Json:
        with self._reaching():
            response = self._http.request(method, _full(path), **request)
        if not response.is_success:
            raise refusal(response.status_code, response.text)
        if method != "GET" and _full(path).startswith(ADMIN) and "X-Request-ID" not in response.headers:
            # Another server may accept anything; every answer of kvferry has this header, also an empty one.
            raise refusal(response.status_code, "")
        return {} if response.status_code == 204 else _parsed(response.text, response.status_code)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise Unreachable(self.url, "no answer in time") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error


def _full(path: str) -> str:
    return path if path.startswith("/") else ADMIN + path


def _parsed(text: str, status: int) -> Json:
    try:
        value = json.loads(text, object_hook=_Answer)
    except ValueError as error:
        raise refusal(status, text) from error
    if not isinstance(value, dict):
        raise refusal(status, text)
    return value


def http_options(url: str, token: str | None) -> Json:
    """Return the options of sync and async clients: no redirects, no proxy for this machine, and no compression."""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "kvferry"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    local = _is_local(url)
    # Certificates take 30 ms to load, which plain HTTP without a proxy does not need.
    verify = not local or url.startswith("https:")
    return {"base_url": url, "headers": headers, "trust_env": not local, "verify": verify, "follow_redirects": False}


def refusal(status: int, text: str) -> Refused:
    """Return the error for an unexpected response."""
    try:
        problem = json.loads(text)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and problem:
        return Refused(status, problem)
    detail = "the answer is not kvferry's; is that the right URL?"
    return Refused(status, {"title": "Unexpected answer", "status": status, "detail": detail})


def _sentence(status: int, problem: Mapping[str, Any]) -> str:
    nested = problem.get("error")
    if isinstance(nested, dict):
        problem = nested
    title = problem.get("title")
    detail = problem.get("detail") or problem.get("message")
    errors = problem.get("errors")
    if isinstance(errors, list):
        fields = [error for error in errors[:10] if isinstance(error, dict)]
        # The detail of a problem with fields repeats their names.
        detail = "; ".join(f"{one.get('field', 'body')}: {one.get('message', 'is wrong')}" for one in fields) or detail
    said = ": ".join(str(part) for part in (title, detail) if part) or "no reason given"
    advice = (
        "; give the token by --token-file, or by KVFERRY_ADMIN_TOKEN or KVFERRY_READ_TOKEN" if status == 401 else ""
    )
    return f"{said} ({status}){advice}"


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
