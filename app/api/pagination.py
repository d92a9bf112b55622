"""Query parameters of cursor-paged lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query, Response
from pydantic import BaseModel
from pydantic_core import to_json

from kvferry.app.store import JsonPage

T = TypeVar("T")

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
_CURSOR_TEXT = "`next_cursor` of the page before"
# Exactly the texts that are cursors, so that the API's description says which are refused. Floats are the hex digits of
# positive finite numbers.
_TIME_AND_ID = "_x[0-6][0-9a-f]{15}_[0-9]{1,18}$"

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="maximum number of items")]
PositionCursor = Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description=_CURSOR_TEXT)]
AuditCursor = Annotated[str | None, Query(pattern="^audit" + _TIME_AND_ID, description=_CURSOR_TEXT)]
EvictionCursor = Annotated[str | None, Query(pattern="^evictions" + _TIME_AND_ID, description=_CURSOR_TEXT)]
RuleCursor = Annotated[
    str | None, Query(pattern="^rules_-?[0-9]{1,18}_[A-Za-z0-9._-]{1,64}$", description=_CURSOR_TEXT)
]


class PageQuery(BaseModel):
    """Page of a list with filters."""

    limit: Limit = DEFAULT_LIMIT


def cut_page(items: Sequence[T], limit: int, cursor: str | None) -> tuple[Sequence[T], str | None]:
    """Return a page of a short list, and the cursor of the next page: the position that it begins at."""
    begin = int(cursor or 0)
    end = begin + limit
    return items[begin:end], str(end) if end < len(items) else None


def page_response(items: Sequence[Any], next_cursor: str | None) -> Response:
    """Return a page as JSON. Items are in their final form: validating 1,000 as models takes several times as long."""
    return Response(to_json({"items": items, "next_cursor": next_cursor}), media_type="application/json")


def json_page_response(page: JsonPage, more: Mapping[str, object] | None = None) -> Response:
    """Return a page that the database wrote, with `more` fields."""
    others = json.dumps({"next_cursor": page.next_cursor} | dict(more or {}))
    content = f'{{"items":{page.items},{others[1:]}'
    return Response(content, media_type="application/json")
