"""How connections are made: the file, its folder, the pragmas, a server's limits, and who begins a transaction.

SQLite runs in WAL mode, so that readers go on beside the one writer. Every wait is bounded. Connections never create a
file: a database that was deleted would come back empty and without a schema, unnoticed. PostgreSQL is spoken to by
psycopg, and reads there are on a snapshot too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from kvferry.app.store.errors import StoreError

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_SQLITE = "sqlite:///"
_POSTGRESQL = "postgresql+psycopg"
_EXAMPLE = "it should look like sqlite:////folder/kvferry.db"
_CACHE_KIB = 16 * 1024
_WAL_KEPT_BYTES = 64 << 20
_READERS = 8
NOT_JSON = "unreadable_chars"
"""The only field of what is read from a JSON column that holds something else; no policy or rule has such a field."""
_STATEMENT_TIMEOUT_S = 30
"""Whoever asked has given up by then, and the server should too."""
_NETWORK_TIMEOUT_S = 10


class Access(Enum):
    """What a connection is for."""

    READ = "read"
    WRITE = "write"


def parse_url(text: str) -> URL:
    """The URL of a database; `StoreError` if it is none, or one that could not be kept."""
    if text.startswith(_SQLITE):
        # The path is taken as it is: it may come from a folder's name, which nobody has percent-encoded.
        database = text.removeprefix(_SQLITE)
        if not database or database == ":memory:" or "?" in database or "\0" in database:
            raise StoreError(f"KVFERRY_DATABASE_URL {text!r} does not name a plain file without options; {_EXAMPLE}")
        return URL.create("sqlite", database=database)
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        # The text may hold a password, so it is not repeated.
        raise StoreError(f"KVFERRY_DATABASE_URL is not the URL of a database; {_EXAMPLE}") from None
    if backend == "sqlite":
        raise StoreError(f"KVFERRY_DATABASE_URL {shown(url)} does not name a file; {_EXAMPLE}")
    if backend == "postgresql":
        if url.drivername not in ("postgresql", _POSTGRESQL):
            raise StoreError(
                f"KVFERRY_DATABASE_URL {shown(url)}: PostgreSQL is spoken to by psycopg; write postgresql://..."
            )
        return url.set(drivername=_POSTGRESQL)
    return url


def shown(url: URL) -> str:
    """A URL as logs and answers may show it: without user, password and options."""
    where = f"{url.host}:{url.port}" if url.port else url.host or ""
    return f"{url.get_backend_name()}://{where}/{url.database or ''}"


def sqlite_path(url: URL) -> Path | None:
    """The absolute path of a SQLite database, None for another kind."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return None
    return Path(url.database).absolute()


def prepare_file(path: Path, busy_timeout_s: float) -> None:
    """Create the folder and the file where they are missing, for the owner alone, and put the file into WAL mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(path, timeout=busy_timeout_s)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        _log.warning(
            "%s cannot be put into WAL mode (it is in mode %s): readers and the writer will wait for each other",
            path,
            mode,
        )


def make_engine(
    url: URL, access: Access, busy_timeout_s: float, max_bytes: int | None, before_connect: Callable[[], None]
) -> Engine:
    """A pool of connections. `before_connect` may refuse a new one by raising; `max_bytes` bounds a SQLite file."""
    path = sqlite_path(url)
    if path is None:
        return _server_engine(url, access, busy_timeout_s)
    where = f"{path.as_uri()}?mode=rw"

    def connect() -> sqlite3.Connection:
        before_connect()
        # Transactions are begun below, and connections travel between threads one at a time.
        connection = sqlite3.connect(
            where, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            _set_pragmas(connection, access, max_bytes)
        except BaseException:
            connection.close()
            raise
        return connection

    size = _READERS if access is Access.READ else 1
    engine = create_engine(
        "sqlite:///" + str(path),
        creator=connect,
        pool_size=size,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
        json_deserializer=_read_json,
    )
    # Python's lock changes hands at every statement. Row by row, a busy engine could stretch one batch, and with it the
    # database's lock, over seconds; so rows are sent many to a statement.
    engine.dialect.use_insertmanyvalues_wo_returning = True
    # A writer that began as a reader could find its snapshot outdated and fail without waiting.
    begin = "BEGIN" if access is Access.READ else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _server_engine(url: URL, access: Access, busy_timeout_s: float) -> Engine:
    if url.drivername != _POSTGRESQL:
        return create_engine(url)
    settings = {"lock_timeout": math.ceil(busy_timeout_s * 1000)}
    if access is Access.READ:
        settings["statement_timeout"] = _STATEMENT_TIMEOUT_S * 1000
    given = url.query.get("options", "")
    options = [
        given if isinstance(given, str) else " ".join(given),
        *(f"-c {name}={n}" for name, n in settings.items()),
    ]
    arguments: dict[str, Any] = {
        "options": " ".join(options).strip(),
        "application_name": "kvferry",
        # libpq takes less than two seconds for two.
        "connect_timeout": max(2, math.ceil(busy_timeout_s)),
        "tcp_user_timeout": _NETWORK_TIMEOUT_S * 1000,
    }
    size = _READERS if access is Access.READ else 1
    engine = create_engine(
        url.difference_update_query(["options"]),
        connect_args=arguments,
        pool_pre_ping=True,
        pool_size=size,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
    )
    if access is Access.READ:
        # One snapshot a transaction, as in SQLite, and no way to change anything.
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return engine


def _read_json(text: str | bytes) -> Any:
    """Return the value of a JSON column. SQLite takes any text there: one that is not JSON must not fail its query."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {NOT_JSON: len(text)}


def _set_pragmas(connection: sqlite3.Connection, access: Access, max_bytes: int | None) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    if access is Access.READ:
        connection.execute("PRAGMA query_only=ON")
        # Text that is not UTF-8 must not fail its query either.
        connection.text_factory = lambda content: content.decode("utf-8", "replace")
        return
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    connection.execute(f"PRAGMA journal_size_limit={_WAL_KEPT_BYTES}")
    if max_bytes is not None:
        connection.execute(f"PRAGMA max_page_count={max(1, max_bytes // PAGE_BYTES)}")
