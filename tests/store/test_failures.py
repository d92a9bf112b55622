"""The database is locked or full while an engine runs: that goes on, is told, and the store recovers by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.store import AuditEntry, MetadataStore, StoreUnavailable
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.inventory import Inventory
from tests.harness.stores import (
    DEADLINE_S,
    START_S,
    count,
    eviction,
    fill,
    held_exclusively,
    hit,
    in_file,
    in_memory,
    open_store,
    read_only,
    running,
    shell,
    sized,
    wait_until,
    within_deadline,
)

pytestmark = pytest.mark.usefixtures("short_waits")

ENTRY = AuditEntry(START_S, "admin", "127.0.0.1", "id", "POST", "/admin/v1/reset", {"reason": "test"})


def told(store: MetadataStore, *words: str) -> bool:
    return any(all(word in reason for word in words) for reason in store.degraded())


def test_a_locked_database_is_told_and_costs_no_waiting_and_no_slot(path: Path) -> None:
    with running(path, 200, max_queued_rows=500) as (store, manager):
        fill(manager, range(100))
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):

            def traffic() -> None:
                for step in range(1, 40):
                    fill(manager, range(step * 100, step * 100 + 100), START_S + step, RequestIdentity(f"r{step}"))
                    hit(manager, range(step * 100, step * 100 + 10), START_S + step)

            within_deadline(traffic)
            wait_until(lambda: told(store, "locked"), "health says that the database is locked")
            stats = store.journal_stats()
            evicted = manager.counts().slots and manager.evictions.total
            assert stats.written + stats.queued + stats.dropped == evicted == 3800
            assert stats.queued <= 500
            assert stats.dropped >= 3300
            wait_until(lambda: store.journal_stats().lag_s > 0, "lag grows")
            for call in (
                lambda: store.intents.save_override("r", {"store": False}, START_S, START_S + 60),
                lambda: store.intents.delete_override("r", 0.0),
                lambda: store.intents.begin_audit(ENTRY),
            ):
                with pytest.raises(StoreUnavailable, match="locked"):
                    call()
            assert store.reader.evictions().items == [], "readers go on beside a writer"
        wait_until(lambda: store.degraded() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
        after = store.journal_stats()
        assert (after.queued, after.dropped, after.lag_s) == (0, stats.dropped, 0.0)
        assert count(path, "evictions") == after.written == 3800 - stats.dropped
        assert store.intents.begin_audit(ENTRY) == 1
        assert store.reader.load_overrides(START_S) == [], "what was answered with 503 was not done"


def test_a_lock_is_noticed_without_traffic(path: Path) -> None:
    with running(path) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            wait_until(lambda: told(store, "locked"), "an idle journal notices too")
        wait_until(lambda: store.degraded() == [], "health is well again")


def test_closing_while_locked_is_bounded_and_says_what_is_lost(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, manager = open_store(path)
    store.start(Inventory(manager))
    assert store.journal.flush(DEADLINE_S)
    with held_exclusively(path):
        store.journal.evicted(eviction([1]))
        within_deadline(lambda: store.close(0.2), DEADLINE_S)
        assert not store.close(0.1), "an eviction was not written, and close says so"
    assert "1 rows of history were not written within 0 s" in caplog.text
    assert store.journal_stats().queued == 1


def test_a_full_database_is_told_and_recovers(path: Path) -> None:
    with sized() as limit_pages, running(path, 50, max_queued_rows=1000) as (store, manager):
        fill(manager, range(50))
        assert store.journal.flush(DEADLINE_S)
        pages = shell(path, "PRAGMA page_count")[0][0]
        limit_pages(pages + 4)
        for step in range(1, 60):
            fill(manager, range(step * 50, step * 50 + 50), START_S + step, RequestIdentity("long " * 20))
        wait_until(lambda: told(store, "full", "EVICTION_HISTORY_ROWS"), "health says that the database is full")
        assert manager.counts().ready == 50
        assert in_file(path) != {}
        limit_pages()
        wait_until(lambda: store.degraded() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
        stats = store.journal_stats()
        assert stats.written + stats.dropped == 59 * 50
        assert count(path, "evictions") == stats.written


def test_a_database_that_turns_read_only_is_told_still_read_and_recovers(path: Path) -> None:
    with running(path, 50, max_queued_rows=1000) as (store, manager):
        fill(manager, range(50))
        fill(manager, range(100, 150), START_S + 1)
        assert store.journal.flush(DEADLINE_S)
        with read_only():

            def traffic() -> None:
                for step in range(2, 42):
                    fill(manager, range(step * 100, step * 100 + 50), START_S + step)

            within_deadline(traffic)
            wait_until(lambda: told(store, "READONLY"), "health says that it cannot be written")
            failures = store.journal.failures
            wait_until(lambda: store.journal.failures > failures + 1, "it was tried again and again")
            assert len(store.reader.evictions().items) == 50, "history can still be asked"
            for call in (
                lambda: store.intents.save_override("r", {"store": False}, START_S, START_S + 60),
                lambda: store.intents.begin_audit(ENTRY),
            ):
                with pytest.raises(StoreUnavailable):
                    call()
            stats = store.journal_stats()
            assert (stats.written, stats.queued + stats.dropped) == (50, 40 * 50)
            assert 1000 <= stats.dropped < 40 * 50
        wait_until(lambda: store.degraded() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager) != {}
        after = store.journal_stats()
        assert (after.queued, after.dropped, count(path, "evictions")) == (0, stats.dropped, after.written)
        assert after.written == 41 * 50 - stats.dropped
        store.intents.save_override("r", {"store": False}, START_S, START_S + 60)


_FILE_SIZE_LIMIT = """
import resource, signal, sys
from pathlib import Path
from tests.harness.stores import *

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
with running(path, 50, max_queued_rows=1000) as (store, manager):
    fill(manager, range(50))
    assert store.journal.flush(DEADLINE_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(f.stat().st_size for f in path.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, hard))
    for step in range(1, 60):
        fill(manager, range(step * 50, step * 50 + 50), START_S + step, RequestIdentity("long " * 20))
    wait_until(lambda: any("cannot grow" in r or "full" in r for r in store.degraded()), "health says it cannot grow")
    assert manager.counts().ready == 50
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    wait_until(lambda: store.degraded() == [], "health is well again")
    assert store.journal.flush(DEADLINE_S)
    assert in_file(path) == in_memory(manager) != {}
    stats = store.journal_stats()
    assert stats.written + stats.dropped == 59 * 50
    assert count(path, "evictions") == stats.written
    assert shell(path, "PRAGMA integrity_check") == [("ok",)]
print("recovered")
"""


def test_a_limit_on_file_size_is_told_and_recovers(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FILE_SIZE_LIMIT, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "recovered"


def test_rows_that_could_not_be_written_before_a_reset_are_not_written_after_it(path: Path) -> None:
    with running(path, 40) as (store, manager):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            fill(manager, range(40))
            wait_until(lambda: "slots" in store.journal._failing, "writing the rows has failed")
            assert store.journal._projection.pending_rows == 40
            manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == {} == in_memory(manager)


def test_a_failure_is_logged_once_a_while(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(path) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            wait_until(lambda: store.journal.failures >= 3, "it has failed three times")
        wait_until(lambda: store.degraded() == [], "health is well again")
    assert len([record for record in caplog.records if "locked" in record.getMessage()]) == 1
