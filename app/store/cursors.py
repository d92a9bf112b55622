"""Cursors: where a page ended, as an opaque url-safe string, and the pages they belong to."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_LIMIT = 1000
_MAX_CURSOR_CHARS = 8192
_INT64 = 2**63
_SEPARATOR = "_"
_FLOAT = re.compile(r"x[0-9a-f]{16}", re.ASCII)
_INT = re.compile(r"-?[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list; `next_cursor` is None on the last page."""

    items: list[T]
    next_cursor: str | None


def encode_cursor(kind: str, position: Sequence[float | int | str]) -> str:
    """Return a cursor of one kind of list: the sort values of the last item shown, a text only as the last value."""
    return _SEPARATOR.join([kind, *map(_encode, position)])


def decode_cursor(kind: str, types: Sequence[type], cursor: str) -> list[float | int | str]:
    """Return the sort values in a cursor. Raises `ValueError` if `encode_cursor` did not make it for this list."""
    found, *parts = cursor.split(_SEPARATOR, len(types))
    values = [_decode(part, wanted) for part, wanted in zip(parts, types, strict=False)]
    if found != kind or len(parts) != len(types) or len(cursor) > _MAX_CURSOR_CHARS or None in values:
        raise ValueError("cursor is not one of this list; pass next_cursor on as it came, or leave it out")
    return [value for value in values if value is not None]


def _encode(value: float | int | str) -> str:
    return "x" + struct.pack(">d", value).hex() if isinstance(value, float) else str(value)


def _decode(part: str, wanted: type) -> float | int | str | None:
    if wanted is float and _FLOAT.fullmatch(part):
        (number,) = struct.unpack(">d", bytes.fromhex(part[1:]))
        return float(number) if math.isfinite(number) else None
    if wanted is int and _INT.fullmatch(part):
        return int(part) if -_INT64 <= int(part) < _INT64 else None
    if wanted is str and "\0" not in part and not any("\ud800" <= char <= "\udfff" for char in part):
        return part
    return None


def check_limit(limit: int) -> int:
    """The page size itself, or `ValueError`."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit is {limit}; it must be from 1 to {MAX_LIMIT}")
    return limit
