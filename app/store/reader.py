"""Reads for the admin API: pages that stay stable while rows come and go, each on a snapshot of its own.

A page starts after the sort values of the last item shown, never at an offset, so that rows that come or go neither
repeat an item nor hide one. Every list is read in the order of an index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Row, Select, Table, select, tuple_

from kvferry.app.store.database import Database
from kvferry.app.store.history import EvictionSummary, in_window, summarize
from kvferry.app.store.schema import AUDIT, EVICTIONS, OVERRIDES, RULES, clean

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None


def _encode_cursor(kind: str, time_s: float, number: int) -> str:
    """Return the cursor behind an item; `kvferry.app.api.pagination` has the pattern of such texts."""
    return f"{kind}_x{struct.pack('>d', time_s).hex()}_{number}"


def _decode_cursor(cursor: str) -> tuple[float, int]:
    _, time, number = cursor.split("_")
    (time_s,) = struct.unpack(">d", bytes.fromhex(time.removeprefix("x")))
    return time_s, int(number)


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
    return _newest_first(EVICTIONS, conditions, cursor, limit)


def audit_statement(engine: str, cursor: str | None, limit: int) -> Select[Any]:
    """Select `limit + 1` recorded calls, newest first."""
    return _newest_first(AUDIT, [AUDIT.c.engine == engine], cursor, limit)


def _newest_first(table: Table, conditions: list[ColumnElement[bool]], cursor: str | None, limit: int) -> Select[Any]:
    statement = select(table).where(*conditions)
    if cursor is not None:
        statement = statement.where(tuple_(table.c.time, table.c.id) < tuple_(*_decode_cursor(cursor)))
    return statement.order_by(table.c.time.desc(), table.c.id.desc()).limit(limit + 1)


class StoreReader:
    """Reads of one engine's rows. Every call may raise `StoreUnavailable`.

    Callers validate limits and cursors by the types of `kvferry.app.api.pagination`.
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
    return _encode_cursor(kind, rows[limit - 1].time, rows[limit - 1].id) if len(rows) > limit else None
