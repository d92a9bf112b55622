"""Routers of the admin API: their calls take the query parameters that they describe and no others, each once unless it
is a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args, get_origin

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from kvferry.app.api.errors import invalid_fields
from kvferry.app.call_errors import FieldError

ADMIN_PREFIX = "/admin/v1"
MAX_ERRORS = 10
MAX_NAME_CHARS = 100


def admin_router(prefix: str = "", tags: list[str | Enum] | None = None) -> APIRouter:
    """Return a router for paths of the admin API.

    Prefix and dependency stand here since `include_router` makes each route anew, which takes as long as all else of a
    service's start.
    """
    return APIRouter(prefix=ADMIN_PREFIX + prefix, tags=tags, dependencies=[Depends(check_query)])


async def check_query(request: Request) -> None:
    """Refuse parameters that a route does not have, since a misspelled one would do nothing. Raises `Problem`."""
    sent = Counter(name for name, _ in request.query_params.multi_items())
    if not sent:
        return
    known = dict(_parameters(request.scope["route"]))
    names = f"this call has {', '.join(sorted(known))}" if known else "this call has none"
    errors = [
        FieldError(
            field=name[:MAX_NAME_CHARS],
            message="must not be repeated" if name in known else f"there is no such query parameter; {names}",
        )
        for name, count in sent.items()
        if name not in known or (count > 1 and not known[name])
    ]
    if errors:
        raise invalid_fields(errors[:MAX_ERRORS])


def _parameters(route: Any) -> Iterator[tuple[str, bool]]:
    """Yield the name of each query parameter of a route, and whether it may be repeated."""
    for parameter in _query_fields(route.dependant):
        annotation = parameter.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from ((field.alias or name, False) for name, field in annotation.model_fields.items())
        else:
            yield parameter.alias, any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


def _query_fields(dependant: Any) -> Iterator[Any]:
    """Yield the fields of a route and of what it depends on; FastAPI's own function for that is not in all releases."""
    yield from dependant.query_params
    for one in dependant.dependencies:
        yield from _query_fields(one)
