"""The HTTP client of the service, for programs and for the command line: one method a call of the contract."""

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
    """A call that did not work, in one line."""


class Unreachable(ClientError):
    """Nobody answered, or not in time."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"cannot reach {url}: {reason}")


class Refused(ClientError):
    """The server said no. `problem` is its problem document, or one made up from an answer that has none."""

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
    """Talks to one kvferry service. Use it as a context manager, or close it.

    Without arguments it reads KVFERRY_URL, and KVFERRY_ADMIN_TOKEN or KVFERRY_READ_TOKEN (or `..._FILE`), and raises
    `BadSettings` where one of these will not do. An empty `token` sends none. Redirects are not followed, so that the
    token reaches no other address. Calls raise `Unreachable` or `Refused`.
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
        """Close its connections."""
        self._http.close()

    def stats(self) -> Json:
        """One consistent snapshot."""
        return self._object("GET", f"{ADMIN}/stats")

    def stats_stream(self, interval_s: float = 1.0) -> Generator[Json, None, None]:
        """Snapshots, one each interval, until the server ends or the caller stops asking."""
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
        """Drop what is stored, all of it or by `match`; `pending_jobs` of the answer is 0 once all has drained."""
        body: Json = {"drain_timeout_s": drain_timeout_s}
        given = {"tiers": list(tiers) if tiers else None, "match": dict(match) if match else None, "reason": reason}
        body |= {name: value for name, value in given.items() if value is not None}
        timeout_s = drain_timeout_s + DEFAULT_TIMEOUT_S
        return self._object("POST", f"{ADMIN}/reset", body=body, timeout_s=timeout_s)

    def policy(self) -> Json:
        """The runtime default policy, each field with its source."""
        return self._object("GET", f"{ADMIN}/policy")

    def patch_policy(self, patch: Mapping[str, Any]) -> Json:
        """Change runtime defaults; None gives a field back to the settings."""
        return self._object("PATCH", f"{ADMIN}/policy", body=patch)

    def request_policy(self, request_id: str) -> Json:
        """The override of one request."""
        return self._object("GET", f"{_request(request_id)}/policy")

    def put_request_policy(self, request_id: str, fields: Mapping[str, Any], *, ttl_s: float | None = None) -> Json:
        """Override fields for one request, before it arrives or while it runs."""
        body = dict(fields) | ({} if ttl_s is None else {"ttl_s": ttl_s})
        return self._object("PUT", f"{_request(request_id)}/policy", body=body)

    def delete_request_policy(self, request_id: str) -> None:
        """Take a request's override away."""
        self._send("DELETE", f"{_request(request_id)}/policy")

    def rules(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """The rules, in the order in which they are tried."""
        return self._page("rules", limit, cursor)

    def rule(self, name: str) -> Json:
        """One rule."""
        return self._object("GET", _rule(name))

    def put_rule(
        self,
        name: str,
        *,
        order: int = 0,
        match: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> Json:
        """Set a rule, in place of the one of this name if there is one."""
        body = {"order": order, "match": dict(match or {}), "policy": dict(policy or {})}
        return self._object("PUT", _rule(name), body=body)

    def delete_rule(self, name: str) -> None:
        """Take a rule away."""
        self._send("DELETE", _rule(name))

    def requests(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """Live and recent requests."""
        return self._page("requests", limit, cursor)

    def request(self, request_id: str) -> Json:
        """One request: its state, effective policy, tokens and blocks."""
        return self._object("GET", _request(request_id))

    def blocks(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """What the pool holds."""
        return self._page("blocks", limit, cursor)

    def evictions(self, *, limit: int | None = None, cursor: str | None = None, **filters: str | None) -> Page:
        """History of evictions; filters are `since`, `until`, `reason`, `request` and `tenant`."""
        return self._page("evictions", limit, cursor, **filters)

    def evictions_summary(self, *, since: str | None = None, until: str | None = None) -> Json:
        """Counts by reason, ages at eviction and the regret rate."""
        return self._object("GET", f"{ADMIN}/evictions/summary", params={"since": since, "until": until})

    def config(self) -> Json:
        """Every setting by name, secrets masked."""
        return self._object("GET", f"{ADMIN}/config")

    def patch_config(self, patch: Mapping[str, Any]) -> Json:
        """Change settings that may change while running."""
        return self._object("PATCH", f"{ADMIN}/config", body=patch)

    def audit(self, *, limit: int | None = None, cursor: str | None = None) -> Page:
        """What operators did."""
        return self._page("audit", limit, cursor)

    def events(self, types: Sequence[str] = ()) -> Generator[Json, None, None]:
        """What the cache does while it happens, of these types or all, until the server ends or the caller stops."""
        for data in self._events("GET", f"{ADMIN}/events", params={"type": list(types)}):
            yield self._parsed(data)

    def models(self) -> list[Json]:
        """The models that the engine serves."""
        items = self._object("GET", "/v1/models").get("data")
        return items if isinstance(items, list) else []

    def complete(self, prompt: str | Sequence[int], *, request_id: str | None = None, **options: Any) -> Json:
        """A completion; options are those of `POST /v1/completions`, such as `max_tokens`."""
        body = _completion(prompt, options, stream=False)
        return self._object("POST", "/v1/completions", body=body, headers=_id_header(request_id))

    def stream_completion(
        self, prompt: str | Sequence[int], *, request_id: str | None = None, **options: Any
    ) -> Generator[Json, None, None]:
        """A completion, chunk by chunk."""
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
    """What sync and async clients have in common. A proxy is never asked for this very machine.

    Redirects are not followed: the token is for this address only.
    """
    headers = {"Accept": "application/json", "User-Agent": "kvferry"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return {"base_url": url, "headers": headers, "trust_env": not _is_local(url), "follow_redirects": False}


def refusal(status: int, text: str) -> Refused:
    """The error for an answer that is not what was asked for."""
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
