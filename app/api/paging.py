"""Cursor paging: the query parameters and the shape of every list."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100
_CURSOR_TEXT = "`next_cursor` of the page before"
# Every text that matches is a cursor, so that the API's description says exactly which are refused. Floats are the hex
# digits of positive finite numbers.
_TIME_AND_ID = "_x[0-6][0-9a-f]{15}_[0-9]{1,18}$"

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="how many items at most")]
PositionCursor = Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description=_CURSOR_TEXT)]
AuditCursor = Annotated[str | None, Query(pattern="^audit" + _TIME_AND_ID, description=_CURSOR_TEXT)]
EvictionCursor = Annotated[str | None, Query(pattern="^evictions" + _TIME_AND_ID, description=_CURSOR_TEXT)]
RuleCursor = Annotated[
    str | None, Query(pattern="^rules_-?[0-9]{1,18}_[A-Za-z0-9._-]{1,64}$", description=_CURSOR_TEXT)
]


class PageQuery(BaseModel):
    """Which page of a list that can be filtered. An unknown parameter is refused, since a filter that is misspelled
    would filter nothing."""

    model_config = ConfigDict(extra="forbid")
    limit: Limit = DEFAULT_LIMIT


class Page(BaseModel, Generic[T]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None = Field(description="give it as `cursor` to read on; null at the end")
