"""Routes that are asked again and again: described like any other, and answered without what FastAPI does for others.

What it does for each call (stacks for dependencies and files, the solving of parameters, models) costs a call without
any of them about as much as its answer, and that is time of the interpreter that an engine in this process wants too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class PolledRoute(APIRoute):
    """A route whose endpoint is an `async` function that takes the request or nothing, and returns a `Response`.

    Give it to a router as `add_api_route(..., route_class_override=PolledRoute)`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Raises `TypeError` for an endpoint that takes more."""
        super().__init__(path, endpoint, **options)
        asked = self.dependant
        if asked.path_params or asked.query_params or asked.header_params or asked.body_params or asked.dependencies:
            raise TypeError(f"{path}: a polled route takes no parameters and has no dependencies")

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(*([Request(scope, receive, send)] if asked.request_param_name else []))
            await response(scope, receive, send)

        self.app = answer


def polled_first(app: FastAPI) -> None:
    """Have an app's polled routes tried before all others, since each that is tried takes its time."""
    app.router.routes.sort(key=lambda route: not isinstance(route, PolledRoute))
