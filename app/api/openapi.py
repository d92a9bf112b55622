"""The API's own description: FastAPI's, with problem documents and security as they really are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvferry.app.api.auth import OPEN_PATHS
from kvferry.app.api.problems import PROBLEM_JSON, ProblemModel

DESCRIPTION = """\
Watch and steer a KV-cache offloading service while its engine serves.

Errors are RFC 9457 problem documents; under `/v1` they have OpenAI's form. Lists are paged with `limit` and `cursor`.
Times are RFC 3339 UTC, sizes bytes, durations seconds. With tokens set, every call but the health checks needs one: the
admin token may do all, the read token only GET (and `/v1`). `X-Request-ID` is taken over, if it has 1 to 512 printable
ASCII characters, or made up, and returned.
"""
_METHODS = ("get", "put", "post", "delete", "patch")
_TAGS = [
    {"name": "stats", "description": "What the cache does, in numbers"},
    {"name": "reset", "description": "Forget stored blocks"},
    {"name": "policies", "description": "What may be stored and loaded, by default and for single requests"},
    {"name": "requests", "description": "Live and recent requests"},
    {"name": "blocks", "description": "What the pool holds"},
    {"name": "slots", "description": "The pool, slot by slot"},
    {"name": "evictions", "description": "What left the pool, and why"},
    {"name": "config", "description": "Settings"},
    {"name": "audit", "description": "What operators did"},
    {"name": "events", "description": "What the cache does, while it happens"},
    {"name": "health", "description": "For probes and scrapers"},
]
_EVERYWHERE = {
    "400": "Bad request",
    "401": "No token, or an unknown one",
    "403": "Not allowed with this token or from there",
}
_WITH_BODY = {"413": "Body too large", "415": "Body not sent as application/json"}


def describe(app: FastAPI, needs_token: bool) -> dict[str, Any]:
    """The OpenAPI document; built once, since routes do not change. Without a token set, no call needs one."""
    if app.openapi_schema is None:
        app.openapi_schema = _build(app, needs_token)
    return app.openapi_schema


def _build(app: FastAPI, needs_token: bool) -> dict[str, Any]:
    document = get_openapi(
        title="kvferry",
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=_TAGS,
        license_info=app.license_info,
    )
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
            "description": "`KVFERRY_ADMIN_TOKEN` may do all, `KVFERRY_READ_TOKEN` only GET. Not needed while "
            "neither is set.",
        }
    }
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                _describe_operation(path, method, item[method], needs_token)
    return document


def _describe_operation(path: str, method: str, operation: dict[str, Any], needs_token: bool) -> None:
    is_open = path in OPEN_PATHS
    operation["security"] = [{"token": []}] if needs_token and not is_open else []
    responses = operation["responses"]
    missing = {} if is_open else dict(_EVERYWHERE)
    if "{" in path:
        missing["404"] = "There is none of that name"
    if "requestBody" in operation:
        missing |= _WITH_BODY
    if method != "get" and path.startswith("/admin/"):
        missing["503"] = "The metadata store is gone"
    if path.startswith("/v1/"):
        # The engine's router describes all of its answers, in OpenAI's form.
        missing = {}
    for status, description in missing.items():
        responses.setdefault(status, {"description": description})
    if path.startswith("/v1/"):
        # The engine's own API says in its own words what is not valid, and with which status.
        responses.pop("422", None)
    elif "HTTPValidationError" in str(responses.get("422")):
        responses["422"] = {"description": "Fields that are not valid, one entry a field under `errors`"}
    for status, response in responses.items():
        if status[0] in "45" and "content" not in response:
            response["content"] = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    operation["responses"] = dict(sorted(responses.items()))
