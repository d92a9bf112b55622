"""Overrides, rules and audit: kept across restarts, written while the caller waits, never for long."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.store import AuditEntry, DatabaseUnavailable
from tests.harness.stores import START_S, Where, eviction, items_of, read_only, running, shell, write
from tests.harness.waiting import DEADLINE_S, wait_until

LATER_S = START_S + 3600


def test_overrides_survive_a_restart_until_their_time_is_over(where: Where) -> None:
    # Later than now, since the journal deletes what is over by the real clock.
    with running(where) as (store, _):
        write(
            store,
            store.writer.save_override,
            "a",
            {"store": False, "tiers": ["disk"], "max_offload_tokens": "unlimited"},
            LATER_S,
            LATER_S + 60,
        )
        write(store, store.writer.save_override, "b", {"load": False}, LATER_S, LATER_S + 10)
        write(store, store.writer.save_override, "c", {"load": False}, LATER_S, LATER_S + 60)
        write(store, store.writer.save_override, "a", {"max_offload_tokens": 64}, LATER_S + 1, LATER_S + 90)
        assert write(store, store.writer.delete_override, "c", 0.0)
        assert not write(store, store.writer.delete_override, "c", 0.0)
        write(store, store.writer.save_override, "over", {"load": False}, LATER_S, LATER_S + 5)
        assert not write(store, store.writer.delete_override, "over", LATER_S + 5)
    with running(where) as (store, _):
        (found,) = store.reader.load_overrides(LATER_S + 10)
        assert tuple(found)[1:] == ("a", {"max_offload_tokens": 64}, LATER_S + 1, LATER_S + 90)
        assert [found.request for found in store.reader.load_overrides(LATER_S + 5)] == ["a", "b"]
    with running(where, engine="another") as (store, _):
        assert store.reader.load_overrides(LATER_S) == []


def rule_row(name: str, order: int, match: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "order": order, "match": match, "policy": policy}


def test_rules_are_kept_in_the_order_in_which_they_are_tried(where: Where) -> None:
    late = rule_row("late", 9, {"lora": "sql-*"}, {"store": False})
    with running(where) as (store, _):
        for rule in (
            late,
            rule_row("b", 1, {"tenant": "x"}, {"priority": "high"}),
            rule_row("a", 1, {"prompt_tokens": {"min": 5, "max": None}}, {"tiers": []}),
        ):
            write(store, store.writer.save_rule, rule)
        assert [rule["name"] for rule in store.reader.load_rules()] == ["a", "b", "late"]
        write(store, store.writer.save_rule, {**late, "order": 0})
        assert write(store, store.writer.delete_rule, "b")
        assert not write(store, store.writer.delete_rule, "b")
    with running(where) as (store, _):
        assert store.reader.load_rules() == [
            {**late, "order": 0},
            rule_row("a", 1, {"prompt_tokens": {"min": 5, "max": None}}, {"tiers": []}),
        ]
        assert store.degraded() == []
    with running(where, engine="another") as (store, _):
        assert store.reader.load_rules() == []


def test_a_call_is_recorded_before_and_after(where: Where) -> None:
    with running(where) as (store, _):
        entry = AuditEntry(
            START_S, "admin", "10.0.0.1", "id-1", "PATCH", "/admin/v1/policy", {"store": False, "n": [1, None]}
        )
        number = write(store, store.writer.begin_audit, entry)
        (record,) = items_of(store.reader.audit())
        assert (record.id, record.time) == (number, entry.time_s)
        shown = ("token", "client", "request_id", "method", "path", "what", "status", "outcome")
        assert all(getattr(record, name) == getattr(entry, name) for name in shown)
        ended = replace(entry, what={"store": True}, status=200, outcome="applied")
        assert write(store, store.writer.end_audit, number, ended)
        assert not write(store, store.writer.end_audit, number + 1, ended)
        second = write(
            store,
            store.writer.begin_audit,
            AuditEntry(START_S, "none", "", "id\0\ud800", "POST", "/", None, 401, "refused"),
        )
        assert second > number
    with running(where) as (store, _):
        last, first = items_of(store.reader.audit())
        assert (first.status, first.outcome, first.what) == (200, "applied", ended.what)
        assert (last.status, last.what) == (401, None)
        assert shell(where, "SELECT what IS NULL FROM audit ORDER BY id") == [(0,), (1,)]


def test_journal_and_callers_when_both_busy_make_progress(where: Where) -> None:
    """History comes faster than it is written, and calls come without a pause; both get on."""
    stop, saved = threading.Event(), [0, 0, 0]
    with running(where, max_queued_rows=10_000_000) as (store, _), ThreadPoolExecutor(4) as threads:

        def flood() -> None:
            number = 0
            while not stop.wait(0.001):
                if store.journal.stats().queued < 20_000:
                    store.journal.append(eviction(range(number, number + 500), START_S))
                    number += 500

        def save(caller: int) -> None:
            while not stop.is_set():
                with suppress(DatabaseUnavailable):
                    write(
                        store,
                        store.writer.save_override,
                        f"{caller}-{saved[caller]}",
                        {"store": False},
                        START_S,
                        LATER_S,
                    )
                    saved[caller] += 1

        work = [threads.submit(flood), *(threads.submit(save, caller) for caller in range(3))]
        try:
            wait_until(
                lambda: min(saved) >= 10 and store.journal.stats().written >= 4_000, "overrides and history are written"
            )
        finally:
            stop.set()
        assert [one.result(DEADLINE_S) for one in work] == [None] * 4
        assert len(store.reader.load_overrides(START_S)) == sum(saved)


def test_nothing_secret_or_personal_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(path) as (store, _):
        write(store, store.writer.save_override, "private-request-id", {"store": False}, START_S, START_S + 60)
        store.journal.append(eviction([1], request="private-request-id"))
        assert store.journal.flush(DEADLINE_S)
        with read_only():
            store.journal.append(eviction([2], request="private-request-id"))
            wait_until(lambda: any("READONLY" in reason for reason in store.degraded()), "it cannot be written")
        wait_until(lambda: store.degraded() == [], "it is well again")
    assert any("READONLY" in record.getMessage() for record in caplog.records)
    assert "private-request-id" not in caplog.text
