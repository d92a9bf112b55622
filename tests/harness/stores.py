"""What the store's tests share: batches to append, a real pool to project, and a second pair of eyes on the file."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import psycopg
from alembic import command
from sqlalchemy import Connection, MetaData, event, inspect, text
from sqlalchemy.pool import Pool

from kvferry.app.store import JsonPage, MetadataStore
from kvferry.app.store.database import Waits, make_engine, parse_url
from kvferry.app.store.migrate import alembic_config
from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.pool.events import EvictionBatch
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import SLOT_RECORD, SlotRows, lines_of
from kvferry.core.stats import EvictionReason
from tests.harness.waiting import DEADLINE_S

SLOT_BYTES = 4096
START_S = float(int(time.time()))
"""Recent, since history that is too old is not kept; whole, so that sums of times are exact."""


T = TypeVar("T")
SHORT_WAITS = Waits(busy_s=0.05, open_s=0.05, round_s=0.05, max_backoff_s=0.1)
"""Of a store that waits briefly for locks, and soon tries again after a failure."""
Where = Path | str
"""A SQLite file, or the URL of a PostgreSQL database."""


def key_of(number: int, group: int = 0) -> Key:
    return hashlib.sha256(str(number).encode()).digest() + bytes([group])


def keys_of(numbers: Sequence[int]) -> list[Key]:
    return [key_of(number) for number in numbers]


def eviction(
    numbers: Sequence[int],
    time_s: float = START_S,
    reason: EvictionReason = EvictionReason.CAPACITY,
    request: str = "r",
    tenant: str | None = None,
    stored_s: float = START_S - 100,
    hit_s: float = 0.0,
) -> EvictionBatch:
    count = len(numbers)
    records = np.zeros(count, dtype=SLOT_RECORD)
    records["generation"] = records["priority_class"] = 1
    records["size"] = SLOT_BYTES
    records["position"] = np.arange(count)
    records["stored_s"], records["hit_s"], records["hits"] = stored_s, hit_s, hit_s > 0
    rows = SlotRows(
        slots=np.arange(count, dtype=np.int64),
        keys=keys_of(numbers),
        live=np.ones(count, dtype=np.bool_),
        origins=[RequestIdentity(request, tenant)] * count,
        lines=lines_of(records),
    )
    return EvictionBatch(time_s, reason, "lru", rows, None)


def fill(
    manager: OffloadManager, numbers: Sequence[int], now_s: float = START_S, origin: RequestIdentity | None = None
) -> None:
    """Store blocks in the pool as an engine does."""
    positions = np.arange(len(numbers), dtype=np.int64)
    offer = manager.prepare_store(
        keys_of(numbers), origin or RequestIdentity("r", "t" * 16, "lora"), positions, 1, now_s
    )
    manager.complete_store(offer.slots, now_s)


def hit(manager: OffloadManager, numbers: Sequence[int], now_s: float) -> None:
    """Load blocks from the pool as an engine does."""
    pin = manager.pin(manager.lookup(keys_of(numbers)))
    assert manager.prepare_load(pin, now_s)
    manager.complete_load(pin)


def shell(path: Where, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Read the database as an outsider does."""
    if isinstance(path, str):
        with psycopg.connect(path) as server:
            return server.execute(sql.replace("%", "%%").replace("?", "%s"), values).fetchall()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=DEADLINE_S)) as connection:
        return connection.execute(sql, values).fetchall()


def rebuild_at(where: Where, revision: str) -> None:
    """Make a database of an older schema, with its present rows as far as that has their columns."""
    engine = make_engine(parse_url(url_of(where)), DEADLINE_S)
    present, older = MetaData(), MetaData()
    with engine.begin() as connection:
        present.reflect(connection)
        rows = {name: connection.execute(table.select()).mappings().all() for name, table in present.tables.items()}
        for view in inspect(connection).get_view_names():
            connection.execute(text(f"DROP VIEW {view}"))
        present.drop_all(connection)
        command.upgrade(alembic_config(connection), revision)
        older.reflect(connection)
        del rows["alembic_version"]
        for name, table in older.tables.items():
            required = {one.name: one.type.python_type() for one in table.columns if not one.nullable}
            names = set(table.columns.keys())
            for row in rows.get(name, ()):
                connection.execute(table.insert(), required | {key: row[key] for key in names & row.keys()})
    engine.dispose()


def execute(path: Where, *statements: str) -> None:
    """Change the database as an outsider does."""
    if isinstance(path, str):
        with psycopg.connect(path) as server:
            for statement in statements:
                server.execute(statement)
        return
    with closing(sqlite3.connect(path, timeout=DEADLINE_S)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def write(store: MetadataStore, statements: Callable[..., T], *values: Any) -> T:
    """Execute a writer's statements as a thread of the service does."""
    return store.database.write(partial(statements, *values))


@contextmanager
def busy_writer(store: MetadataStore) -> Iterator[None]:
    """Occupy the thread that writes, as a transaction does that hangs."""
    begun, released = threading.Event(), threading.Event()

    def hang(_: Connection) -> None:
        begun.set()
        released.wait(DEADLINE_S)

    thread = threading.Thread(target=store.database.write, args=(hang,), daemon=True)
    thread.start()
    assert begun.wait(DEADLINE_S)
    try:
        yield
    finally:
        released.set()
        thread.join(DEADLINE_S)


Projected = dict[int, tuple[Any, ...]]


def in_memory(manager: OffloadManager) -> Projected:
    """What `slots` should say."""
    rows = Inventory(manager).list_blocks(0, manager.table.num_slots)
    return {
        int(slot): (
            rows.keys[i].hex(),
            int(rows.records["generation"][i]),
            int(rows.records["epoch"][i]),
            int(rows.records["size"][i]),
            int(rows.records["position"][i]),
            rows.origins[i].request_id,
            rows.origins[i].tenant,
            rows.origins[i].lora,
            float(rows.records["stored_s"][i]),
            float(rows.records["hit_s"][i]) or None,
            int(rows.records["hits"][i]),
        )
        for i, slot in enumerate(rows.slots)
    }


def in_file(path: Where, engine: str = "e") -> Projected:
    """What `slots` says."""
    columns = "slot, key, generation, epoch, size_bytes, position, request, tenant, lora, stored_at, last_hit_at, hits"
    return {row[0]: row[1:] for row in shell(path, f"SELECT {columns} FROM slots WHERE engine = ?", engine)}


def count(path: Where, table: str) -> int:
    return int(shell(path, f"SELECT count(*) FROM {table}")[0][0])


def url_of(path: Where) -> str:
    return path if isinstance(path, str) else f"sqlite:///{path}"


def open_store(path: Where, slots: int = 8, engine: str = "e", **options: Any) -> tuple[MetadataStore, OffloadManager]:
    """A store on a file and a pool that reports to it; the journal's thread is not started yet."""
    options.setdefault("pool_kind", "pinned")
    store = MetadataStore(url_of(path), engine, **options)
    return store, OffloadManager(slots, SLOT_BYTES, sink=store.journal.append)


@contextmanager
def running(
    path: Where, slots: int = 8, engine: str = "e", **options: Any
) -> Iterator[tuple[MetadataStore, OffloadManager]]:
    """A store on a file, with its journal behind a pool that reports to it."""
    store, manager = open_store(path, slots, engine, **options)
    store.start(Inventory(manager))
    try:
        yield store, manager
    finally:
        store.close(DEADLINE_S)


def items_of(page: JsonPage) -> list[Any]:
    """A page's items as objects, whose times are Unix seconds."""

    def read(item: dict[str, Any]) -> SimpleNamespace:
        for name in ("time", "regretted_at"):
            if item.get(name) is not None:
                item[name] = datetime.fromisoformat(item[name]).timestamp()
        return SimpleNamespace(**item)

    return [read(item) for item in json.loads(page.items)]


@contextmanager
def held_exclusively(path: Path) -> Iterator[None]:
    """Another process's lock on the database."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=DEADLINE_S)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def read_only() -> Iterator[None]:
    """No connection of this process writes any more, as on a disk that was mounted anew for reading."""

    def refuse(connection: Any, record: Any, proxy: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    event.listen(Pool, "checkout", refuse)
    try:
        yield
    finally:
        event.remove(Pool, "checkout", refuse)


def within_deadline(call: Callable[[], None], deadline_s: float = DEADLINE_S / 2) -> None:
    """Run a call that must not block on a thread, and fail if it did."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(deadline_s)
    assert not thread.is_alive(), "the call blocked"
