"""Counters over time outlive the process: in one history, with marks where it started and what operators changed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.service.test_restart import kill

DAY_S = 86400


def day(served: Served, **query: object) -> dict[str, Any]:
    answer = served.http.get("/admin/v1/stats/history", params={"window_s": DAY_S} | query)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def total(history: dict[str, Any], column: str) -> float:
    index = history["columns"].index(column)
    return float(sum(row[index] for row in history["rows"]))


def rows_kept(folder: Path) -> list[tuple[float, float, dict[str, float]]]:
    with closing(sqlite3.connect(folder / "kvferry.db", timeout=DEADLINE_S)) as database:
        rows = database.execute("SELECT time, started_at, counts FROM stats_rows ORDER BY id").fetchall()
    return [(time_s, started_s, json.loads(counts)) for time_s, started_s, counts in rows]


def test_history_when_stopped_or_killed_spans_processes_with_marks(tmp_path: Path) -> None:
    name = {"engine_name": "one"}
    with serving(tmp_path, **name) as served:
        wait_until(lambda: day(served)["rows"], "the start is sampled")
        for number in range(4):
            served.tokens([number % 2 * 100 + i % 100 + 3 for i in range(200)], max_tokens=1)
        served.http.patch("/admin/v1/config", json={"store_threshold": 2, "auto_pause": True}).raise_for_status()
        served.http.post("/admin/v1/reset", params={"dry_run": True}, json={}).raise_for_status()
        stats = served.settle()
        assert served.stop() == 0
    (first_s, *_), *_ = rows_kept(tmp_path)
    assert len(rows_kept(tmp_path)) >= 2, "the start, and what followed it"
    with serving(tmp_path, engine="none", **name) as served:
        wait_until(lambda: len({started for _, started, _ in rows_kept(tmp_path)}) == 2, "the second start is kept")
        kill(served)
    with serving(tmp_path, engine="none", **name) as served:
        wait_until(lambda: len({row[0] for row in day(served)["rows"]}) >= 4, "the third start is sampled")
        history = day(served)
        assert total(history, "recomputed") == stats["prompt_tokens"]["recomputed"] > 0
        assert total(history, "device_hit") == stats["prompt_tokens"]["device_hit"] > 0
        for cause, tokens in stats["missed_tokens"]["causes"].items():
            assert total(history, f"missed_tokens.causes.{cause}") == tokens, cause
        assert stats["missed_tokens"]["causes"]["new"] > 0
        marks = history["marks"]
        assert [mark["kind"] for mark in marks] == ["start", "change", "start", "start"]
        assert marks[1]["text"] == "PATCH config: store_threshold=2, auto_pause=true"
        assert [mark["time"] for mark in marks] == sorted(mark["time"] for mark in marks)
        assert total(history, "span_s") < 2 * DEADLINE_S, "rows cover the time in which a process ran"
        latest = served.get("/admin/v1/stats/history?window_s=900")
        assert total(latest, "recomputed") == 0, "seconds are of this process"
        until = datetime.fromtimestamp(first_s + 0.001, UTC)
        earlier = day(served, until=until.isoformat().replace("+00:00", "Z"))
        assert (len(earlier["rows"]), earlier["interval_s"]) == (1, 60)
        assert [mark["kind"] for mark in earlier["marks"]] == ["start"]
        before = (until - timedelta(days=2)).isoformat().replace("+00:00", "Z")
        assert day(served, until=before) | {"columns": []} == {
            "interval_s": 60,
            "columns": [],
            "rows": [],
            "marks": [],
        }


def test_history_with_damaged_rows_starts_without_them(tmp_path: Path) -> None:
    with serving(tmp_path, engine="none") as served:
        wait_until(lambda: rows_kept(tmp_path), "the start is kept")
        assert served.stop() == 0
    kept = len(rows_kept(tmp_path))
    damaged = ['{"slots": ', '{"a column of tomorrow": 1}', '{"slots": "many"}', '{"slots": 1e999}', "[]", "7", "{}"]
    with closing(sqlite3.connect(tmp_path / "kvferry.db", isolation_level=None, timeout=DEADLINE_S)) as database:
        again = "INSERT INTO stats_rows (engine, time, started_at, counts) SELECT engine, time, {}, {} FROM stats_rows"
        for counts in damaged:
            database.execute(again.format("started_at", "?") + " LIMIT 1", (counts,))
        database.execute(again.format("'yesterday'", "'{}'") + " LIMIT 1")
        database.execute(again.format("started_at", "x'ff00'") + " LIMIT 1")
        database.execute(again.replace("engine, time, {}, {} FROM", "'other', time, {}, {} FROM").format(1, "'{}'"))
    with serving(tmp_path, engine="none") as served:
        # A row may leave out columns that are 0.
        wait_until(lambda: len(day(served)["rows"]) == kept + 2, "the rows that can be read, and the second start")
        assert served.log().count("rows of stats left out, which cannot be read: 8:") == 1


def test_history_when_the_database_is_gone_has_its_rows(tmp_path: Path) -> None:
    with serving(tmp_path, engine="none") as served:
        wait_until(lambda: day(served)["rows"], "the start is sampled")
        (tmp_path / "kvferry.db").rename(tmp_path / "away.db")
        history = day(served)
        assert len(history["rows"]) == 1
        assert [mark["kind"] for mark in history["marks"]] == ["start"]
        answer = served.http.get("/admin/v1/stats/history?until=2026-01-31T12:00:00Z")
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
