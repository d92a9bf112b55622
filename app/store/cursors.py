"""Cursors: where a page ended, as an opaque url-safe string, and the pages they belong to."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_LIMIT = 1000
_MAX_CURSOR_CHARS = 8192
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list; `next_cursor` is None on the last page."""

    items: list[T]
    next_cursor: str | None


def encode_cursor(kind: str, position: Sequence[float | int | str]) -> str:
    """A cursor of one kind of list: the sort values of the last item shown."""
    return base64.urlsafe_b64encode(json.dumps([kind, *position]).encode()).decode().rstrip("=")


def decode_cursor(kind: str, types: Sequence[type], cursor: str) -> list[float | int | str]:
    """The sort values in a cursor; `ValueError` for what `encode_cursor` did not make for this kind of list."""
    bad = ValueError("cursor is not one of this list; pass next_cursor on as it came, or leave it out")
    if len(cursor) > _MAX_CURSOR_CHARS:
        raise bad
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise bad from None
    if not isinstance(found, list) or len(found) != len(types) + 1 or found[0] != kind:
        raise bad
    values: list[float | int | str] = found[1:]
    if not all(_is(value, wanted) for value, wanted in zip(values, types, strict=True)):
        raise bad
    return values


def _is(value: object, wanted: type) -> bool:
    if type(value) is not wanted:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\0" not in value and value.encode("utf-8", "replace") == value.encode("utf-8", "surrogatepass")
    return not isinstance(value, int) or -_INT64 <= value < _INT64


def check_limit(limit: int) -> int:
    """The page size itself, or `ValueError`."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit is {limit}; it must be from 1 to {MAX_LIMIT}")
    return limit
