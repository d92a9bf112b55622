"""The database: connections and their creation, transactions, and statements for either kind of it.

SQLite runs in WAL mode, so that readers go on beside the one writer. Every wait is bounded. Connections never create a
file: a deleted database would come back empty and without a schema. PostgreSQL is accessed with psycopg; reads are
snapshots there, too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Table,
    create_engine,
    event,
    extract,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError

from kvferry.app.store.errors import (
    DatabaseUnavailable,
    OutcomeUnknown,
    StoreError,
    diagnose,
    raising_store_error,
    raising_unavailable,
)
from kvferry.app.store.migrate import Upgrade, migrate
from kvferry.app.store.threads import CallThreads, Change, database_only, result_async, result_of
from kvferry.core.errors import FailureCause

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 512
"""Length of the longest text that is written to a row; see `clean`."""

_SQLITE = "sqlite:///"
_POSTGRESQL = "postgresql+psycopg"
_EXAMPLE = "it should look like sqlite:////folder/kvferry.db"
_CACHE_KIB = 16 * 1024
_MAX_WAL_BYTES = 64 << 20
_MAX_READERS = 8
_RETRY_S = 0.02
_STATEMENT_TIMEOUT_S = 30
_NETWORK_TIMEOUT_S = 10
_KEEPALIVES = {"keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 2}
"""In seconds: the system's default ends the connection to a server that has vanished after two hours."""


def parse_url(given: str) -> URL:
    """Return the URL of a database. Raises `StoreError`."""
    if given.startswith(_SQLITE):
        # The path is not percent-decoded, since it may be the name of a folder.
        database = given.removeprefix(_SQLITE)
        if not database or database == ":memory:" or "?" in database or "\0" in database:
            raise StoreError(f"KVFERRY_DATABASE_URL {given!r} does not name a plain file without options; {_EXAMPLE}")
        return URL.create("sqlite", database=database)
    try:
        url = make_url(given)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        # The text may hold a password.
        raise StoreError(f"KVFERRY_DATABASE_URL is not the URL of a database; {_EXAMPLE}") from None
    if backend == "sqlite":
        raise StoreError(f"KVFERRY_DATABASE_URL {masked(url)} does not name a file; {_EXAMPLE}")
    if "@" in f"{url.host}{url.database}":
        # What is before it belongs to the password, and must not be shown.
        raise StoreError(
            "KVFERRY_DATABASE_URL has more than one @; percent-encode user and password: write %40 for @, %2F for /"
        )
    if backend == "postgresql":
        if url.drivername not in ("postgresql", _POSTGRESQL):
            raise StoreError(
                f"KVFERRY_DATABASE_URL {masked(url)}: psycopg is the only driver for PostgreSQL; write postgresql://..."
            )
        return url.set(drivername=_POSTGRESQL)
    if backend == "postgres":
        raise StoreError("KVFERRY_DATABASE_URL begins with postgres://; write postgresql://...")
    return url


def masked(url: URL) -> str:
    """Return a URL without user, password and options, for logs and responses."""
    where = f"{url.host}:{url.port}" if url.port else url.host or ""
    return f"{url.get_backend_name()}://{where}/{url.database or ''}"


def sqlite_path(url: URL) -> Path | None:
    """Return the absolute path of a SQLite database, None for another kind."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return None
    return Path(url.database).absolute()


def make_engine(url: URL, busy_timeout_s: float, *, read_only: bool = False) -> Engine:
    """Return a pool of connections."""
    path = sqlite_path(url)
    if path is None:
        return _server_engine(url, busy_timeout_s, read_only)
    where = f"{path.as_uri()}?mode=rw"

    def connect() -> sqlite3.Connection:
        # Transactions are begun below, and one thread at a time uses a connection.
        connection = sqlite3.connect(
            where, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            _set_pragmas(connection, read_only)
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine(
        "sqlite:///" + str(path),
        creator=connect,
        pool_size=_MAX_READERS if read_only else 1,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
        json_serializer=partial(json.dumps, separators=(",", ":")),
        json_deserializer=_read_json,
    )
    # A writer that began as a reader could find its snapshot outdated and fail without waiting.
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _server_engine(url: URL, busy_timeout_s: float, read_only: bool) -> Engine:
    if url.drivername != _POSTGRESQL:
        return create_engine(url)
    settings = {"lock_timeout": math.ceil(busy_timeout_s * 1000)}
    if read_only:
        settings["statement_timeout"] = _STATEMENT_TIMEOUT_S * 1000
    given = url.query.get("options", "")
    options = [
        given if isinstance(given, str) else " ".join(given),
        *(f"-c {name}={n}" for name, n in settings.items()),
    ]
    arguments: dict[str, Any] = {
        "options": " ".join(options).strip(),
        "application_name": "kvferry",
        # libpq's minimum is two seconds.
        "connect_timeout": max(2, math.ceil(busy_timeout_s)),
        "tcp_user_timeout": _NETWORK_TIMEOUT_S * 1000,
        # That limits what is not acknowledged. A server that has vanished while it executed a statement sends nothing.
        **_KEEPALIVES,
    }
    engine = create_engine(
        url.difference_update_query(["options"]),
        connect_args=arguments,
        # The writer is in use every second, so that the journal notices a lost connection.
        pool_pre_ping=read_only,
        pool_size=_MAX_READERS if read_only else 1,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
    )
    if read_only:
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return engine


def time_on_host(connection: Connection, now_s: float) -> float:
    """Return the Unix time on the database's host, by which engines on several hosts compare times.

    Args:
        connection: in a transaction.
        now_s: the time on this host, which is that of a SQLite file.
    """
    if connection.dialect.name == "sqlite":
        return now_s
    return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())


def _read_json(text: str | bytes) -> Any:
    """Return the value of a JSON column, None for text that is not JSON, which SQLite accepts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _set_pragmas(connection: sqlite3.Connection, read_only: bool) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    if read_only:
        connection.execute("PRAGMA query_only=ON")
        return
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    connection.execute(f"PRAGMA journal_size_limit={_MAX_WAL_BYTES}")


def _create_file(path: Path, busy_timeout_s: float) -> None:
    """Create folder and file where they are missing, with access for the owner alone, and enable WAL mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    end_s = time.monotonic() + busy_timeout_s
    with closing(sqlite3.connect(path, timeout=busy_timeout_s)) as connection:
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                # SQLite does not wait for another process that enables it at the same time.
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= end_s:
                    raise
                time.sleep(_RETRY_S)
    if mode != "wal":
        _log.warning("database: no WAL mode, so that readers and the writer wait for each other: %s (%s)", path, mode)


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class Waits:
    """Time limits of a database, and intervals of its journal."""

    busy_s: float = 1.0
    """Bound of each wait for another connection's lock."""
    open_s: float = 5.0
    """The same while the schema is upgraded."""
    round_s: float = 1.0
    """Interval of the journal's rounds."""
    max_backoff_s: float = 2.0
    """Longest interval after rounds that failed."""


DEFAULT_WAITS = Waits()


class Database:
    """Connections to one database. Methods may be called from any thread once `open` has returned."""

    def __init__(self, url: str, waits: Waits = DEFAULT_WAITS) -> None:
        self._url = parse_url(url)
        self.name = masked(self._url)
        self.waits = waits
        self._path = sqlite_path(self._url)
        self._opened_file: tuple[int, int] | None = None
        self._writes = CallThreads("kvferry-writer", 1)
        self._writer: Engine | None = None
        self._reader: Engine | None = None

    def open(self) -> Upgrade:
        """Create what is missing and migrate the schema to this version. Raises `StoreError`."""
        with raising_store_error(self.name):
            if self._path is not None:
                _create_file(self._path, self.waits.open_s)
                self._opened_file = _file_identity(self._path)
            migrator = make_engine(self._url, self.waits.open_s)
            try:
                upgrade = migrate(migrator)
            finally:
                migrator.dispose()
            self._writer = make_engine(self._url, self.waits.busy_s)
            self._reader = make_engine(self._url, self.waits.busy_s, read_only=True)
        return upgrade

    def check(self) -> None:
        """Raise `DatabaseUnavailable` if the SQLite file is no longer the one that was opened.

        Connections keep using a file that was moved or deleted, so that only the inode under the path shows it.
        """
        if self._path is None:
            return
        identity = _file_identity(self._path)
        if identity is None or identity != self._opened_file:
            what = "was deleted or moved away" if identity is None else "was replaced by another file"
            raise DatabaseUnavailable(
                f"the file of the database {what} while in use: restart kvferry, until then nothing is written",
                FailureCause.GONE,
            )

    def write(self, statements: Callable[[Connection], T], timeout_s: float | None = None) -> T:
        """Execute statements in a transaction of their own, and return their result.

        Without `timeout_s`, wait for as long as the database takes.

        Raises:
            DatabaseUnavailable: nothing was written.
            OutcomeUnknown: the connection was lost during the commit, or it did not end in time.
        """
        return result_of(self._submit(database_only(statements)), timeout_s)

    async def change(self, change: Change[T], timeout_s: float) -> T:
        """Commit a change, apply it in memory, and return its result. Raises as `write` does."""
        return await result_async(self._submit(change), timeout_s)

    def _submit(self, change: Change[T]) -> Future[T]:
        return self._writes.submit(partial(self._execute, change))

    def _execute(self, change: Change[T], may_commit: Callable[[], bool]) -> T:
        """Execute a change. Thread: writer."""
        is_committing = False
        self.check()
        with raising_unavailable():
            try:
                with _opened(self._writer).begin() as connection:
                    apply = change(connection)
                    is_committing = may_commit()
                    if not is_committing:
                        raise DatabaseUnavailable("the caller stopped waiting before the commit")
            except DBAPIError as error:
                if is_committing and error.connection_invalidated:
                    failure = diagnose(error)
                    raise OutcomeUnknown(f"{failure.text}, during a commit", failure.cause) from error
                raise
        return apply()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Read a snapshot on a connection of its own. Raises `DatabaseUnavailable`."""
        self.check()
        with raising_unavailable(), _opened(self._reader).begin() as connection:
            yield connection

    def drop_connections(self) -> None:
        """Close connections, those in use when they are returned; later calls make new ones."""
        for engine in (self._writer, self._reader):
            if engine is not None:
                engine.dispose()

    def close(self) -> None:
        """Execute the changes in the queue and close connections; later calls raise `DatabaseUnavailable`."""
        self._writes.close(self.waits.busy_s)
        self.drop_connections()
        self._writer = self._reader = None


def _opened(engine: Engine | None) -> Engine:
    if engine is None:
        raise DatabaseUnavailable("the database is not open")
    return engine


# --- what depends on the kind of database ----------------------------------------------------------------------

_INSERTS: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def upsert(connection: Connection, table: Table, row: Mapping[str, Any], kept: Collection[str] = ()) -> None:
    """Write a row by primary key: insert a new one, or overwrite an existing one except for the columns in `kept`."""
    insert = _INSERTS.get(connection.dialect.name)
    if insert is None:
        raise StoreError(f"databases of kind {connection.dialect.name} are not supported; use {' or '.join(_INSERTS)}")
    statement = insert(table).values(row)
    primary = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in row if name not in primary and name not in kept}
    connection.execute(statement.on_conflict_do_update(index_elements=primary, set_=changed))


def insert_rows(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows with the same columns, none of which is JSON or bytes."""
    names = ", ".join(f'"{name}"' for name in rows[0])
    if connection.dialect.name == "sqlite":
        # Not as a construct of SQLAlchemy, which takes as much processor time for each row as half of SQLite's.
        values = ", ".join(f":{name}" for name in rows[0])
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({values})", list(rows))  # noqa: S608
        return
    # One statement with one parameter: a statement for each row takes server and driver twice the processor time.
    statement = text(
        f"INSERT INTO {table.name} ({names}) "  # noqa: S608  names of the schema
        f"SELECT {names} FROM json_populate_recordset(NULL::{table.name}, CAST(:rows AS JSON))"
    )
    connection.execute(statement, {"rows": json.dumps(rows, allow_nan=False)})


def write_accepted(connection: Connection, rows: Sequence[T], write: Callable[[Sequence[T]], object]) -> int:
    """Write rows in the transaction under way, without those that the database rejects; return the number of these.

    A request's id may have characters that the encoding of a PostgreSQL database lacks.
    """
    if not rows:
        return 0
    try:
        with connection.begin_nested():
            write(rows)
    except (DataError, IntegrityError):
        if len(rows) == 1:
            return 1
        middle = len(rows) // 2
        return sum(write_accepted(connection, part, write) for part in (rows[:middle], rows[middle:]))
    return 0


@overload
def clean(given: str) -> str: ...
@overload
def clean(given: None) -> None: ...
def clean(given: str | None) -> str | None:
    """Return a text of bounded length without NULs and lone surrogates. Filters use it too, so that they match."""
    if given is None:
        return None
    cut = given[:MAX_TEXT_CHARS]
    if cut.isascii() and "\0" not in cut:
        return cut
    return cut.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
