"""The schema: made and unmade by migrations, the same as the models, readable in a shell, with an index a filter."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Select, create_engine, inspect, text
from sqlalchemy.dialects import sqlite

from kvferry.app.store import EvictionFilter, StoreError, upgrade
from kvferry.app.store.database import parse_url
from kvferry.app.store.reader import (
    _encode_cursor,
    audit_statement,
    evictions_statement,
)
from kvferry.app.store.schema import METADATA
from tests.harness.commands import run_script, running_script
from tests.harness.debian import installed
from tests.harness.stores import (
    SHORT_WAITS,
    START_S,
    Where,
    eviction,
    fill,
    held_exclusively,
    in_file,
    in_memory,
    items_of,
    rebuild_at,
    running,
    shell,
    url_of,
    write,
)
from tests.harness.waiting import DEADLINE_S


def test_migrations_create_the_declared_schema(where: Where) -> None:
    assert upgrade(url_of(where)).before is None
    engine = create_engine(parse_url(url_of(where)))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    found = {index["name"] for table in METADATA.tables for index in inspect(engine).get_indexes(table)}
    assert found == {index.name for table in METADATA.tables.values() for index in table.indexes}
    engine.dispose()


def made_by_migrations(where: Where) -> tuple[set[str], set[str]]:
    """The tables and the views."""
    engine = create_engine(parse_url(url_of(where)))
    found = inspect(engine)
    tables, views = set(found.get_table_names()), set(found.get_view_names())
    engine.dispose()
    return tables - {"alembic_version"}, views


def test_migrations_go_up_over_data(where: Where) -> None:
    with running(where) as (store, manager):
        fill(manager, range(8))
        fill(manager, range(20, 24), START_S + 1)
        write(store, store.writer.save_override, "r", {"max_offload_tokens": "unlimited"}, START_S, START_S + 60)
        assert store.journal.flush(DEADLINE_S)
        truth = in_memory(manager)
    # Of `slots`, `evictions` and `engines` an older version knows less; what it had of `slots` is compared below.
    old = "name, pool_kind, seen_at, eviction_rows, eviction_days"
    rows = (
        "id, engine, time, key, reason, policy, age_s, idle_s, hits, position, size_bytes, request, tenant, needed_by"
    )
    tables = {"evictions": rows, "overrides": "*", "engines": old}

    def content() -> dict[str, list[tuple[object, ...]]]:
        return {table: shell(where, f"SELECT {columns} FROM {table}") for table, columns in tables.items()}

    before = content()
    rebuild_at(where, "0001")
    assert made_by_migrations(where)[1] == set()
    assert content() == before
    again = upgrade(url_of(where))
    assert (again.before, again.after) == ("0001", "0015")
    assert upgrade(url_of(where)) == upgrade(url_of(where))
    assert content() == before
    assert in_file(where) == truth


UPGRADING = "import sys; from kvferry.app.store import upgrade; print(upgrade(sys.argv[1]).after)"


def test_upgrade_depends_on_no_folder_and_keeps_others_out(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "migrations").mkdir(parents=True)
    (elsewhere / "migrations" / "env.py").write_text("raise RuntimeError('not ours')")
    path = tmp_path / "new %41 folder" / "deep" / "kvferry.db"
    # As an interpreter that is started in the folder has its path.
    done = run_script(f"import sys; sys.path.insert(0, '')\n{UPGRADING}", url_of(path), cwd=elsewhere)
    assert done.stdout.strip() == "0015", done.stderr
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert shell(path, "PRAGMA journal_mode") == [("wal",)]


def test_two_processes_may_upgrade_at_once(where: Where) -> None:
    with running_script(UPGRADING, url_of(where)) as (_, one), running_script(UPGRADING, url_of(where)) as (_, two):
        assert (one.read().strip(), two.read().strip()) == ("0015", "0015")


def test_readable_views_work_in_the_sqlite_shell(path: Path) -> None:
    sqlite3 = installed("sqlite3", "sqlite3")
    with running(path) as (store, manager):
        store.journal.append(eviction([1], START_S + 0.25, request="chat-1"))
        fill(manager, range(1))
        assert store.journal.flush(DEADLINE_S)
        sql = "SELECT time, key, reason, request FROM readable_evictions; SELECT slot, request FROM readable_slots"
        done = subprocess.run([sqlite3, str(path), sql], capture_output=True, text=True, check=True)
        record = items_of(store.reader.evictions())[0]
        shown = datetime.fromtimestamp(START_S, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        assert done.stdout.splitlines() == [f"{shown}.250Z|{record.key}|capacity|chat-1", "0|r"]


EVICTIONS_AFTER = _encode_cursor("evictions", START_S, 5)
EVICTION_PLANS = [
    (EvictionFilter(), "engine_time_id"),
    (EvictionFilter(since_s=START_S), "engine_time_id"),
    (EvictionFilter(until_s=START_S), "engine_time_id"),
    (EvictionFilter(reason="capacity"), "engine_reason_time_id"),
    (EvictionFilter(reason="capacity", since_s=START_S, until_s=START_S + 1), "engine_reason_time_id"),
    (EvictionFilter(request="r"), "engine_request_time_id"),
    (EvictionFilter(request="r", since_s=START_S), "engine_request_time_id"),
    (EvictionFilter(tenant="t"), "engine_tenant_time_id"),
    (EvictionFilter(tenant="t", until_s=START_S), "engine_tenant_time_id"),
    (EvictionFilter(reason="capacity", tenant="t"), "engine_tenant_reason_time_id"),
    (EvictionFilter(reason="capacity", tenant="t", until_s=START_S), "engine_tenant_reason_time_id"),
    (EvictionFilter(request="r", tenant="t"), "engine_request_time_id"),
    (EvictionFilter(reason="capacity", request="r"), "engine_request_time_id"),
    (EvictionFilter(reason="capacity", request="r", tenant="t"), "engine_request_time_id"),
]
PLANS = [
    *[(evictions_statement("e", wanted, None), f"ix_evictions_{index}") for wanted, index in EVICTION_PLANS],
    *[(evictions_statement("e", wanted, EVICTIONS_AFTER), index) for wanted, index in EVICTION_PLANS],
    (audit_statement("e", None), "ix_audit_engine_time_id"),
    (audit_statement("e", _encode_cursor("audit", START_S, 5)), "ix_audit_engine_time_id"),
]


def plan_of(path: Path, statement: object) -> str:
    text = str(
        statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})  # type: ignore[attr-defined]
    )
    return "\n".join(str(row[3]) for row in shell(path, f"EXPLAIN QUERY PLAN {text}"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with enough rows that a wrong plan would show."""
    path = tmp_path_factory.mktemp("plans") / "kvferry.db"
    with running(path, 100) as (store, manager):
        for step in range(30):
            fill(manager, range(step * 100, step * 100 + 100), START_S + step)
        assert store.journal.flush(DEADLINE_S)
    return path


@pytest.mark.parametrize(("statement", "index"), PLANS)
def test_every_list_is_read_in_the_order_of_an_index(filled: Path, statement: Select, index: str) -> None:
    plan = plan_of(filled, statement.limit(10))
    assert "SCAN" not in plan
    assert "TEMP B-TREE" not in plan
    assert "SEARCH" in plan
    assert index in plan


def test_a_url_that_cannot_work_refuses_to_start_and_shows_no_password(tmp_path: Path) -> None:
    for url in ("nonsense with s3cret", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:////tmp/x.db?mode=ro", "postgresql+asyncpg://user:s3cret@h/db",
                "unheard://user:s3cret@h/db", "mysql://user:s3cret@h:1/db"):  # fmt: skip
        with pytest.raises(StoreError) as caught:
            upgrade(url)
        assert "DATABASE_URL" in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_a_place_that_cannot_be_written_refuses_to_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="KVFERRY_STATE_DIR or KVFERRY_DATABASE_URL"):
        upgrade(url_of(tmp_path / "file" / "kvferry.db"))
    with pytest.raises(StoreError, match="KVFERRY_STATE_DIR or KVFERRY_DATABASE_URL"):
        upgrade(url_of(tmp_path))


def test_a_file_that_is_no_database_refuses_to_start_and_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"precious notes " * 500)
    with pytest.raises(StoreError, match="move the file away"):
        upgrade(url_of(path))
    assert path.read_bytes() == b"precious notes " * 500


def test_a_database_of_a_newer_version_refuses_to_start(where: Where) -> None:
    upgrade(url_of(where))
    engine = create_engine(parse_url(url_of(where)))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="newer version"):
        upgrade(url_of(where))


def test_a_database_locked_at_start_refuses_to_start(path: Path) -> None:
    upgrade(url_of(path))
    with held_exclusively(path), pytest.raises(StoreError, match="locked"):
        upgrade(url_of(path), SHORT_WAITS)
    assert upgrade(url_of(path)).before == "0015"
