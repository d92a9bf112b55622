"""OpenAPI document: FastAPI's, with problem documents and security added. Routes for HEAD, which it leaves out."""

from __future__ import annotations

import json
import threading
from copy import copy
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from kvferry.app.api.auth import OPEN_PATHS
from kvferry.app.api.errors import PROBLEM_JSON, ProblemModel

DESCRIPTION = """\
Observe and control a KV-cache offloading service while its engine serves.

Errors are RFC 9457 problem documents; under `/v1` they have OpenAI's form. Lists are paged with `limit` and `cursor`.
Times are RFC 3339 UTC, sizes bytes, durations seconds. With tokens set, every call except the health checks needs one:
the admin token allows all calls, the read token only GET and HEAD (and `/v1`). An `X-Request-ID` of 1 to 512 printable
ASCII characters is accepted, else one is generated; the response returns it. Under `/admin/v1`, query parameters that a
call does not have, or that are repeated, are refused with 422.
"""
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


class Document:
    """The OpenAPI document of an app as JSON, made by the first call.

    Thread: any but the event loop's: making it takes half a second of Python.
    """

    def __init__(self, app: FastAPI, needs_token: bool) -> None:
        """`needs_token` is whether a token is set."""
        self._app = app
        self._needs_token = needs_token
        self._lock = threading.Lock()
        self._json: bytes | None = None

    def read(self) -> bytes:
        """Return the document."""
        with self._lock:
            if self._json is None:
                document = _describe(self._app.openapi(), self._needs_token)
                self._json = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
            return self._json


def _describe(document: dict[str, Any], needs_token: bool) -> dict[str, Any]:
    """Return FastAPI's document with problem documents and security."""
    components = document.setdefault("components", {})
    problem = ProblemModel.model_json_schema(ref_template="#/components/schemas/{model}")
    components.setdefault("schemas", {}).update({"Problem": problem, **problem.pop("$defs")})
    components["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "`KVFERRY_ADMIN_TOKEN` allows all calls, `KVFERRY_READ_TOKEN` only GET and HEAD. Not needed "
            "while neither is set.",
        }
    }
    problem_content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path, item in document["paths"].items():
        for operation in item.values():
            operation["security"] = [{"token": []}] if needs_token and path not in OPEN_PATHS else []
            for status, response in operation["responses"].items():
                if status[0] in "45d":
                    response.setdefault("content", problem_content)
    return document


def add_heads(router: APIRouter) -> APIRouter:
    """Return a router with a HEAD route for each GET route, since load balancers use it. The server sends no body."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in route.methods:
            head = copy(route)
            head.methods, head.include_in_schema = {"HEAD"}, False
            router.routes.append(head)
    return router
