"""Rows of stats: written behind each other, read by their engine alone, and kept for their days."""

from __future__ import annotations

import itertools
from typing import Any

from kvferry.app.store import AuditEntry, HistoryLimits
from kvferry.app.telemetry.history import COUNTERS, GAUGES, StatsHistory
from kvferry.app.telemetry.history import Row as StatsRow
from tests.harness.stores import START_S, Where, count, open_store, running, shell, write
from tests.harness.waiting import DEADLINE_S, wait_until

MINUTE_S = 60.0


def row(time_s: float, **numbers: float) -> StatsRow:
    return StatsRow.of_json(time_s, START_S - 1, {"span_s": MINUTE_S, **numbers})


def numbered(number: int) -> StatsRow:
    names = itertools.chain(COUNTERS, GAUGES)
    return row(START_S + MINUTE_S * number, **{name: number + at / 8 for at, name in enumerate(names)})


def test_rows_of_stats_are_read_as_they_were_written(where: Where) -> None:
    rows = [numbered(number) for number in range(5)]
    with running(where) as (store, _), running(where, engine="other") as (other, _):
        for one in rows:
            store.journal.append(one)
        other.journal.append(row(START_S, recomputed=7))
        assert store.journal.flush(DEADLINE_S)
        assert other.journal.flush(DEADLINE_S)
        assert store.reader.stats_rows(START_S - 1, START_S + 1000, 10) == rows
        assert store.reader.stats_rows(START_S, START_S + 120, 10) == rows[1:3], "after, up to"
        assert store.reader.stats_rows(0, START_S + 1000, 2) == rows[3:], "the latest"
        assert other.reader.stats_rows(0, START_S + 1000, 10) == [row(START_S, recomputed=7)]
        assert store.journal.stats().written == 5


def test_rows_of_stats_older_than_their_days_go_for_every_engine(where: Where) -> None:
    day_s = 86400.0
    with running(where, engine="gone") as (store, _):
        for days in (1, 29, 40):
            store.journal.append(row(START_S - days * day_s))
        assert store.journal.flush(DEADLINE_S)
    with running(where, engine="here", limits=HistoryLimits(eviction_days=1, stats_days=30.0)) as (store, _):
        for days in (0, 31):
            store.journal.append(row(START_S - days * day_s))
        assert store.journal.flush(DEADLINE_S)
        store.set_limits(HistoryLimits(eviction_days=1, stats_days=30.0))
        left = "SELECT engine, count(*) FROM stats_rows GROUP BY engine ORDER BY engine"
        wait_until(lambda: shell(where, left) == [("gone", 2), ("here", 1)], "what is too old is gone, of both")
        store.set_limits(HistoryLimits(eviction_days=1, stats_days=2.0))
        wait_until(lambda: shell(where, left) == [("gone", 1), ("here", 1)], "by the limit of the engine that runs")
    assert count(where, "engines") == 2, "the engine is known for as long as it has rows"


def test_changes_are_the_applied_calls_of_a_window(where: Where) -> None:
    def call(number: int, path: str, outcome: str | None = "applied", **what: Any) -> AuditEntry:
        return AuditEntry(START_S + number, "admin", "", str(number), "PATCH", f"/admin/v1/{path}", what, 200, outcome)

    store, _ = open_store(where)
    calls = [
        call(0, "config", store_threshold=2),
        call(1, "config", "refused"),
        call(2, "reset?dry_run=true"),
        call(3, "prefetch"),
        call(4, "rules/r"),
        call(5, "policy", None),
        call(6, "policy", store=False),
    ]
    for one in calls:
        write(store, store.writer.begin_audit, one)
    found = store.reader.changes(START_S, START_S + 7, 10)
    assert [(change.time - START_S, change.path, change.what) for change in found] == [
        (0, "/admin/v1/config", {"store_threshold": 2}),
        (4, "/admin/v1/rules/r", {}),
        (6, "/admin/v1/policy", {"store": False}),
    ]
    assert [change.time - START_S for change in store.reader.changes(START_S + 1, START_S + 6, 10)] == [4]
    assert [change.time - START_S for change in store.reader.changes(START_S, START_S + 7, 2)] == [4, 6]
    store.close(DEADLINE_S)


def test_history_after_a_long_gap_has_no_rows_older_than_the_window() -> None:
    history = StatsHistory(started_s=START_S)
    hours = [row(START_S - 3600 * hour - 1) for hour in (30, 5, 2)]
    history.restore(hours)
    assert history.rows(86400) == (60, hours[1:])
    assert history.rows(2 * 3600)[1] == hours[2:]
    assert history.rows(900) == (1, [])
