"""Problem documents (RFC 9457): the form of all errors of the API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvferry.app.common.call_errors import BODY_FIELD, Conflict, FieldError, NotFound, field_errors
from kvferry.app.settings import BadSettings
from kvferry.app.store import DatabaseUnavailable, OutcomeUnknown

PROBLEM_JSON = "application/problem+json"
UNREADABLE_JSON = "the body is not JSON in UTF-8, or holds a number that is too long to read"
ENGINE_PREFIX = "/v1/"
RETRY_AFTER_S = 1
Responses = dict[int | str, dict[str, Any]]
"""Descriptions of the responses of a route, by status."""
NO_DATABASE: Responses = {503: {"description": "The metadata store does not answer"}}
_URN = "urn:kvferry:problem:"
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class ProblemModel(BaseModel):
    """An RFC 9457 problem document."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "no request 'r1' is known"}
            ]
        }
    )
    type: str
    title: str
    status: int
    detail: str
    request_id: str | None = None
    errors: list[FieldError] | None = Field(default=None, description="on a 422: one entry per field")


class Problem(Exception):
    """Raised in a route or in middleware to answer with a problem document."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        slug: str | None = None,
        title: str | None = None,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.slug = slug
        self.title = title or HTTPStatus(status).phrase
        self.errors = list(errors)
        self.headers = dict(headers or {})
        self.extras = dict(extras or {})

    def response(self, scope: Scope) -> Response:
        """Return the document for the request of this ASGI scope; under `/v1/` an error in OpenAI's form."""
        if f"{scope.get('path', '')}/".startswith(ENGINE_PREFIX):
            content = json.dumps(self.openai_body()).encode("ascii")
            # OpenAI's API has no 422.
            return Response(content, 400 if self.status == 422 else self.status, self.headers, "application/json")
        document: dict[str, Any] = {
            "type": _URN + self.slug if self.slug else "about:blank",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.extras,
        }
        if self.errors:
            document["errors"] = [error.model_dump() for error in self.errors]
        request_id = scope.get("state", {}).get("request_id")
        if request_id is not None:
            document["request_id"] = request_id
        # ASCII, since it may quote a client's field names, which may hold lone surrogates.
        content = json.dumps(document, ensure_ascii=True).encode("ascii")
        return Response(content, self.status, self.headers, PROBLEM_JSON)

    def openai_body(self) -> dict[str, Any]:
        """Return the body of the error in the form of OpenAI's API; `extras` may hold its `param` and `code`."""
        status = self.status
        kind = "requests" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
        code = self.extras.get("code", _OPENAI_CODES.get(status))
        return {"error": {"message": self.detail, "type": kind, "param": self.extras.get("param"), "code": code}}


def bad_request(detail: str, param: str | None = None) -> Problem:
    """Return the 400 for a call of the engine's API, and for its field `param`."""
    return Problem(400, detail, extras={"param": param})


def too_long(detail: str, param: str) -> Problem:
    """Return the 400 for a prompt that can never fit."""
    return Problem(400, detail, extras={"param": param, "code": "context_length_exceeded"})


def busy(detail: str) -> Problem:
    """Return the 429 for a call that may be repeated."""
    return Problem(429, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


def invalid_fields(errors: Sequence[FieldError]) -> Problem:
    """Return the 422 for these fields."""
    detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
    return Problem(422, detail[:500], slug="invalid-fields", title="Invalid fields", errors=errors)


def invalid_field(field: str, message: str) -> Problem:
    """Return the 422 for one field."""
    return invalid_fields([FieldError(field=field, message=message)])


def _problem_of(request: Request, exc: Exception) -> Problem:
    if isinstance(exc, RequestValidationError):
        errors = exc.errors()
        if any(error["type"] == "json_invalid" for error in errors):
            return Problem(400, "the body is not JSON", slug="invalid-json", title="Invalid JSON")
        return invalid_fields(field_errors(errors))
    if isinstance(exc, OutcomeUnknown):
        return Problem(504, f"{exc}: the outcome is not known", slug="outcome-unknown")
    if isinstance(exc, DatabaseUnavailable):
        outcome = "" if request.method == "GET" else ", and nothing was changed"
        detail = f"the metadata store does not answer{outcome}: {exc}"
        return Problem(503, detail, slug="store-unavailable", headers={"Retry-After": "5"})
    if isinstance(exc, NotFound):
        return Problem(404, str(exc))
    if isinstance(exc, Conflict):
        return Problem(409, str(exc), slug=exc.slug, title=exc.title, errors=exc.errors, extras=exc.extras)
    if isinstance(exc, BadSettings):
        return invalid_fields(
            [FieldError(field=one.name[:200] or BODY_FIELD, message=one.advice) for one in exc.problems]
        )
    if isinstance(exc, HTTPException):
        return _problem_of_http(request, exc)
    if isinstance(exc, Problem):
        return exc
    raise exc


def _problem_of_http(request: Request, exc: HTTPException) -> Problem:
    if exc.status_code == 400:
        # FastAPI raises it only for a body that its JSON reader cannot decode.
        return Problem(400, UNREADABLE_JSON, slug="invalid-json", title="Invalid JSON")
    if exc.status_code == 405:
        return method_not_allowed(request.method, request.url.path, _allowed_methods(request))
    detail = f"there is no {request.url.path}" if exc.status_code == 404 else str(exc.detail)
    return Problem(exc.status_code, detail, headers=dict(exc.headers or {}))


def method_not_allowed(method: str, path: str, allowed: Sequence[str]) -> Problem:
    """Return the 405 for a method that a path does not have."""
    return Problem(405, f"{path} does not support {method}", headers={"Allow": ", ".join(allowed)})


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods that the description has at a request's path; the router's 405 names those of one route only.

    Of a path that is described itself, as `/rules/test`, these are not those of a path with parameters that matches it.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    described = [route for route in matching if not route.param_convertors] or matching
    return sorted(set().union(*(route.methods or () for route in described))) or ["GET", "HEAD"]


async def _answer(request: Request, exc: Exception) -> Response:
    return _problem_of(request, exc).response(request.scope)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error with a problem document."""
    for kind in (Problem, RequestValidationError, HTTPException, DatabaseUnavailable, NotFound, Conflict, BadSettings):
        app.add_exception_handler(kind, _answer)
