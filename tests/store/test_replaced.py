"""The database is replaced or ruined under an engine: that goes on, is told, and the store recovers by itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.store import AuditEntry, OverrideRecord, Store, StoreUnavailable
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import SlotRows

from .helpers import (
    DEADLINE_S,
    START_S,
    count,
    fill,
    held_exclusively,
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
        store.intents.save_override("r", {"store": False}, START_S, START_S + 600)
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
        assert [o.request for o in store.reader.load_overrides(START_S)] == ["r"]
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
                store.intents.begin_audit(ENTRY)
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)


def test_rows_of_an_older_copy_go_even_if_memory_tells_of_live_slots_only(path: Path) -> None:
    store, manager = open_store(path, 40)

    class TellsOfLiveSlots:
        def dirty_rows(self, limit: int) -> SlotRows | None:
            return Inventory(manager).dirty_rows(limit)

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
        assert manager.drop_key(key_of(number), START_S + 1)
    assert store.journal.flush(DEADLINE_S)
    os.replace(copy, path)
    wait_until(lambda: store.health() != [], "health says that the file was replaced")
    wait_until(lambda: store.health() == [], "health is well again")
    assert store.journal.flush(DEADLINE_S)
    assert in_file(path) == in_memory(manager)
    assert len(in_memory(manager)) == 10
    assert store.close(DEADLINE_S)


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
            store.intents.begin_audit(ENTRY)
        within_deadline(lambda: fill(manager, range(100, 110), START_S + 1))
        assert path.read_bytes().startswith(b"not a database"), "what is not ours is not overwritten"
        path.unlink()
        wait_until(lambda: store.health() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert in_file(path) == in_memory(manager)
