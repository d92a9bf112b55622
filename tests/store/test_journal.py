"""The journal: slots as memory has them, resets, engines beside each other, starting and stopping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, event

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import SlotRows
from tests.harness.stores import (
    SHORT_WAITS,
    START_S,
    Where,
    count,
    eviction,
    fill,
    hit,
    in_file,
    in_memory,
    key_of,
    open_store,
    running,
    shell,
)
from tests.harness.waiting import DEADLINE_S, wait_until


def test_the_projection_follows_the_pool_through_traffic(where: Where) -> None:
    random = np.random.default_rng(7)
    with running(where, 3000) as (store, manager):
        for step in range(60):
            now_s = START_S + step
            first = int(random.integers(0, 6000))
            numbers = range(first, first + int(random.integers(1, 400)))
            fill(manager, numbers, now_s, RequestIdentity(f"request-{step}", f"{step % 3:016x}"))
            hit(manager, numbers[:50], now_s)
            if step % 9 == 8:
                manager.drop_key(key_of(first), now_s)
            if step in (20, 41):
                manager.reset(np.empty(0, dtype=np.int64), now_s)
            if step in (10, 20, 30, 45):
                assert store.journal.flush(DEADLINE_S)
                assert in_file(where) == in_memory(manager)
        assert store.journal.flush(DEADLINE_S)
        truth = in_memory(manager)
        assert len(truth) > 1000
        assert in_file(where) == truth


def test_a_reset_removes_rows_of_older_epochs_and_is_history_itself(where: Where) -> None:
    with running(where, 5000) as (store, manager):
        fill(manager, range(4500))
        assert store.journal.flush(DEADLINE_S)
        assert count(where, "slots") == 4500
        manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
        fill(manager, range(9000, 9010), START_S + 2)
        assert store.journal.flush(DEADLINE_S)
        assert shell(where, "SELECT epoch, count(*) FROM slots GROUP BY epoch") == [(1, 10)]
        assert in_file(where) == in_memory(manager)
        assert shell(where, "SELECT engine, epoch, dropped FROM resets") == [("e", 1, 4500)]
        summary = store.reader.eviction_summary()
        assert (summary.resets, summary.reset_blocks, summary.total) == (1, 4500, 0)


def test_rows_read_before_a_reset_are_not_written_after_it(where: Where) -> None:
    """The journal may hold rows of a batch while the pool is reset under it."""
    store, manager = open_store(where, 64)
    fill(manager, range(64))

    class ResetsWhileAsked:
        def __init__(self) -> None:
            self.asked = 0

        def dirty_rows(self, limit: int) -> SlotRows | None:
            rows = Inventory(manager).dirty_rows(limit)
            self.asked += 1
            if self.asked == 1:
                manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
            return rows

    store.start(ResetsWhileAsked())
    assert store.journal.flush(DEADLINE_S)
    assert in_file(where) == {} == in_memory(manager)
    assert store.close(DEADLINE_S)


def test_a_reset_during_the_sweep_of_another_leaves_no_row_behind(where: Where) -> None:
    """A sweep that is under way must not take the place of the next one for the slots that it has passed."""
    store, manager = open_store(where, 20_000)
    projection, database = store.journal._projection, store.database

    def step() -> bool:
        projection.prepare(Inventory(manager))
        return not projection.is_up_to_date and projection.confirm(database.write(projection.write))

    fill(manager, range(20_000))
    while step():
        pass
    assert count(where, "slots") == 20_000
    manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
    fill(manager, range(30_000, 30_010), START_S + 2)
    assert step(), "the sweep is not over"
    assert shell(where, "SELECT count(*) FROM slots WHERE epoch = 1") == [(10,)]
    assert count(where, "slots") > 10
    manager.reset(np.empty(0, dtype=np.int64), START_S + 3)
    while step():
        pass
    assert in_file(where) == {} == in_memory(manager)
    assert projection.is_up_to_date
    database.close()


@pytest.mark.parametrize(("num_recovered_slots", "survivors"), [(0, 0), (2, 2), (8, 3)])
def test_rows_of_slots_that_did_not_survive_are_deleted_at_start(
    where: Where, num_recovered_slots: int, survivors: int
) -> None:
    with running(where) as (store, manager):
        fill(manager, range(3))
    assert count(where, "slots") == 3
    with running(where, engine="another") as (store, _):
        assert store.journal.flush(DEADLINE_S)
        assert count(where, "slots") == 3, "another engine's rows are not ours to delete"
    with running(where, num_recovered_slots=num_recovered_slots) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        assert count(where, "slots") == survivors
        assert sorted(in_file(where)) == list(range(survivors))


def test_engines_that_share_a_database_do_not_see_each_other(where: Where) -> None:
    with running(where, 4, "one") as (first, one), running(where, 4, "two") as (second, two):
        fill(one, range(4), START_S)
        fill(two, range(2), START_S)
        fill(one, range(10, 14), START_S + 1)
        two.reset(np.empty(0, dtype=np.int64), START_S + 2)
        assert first.journal.flush(DEADLINE_S)
        assert second.journal.flush(DEADLINE_S)
        assert in_file(where, "one") == in_memory(one) != {}
        assert in_file(where, "two") == {}
        assert first.reader.eviction_summary().total == 4
        assert second.reader.eviction_summary().total == 0
        assert {row[0] for row in shell(where, "SELECT name FROM engines")} == {"one", "two"}


def test_close_writes_the_queued_rows(where: Where) -> None:
    store, manager = open_store(where, 64)
    store.start(Inventory(manager))
    fill(manager, range(64))
    fill(manager, range(100, 164), START_S + 1)
    assert store.close(DEADLINE_S)
    assert not store.journal.is_alive()
    assert count(where, "evictions") == 64
    assert in_file(where) == in_memory(manager)


def test_a_source_that_raises_does_not_end_the_journal(where: Where) -> None:
    class Broken:
        broken = True

        def dirty_rows(self, limit: int) -> SlotRows | None:
            if self.broken:
                raise RuntimeError("a bug of ours")
            return None

    source = Broken()
    store, _ = open_store(where)
    store.start(source)
    wait_until(lambda: any("unexpected RuntimeError" in reason for reason in store.degraded()), "health names the bug")
    store.journal.append(eviction([1]))
    wait_until(lambda: store.journal.stats().written == 1, "history goes on")
    source.broken = False
    wait_until(lambda: store.degraded() == [], "health is well again")
    assert store.journal.is_alive()
    assert store.close(DEADLINE_S)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_slots_when_an_exception_interrupts_their_write_follow(where: Where, error: type[Exception]) -> None:
    failures = 0

    def fail_once(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal failures
        if statement.startswith("INSERT INTO slots") and not failures:
            failures += 1
            raise error("once")

    event.listen(Engine, "before_cursor_execute", fail_once)
    try:
        with running(where, 64, waits=SHORT_WAITS) as (store, manager):
            fill(manager, range(40))
            assert store.journal.flush(DEADLINE_S)
            assert failures == 1
            assert in_file(where) == in_memory(manager) != {}
            assert (store.journal.stats().dropped, store.degraded()) == (0, [])
    finally:
        event.remove(Engine, "before_cursor_execute", fail_once)


def test_rows_that_the_database_rejects_are_given_up_and_others_written(where: Where) -> None:
    with running(where, 64, waits=SHORT_WAITS) as (store, manager):
        # The type of `request` allows no None, nor does its column.
        fill(manager, range(20), origin=RequestIdentity(None))  # type: ignore[arg-type]
        batch = eviction(range(10))
        batch.rows.origins[7] = RequestIdentity(None)  # type: ignore[index,arg-type]
        store.journal.append(batch)
        assert store.journal.flush(DEADLINE_S)
        assert (count(where, "slots"), count(where, "evictions")) == (0, 9)
        assert (store.journal.stats().written, store.journal.stats().dropped) == (9, 21)
        fill(manager, range(20, 40))
        store.journal.append(eviction(range(20, 30)))
        assert store.journal.flush(DEADLINE_S)
        assert {row[0] for row in in_file(where).values()} == {key_of(number).hex() for number in range(20, 40)}
        assert store.reader.eviction_summary().total == 19
        assert store.degraded() == []


def test_evictions_whose_rows_cannot_be_made_are_dropped_alone(where: Where) -> None:
    nameless = eviction([7])._replace(reason="no reason")
    with running(where, waits=SHORT_WAITS) as (store, _):
        for batch in (eviction(range(5)), nameless, eviction(range(10, 15))):
            store.journal.append(batch)
        wait_until(lambda: store.journal.stats().queued == 0, "all but one are written")
        assert (store.journal.stats().written, store.journal.stats().dropped) == (10, 1)
        wait_until(lambda: store.degraded() == [], "health is well again")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_journal_thread_when_dead_is_reported_and_restarts(where: Where) -> None:
    """LMCache#4817: a background thread died, and nobody noticed."""

    class Deadly:
        def dirty_rows(self, limit: int) -> SlotRows | None:
            raise SystemExit

    store, manager = open_store(where)
    store.start(Deadly())
    thread = store.journal.thread
    wait_until(lambda: any("does not run" in reason for reason in thread.degraded()), "health says that it died")
    assert store.degraded() == [], "one part says so"
    fill(manager, range(3))
    store.start(Inventory(manager))
    assert store.journal.flush(DEADLINE_S)
    assert store.degraded() == []
    assert in_file(where) == in_memory(manager) != {}
    assert store.close(DEADLINE_S)
