"""HTTP client of the service, for programs and the command line: one method per call of the HTTP contract."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx
from httpx_sse import SSEError, connect_sse

from kvferry.app.settings.connection import find_connection

Json = dict[str, Any]

ADMIN = "/admin/v1"
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


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list; `next_cursor` is None on the last."""

    items: list[Json]
    next_cursor: str | None


class KVFerryClient:
    """Client of one kvferry service. A context manager, or to be closed.

    Without arguments it reads KVFERRY_URL, and KVFERRY_ADMIN_TOKEN or KVFERRY_READ_TOKEN (or `..._FILE`), and raises
    `BadSettings` if one of these is invalid. An empty `token` sends none. Redirects are not followed, so that the
    token is sent to no other address. Calls raise `Unreachable` or `Refused`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        found = find_connection(url, token, env_files=())
        self.url = found.url
        self.token = None if token == "" else found.token
        self._http = httpx.Client(
            **http_options(self.url, self.token),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def stats(self) -> Json:
        """Return one consistent snapshot."""
        return self._object("GET", f"{ADMIN}/stats")

    def stats_stream(self, interval_s: float = 1.0) -> Generator[Json, None, None]:
        """Yield a snapshot per interval, until the server ends."""
        for data in self._events("GET", f"{ADMIN}/stats/stream", params={"interval_s": interval_s}):
            yield self._parsed(data)

    def reset(
        self,
        *,
        tiers: Sequence[str] | None = None,
        match: Mapping[str, str] | None = None,
        drain_timeout_s: float = 30.0,
        reason: str | None = None,
    ) -> Json:
        """Drop all blocks, or those of `match`; `pending_jobs` of the response is 0 once all jobs have ended."""
        body: Json = {"drain_timeout_s": drain_timeout_s}
        given = {"tiers": list(tiers) if tiers else None, "match": dict(match) if match else None, "reason": reason}
        body |= {name: value for name, value in given.items() if value is not None}
        timeout_s = drain_timeout_s + DEFAULT_TIMEOUT_S
        return self._object("POST", f"{ADMIN}/reset", body=body, timeout_s=timeout_s)

    def policy(self) -> Json:
        """Return the runtime default policy, each field with its source."""
        return self._object("GET", f"{ADMIN}/policy")

    def patch_policy(self, patch: Mapping[str, Any]) -> Json:
        """Change runtime defaults; None restores the value of the settings."""
        return self._object("PATCH", f"{ADMIN}/policy", body=patch)

    def request_policy(self, request_id: str) -> Json:
        """Return the override of one request."""
        return self._object("GET", f"{_request(request_id)}/policy")

    def put_request_policy(self, request_id: str, fields: Mapping[str, Any], *, ttl_s: float | None = None) -> Json:
        """Override fields for one request, before it arrives or while it runs."""
        body = dict(fields) | ({} if ttl_s is None else {"ttl_s": ttl_s})
        return self._object("PUT", f"{_request(request_id)}/policy", body=body)

    def delete_request_policy(self, request_id: str) -> None:
        """Delete a request's override."""
        self._send("DELETE", f"{_request(request_id)}/policy")

    def rules(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """Return the rules in order of precedence."""
        return self._page("rules", limit, cursor)

    def rule(self, name: str) -> Json:
        """Return one rule."""
        return self._object("GET", _rule(name))

    def put_rule(
        self,
        name: str,
        *,
        order: int = 0,
        match: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> Json:
        """Create or replace a rule."""
        body = {"order": order, "match": dict(match or {}), "policy": dict(policy or {})}
        return self._object("PUT", _rule(name), body=body)

    def delete_rule(self, name: str) -> None:
        """Delete a rule."""
        self._send("DELETE", _rule(name))

    def requests(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """Return live and recent requests."""
        return self._page("requests", limit, cursor)

    def request(self, request_id: str) -> Json:
        """Return one request: state, effective policy, tokens and blocks."""
        return self._object("GET", _request(request_id))

    def blocks(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """Return the blocks of the pool."""
        return self._page("blocks", limit, cursor)

    def evictions(self, *, limit: int | None = None, cursor: str | None = None, **filters: str | None) -> Page:
        """Return evictions; filters are `since`, `until`, `reason`, `request` and `tenant`."""
        return self._page("evictions", limit, cursor, **filters)

    def evictions_summary(self, *, since: str | None = None, until: str | None = None) -> Json:
        """Return counts by reason, ages at eviction and the regret rate."""
        return self._object("GET", f"{ADMIN}/evictions/summary", params={"since": since, "until": until})

    def config(self) -> Json:
        """Return every setting by name, secrets masked."""
        return self._object("GET", f"{ADMIN}/config")

    def patch_config(self, patch: Mapping[str, Any]) -> Json:
        """Change settings while the service runs."""
        return self._object("PATCH", f"{ADMIN}/config", body=patch)

    def audit(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """Return the changes that operators made."""
        return self._page("audit", limit, cursor)

    def events(self, types: Sequence[str] = ()) -> Generator[Json, None, None]:
        """Yield events of the cache, of these types or all, until the server ends."""
        for data in self._events("GET", f"{ADMIN}/events", params={"type": list(types)}):
            yield self._parsed(data)

    def models(self) -> list[Json]:
        """Return the models that the engine serves."""
        items = self._object("GET", "/v1/models").get("data")
        return items if isinstance(items, list) else []

    def complete(self, prompt: str | Sequence[int], *, request_id: str | None = None, **options: Any) -> Json:
        """Return a completion; options are those of `POST /v1/completions`, such as `max_tokens`."""
        body = _completion(prompt, options, stream=False)
        return self._object("POST", "/v1/completions", body=body, headers=_id_header(request_id))

    def stream_completion(
        self, prompt: str | Sequence[int], *, request_id: str | None = None, **options: Any
    ) -> Generator[Json, None, None]:
        """Yield the chunks of a completion."""
        body = _completion(prompt, options, stream=True)
        for data in self._events("POST", "/v1/completions", json=body, headers=_id_header(request_id)):
            if data == DONE:
                return
            yield self._parsed(data)

    def _page(self, what: str, limit: int | None, cursor: str | None, **filters: str | None) -> Page:
        params = {"limit": limit, "cursor": cursor, **filters}
        answer = self._object("GET", f"{ADMIN}/{what}", params=params)
        items = answer.get("items")
        return Page(items if isinstance(items, list) else [], answer.get("next_cursor"))

    def _object(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Json:
        response = self._send(method, path, params=params, body=body, headers=headers, timeout_s=timeout_s)
        return self._parsed(response.text, response.status_code)

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        request = self._http.build_request(
            method,
            path,
            params={name: value for name, value in (params or {}).items() if value is not None},
            json=body,
            headers=headers,
            timeout=timeout_s or self._http.timeout,
        )
        with self._reaching():
            response = self._http.send(request)
        if not response.is_success:
            raise refusal(response.status_code, response.text)
        return response

    def _events(self, method: str, path: str, **request: Any) -> Generator[str, None, None]:
        timeout = httpx.Timeout(self._http.timeout.read, connect=CONNECT_TIMEOUT_S)
        with self._reaching(), connect_sse(self._http, method, path, timeout=timeout, **request) as source:
            if not source.response.is_success:
                source.response.read()
                raise refusal(source.response.status_code, source.response.text)
            try:
                for event in source.iter_sse():
                    if event.data:
                        yield event.data
            except SSEError as error:
                raise refusal(source.response.status_code, "") from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise Unreachable(self.url, "no answer in time") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error

    def _parsed(self, text: str, status: int = 200) -> Json:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise refusal(status, text) from error
        if not isinstance(value, dict):
            raise refusal(status, text)
        return value


def http_options(url: str, token: str | None) -> Json:
    """Return the options of sync and async clients: no redirects, and no proxy for this machine."""
    headers = {"Accept": "application/json", "User-Agent": "kvferry"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return {"base_url": url, "headers": headers, "trust_env": not _is_local(url), "follow_redirects": False}


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
    said = ": ".join(str(part) for part in (title, detail) if part) or "no reason given"
    fields = problem.get("errors")
    if isinstance(fields, list):
        said += "".join(f"; {_field(item)}" for item in fields[:10] if isinstance(item, dict))
    return f"{said} ({status})"


def _field(item: Mapping[str, Any]) -> str:
    name = item.get("field") or item.get("path") or item.get("loc") or "body"
    name = ".".join(str(part) for part in name) if isinstance(name, list) else str(name)
    return f"{name}: {item.get('message') or item.get('msg') or item.get('detail') or 'is wrong'}"


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _request(request_id: str) -> str:
    return f"{ADMIN}/requests/{quote(request_id, safe='')}"


def _rule(name: str) -> str:
    return f"{ADMIN}/rules/{quote(name, safe='')}"


def _id_header(request_id: str | None) -> dict[str, str]:
    return {} if request_id is None else {"X-Request-ID": request_id}


def _completion(prompt: str | Sequence[int], options: Mapping[str, Any], *, stream: bool) -> Json:
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options, "stream": stream}
