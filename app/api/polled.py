"""Calls that are made again and again: described like any other, and answered without what others need.

What FastAPI does for each call (stacks for dependencies and files, the solving of parameters, models) costs a call
without any of them about as much as its answer, and that is time of the interpreter that an engine in this process
wants too. A caller who sends the same bytes again on the same connection costs still less: see `app.api.repeats`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.repeats import BODY_NOW


class PolledAnswer(Response):
    """An answer with 200, whose body can be made anew whenever the same call comes again."""

    def __init__(self, make_body: Callable[[], bytes], content_type: str) -> None:
        """`make_body` gives the bytes of the moment."""
        super().__init__(make_body(), headers={"Content-Type": content_type})
        self.make_body = make_body


class PolledRoute(APIRoute):
    """A route whose endpoint takes the request or nothing, and returns a `PolledAnswer` without waiting for anything.

    Give it to a router as `add_api_route(..., route_class_override=PolledRoute)`.
    """

    def __init__(self, path: str, endpoint: Callable[..., PolledAnswer], **options: Any) -> None:
        """Raises `TypeError` for an endpoint that takes more."""
        super().__init__(path, endpoint, **options)
        asked = self.dependant
        if asked.path_params or asked.query_params or asked.header_params or asked.body_params or asked.dependencies:
            raise TypeError(f"{path}: a polled route takes no parameters and has no dependencies")

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = endpoint(*([Request(scope, receive, send)] if asked.request_param_name else []))
            scope["state"][BODY_NOW] = response.make_body
            await response(scope, receive, send)

        self.app = answer


def polled_first(app: FastAPI) -> None:
    """Have an app's polled routes tried before all others, since each that is tried takes its time."""
    app.router.routes.sort(key=lambda route: not isinstance(route, PolledRoute))
