"""History is held to its rows and days while it is written, and the latest stay."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

SLOTS = 20
EVICTIONS = "/admin/v1/evictions"


def evict(served: Served, first: int, count: int) -> None:
    for number in range(first, first + count):
        served.tokens([(number * 31 + i) % 240 + 3 for i in range(200)], max_tokens=1)
    served.settle()
    wait_until(lambda: served.stats()["journal"]["queued"] == 0, "history is written")


def rows(served: Served) -> list[Any]:
    return list(served.get(f"{EVICTIONS}?limit=1000")["items"])


def test_history_is_kept_within_its_rows_and_days_which_can_change(tmp_path: Path) -> None:
    with serving(tmp_path, device_blocks=64, pool_bytes=32768 * SLOTS) as served:
        evict(served, 0, 40)
        assert served.stats()["evictions"]["total"] > 400
        served.http.patch("/admin/v1/config", json={"eviction_history_rows": 200}).raise_for_status()
        wait_until(lambda: len(rows(served)) == 200, "no more than its rows")
        kept = [row["id"] for row in rows(served)]
        served.http.patch("/admin/v1/config", json={"eviction_history_rows": 50}).raise_for_status()
        wait_until(lambda: len(rows(served)) == 50, "no more than the new limit")
        assert [row["id"] for row in rows(served)] == kept[:50], "the latest are kept"
        summary = served.get(f"{EVICTIONS}/summary")
        assert sum(summary["by_reason"].values()) == summary["total"] >= 50
        with closing(sqlite3.connect(tmp_path / "kvferry.db", isolation_level=None, timeout=DEADLINE_S)) as database:
            old_s = 3 * 86400.0
            database.execute("UPDATE evictions SET time = time - ? WHERE id <= ?", (old_s, kept[9] - 1))
        served.http.patch("/admin/v1/config", json={"eviction_history_days": 2}).raise_for_status()
        wait_until(lambda: len(rows(served)) == 10, "nothing older than its days")
        assert [row["id"] for row in rows(served)] == kept[:10]
