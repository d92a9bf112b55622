"""Rows of the metadata store beside history, for `bench.admin`: what operators set, and what other engines report."""

from __future__ import annotations

import time
from pathlib import Path

from bench.history import DAY_S, ENGINE
from kvferry.app.store.database import Database, upsert
from kvferry.app.store.schema import AUDIT, OVERRIDES, RULES, TENANT_LIMITS


def digest(number: int) -> str:
    """Return a text of the form that names a tenant."""
    return f"{number:016x}"


def fill_policies(path: Path, overrides: int, rules: int, tenants: int, audit: int) -> None:
    """Write overrides, rules, limits of tenants and audit records as the service does, in one transaction."""
    database = Database(f"sqlite:///{path}")
    database.open()
    now_s = time.time()
    with database.write() as connection:
        policy = {"store": False}
        common = {"engine": ENGINE, "policy": policy, "set_at": now_s, "expires_at": now_s + DAY_S}
        upsert(connection, OVERRIDES, [{**common, "request": f"later-{number}"} for number in range(overrides)])
        made = {"engine": ENGINE, "policy": policy, "created_at": now_s, "updated_at": now_s}
        matches = [
            {"request": f"batch-{number}-*"}
            if number % 3 == 0
            else {"tenant": digest(number)}
            if number % 3 == 1
            # No glob has a literal start.
            else {"lora": f"*-v{number}"}
            for number in range(rules)
        ]
        rows = [
            {**made, "name": f"rule-{number}", "rule_order": number, "match": match}
            for number, match in enumerate(matches)
        ]
        upsert(connection, RULES, rows)
        limit = {"engine": ENGINE, "max_bytes": 1 << 30, "set_at": now_s}
        upsert(connection, TENANT_LIMITS, [{**limit, "tenant": digest(number)} for number in range(tenants)])
        call = {"engine": ENGINE, "token": "admin", "client": "127.0.0.1", "method": "PUT", "path": "/admin/v1/policy"}
        called = [
            {**call, "time": now_s - number, "request_id": str(number), "what": policy, "status": 200, "outcome": ""}
            for number in range(audit)
        ]
        connection.execute(AUDIT.insert(), called)
    database.close()
