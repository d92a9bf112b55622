"""The database is locked or full while an engine runs: that goes on, is told, and the store recovers by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.store import AuditEntry, DatabaseUnavailable, MetadataStore
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.inventory import Inventory
from tests.harness import stores
from tests.harness.stores import (
    SHORT_WAITS,
    START_S,
    busy_writer,
    count,
    eviction,
    fill,
    held_exclusively,
    hit,
    in_file,
    in_memory,
    items_of,
    read_only,
    within_deadline,
    write,
)
from tests.harness.waiting import DEADLINE_S, wait_until

running = partial(stores.running, waits=SHORT_WAITS)
open_store = partial(stores.open_store, waits=SHORT_WAITS)

ENTRY = AuditEntry(START_S, "admin", "127.0.0.1", "id", "POST", "/admin/v1/reset", {"reason": "test"})

LATER_S = START_S + 3600


def told(store: MetadataStore, *words: str) -> bool:
    return any(all(word in reason for word in words) for reason in store.degraded())


@pytest.mark.parametrize(
    ("trouble", "word"),
    [(held_exclusively, "locked"), (lambda _: read_only(), "READONLY")],
    ids=["lock", "read-only"],
)
def test_database_that_refuses_writes_does_not_block_the_pool(
    path: Path, trouble: Callable[[Path], AbstractContextManager[None]], word: str
) -> None:
    with running(path, 200, max_queued_rows=500) as (store, manager):
        fill(manager, range(100))
        assert store.journal.flush(DEADLINE_S)
        with trouble(path):

            def traffic() -> None:
                for step in range(1, 40):
                    fill(manager, range(step * 100, step * 100 + 100), START_S + step, RequestIdentity(f"r{step}"))
                    hit(manager, range(step * 100, step * 100 + 10), START_S + step)

            within_deadline(traffic)
            wait_until(lambda: told(store, word), "health names the cause")
            failures = store.journal.num_failures
            wait_until(lambda: store.journal.num_failures > failures + 1, "it was tried again and again")
            stats = store.journal.stats()
            assert stats.written + stats.queued + stats.dropped == manager.evictions.total == 3800
            assert stats.queued <= 500
            assert stats.dropped >= 3300
            wait_until(lambda: store.journal.stats().lag_s > 0, "lag grows")
            for call in (
                lambda: write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 60),
                lambda: write(store, store.writer.delete_override, "r", 0.0),
                lambda: write(store, store.writer.begin_audit, ENTRY),
            ):
                with pytest.raises(DatabaseUnavailable):
                    call()
            assert items_of(store.reader.evictions()) == [], "history can still be read"
        wait_until(lambda: store.degraded() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
        after = store.journal.stats()
        assert (after.queued, after.dropped, after.lag_s) == (0, stats.dropped, 0.0)
        assert count(path, "evictions") == after.written == 3800 - stats.dropped
        assert write(store, store.writer.begin_audit, ENTRY) == 1
        assert store.reader.load_overrides(START_S) == [], "what was answered with 503 was not done"


def test_write_when_another_takes_too_long_is_refused(path: Path) -> None:
    with running(path) as (store, _):
        with busy_writer(store), pytest.raises(DatabaseUnavailable, match="busy"):
            store.database.write(partial(store.writer.save_override, "r", {}, START_S, LATER_S), 0.05)
        assert store.journal.flush(DEADLINE_S)
        assert store.reader.load_overrides(START_S) == []


def test_close_while_locked_is_bounded_and_logs_the_loss(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, manager = open_store(path)
    store.start(Inventory(manager))
    assert store.journal.flush(DEADLINE_S)
    with held_exclusively(path):
        store.journal.append(eviction([1]))
        within_deadline(lambda: store.close(0.2), DEADLINE_S)
        assert not store.close(0.1), "an eviction was not written, and close says so"
    assert "1 rows of history were not written within 0 s" in caplog.text
    assert store.journal.stats().queued == 1


def test_rows_delayed_by_a_lock_are_not_written_after_a_reset(path: Path) -> None:
    with running(path, 40) as (store, manager):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            fill(manager, range(40))
            wait_until(lambda: told(store, "locked"), "writing the rows has failed")
            assert len(store.journal._projection._pending) == 40
            manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == {} == in_memory(manager)


def test_lock_without_traffic_is_noticed_and_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(path) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            wait_until(lambda: told(store, "locked"), "an idle journal notices too")
            wait_until(lambda: store.journal.num_failures >= 3, "it has failed three times")
        wait_until(lambda: store.degraded() == [], "health is well again")
    assert len([record for record in caplog.records if "locked" in record.getMessage()]) == 1
