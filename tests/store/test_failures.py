"""The database is locked, full, replaced, deleted or broken while an engine runs: it goes on, is told, and recovers."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from app.store import AuditEntry, OverrideRecord, Store, StoreUnavailable
from core.events import Origin, SlotRows

from .helpers import (
    DEADLINE_S,
    START_S,
    count,
    eviction,
    fill,
    held_exclusively,
    hit,
    in_file,
    in_memory,
    key_of,
    open_store,
    running,
    shell,
    wait_until,
    within_deadline,
)

ENTRY = AuditEntry(START_S, "admin", "127.0.0.1", "id", "POST", "/admin/v1/reset", {"reason": "test"})


def told(store: Store, *words: str) -> bool:
    return any(all(word in reason for word in words) for reason in store.health())


def test_a_locked_database_is_told_and_costs_no_waiting_and_no_slot(path: Path) -> None:
    with running(path, 200, max_queued_rows=500) as (store, manager):
        fill(manager, range(100))
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):

            def traffic() -> None:
                for step in range(1, 40):
                    fill(manager, range(step * 100, step * 100 + 100), START_S + step, Origin(f"r{step}"))
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
                lambda: store.save_override("r", {"store": False}, START_S, START_S + 60),
                lambda: store.delete_override("r"),
                lambda: store.begin_audit(ENTRY),
            ):
                with pytest.raises(StoreUnavailable, match="locked"):
                    call()
            assert store.reader.evictions().items == [], "readers go on beside a writer"
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
        after = store.journal_stats()
        assert (after.queued, after.dropped, after.lag_s) == (0, stats.dropped, 0.0)
        assert count(path, "evictions") == after.written == 3800 - stats.dropped
        assert store.begin_audit(ENTRY) == 1
        assert store.load_overrides(START_S) == [], "what was answered with 503 was not done"


def test_a_lock_is_noticed_without_traffic(path: Path) -> None:
    with running(path) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            wait_until(lambda: told(store, "locked"), "an idle journal notices too")
        wait_until(lambda: store.health() == [], "health is well again")


def test_closing_while_locked_is_bounded(path: Path) -> None:
    store, manager = open_store(path)
    store.start(manager)
    assert store.journal.flush(DEADLINE_S)
    with held_exclusively(path):
        store.journal.evicted(eviction([1]))
        within_deadline(lambda: store.close(0.2), DEADLINE_S)
        assert not store.close(0.1), "an eviction was not written, and close says so"
    assert store.journal_stats().queued == 1


def test_a_full_database_is_told_and_recovers(path: Path) -> None:
    with running(path, 50, max_queued_rows=1000) as (store, manager):
        fill(manager, range(50))
        assert store.journal.flush(DEADLINE_S)
        pages = shell(path, "PRAGMA page_count")[0][0]
        store.database.limit_bytes((pages + 4) * 4096)
        for step in range(1, 60):
            fill(manager, range(step * 50, step * 50 + 50), START_S + step, Origin("long " * 20))
        wait_until(lambda: told(store, "full", "EVICTION_HISTORY_ROWS"), "health says that the database is full")
        assert manager.counts().ready == 50
        assert store.reader.slots() != []
        store.database.limit_bytes(None)
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
        stats = store.journal_stats()
        assert stats.written + stats.dropped == 59 * 50
        assert count(path, "evictions") == stats.written


_FILE_SIZE_LIMIT = """
import resource, signal, sys
from pathlib import Path
from tests.store.helpers import *

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
with running(path, 50, max_queued_rows=1000) as (store, manager):
    fill(manager, range(50))
    assert store.journal.flush(DEADLINE_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(f.stat().st_size for f in path.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, hard))
    for step in range(1, 60):
        fill(manager, range(step * 50, step * 50 + 50), START_S + step, Origin("long " * 20))
    wait_until(lambda: any("cannot grow" in r or "full" in r for r in store.health()), "health says it cannot grow")
    assert manager.counts().ready == 50
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    wait_until(lambda: store.health() == [], "health is well again")
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


def sabotage_delete(path: Path) -> None:
    path.unlink()


def sabotage_delete_with_log(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        Path(str(path) + name).unlink(missing_ok=True)


def sabotage_delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def sabotage_folder_by_file(path: Path) -> None:
    """For a moment there is no folder at all, nor a place for one."""
    shutil.rmtree(path.parent)
    path.parent.touch()
    threading.Timer(2.0, path.parent.unlink).start()


def sabotage_move_away(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def sabotage_replace_by_empty(path: Path) -> None:
    other = path.with_name("other.db")
    other.touch()
    other.replace(path)


def sabotage_replace_by_foreign(path: Path) -> None:
    """A database of somebody else, valid and without our tables, while our log lies beside it."""
    other = path.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.executemany("INSERT INTO theirs VALUES (?)", [("B" * 500,)] * 500)
        connection.commit()
    other.replace(path)


@pytest.mark.parametrize(
    "sabotage",
    [
        sabotage_folder_by_file,
        sabotage_delete,
        sabotage_delete_with_log,
        sabotage_delete_folder,
        sabotage_move_away,
        sabotage_replace_by_empty,
        sabotage_replace_by_foreign,
    ],
)
def test_a_database_replaced_under_it_is_told_and_filled_anew(path: Path, sabotage: object) -> None:
    restored = threading.Event()
    with running(path, 100, on_replaced=restored.set) as (store, manager):
        fill(manager, range(100))
        fill(manager, range(200, 250), START_S + 1)
        store.save_override("r", {"store": False}, START_S, START_S + 600)
        assert store.journal.flush(DEADLINE_S)
        sabotage(path)  # type: ignore[operator]
        fill(manager, range(300, 310), START_S + 2)
        wait_until(lambda: told(store, str(path), "while in use"), "health says that the file was replaced")
        within_deadline(lambda: fill(manager, range(400, 410), START_S + 3))
        wait_until(lambda: store.health() == [], "health is well again")
        assert restored.wait(DEADLINE_S)
        assert store.journal.flush(DEADLINE_S)
        assert shell(path, "PRAGMA integrity_check") == [("ok",)]
        assert shell(path, "PRAGMA journal_mode") == [("wal",)]
        assert in_file(path) == in_memory(manager)
        assert len(in_memory(manager)) == 100
        assert shell(path, "SELECT name FROM engines") == [("e",)]
        assert path.parent.stat().st_mode & 0o777 == 0o700
        store.intents.save_overrides([OverrideRecord("r", {"store": False}, START_S, START_S + 600)])
        assert [o.request for o in store.load_overrides(START_S)] == ["r"]
        fill(manager, range(500, 510), START_S + 4)
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)


def test_an_older_copy_put_in_place_is_brought_up_to_date(path: Path) -> None:
    """The rows of the copy describe slots that hold something else by now, and its log is not the one beside it."""
    with running(path, 40) as (store, manager):
        fill(manager, range(40))
        assert store.journal.flush(DEADLINE_S)
        copy = path.with_name("copy.db")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        assert count(copy, "slots") == 40
        manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
        fill(manager, range(100, 103), START_S + 2)
        for step in range(20):
            fill(manager, range(100, 103 + step), START_S + 3 + step)
            assert store.journal.flush(DEADLINE_S)
        os.replace(copy, path)
        wait_until(lambda: told(store, "replaced by another file"), "health says that the file was replaced")
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert shell(path, "PRAGMA integrity_check") == [("ok",)]
        assert in_file(path) == in_memory(manager)


def test_an_older_copy_that_cannot_be_opened_at_first_is_still_brought_up_to_date(path: Path) -> None:
    with running(path, 40) as (store, manager):
        fill(manager, range(40))
        assert store.journal.flush(DEADLINE_S)
        copy = path.with_name("copy.db")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        fill(manager, range(100, 110), START_S + 1)
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(copy):
            os.replace(copy, path)
            wait_until(lambda: told(store, "locked"), "the copy could not be opened")
            with pytest.raises(StoreUnavailable):
                store.begin_audit(ENTRY)
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)


def test_rows_of_an_older_copy_go_even_if_memory_tells_of_live_slots_only(path: Path) -> None:
    store, manager = open_store(path, 40)

    class TellsOfLiveSlots:
        def dirty_rows(self, limit: int) -> SlotRows | None:
            return manager.dirty_rows(limit)

        def mark_all_dirty(self) -> None:
            for slot in in_memory(manager):
                manager.table.dirty[slot] = True

    store.start(TellsOfLiveSlots())
    fill(manager, range(40))
    assert store.journal.flush(DEADLINE_S)
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    for number in range(30):
        assert manager.drop_block(key_of(number), START_S + 1)
    assert store.journal.flush(DEADLINE_S)
    os.replace(copy, path)
    wait_until(lambda: store.health() != [], "health says that the file was replaced")
    wait_until(lambda: store.health() == [], "health is well again")
    assert store.journal.flush(DEADLINE_S)
    assert in_file(path) == in_memory(manager)
    assert len(in_memory(manager)) == 10
    assert store.close(DEADLINE_S)


def test_rows_that_could_not_be_written_before_a_reset_are_not_written_after_it(path: Path) -> None:
    with running(path, 40) as (store, manager):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            fill(manager, range(40))
            wait_until(lambda: "slots" in store.journal._ailments, "writing the rows has failed")
            assert store.journal._projection.pending_rows == 40
            manager.reset(np.empty(0, dtype=np.int64), START_S + 1)
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == {} == in_memory(manager)


def test_a_database_emptied_in_place_is_told_and_filled_anew(path: Path) -> None:
    with running(path, 40) as (store, manager):
        fill(manager, range(40))
        assert store.journal.flush(DEADLINE_S)
        with closing(sqlite3.connect(path, isolation_level=None, timeout=DEADLINE_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            ours = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'table') ORDER BY type DESC"
            for kind, name in connection.execute(ours).fetchall():
                connection.execute(f'DROP {kind} "{name}"')
            connection.execute("COMMIT")
        fill(manager, range(100, 110), START_S + 1)
        wait_until(lambda: told(store, "no such table"), "health says that tables are missing")
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)


def test_rubbish_in_place_is_told_until_somebody_moves_it_away(path: Path) -> None:
    with running(path, 40) as (store, manager):
        fill(manager, range(40))
        assert store.journal.flush(DEADLINE_S)
        rubbish = path.with_name("rubbish")
        rubbish.write_bytes(b"not a database " * 1000)
        rubbish.replace(path)
        wait_until(lambda: told(store, "not a database"), "health says what lies there")
        with pytest.raises(StoreUnavailable):
            store.begin_audit(ENTRY)
        within_deadline(lambda: fill(manager, range(100, 110), START_S + 1))
        assert path.read_bytes().startswith(b"not a database"), "what is not ours is not overwritten"
        path.unlink()
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)


def test_a_failure_is_logged_once_a_while(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(path) as (store, _):
        assert store.journal.flush(DEADLINE_S)
        with held_exclusively(path):
            wait_until(lambda: store.journal.failures >= 3, "it has failed three times")
        wait_until(lambda: store.health() == [], "health is well again")
    assert len([record for record in caplog.records if "locked" in record.getMessage()]) == 1
