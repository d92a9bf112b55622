"""OpenAPI document: FastAPI's, with problem documents and security added. HEAD, where it is as GET."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from kvferry.app.api.auth import OPEN_PATHS
from kvferry.app.api.errors import PROBLEM_JSON, ProblemModel
from kvferry.app.operations.policy_json import whole
from kvferry.core.tiers.base import HOST

DESCRIPTION = """\
Observe and control a KV-cache offloading service while its engine serves.

Errors are RFC 9457 problem documents; under `/v1` they have OpenAI's form. Lists are paged with `limit` and `cursor`.
Times are RFC 3339 UTC, sizes bytes, durations seconds. With tokens set, every call except the health checks needs one:
the admin token allows all calls, the read token only GET and HEAD (and `/v1`). An `X-Request-ID` of 1 to 512 printable
ASCII characters is accepted, else one is generated; the response returns it. Under `/admin/v1`, query parameters that a
call does not have, or that are repeated, are refused with 422.
"""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_METHODS = ("get", "put", "post", "delete", "patch")
TAGS = [
    {"name": "stats", "description": "Counters of the cache"},
    {"name": "reset", "description": "Drop stored blocks"},
    {"name": "policies", "description": "What may be stored and loaded, by default and for single requests"},
    {"name": "requests", "description": "Live and recent requests"},
    {"name": "sessions", "description": "Sessions that clients name: what served them, and leases of their blocks"},
    {"name": "blocks", "description": "Blocks in the pool"},
    {"name": "slots", "description": "The pool, slot by slot"},
    {"name": "tiers", "description": "Stores below the pool"},
    {"name": "tenants", "description": "What each tenant has in the pool, and its limit"},
    {"name": "evictions", "description": "Blocks that left the pool"},
    {"name": "config", "description": "Settings"},
    {"name": "audit", "description": "Mutating calls"},
    {"name": "events", "description": "Live events"},
    {"name": "engine", "description": "OpenAI-compatible API of the embedded engine, where kvferry has it"},
    {"name": "health", "description": "Probes and metrics"},
]
_EVERYWHERE = {
    "400": "Bad request",
    "401": "No token, or an unknown one",
    "403": "Not allowed with this token or from this origin",
}
_OF_SESSION = "/admin/v1/sessions/{id}/prefetch"
_BODIES_WITH_TIERS: dict[str, tuple[str, ...]] = {"/admin/v1/reset": (HOST,), "/admin/v1/prefetch": (), _OF_SESSION: ()}
"""Paths whose body names tiers, and what may stand among their names."""
_WITH_BODY = {"413": "Body too large", "415": "Body not sent as application/json"}


class Document:
    """The OpenAPI document of an app as JSON, made by the first call, and written again when other tiers are attached.

    Thread: any but the event loop's: making it takes half a second of Python.
    """

    def __init__(self, app: FastAPI, needs_token: bool, tier_names: Callable[[], Sequence[str]]) -> None:
        """`needs_token` is whether a token is set. `tier_names` returns the tiers that are attached now."""
        self._app = app
        self._needs_token = needs_token
        self._tier_names = tier_names
        self._lock = threading.Lock()
        self._document: dict[str, Any] | None = None
        self._json: tuple[Sequence[str], bytes] | None = None

    def read(self) -> bytes:
        """Return the document."""
        with self._lock:
            names = self._tier_names()
            if self._json is None or self._json[0] != names:
                if self._document is None:
                    self._document = _describe(self._app.openapi(), self._needs_token)
                document = self._document
                for path, places in _BODIES_WITH_TIERS.items():
                    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                    body["schema"]["properties"] = {"tiers": {"items": {"enum": [*places, *names]}}}
                text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
                self._json = names, text.encode("utf-8")
            return self._json[1]


def _describe(document: dict[str, Any], needs_token: bool) -> dict[str, Any]:
    """Return FastAPI's document with problem documents, security and HEAD."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    problem = ProblemModel.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs"))
    schemas["Problem"] = problem
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "`KVFERRY_ADMIN_TOKEN` allows all calls, `KVFERRY_READ_TOKEN` only GET and HEAD. Not needed "
            "while neither is set.",
        }
    }
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                _describe_operation(path, method, item[method], needs_token)
        if not path.startswith(("/admin/", "/v1/")):
            item["head"] = _describe_head(item["get"])
    _write_whole_bounds(document)
    return document


def _write_whole_bounds(part: Any) -> None:
    """Make bounds that FastAPI wrote as floats whole numbers again, since readers round floats beyond 2**53."""
    if isinstance(part, dict):
        for name in _BOUNDS & part.keys():
            part[name] = whole(part[name])
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _write_whole_bounds(value)


def _describe_operation(path: str, method: str, operation: dict[str, Any], needs_token: bool) -> None:
    is_open = path in OPEN_PATHS
    operation["security"] = [{"token": []}] if needs_token and not is_open else []
    responses = operation["responses"]
    missing = {} if is_open else dict(_EVERYWHERE)
    if "{" in path:
        missing["404"] = "Not found"
    if "requestBody" in operation:
        missing |= _WITH_BODY
    if method != "get" and path.startswith("/admin/"):
        missing["503"] = "The metadata store does not answer"
    if path.startswith("/admin/"):
        missing["422"] = "Fields or query parameters that are not valid, one entry for each under `errors`"
    if path.startswith("/v1/"):
        # The engine's router describes all of its responses, in OpenAI's form.
        missing = {}
    for status, description in missing.items():
        responses.setdefault(status, {"description": description})
    if path.startswith("/v1/"):
        # The engine's API has its own form and status for invalid fields.
        responses.pop("422", None)
    elif "HTTPValidationError" in str(responses.get("422")):
        responses["422"] = {"description": missing.get("422", "Fields that are not valid")}
    for status, response in responses.items():
        if status[0] in "45" and "content" not in response:
            response["content"] = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    operation["responses"] = dict(sorted(responses.items()))


def add_heads(router: APIRouter) -> APIRouter:
    """Return a router with a HEAD route for each GET route, since load balancers use it. The server sends no body."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in route.methods:
            head = copy(route)
            head.methods, head.include_in_schema = {"HEAD"}, False
            router.routes.append(head)
    return router


def _describe_head(get: dict[str, Any]) -> dict[str, Any]:
    """Return the description of HEAD from that of GET."""
    responses = {status: {"description": response["description"]} for status, response in get["responses"].items()}
    operation_id = get["operationId"].removesuffix("_get") + "_head"
    return {**get, "operationId": operation_id, "responses": responses}
