"""Cursor paging: the query parameters and the shape of every list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from app.api.problems import Problem, invalid_field

T = TypeVar("T")

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100
MAX_CURSOR_CHARS = 8192
_MAX_POSITION = 2**63 - 1
_POSITION = re.compile(r"[0-9]{1,19}", re.ASCII)

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="how many items at most")]
Cursor = Annotated[str | None, Query(max_length=MAX_CURSOR_CHARS, description="`next_cursor` of the page before")]


class PageQuery(BaseModel):
    """Which page of a list that can be filtered. An unknown parameter is refused, since a filter that is misspelled
    would filter nothing."""

    model_config = ConfigDict(extra="forbid")
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor = None


class Page(BaseModel, Generic[T]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None = Field(description="give it as `cursor` to read on; null at the end")


def _refusal() -> Problem:
    return invalid_field("cursor", "is not a cursor of this list: pass next_cursor on as it came, or leave it out")


def parse_position(cursor: str | None) -> int | None:
    """The position that a cursor of a list in memory stands for; 422 for one that we never gave out."""
    if cursor is None:
        return None
    if not _POSITION.fullmatch(cursor) or int(cursor) > _MAX_POSITION:
        raise _refusal()
    return int(cursor)


@contextmanager
def refused_cursor() -> Iterator[None]:
    """Around a call to the store's reader, which raises ValueError for a cursor that it never gave out."""
    try:
        yield
    except ValueError:
        raise _refusal() from None
