"""History: what is written about evictions and resets, what is refused, and how much is kept."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from kvferry.app.store import AuditEntry, EvictionFilter, HistoryLimits
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.events import RegretBatch
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.stats import EvictionReason
from tests.harness.postgres import new_database
from tests.harness.stores import (
    SLOT_BYTES,
    START_S,
    Where,
    count,
    eviction,
    execute,
    fill,
    hit,
    in_file,
    in_memory,
    items_of,
    key_of,
    keys_of,
    open_store,
    running,
    shell,
    write,
)
from tests.harness.waiting import DEADLINE_S, wait_until


def test_evictions_of_a_real_pool_are_written_with_all_that_is_known(where: Where) -> None:
    with running(where, 4) as (store, manager):
        fill(manager, range(4), START_S, RequestIdentity("first", "a" * 16))
        hit(manager, [0], START_S + 7)
        fill(manager, range(10, 14), START_S + 10, RequestIdentity("second", None))
        assert store.journal.flush(DEADLINE_S)
        page = store.reader.evictions()
        items = items_of(page)
        found = {item.key: item for item in items}
        assert set(found) == {key_of(n).hex() for n in range(4)}
        was_hit, never = found[key_of(0).hex()], found[key_of(1).hex()]
        assert (was_hit.age_s, was_hit.idle_s, was_hit.hits, was_hit.position) == (10.0, 3.0, 1, 0)
        assert (never.age_s, never.idle_s, never.hits, never.position) == (10.0, 10.0, 0, 1)
        assert {item.reason for item in items} == {"capacity"}
        assert {(item.request, item.tenant, item.needed_by) for item in items} == {("first", "a" * 16, "second")}
        assert {(item.policy, item.size, item.group) for item in items} == {("lru", SLOT_BYTES, 0)}
        assert page.next_cursor is None
        assert all(item.regretted_at is None for item in items)


def test_a_regret_marks_the_last_eviction_of_its_key_only(where: Where) -> None:
    with running(where) as (store, _):
        journal = store.journal
        journal.append(eviction([1, 2], START_S))
        journal.append(eviction([1], START_S + 5))
        journal.append(RegretBatch(START_S + 6, keys_of([1, 99]), [START_S + 5] * 2))
        journal.append(eviction([1], START_S + 9))
        assert journal.flush(DEADLINE_S)
        found = {(i.key[:4], i.time): i.regretted_at for i in items_of(store.reader.evictions())}
        one, two = key_of(1).hex()[:4], key_of(2).hex()[:4]
        assert found == {
            (one, START_S): None,
            (two, START_S): None,
            (one, START_S + 5): START_S + 6,
            (one, START_S + 9): None,
        }
        for time_s in (START_S + 20, START_S + 30):
            journal.append(RegretBatch(time_s, keys_of([1]), [START_S + 9]))
        assert journal.flush(DEADLINE_S)
        assert items_of(store.reader.evictions())[0].regretted_at == START_S + 20
        summary = store.reader.eviction_summary()
        assert (summary.total, summary.regretted, summary.regret_rate) == (4, 2, 0.5)


def test_odd_request_ids_are_stored_and_found(where: Where) -> None:
    hostile = ["nul\0inside", "lone\ud800surrogate", "x" * 5000, "'; DROP TABLE evictions; --", "日本語", ""]
    with running(where) as (store, _):
        for number, request in enumerate(hostile):
            store.journal.append(eviction([number], START_S + number, request=request))
        assert store.journal.flush(DEADLINE_S)
        assert store.degraded() == []
        assert store.journal.stats().written == len(hostile)
        for number, request in enumerate(hostile):
            found = items_of(store.reader.evictions(EvictionFilter(request=request)))
            assert [item.key for item in found] == [key_of(number).hex()]


def test_history_is_trimmed_by_rows_and_by_age_for_every_engine(where: Where) -> None:
    old_s, now_s = START_S - 40 * 86400, START_S
    with running(where, engine="gone", limits=HistoryLimits(eviction_rows=50)) as (store, _):
        store.journal._clock = lambda: old_s
        for number in range(20):
            store.journal.append(eviction(range(100 * number, 100 * number + 100), old_s + number))
        assert store.journal.flush(DEADLINE_S)
        store.journal._trimmer._next_pass_s = 0.0
        wait_until(lambda: count(where, "evictions") <= 50, "the limit of rows holds")
        assert store.journal.flush(DEADLINE_S)
        rows = shell(where, "SELECT min(time), max(time), count(*) FROM evictions")
        assert rows == [(old_s + 19, old_s + 19, 50)], "the newest are kept"
    limits = HistoryLimits(eviction_rows=10_000, eviction_days=1)
    store, _ = open_store(where, engine="here", limits=limits)
    store.journal._clock = lambda: now_s
    store.start(Inventory(OffloadManager(4, SLOT_BYTES)))
    store.journal.append(eviction(range(30), now_s - 2 * 86400))
    store.journal.append(eviction(range(40), now_s - 100))
    assert store.journal.flush(DEADLINE_S)
    store.journal._trimmer._next_pass_s = 0.0
    left = "SELECT engine, count(*) FROM evictions GROUP BY engine"
    wait_until(lambda: shell(where, left) == [("here", 40)], "what is too old is gone, of both engines")
    assert store.close(DEADLINE_S)


@pytest.mark.long
def test_engine_whose_clock_is_ahead_keeps_what_others_have(postgres_url: str) -> None:
    ahead_s = 366 * 86400
    with new_database(postgres_url) as url:
        live, pool = open_store(url, 64, "live")
        live.start(Inventory(pool))
        fill(pool, range(20))
        live.journal.append(eviction(range(100, 150)))
        assert live.journal.flush(DEADLINE_S)
        other, others = open_store(url, 64, "ahead")
        other.journal._clock = lambda: time.time() + ahead_s
        other.start(Inventory(others))
        assert other.journal.flush(DEADLINE_S)
        assert in_file(url, "live") == in_memory(pool) != {}
        assert count(url, "evictions") == 50
        seen = dict(shell(url, "SELECT name, seen_at FROM engines"))
        assert seen.keys() == {"live", "ahead"}
        assert max(seen.values()) < START_S + ahead_s, "on the clock of the database's host"
        assert other.close(DEADLINE_S)
        assert live.close(DEADLINE_S)


def test_expired_overrides_and_old_audit_records_go(where: Where) -> None:
    store, _ = open_store(where, limits=HistoryLimits(audit_rows=5, audit_days=1))
    for number in range(12):
        write(store, store.writer.begin_audit, AuditEntry(START_S + number, "admin", "", str(number), "POST", "/"))
    write(store, store.writer.save_override, "over", {"store": False}, START_S, START_S + 1)
    write(store, store.writer.save_override, "holds", {"store": False}, START_S, START_S + 5000)
    store.journal._clock = lambda: START_S + 100
    store.start(Inventory(OffloadManager(4, SLOT_BYTES)))
    wait_until(lambda: count(where, "audit") == 5, "the oldest records are gone")
    assert [record.request_id for record in items_of(store.reader.audit())] == ["11", "10", "9", "8", "7"]
    assert shell(where, "SELECT request FROM overrides") == [("holds",)]
    assert store.close(DEADLINE_S)


def test_overrides_of_many_requests_when_expired_all_go(where: Where) -> None:
    store, _ = open_store(where)
    write(store, store.writer.save_override, "holds", {"store": False}, START_S, time.time() + 5000)
    rows = "SELECT engine, request || n, policy, set_at, 0 FROM overrides, numbers WHERE request = 'holds'"
    numbers = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 2500)"
    execute(where, f"INSERT INTO overrides (engine, request, policy, set_at, expires_at) {numbers} {rows}")
    assert count(where, "overrides") == 2501
    store.start(Inventory(OffloadManager(4, SLOT_BYTES)))
    assert store.journal.flush(DEADLINE_S)
    assert shell(where, "SELECT request FROM overrides") == [("holds",)]
    assert store.close(DEADLINE_S)


def test_retention_after_the_clock_was_set_back_goes_on(where: Where) -> None:
    with running(where) as (store, _):
        store.journal._clock = lambda: time.time() + 3600
        assert store.journal.flush(DEADLINE_S)
        store.journal._clock = time.time
        write(store, store.writer.save_override, "over", {"store": False}, START_S, START_S)
        store.set_limits(HistoryLimits())
        assert store.journal.flush(DEADLINE_S)
        assert count(where, "overrides") == 0


def test_summary_of_a_window_equals_its_counted_rows(where: Where) -> None:
    rng = random.Random(1)
    with running(where) as (store, _):
        for number in range(20):
            reason = rng.choice([EvictionReason.CAPACITY, EvictionReason.OPERATOR])
            stored_s = START_S + number - rng.choice([0.5, 1.0, 10.0, 59.0, 3000.0, 1e6])
            hit_s = rng.choice([0.0, stored_s])
            numbers = range(number * 30, number * 30 + 30)
            store.journal.append(eviction(numbers, START_S + number, reason, stored_s=stored_s, hit_s=hit_s))
            regretted = keys_of(rng.sample(numbers, 5))
            store.journal.append(RegretBatch(START_S + number, regretted, [START_S + number] * 5))
        assert store.journal.flush(DEADLINE_S)
        rows = shell(where, "SELECT time, reason, age_s, hits, regretted_at FROM evictions")
        for since_s, until_s in ((0.0, None), (START_S + 5, START_S + 9), (None, START_S + 12.5), (START_S + 99, None)):
            found = store.reader.eviction_summary(since_s, until_s)
            inside = [row for row in rows if (since_s or 0.0) <= row[0] < (until_s or float("inf"))]
            assert found.total == len(inside)
            assert found.by_reason == Counter(row[1] for row in inside)
            assert found.regretted_by_reason == Counter(row[1] for row in inside if row[4] is not None)
            assert found.regretted == sum(found.regretted_by_reason.values())
            assert found.never_hit == sum(row[3] == 0 for row in inside)
            ages = [row[2] for row in inside]
            assert (found.age.min_s, found.age.max_s) == ((min(ages), max(ages)) if ages else (None, None))
            assert found.age.mean_s == (pytest.approx(sum(ages) / len(ages)) if ages else None)
            bounds = [bucket.upto_s for bucket in found.age.buckets]
            counted = Counter(next(b for b in bounds if b is None or age <= b) for age in ages)
            assert {bucket.upto_s: bucket.count for bucket in found.age.buckets if bucket.count} == counted
