"""Reads for the admin API: pages that stay stable while rows come and go, each on a snapshot of its own.

A page starts after the sort values of the last item shown, never at an offset, so that rows that come or go neither
repeat an item nor hide one. Every list is read in the order of an index.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Row,
    Select,
    Table,
    Text,
    func,
    literal_column,
    select,
    tuple_,
)

from kvferry.app.store.database import Database, clean
from kvferry.app.store.history import EvictionSummary, in_window, summarize
from kvferry.app.store.intents import StoredReset
from kvferry.app.store.schema import (
    AUDIT,
    EVICTIONS,
    OVERRIDES,
    RULES,
    STATS_ROWS,
    TENANT_LIMITS,
    TIER_RESETS,
)
from kvferry.app.telemetry.history import Row as StatsRow

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CHANGE_NOTHING = ("%?dry_run=true", "%/prefetch")
"""Paths of recorded calls that change nothing of what the service decides."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class JsonPage:
    """A page whose items are one JSON array, as the database wrote it."""

    items: str
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


def evictions_statement(engine: str, wanted: EvictionFilter, cursor: str | None) -> Select[Any]:
    """Select the evictions of a list after a cursor, newest first."""
    conditions = [EVICTIONS.c.engine == engine, *in_window(EVICTIONS.c.time, wanted.since_s, wanted.until_s)]
    for column, value in (
        (EVICTIONS.c.reason, wanted.reason),
        (EVICTIONS.c.request, wanted.request),
        (EVICTIONS.c.tenant, wanted.tenant),
    ):
        if value is not None:
            # An expression, so that its index is not chosen instead of the request's, which has fewer rows.
            is_rest = wanted.request is not None and column is not EVICTIONS.c.request
            conditions.append((column + "" if is_rest else column) == clean(value))
    return _newest_first(EVICTIONS, conditions, cursor)


def audit_statement(engine: str, cursor: str | None) -> Select[Any]:
    """Select the recorded calls after a cursor, newest first."""
    return _newest_first(AUDIT, [AUDIT.c.engine == engine], cursor)


def _newest_first(table: Table, conditions: list[ColumnElement[bool]], cursor: str | None = None) -> Select[Any]:
    statement = select(table).where(*conditions)
    if cursor is not None:
        statement = statement.where(tuple_(table.c.time, table.c.id) < tuple_(*_decode_cursor(cursor)))
    return statement.order_by(table.c.time.desc(), table.c.id.desc())


_FIELDS = {"engine": (), "key": ("hash", "key"), "group_index": ("group",), "size_bytes": ("size",)}
"""Fields of the lists' items for columns whose name is not that of their field."""
_TIMES = ("time", "regretted_at")


# Once a kind of database, since building it takes longer than reading a page.
@lru_cache
def _json_item(table: Table, is_sqlite: bool) -> ColumnElement[str]:
    """Return SQL for a row of a table as the text of its item in a list."""
    build = "json_object" if is_sqlite else "json_build_object"
    fields = (
        f"'{field}', {_json_value(column, is_sqlite)}"
        for column in table.columns
        for field in _FIELDS.get(column.name, (column.name,))
    )
    return literal_column(f"CAST({build}({', '.join(fields)}) AS TEXT)", Text)


def _json_value(column: Column[Any], is_sqlite: bool) -> str:
    """Return SQL for the JSON value of a column."""
    name = f"{column.table.name}.{column.name}"
    if column.name in _TIMES:
        if is_sqlite:
            # Cut to milliseconds, not rounded: `since` with the time of an item has to find it.
            ms = f"CAST(round({name} * 1e6) AS INTEGER) / 1000"
            return f"strftime('%Y-%m-%dT%H:%M:%fZ', {ms} / 1000.0, 'unixepoch')"
        return f"to_char(to_timestamp({name}) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')"
    if is_sqlite and isinstance(column.type, JSON):
        return f"CASE WHEN json_valid({name}) THEN json({name}) END"
    return name


class StoreReader:
    """Reads of one engine's rows. Every call may raise `DatabaseUnavailable`.

    Callers validate limits and cursors by the types of `kvferry.app.api.pagination`.
    """

    def __init__(self, database: Database, engine: str) -> None:
        self._database = database
        self._engine = engine

    def evictions(self, wanted: EvictionFilter | None = None, cursor: str | None = None, limit: int = 100) -> JsonPage:
        """Return a page of the table `evictions`, newest first."""
        return self._page(EVICTIONS, evictions_statement(self._engine, wanted or EvictionFilter(), cursor), limit)

    def eviction_summary(self, since_s: float | None = None, until_s: float | None = None) -> EvictionSummary:
        """Return counts by reason, ages at eviction and the rate of regrets, within a window."""
        with self._database.read() as connection:
            return summarize(connection, self._engine, since_s, until_s)

    def audit(self, cursor: str | None = None, limit: int = 100) -> JsonPage:
        """Return a page of the table `audit`, newest first."""
        return self._page(AUDIT, audit_statement(self._engine, cursor), limit)

    def stats_rows(self, since_s: float, until_s: float, limit: int) -> list[StatsRow]:
        """Return the latest `limit` rows of stats after `since_s` and up to `until_s`, oldest first."""
        which = [STATS_ROWS.c.engine == self._engine, STATS_ROWS.c.time > since_s, STATS_ROWS.c.time <= until_s]
        found, num_skipped, why = list[StatsRow](), 0, ""
        for row in self._rows(_newest_first(STATS_ROWS, which).limit(limit)):
            try:
                found.append(StatsRow.of_json(row.time, row.started_at, row.counts))
            except ValueError as error:
                num_skipped, why = num_skipped + 1, str(error)
        if num_skipped:
            _log.warning("database: rows of stats left out, which cannot be read: %d: %s", num_skipped, why)
        return found[::-1]

    def changes(self, since_s: float, until_s: float, limit: int) -> list[Row[Any]]:
        """Return the latest `limit` recorded calls that changed something in a window, oldest first."""
        which = [AUDIT.c.engine == self._engine, *in_window(AUDIT.c.time, since_s, until_s)]
        which += [AUDIT.c.outcome == "applied", *(AUDIT.c.path.not_like(path) for path in _CHANGE_NOTHING)]
        return self._rows(_newest_first(AUDIT, which).limit(limit))[::-1]

    def load_overrides(self, now_s: float) -> list[Row[Any]]:
        """Return the rows of all overrides that hold at `now_s`, by request id."""
        statement = select(OVERRIDES).where(OVERRIDES.c.engine == self._engine, OVERRIDES.c.expires_at > now_s)
        return self._rows(statement.order_by(OVERRIDES.c.request))

    def load_rules(self) -> list[dict[str, Any]]:
        """Return the JSON values of all rules, in the order in which they are tried."""
        statement = select(RULES).where(RULES.c.engine == self._engine)
        rows = self._rows(statement.order_by(RULES.c.rule_order, RULES.c.name))
        return [{"name": row.name, "order": row.rule_order, "match": row.match, "policy": row.policy} for row in rows]

    def load_tenant_limits(self) -> dict[str, Any]:
        """Return the bytes that tenants may have in the pool, None for no limit, by tenant."""
        statement = select(TENANT_LIMITS).where(TENANT_LIMITS.c.engine == self._engine)
        rows = self._rows(statement.order_by(TENANT_LIMITS.c.set_at.desc(), TENANT_LIMITS.c.tenant))
        return {row.tenant: row.max_bytes for row in rows}

    def load_tier_resets(self) -> list[tuple[int, StoredReset]]:
        """Return id and content of the resets that tiers have not completed, the oldest first."""
        statement = select(TIER_RESETS).where(TIER_RESETS.c.engine == self._engine).order_by(TIER_RESETS.c.id)
        return [(row.id, StoredReset(row.tier, row.match, row.key)) for row in self._rows(statement)]

    def _page(self, table: Table, statement: Select[Any], limit: int) -> JsonPage:
        """Return the first `limit` rows of a statement for rows of a table, newest first.

        The database writes the JSON: SQLite's driver releases the GIL at every row, and each time it may be the turn
        of a busy engine thread.
        """
        with self._database.read() as connection:
            item = _json_item(table, connection.dialect.name == "sqlite")
            page = statement.with_only_columns(item.label("item")).limit(limit).subquery()
            items = connection.scalar(select(func.aggregate_strings(page.c.item, ",")))
            # The page's last row, and the next one if there is any.
            rest = statement.with_only_columns(table.c.time, table.c.id).offset(limit - 1).limit(2)
            last = connection.execute(rest).all()
        cursor = _encode_cursor(table.name, last[0].time, last[0].id) if len(last) == 2 else None
        return JsonPage(f"[{items or ''}]", cursor)

    def _rows(self, statement: Select[Any]) -> list[Row[Any]]:
        with self._database.read() as connection:
            return list(connection.execute(statement).all())
