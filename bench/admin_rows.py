"""Rows of the metadata store beside history, for `bench.admin`: what operators set, and what other engines report."""

from __future__ import annotations

import time
from pathlib import Path

from bench.history import DAY_S, ENGINE
from kvferry.app.store import MAX_TENANTS
from kvferry.app.store.database import Database, upsert
from kvferry.app.store.schema import AUDIT, ENGINES, OVERRIDES, RULES, TENANT_LIMITS, TENANT_USE

OTHER_ENGINES = 16


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


def fill_fleet(path: Path) -> None:
    """Write what other engines report, with as many tenants as they may, as if their last heartbeat was tomorrow."""
    database = Database(f"sqlite:///{path}")
    database.open()
    names = [f"other-{number}" for number in range(OTHER_ENGINES)]
    tokens = dict.fromkeys(("device_hit", "host_hit", "tier_hit", "recomputed"), 1000)
    engine = {
        "pool_kind": "pinned",
        "epoch": 0,
        "started_at": time.time(),
        "seen_at": time.time() + DAY_S,
        "eviction_rows": 1000,
        "eviction_days": 30.0,
        "url": "http://host:8787",
        "kind": "vllm",
        "model": "model",
        "version": "1",
        "slots": 1000,
        "used_slots": 500,
        "pool_bytes": 1 << 30,
        "recent": {"window_s": 300.0, **tokens, "hit_rates": [0.75] * 30},
        "tiers": [{"name": "redis", "type": "redis", "namespace": "0123456789abcdef"}],
    }
    use = [
        # Engines have half of their tenants in common with the next.
        {"engine": name, "tenant": digest(MAX_TENANTS // 2 * place + number), "pool_bytes": (1 << 20) + number}
        for place, name in enumerate(names)
        for number in range(MAX_TENANTS)
    ]
    with database.write() as connection:
        upsert(connection, ENGINES, [{**engine, "name": name} for name in names])
        upsert(connection, TENANT_USE, use)
    database.close()
