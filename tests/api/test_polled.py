from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.middleware import Middleware

from app.api.envelope import Envelope
from app.api.polled import PolledAnswer, PolledRoute
from app.api.problems import Problem, install_problem_handlers

from .service import Service
from .serving import serve
from .test_envelope import problem_of

Endpoint = Callable[..., PolledAnswer]


def answer(request: Request) -> PolledAnswer:
    asked = request.headers["X-Asked"].encode()
    return PolledAnswer(lambda: asked, "text/plain")


def refuse(_request: Request) -> PolledAnswer:
    raise Problem(409, "not now")


def fail(_request: Request) -> PolledAnswer:
    raise RuntimeError("a secret in a message")


def app_with(**endpoints: Endpoint) -> FastAPI:
    app = FastAPI(middleware=[Middleware(Envelope)])
    install_problem_handlers(app)
    router = APIRouter()
    for name, endpoint in endpoints.items():
        router.add_api_route(f"/{name}", endpoint, route_class_override=PolledRoute)
    app.include_router(router)
    return app


def test_a_polled_route_answers_and_says_no_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.ERROR),
        serve(app_with(answer=answer, refuse=refuse, fail=fail)) as running,
        running.client() as client,
    ):
        answered = client.get("/answer", headers={"X-Asked": "this"})
        assert (answered.status_code, answered.text) == (200, "this")
        assert answered.headers["X-Request-ID"]
        assert problem_of(client.get("/refuse"), 409)["detail"] == "not now"
        problem_of(client.get("/fail"), 500)
        problem_of(client.post("/answer"), 405)
    assert sum("failed" in record.getMessage() for record in caplog.records) == 1


def with_query(_request: Request, limit: int) -> PolledAnswer:
    raise NotImplementedError(limit)


def with_dependency(_request: Request, found: str = Depends(lambda: "found")) -> PolledAnswer:
    raise NotImplementedError(found)


@pytest.mark.parametrize("endpoint", [with_query, with_dependency])
def test_a_polled_route_takes_no_parameters(endpoint: Endpoint) -> None:
    with pytest.raises(TypeError, match="/asked: a polled route takes no parameters"):
        app_with(asked=endpoint)


def test_what_is_polled_is_described(api: httpx.Client, service: Service) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    stats = paths["/admin/v1/stats"]["get"]
    assert stats["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Stats")
    assert stats["tags"] == ["stats"]
    assert stats["description"]
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]
    polled = {route.path for route in service.running.server.config.app.routes if isinstance(route, PolledRoute)}
    assert polled == {"/admin/v1/stats", "/metrics"}
