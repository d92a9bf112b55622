"""The database file is replaced while in use: the store says so, stops writing, and serving goes on."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.app.store import AuditEntry, DatabaseUnavailable
from kvferry.core.pool.inventory import Inventory
from tests.harness.stores import START_S, fill, in_file, in_memory, open_store, running, shell, within_deadline, write
from tests.harness.waiting import DEADLINE_S, wait_until

ENTRY = AuditEntry(START_S, "admin", "127.0.0.1", "id", "POST", "/admin/v1/reset", {"reason": "test"})


def delete(path: Path) -> None:
    path.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def replace_by_rubbish(path: Path) -> None:
    other = path.with_name("rubbish")
    other.write_bytes(b"not a database " * 1000)
    other.replace(path)


def replace_by_foreign(path: Path) -> None:
    """A valid database without our tables."""
    other = path.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    other.replace(path)


@pytest.mark.parametrize("damage", [delete, delete_folder, move_away, replace_by_rubbish, replace_by_foreign])
def test_replaced_file_is_reported_and_not_written(
    path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store, manager = open_store(path, 100)
    store.start(Inventory(manager))
    fill(manager, range(100))
    assert store.journal.flush(DEADLINE_S)
    damage(path)
    found = path.read_bytes() if path.exists() else None
    wait_until(
        lambda: any("restart kvferry" in reason for reason in store.degraded()),
        "health says that the file was replaced",
    )
    assert str(path) in caplog.text
    assert str(path) not in str(store.degraded())
    within_deadline(lambda: fill(manager, range(200, 210), START_S + 1))
    with pytest.raises(DatabaseUnavailable, match="while in use"):
        write(store, store.writer.begin_audit, ENTRY)
    with pytest.raises(DatabaseUnavailable, match="while in use"):
        write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 600)
    within_deadline(lambda: store.close(DEADLINE_S))
    assert (path.read_bytes() if path.exists() else None) == found
    assert len(in_memory(manager)) == 100


def test_file_moved_back_is_written_again(path: Path) -> None:
    with running(path, 40) as (store, manager):
        fill(manager, range(40))
        assert store.journal.flush(DEADLINE_S)
        moved = path.with_name("moved.db")
        path.rename(moved)
        wait_until(lambda: store.degraded() != [], "health says that the file is gone")
        fill(manager, range(100, 110), START_S + 1)
        moved.rename(path)
        wait_until(lambda: store.degraded() == [], "health is well again")
        assert store.journal.flush(DEADLINE_S)
        assert shell(path, "PRAGMA integrity_check") == [("ok",)]
        assert in_file(path) == in_memory(manager)
