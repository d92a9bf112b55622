"""HEAD wherever GET of a plain document is answered, since load balancers use it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute


def add_heads(router: APIRouter) -> APIRouter:
    """Return a router with a HEAD route for each GET route. The server sends no body for HEAD."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in route.methods:
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                response_model=route.response_model,
                include_in_schema=False,
            )
    return router


def describe_head(get: dict[str, Any]) -> dict[str, Any]:
    """Return the description of HEAD from that of GET."""
    responses = {status: {"description": response["description"]} for status, response in get["responses"].items()}
    operation_id = get["operationId"].removesuffix("_get") + "_head"
    return {**get, "operationId": operation_id, "responses": responses}
