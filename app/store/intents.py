"""Statements that write what operators set, open resets of tiers, and audit records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from kvferry.app.store.database import clean, upsert
from kvferry.app.store.schema import AUDIT, OVERRIDES, RULES, TENANT_LIMITS, TIER_RESETS


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A mutating call. `token` is the token's name, `what` the body with secrets masked.

    `status` is None while the call is under way, or if the process ended during it.
    """

    time_s: float
    token: str
    client: str
    request_id: str
    method: str
    path: str
    what: dict[str, Any] | None = None
    status: int | None = None
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class StoredReset:
    """A reset that a tier has not completed: of the blocks that `match` names, of one `key`, or without both of all."""

    tier: str
    match: Mapping[str, Any] | None = None
    key: str | None = None


class StoreWriter:
    """Statements of one engine, for `Database.write` and changes; the connection is the last argument."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def save_override(
        self, request_id: str, policy: Mapping[str, Any], now_s: float, expires_s: float, connection: Connection
    ) -> None:
        """Set the policy fields of a request id, replacing earlier ones."""
        row = {
            "engine": self._engine,
            "request": clean(request_id),
            "policy": dict(policy),
            "set_at": now_s,
            "expires_at": expires_s,
        }
        upsert(connection, OVERRIDES, row)

    def delete_override(self, request_id: str, now_s: float, connection: Connection) -> bool:
        """Delete an override; return False without one that holds at `now_s`."""
        which = (OVERRIDES.c.engine == self._engine, OVERRIDES.c.request == clean(request_id))
        connection.execute(delete(OVERRIDES).where(*which, OVERRIDES.c.expires_at <= now_s))
        return connection.execute(delete(OVERRIDES).where(*which)).rowcount > 0

    def save_rule(self, rule: Mapping[str, Any], connection: Connection) -> None:
        """Add a rule, or replace the one of the same name; `rule` has its JSON values."""
        now_s = time.time()
        row = {
            "engine": self._engine,
            "name": clean(rule["name"]),
            "rule_order": rule["order"],
            "match": rule["match"],
            "policy": rule["policy"],
            "created_at": now_s,
            "updated_at": now_s,
        }
        upsert(connection, RULES, row, kept=["created_at"])

    def delete_rule(self, name: str, connection: Connection) -> bool:
        """Delete a rule; return False without one of this name."""
        which = (RULES.c.engine == self._engine, RULES.c.name == clean(name))
        return connection.execute(delete(RULES).where(*which)).rowcount > 0

    def save_tenant_limit(self, tenant: str, max_bytes: int | None, connection: Connection) -> None:
        """Set the bytes that a tenant may have in the pool, None for no limit."""
        row = {"engine": self._engine, "tenant": clean(tenant), "max_bytes": max_bytes, "set_at": time.time()}
        upsert(connection, TENANT_LIMITS, row)

    def delete_tenant_limit(self, tenant: str, connection: Connection) -> bool:
        """Delete the limit of a tenant; return False without one."""
        which = (TENANT_LIMITS.c.engine == self._engine, TENANT_LIMITS.c.tenant == clean(tenant))
        return connection.execute(delete(TENANT_LIMITS).where(*which)).rowcount > 0

    def change_tier_resets(
        self, opened: Iterable[StoredReset], ended: Iterable[int], connection: Connection
    ) -> list[int]:
        """Record resets that tiers have not completed, and delete records by id; return the ids of the new ones."""
        now_s = time.time()
        rows = [
            {
                "engine": self._engine,
                "time": now_s,
                "tier": reset.tier,
                "match": None if reset.match is None else dict(reset.match),
                "key": reset.key,
            }
            for reset in opened
        ]
        for reset_id in ended:
            connection.execute(
                delete(TIER_RESETS).where(TIER_RESETS.c.engine == self._engine, TIER_RESETS.c.id == reset_id)
            )
        adding = insert(TIER_RESETS).returning(TIER_RESETS.c.id)
        return [int(connection.execute(adding, row).scalar_one()) for row in rows]

    def begin_audit(self, entry: AuditEntry, connection: Connection) -> int:
        """Record a call, before or after it was carried out, or in its own transaction; return the record's id."""
        row = {
            "engine": self._engine,
            "time": entry.time_s,
            "token": clean(entry.token),
            "client": clean(entry.client),
            "request_id": clean(entry.request_id),
            "method": clean(entry.method),
            "path": clean(entry.path),
            "what": entry.what,
            "status": entry.status,
            "outcome": clean(entry.outcome),
        }
        return int(connection.execute(insert(AUDIT).returning(AUDIT.c.id), row).scalar_one())

    def end_audit(self, audit_id: int, ended: AuditEntry, connection: Connection) -> bool:
        """Record the body and outcome of a call that was begun; return False if its record is gone."""
        which = (AUDIT.c.engine == self._engine, AUDIT.c.id == audit_id)
        changed = {"what": ended.what, "status": ended.status, "outcome": clean(ended.outcome)}
        return connection.execute(update(AUDIT).where(*which).values(changed)).rowcount > 0
