"""Reads for the admin API: pages that stay stable while rows come and go, each on a snapshot of its own.

A page starts after the sort values of the last item shown, never at an offset, so that rows that come or go neither
repeat an item nor hide one. Every list is read in the order of an index.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Row, Select, Table, select, tuple_

from kvferry.app.store.database import Database
from kvferry.app.store.history import EvictionSummary, in_window, summarize
from kvferry.app.store.schema import AUDIT, EVICTIONS, OVERRIDES, RULES, clean

T = TypeVar("T")

MAX_LIMIT = 1000
_MAX_CURSOR_CHARS = 8192
_INT64 = 2**63
_SEPARATOR = "_"
_FLOAT = re.compile(r"x[0-9a-f]{16}", re.ASCII)
_INT = re.compile(r"-?[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None


def encode_cursor(kind: str, position: Sequence[float | int | str]) -> str:
    """Return the cursor of a list: the sort values of the last item shown, a text only as the last value."""
    return _SEPARATOR.join([kind, *map(_encode, position)])


def decode_cursor(kind: str, types: Sequence[type], cursor: str) -> list[float | int | str]:
    """Return the sort values in a cursor. Raises `ValueError` for one that `encode_cursor` did not make."""
    found, *parts = cursor.split(_SEPARATOR, len(types))
    values = [_decode(part, type_) for part, type_ in zip(parts, types, strict=False)]
    if found != kind or len(parts) != len(types) or len(cursor) > _MAX_CURSOR_CHARS or None in values:
        raise ValueError("cursor: not one of this list; pass next_cursor unchanged, or leave it out")
    return [value for value in values if value is not None]


def _encode(value: float | int | str) -> str:
    return "x" + struct.pack(">d", value).hex() if isinstance(value, float) else str(value)


def _decode(part: str, type_: type) -> float | int | str | None:
    if type_ is float and _FLOAT.fullmatch(part):
        (number,) = struct.unpack(">d", bytes.fromhex(part[1:]))
        return float(number) if math.isfinite(number) else None
    if type_ is int and _INT.fullmatch(part):
        return int(part) if -_INT64 <= int(part) < _INT64 else None
    if type_ is str and "\0" not in part and not any("\ud800" <= char <= "\udfff" for char in part):
        return part
    return None


@dataclass(frozen=True, slots=True)
class EvictionFilter:
    """Conditions on evictions, all of which must hold; `since_s` is inclusive, `until_s` exclusive."""

    since_s: float | None = None
    until_s: float | None = None
    reason: str | None = None
    request: str | None = None
    tenant: str | None = None


def evictions_statement(engine: str, wanted: EvictionFilter, cursor: str | None, limit: int) -> Select[Any]:
    """Select `limit + 1` evictions, newest first, so that a full page knows whether it is the last."""
    conditions = [EVICTIONS.c.engine == engine, *in_window(EVICTIONS.c.time, wanted.since_s, wanted.until_s)]
    for column, value in (
        (EVICTIONS.c.reason, wanted.reason),
        (EVICTIONS.c.request, wanted.request),
        (EVICTIONS.c.tenant, wanted.tenant),
    ):
        if value is not None:
            conditions.append(column == clean(value))
    return _newest_first(EVICTIONS, conditions, "evictions", cursor, limit)


def audit_statement(engine: str, cursor: str | None, limit: int) -> Select[Any]:
    """Select `limit + 1` recorded calls, newest first."""
    return _newest_first(AUDIT, [AUDIT.c.engine == engine], "audit", cursor, limit)


def _newest_first(
    table: Table,
    conditions: list[ColumnElement[bool]],
    kind: str,
    cursor: str | None,
    limit: int,
) -> Select[Any]:
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit={limit}: must be from 1 to {MAX_LIMIT}")
    statement = select(table).where(*conditions)
    if cursor is not None:
        time_s, number = decode_cursor(kind, [float, int], cursor)
        statement = statement.where(tuple_(table.c.time, table.c.id) < tuple_(time_s, number))
    return statement.order_by(table.c.time.desc(), table.c.id.desc()).limit(limit + 1)


class StoreReader:
    """Reads of one engine's rows.

    Every call may raise `StoreUnavailable`; a bad cursor or limit is a `ValueError`.
    """

    def __init__(self, database: Database, engine: str) -> None:
        self._database = database
        self._engine = engine

    def evictions(
        self, wanted: EvictionFilter | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[Row[Any]]:
        """Return a page of rows of the table `evictions`, newest first."""
        rows = self._rows(evictions_statement(self._engine, wanted or EvictionFilter(), cursor, limit))
        return Page(rows[:limit], _next_cursor("evictions", rows, limit))

    def eviction_summary(self, since_s: float | None = None, until_s: float | None = None) -> EvictionSummary:
        """Return counts by reason, ages at eviction and the rate of regrets, within a window."""
        with self._database.read() as connection:
            return summarize(connection, self._engine, since_s, until_s)

    def audit(self, cursor: str | None = None, limit: int = 100) -> Page[Row[Any]]:
        """Return a page of rows of the table `audit`, newest first."""
        rows = self._rows(audit_statement(self._engine, cursor, limit))
        return Page(rows[:limit], _next_cursor("audit", rows, limit))

    def load_overrides(self, now_s: float) -> list[Row[Any]]:
        """Return the rows of all overrides that hold at `now_s`, by request id."""
        statement = select(OVERRIDES).where(OVERRIDES.c.engine == self._engine, OVERRIDES.c.expires_at > now_s)
        return self._rows(statement.order_by(OVERRIDES.c.request))

    def load_rules(self) -> list[dict[str, Any]]:
        """Return the JSON values of all rules, in the order in which they are tried."""
        statement = select(RULES).where(RULES.c.engine == self._engine)
        rows = self._rows(statement.order_by(RULES.c.rule_order, RULES.c.name))
        return [{"name": row.name, "order": row.rule_order, "match": row.match, "policy": row.policy} for row in rows]

    def _rows(self, statement: Select[Any]) -> list[Row[Any]]:
        with self._database.read() as connection:
            return list(connection.execute(statement).all())


def _next_cursor(kind: str, rows: list[Row[Any]], limit: int) -> str | None:
    return encode_cursor(kind, [rows[limit - 1].time, rows[limit - 1].id]) if len(rows) > limit else None
