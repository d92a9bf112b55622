"""Overrides, rules and audit records: written while the caller waits, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, update

from kvferry.app.store.database import Database
from kvferry.app.store.schema import AuditRow, OverrideRow, RuleRow, clean, upsert


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A mutating call. `token` is the token's name, `what` the body with secrets masked.

    The fields are the table's columns in their order, without id and engine.
    """

    time_s: float
    token: str
    client: str
    request_id: str
    method: str
    path: str
    what: Mapping[str, Any] | None = None
    status: int | None = None
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class OverrideRecord:
    """Policy fields of one request id until `expires_s`, as JSON values."""

    request: str
    policy: Mapping[str, Any]
    set_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """A named policy rule, with its conditions and policy fields as JSON values."""

    name: str
    order: int
    match: Mapping[str, Any]
    policy: Mapping[str, Any]


class Intents:
    """Synchronous writes, for threads that may wait. `StoreUnavailable` means that nothing was written."""

    def __init__(self, database: Database, engine: str) -> None:
        self._database = database
        self._engine = engine

    def save_override(self, request_id: str, policy: Mapping[str, Any], now_s: float, expires_s: float) -> None:
        """Set the policy fields of a request id, replacing earlier ones."""
        row = {
            "engine": self._engine,
            "request": clean(request_id),
            "policy": dict(policy),
            "set_at": now_s,
            "expires_at": expires_s,
        }
        with self._database.write_for_caller() as connection:
            upsert(connection, OverrideRow, [row])

    def delete_override(self, request_id: str, now_s: float) -> bool:
        """Delete an override; return False without one that holds at `now_s`."""
        which = (OverrideRow.engine == self._engine, OverrideRow.request == clean(request_id))
        with self._database.write_for_caller() as connection:
            connection.execute(delete(OverrideRow).where(*which, OverrideRow.expires_at <= now_s))
            return connection.execute(delete(OverrideRow).where(*which)).rowcount > 0

    def save_rule(self, rule: RuleRecord) -> None:
        """Add a rule, or replace the one of the same name."""
        now_s = time.time()
        row = {
            "engine": self._engine,
            "name": clean(rule.name),
            "rule_order": rule.order,
            "match": dict(rule.match),
            "policy": dict(rule.policy),
            "created_at": now_s,
            "updated_at": now_s,
        }
        with self._database.write_for_caller() as connection:
            upsert(connection, RuleRow, [row], keep=("created_at",))

    def delete_rule(self, name: str) -> bool:
        """Delete a rule; return False without one of this name."""
        which = (RuleRow.engine == self._engine, RuleRow.name == clean(name))
        with self._database.write_for_caller() as connection:
            return connection.execute(delete(RuleRow).where(*which)).rowcount > 0

    def begin_audit(self, entry: AuditEntry) -> int:
        """Record a call, before or after it was carried out; return the record's id."""
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
        with self._database.write_for_caller() as connection:
            return connection.execute(insert(AuditRow).returning(AuditRow.id), row).scalar_one()

    def end_audit(self, audit_id: int, status: int, outcome: str | None) -> bool:
        """Record the outcome of a call; return False if its record is gone."""
        which = (AuditRow.engine == self._engine, AuditRow.id == audit_id)
        changed = {"status": status, "outcome": clean(outcome)}
        with self._database.write_for_caller() as connection:
            return connection.execute(update(AuditRow).where(*which).values(changed)).rowcount > 0
