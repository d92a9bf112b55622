"""Reading the store: pages that stay stable while rows come and go, each on a snapshot of its own.

A page starts behind the sort values of the last item shown, never at an offset, so that rows that come or go meanwhile
neither repeat an item nor hide one. Every list is read in the order of an index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Row, Select, select, tuple_

from kvferry.app.store.cursors import MAX_LIMIT, Page, check_limit, decode_cursor, encode_cursor
from kvferry.app.store.database import Database
from kvferry.app.store.models import AuditRow, EvictionRow, OverrideRow, RuleRow, SlotRow
from kvferry.app.store.records import (
    AuditEntry,
    AuditRecord,
    EvictionFilter,
    EvictionRecord,
    EvictionSummary,
    OverrideRecord,
    RuleRecord,
    SlotRecord,
)
from kvferry.app.store.sums import summarize, window
from kvferry.app.store.text import clean

T = TypeVar("T")


def evictions_statement(engine: str, wanted: EvictionFilter, cursor: str | None, limit: int) -> Select[Any]:
    """Evictions, newest first, one more than `limit`, so that a full page knows whether it is the last."""
    statement = select(EvictionRow).where(*_conditions(engine, wanted))
    if cursor is not None:
        statement = statement.where(tuple_(EvictionRow.time, EvictionRow.id) < _position("evictions", cursor))
    return statement.order_by(EvictionRow.time.desc(), EvictionRow.id.desc()).limit(check_limit(limit) + 1)


def audit_statement(engine: str, cursor: str | None, limit: int) -> Select[Any]:
    """Audited calls, newest first, one more than `limit`."""
    statement = select(AuditRow).where(AuditRow.engine == engine)
    if cursor is not None:
        statement = statement.where(tuple_(AuditRow.time, AuditRow.id) < _position("audit", cursor))
    return statement.order_by(AuditRow.time.desc(), AuditRow.id.desc()).limit(check_limit(limit) + 1)


def overrides_statement(engine: str, now_s: float, cursor: str | None, limit: int) -> Select[Any]:
    """Overrides that hold at `now_s`, by request id, one more than `limit`."""
    statement = select(OverrideRow).where(OverrideRow.engine == engine, OverrideRow.expires_at > now_s)
    if cursor is not None:
        (after,) = decode_cursor("overrides", [str], cursor)
        statement = statement.where(OverrideRow.request > after)
    return statement.order_by(OverrideRow.request).limit(check_limit(limit) + 1)


def rules_statement(engine: str, cursor: str | None, limit: int) -> Select[Any]:
    """Rules in the order in which they are tried, one more than `limit`."""
    statement = select(RuleRow).where(RuleRow.engine == engine)
    if cursor is not None:
        order, name = decode_cursor("rules", [int, str], cursor)
        statement = statement.where(tuple_(RuleRow.rule_order, RuleRow.name) > tuple_(order, name))
    return statement.order_by(RuleRow.rule_order, RuleRow.name).limit(check_limit(limit) + 1)


def slots_statement(engine: str, first_slot: int, limit: int) -> Select[Any]:
    """Slots by number, from `first_slot` on."""
    mine = (SlotRow.engine == engine, SlotRow.slot >= first_slot)
    return select(SlotRow).where(*mine).order_by(SlotRow.slot).limit(limit)


class StoreReader:
    """What the admin API reads, of one engine.

    Every call may raise `StoreUnavailable`; a bad cursor or limit is a `ValueError`.
    """

    def __init__(self, database: Database, engine: str) -> None:
        self._database = database
        self._engine = engine

    def evictions(
        self, wanted: EvictionFilter | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[EvictionRecord]:
        """Evictions, newest first."""
        rows = self._rows(evictions_statement(self._engine, wanted or EvictionFilter(), cursor, limit))
        items = [_eviction(row) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(items, encode_cursor("evictions", [items[-1].time_s, items[-1].id]) if more else None)

    def eviction_summary(self, since_s: float | None = None, until_s: float | None = None) -> EvictionSummary:
        """Counts by reason, ages at eviction and the rate of regrets, within a window."""
        with self._database.read() as connection:
            return summarize(connection, self._engine, since_s, until_s)

    def audit(self, cursor: str | None = None, limit: int = 100) -> Page[AuditRecord]:
        """Calls that changed something, newest first."""
        rows = self._rows(audit_statement(self._engine, cursor, limit))
        items = [_audit(row) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(items, encode_cursor("audit", [items[-1].entry.time_s, items[-1].id]) if more else None)

    def overrides(self, now_s: float, cursor: str | None = None, limit: int = 100) -> Page[OverrideRecord]:
        """Overrides that hold at `now_s`, by request id."""
        rows = self._rows(overrides_statement(self._engine, now_s, cursor, limit))
        items = [_override(row) for row in rows[:limit]]
        return Page(items, encode_cursor("overrides", [items[-1].request]) if len(rows) > limit else None)

    def load_overrides(self, now_s: float) -> list[OverrideRecord]:
        """All overrides that hold at `now_s`, for the start of an engine."""
        return _every(lambda cursor: self.overrides(now_s, cursor, MAX_LIMIT))

    def find_override(self, request_id: str, now_s: float) -> OverrideRecord | None:
        """The override of exactly this request id that holds at `now_s`."""
        which = (OverrideRow.engine == self._engine, OverrideRow.request == clean(request_id))
        rows = self._rows(select(OverrideRow).where(*which, OverrideRow.expires_at > now_s))
        return _override(rows[0]) if rows else None

    def rules(self, cursor: str | None = None, limit: int = 100) -> Page[RuleRecord]:
        """Rules in the order in which they are tried."""
        rows = self._rows(rules_statement(self._engine, cursor, limit))
        items = [_rule(row) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(items, encode_cursor("rules", [items[-1].order, items[-1].name]) if more else None)

    def load_rules(self) -> list[RuleRecord]:
        """All rules, for the start of an engine."""
        return _every(lambda cursor: self.rules(cursor, MAX_LIMIT))

    def slots(self, first_slot: int = 0, limit: int = 1000) -> list[SlotRecord]:
        """Rows of slots by number, from `first_slot` on: what a restart reads back."""
        return [_slot(row) for row in self._rows(slots_statement(self._engine, first_slot, check_limit(limit)))]

    def find_slot(self, key: str) -> SlotRecord | None:
        """The slot that holds a key, given as hex; the newest, while the projection is catching up."""
        which = (SlotRow.engine == self._engine, SlotRow.key == clean(key))
        rows = self._rows(select(SlotRow).where(*which).order_by(SlotRow.stored_at.desc()).limit(1))
        return _slot(rows[0]) if rows else None

    def _rows(self, statement: Select[Any]) -> list[Row[Any]]:
        with self._database.read() as connection:
            return list(connection.execute(statement).all())


def _every(read: Callable[[str | None], Page[T]]) -> list[T]:
    """The items of all pages."""
    page = read(None)
    items = list(page.items)
    while page.next_cursor is not None:
        page = read(page.next_cursor)
        items += page.items
    return items


def _position(kind: str, cursor: str) -> Any:
    time_s, number = decode_cursor(kind, [float, int], cursor)
    return tuple_(time_s, number)


def _conditions(engine: str, wanted: EvictionFilter) -> list[ColumnElement[bool]]:
    conditions = [EvictionRow.engine == engine, *window(EvictionRow.time, wanted.since_s, wanted.until_s)]
    for column, value in (
        (EvictionRow.reason, wanted.reason),
        (EvictionRow.request, wanted.request),
        (EvictionRow.tenant, wanted.tenant),
    ):
        if value is not None:
            conditions.append(column == clean(value))
    return conditions


def _eviction(row: Row[Any]) -> EvictionRecord:
    return EvictionRecord(
        id=row.id,
        time_s=row.time,
        key=row.key,
        group=row.group_index,
        reason=row.reason,
        policy=row.policy,
        age_s=row.age_s,
        idle_s=row.idle_s,
        hits=row.hits,
        position=row.position,
        size_bytes=row.size_bytes,
        request=row.request,
        tenant=row.tenant,
        needed_by=row.needed_by,
        regretted_at_s=row.regretted_at,
    )


def _audit(row: Row[Any]) -> AuditRecord:
    entry = AuditEntry(
        time_s=row.time,
        token=row.token,
        client=row.client,
        request_id=row.request_id,
        method=row.method,
        path=row.path,
        what=row.what if isinstance(row.what, dict) else None,
        status=row.status,
        outcome=row.outcome,
    )
    return AuditRecord(row.id, entry)


def _slot(row: Row[Any]) -> SlotRecord:
    return SlotRecord(
        slot=row.slot,
        key=row.key,
        group=row.group_index,
        generation=row.generation,
        epoch=row.epoch,
        size_bytes=row.size_bytes,
        position=row.position,
        request=row.request,
        tenant=row.tenant,
        lora=row.lora,
        stored_s=row.stored_at,
        last_hit_s=row.last_hit_at,
        hits=row.hits,
    )


def _override(row: Row[Any]) -> OverrideRecord:
    return OverrideRecord(row.request, row.policy, row.set_at, row.expires_at)


def _rule(row: Row[Any]) -> RuleRecord:
    return RuleRecord(row.name, row.rule_order, row.match, row.policy)
