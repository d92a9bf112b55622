"""What operators want and did: overrides, rules and audit, written while the caller waits, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, insert, update

from kvferry.app.store.database import Database
from kvferry.app.store.models import AuditRow, OverrideRow, RuleRow
from kvferry.app.store.records import AuditEntry, OverrideRecord, RuleRecord
from kvferry.app.store.text import clean
from kvferry.app.store.upsert import upsert


class Intents:
    """Synchronous writes for threads that may wait. Each is done or not done; `StoreUnavailable` means not done."""

    def __init__(self, database: Database, engine: str) -> None:
        self._database = database
        self._engine = engine

    def save_override(self, request_id: str, policy: Mapping[str, Any], now_s: float, expires_s: float) -> None:
        """Set the policy fields of a request id, in place of what was set for it."""
        self.save_overrides([OverrideRecord(request_id, policy, now_s, expires_s)])

    def save_overrides(self, overrides: Iterable[OverrideRecord]) -> None:
        """Set many overrides, all or none."""
        rows = [self._override_row(override) for override in overrides]
        with self._database.write_for_person() as connection:
            upsert(connection, OverrideRow, rows)

    def delete_override(self, request_id: str, now_s: float) -> bool:
        """Take an override away; False if there was none, or none any more."""
        which = (OverrideRow.engine == self._engine, OverrideRow.request == clean(request_id))
        with self._database.write_for_person() as connection:
            connection.execute(delete(OverrideRow).where(*which, OverrideRow.expires_at <= now_s))
            return connection.execute(delete(OverrideRow).where(*which)).rowcount > 0

    def save_rule(self, rule: RuleRecord) -> None:
        """Add a rule, or put it in place of the one of its name."""
        with self._database.write_for_person() as connection:
            upsert(connection, RuleRow, [self._rule_row(rule)], keep=("created_at",))

    def delete_rule(self, name: str) -> bool:
        """Take a rule away; False if there is none."""
        which = (RuleRow.engine == self._engine, RuleRow.name == clean(name))
        with self._database.write_for_person() as connection:
            return connection.execute(delete(RuleRow).where(*which)).rowcount > 0

    def replace_policies(self, overrides: Iterable[OverrideRecord], rules: Iterable[RuleRecord]) -> None:
        """Have these overrides and rules and no others: what another database said of this engine is not true here."""
        override_rows = [self._override_row(override) for override in overrides]
        rule_rows = [self._rule_row(rule) for rule in rules]
        names = [row["name"] for row in rule_rows]
        with self._database.write_for_person() as connection:
            connection.execute(delete(OverrideRow).where(OverrideRow.engine == self._engine))
            upsert(connection, OverrideRow, override_rows)
            connection.execute(delete(RuleRow).where(RuleRow.engine == self._engine, RuleRow.name.not_in(names)))
            upsert(connection, RuleRow, rule_rows, keep=("created_at",))

    def begin_audit(self, entry: AuditEntry) -> int:
        """Record a call, before or after it was carried out; the number it got."""
        row = {
            "engine": self._engine,
            "time": entry.time_s,
            "token": clean(entry.token),
            "client": clean(entry.client),
            "request_id": clean(entry.request_id),
            "method": clean(entry.method),
            "path": clean(entry.path),
            "what": None if entry.what is None else dict(entry.what),
            "status": entry.status,
            "outcome": clean(entry.outcome),
        }
        with self._database.write_for_person() as connection:
            return connection.execute(insert(AuditRow).returning(AuditRow.id), row).scalar_one()

    def end_audit(self, audit_id: int, status: int, outcome: str | None) -> bool:
        """Say how a recorded call ended; False if it is not there any more."""
        which = (AuditRow.engine == self._engine, AuditRow.id == audit_id)
        changed = {"status": status, "outcome": clean(outcome)}
        with self._database.write_for_person() as connection:
            return connection.execute(update(AuditRow).where(*which).values(changed)).rowcount > 0

    def _override_row(self, override: OverrideRecord) -> dict[str, Any]:
        return {
            "engine": self._engine,
            "request": clean(override.request),
            "policy": dict(override.policy),
            "set_at": override.set_s,
            "expires_at": override.expires_s,
        }

    def _rule_row(self, rule: RuleRecord) -> dict[str, Any]:
        now_s = time.time()
        return {
            "engine": self._engine,
            "name": clean(rule.name),
            "rule_order": rule.order,
            "match": dict(rule.match),
            "policy": dict(rule.policy),
            "created_at": now_s,
            "updated_at": now_s,
        }
