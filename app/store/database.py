"""The database of the metadata store: opened and migrated, written by turns, read beside that, reopened when lost."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from kvferry.app.folders import nearest_folder
from kvferry.app.store.claims import claim_commit
from kvferry.app.store.connections import Access, make_engine, parse_url, prepare_file, shown, sqlite_path
from kvferry.app.store.errors import (
    DatabaseReplaced,
    StoreError,
    StoreUnavailable,
    Trouble,
    diagnose,
    unavailable_on_trouble,
)
from kvferry.app.store.file_watch import FileWatch
from kvferry.app.store.migrate import Upgrade, check_revision, migrate, unmigrate
from kvferry.app.store.turns import WriteTurns

BUSY_TIMEOUT_S = 1.0
OPEN_TIMEOUT_S = 5.0
PERSON_TIMEOUT_S = 3.0


class Database:
    """Connections to one database. Methods may be called from any thread once `open` has returned."""

    def __init__(self, url: str, busy_timeout_s: float = BUSY_TIMEOUT_S, max_bytes: int | None = None) -> None:
        """`busy_timeout_s` bounds each wait for another connection's lock, `max_bytes` a SQLite file's size."""
        self._url = parse_url(url)
        self.name = shown(self._url)
        self.busy_timeout_s = busy_timeout_s
        self._max_bytes = max_bytes
        path = sqlite_path(self._url)
        self._watch = None if path is None else FileWatch(path)
        self._turns = WriteTurns()
        self._writer: Engine | None = None
        self._reader: Engine | None = None
        self._replaced = False
        self.written_s = 0.0
        """When the last transaction was committed, by the monotonic clock."""

    def open(self) -> Upgrade:
        """Create what is missing and bring the schema up to date. Raises `StoreError`."""
        return self._connect(OPEN_TIMEOUT_S)

    def reopen(self) -> bool:
        """Open anew what lies under the path now; True if it is another database, or had no schema.

        Raises `StoreError`, and `StoreUnavailable` while others are writing.
        """
        with self._turns.person(PERSON_TIMEOUT_S):
            self._disconnect()
            if self._watch is not None:
                try:
                    self._watch.verify()
                except DatabaseReplaced:
                    # Known until it was opened: a first attempt may fail, and the file be known to the second.
                    self._replaced = True
                    self._watch.remove_orphaned_log()
            try:
                other = self._connect(self.busy_timeout_s).before is None or self._replaced
            except StoreError:
                # What cannot be written may still be read.
                self._reader = self._make_engine(Access.READ)
                raise
            self._replaced = False
            return other

    def check(self) -> None:
        """Raise `DatabaseReplaced` if the file is no longer the one that was opened."""
        if self._watch is not None:
            self._watch.verify()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction of the journal, whose errors come as they are. It waits for people, who do not wait for it."""
        with self._turns.journal(self.busy_timeout_s):
            self.check()
            with self._opened(self._writer).begin() as connection:
                yield connection
        self.written_s = time.monotonic()

    @contextmanager
    def write_for_person(self) -> Iterator[Connection]:
        """A transaction that a caller waits for. Raises `StoreUnavailable`; then nothing was written."""
        with unavailable_on_trouble(self.name), self._turns.person(PERSON_TIMEOUT_S):
            self.check()
            with self._opened(self._writer).begin() as connection:
                yield connection
                claim_commit()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot for reading, on a connection of its own. Raises `StoreUnavailable`."""
        with unavailable_on_trouble(self.name), self._opened(self._reader).begin() as connection:
            yield connection

    def limit_bytes(self, max_bytes: int | None) -> None:
        """Change the bound on a SQLite file's size, from the next connection on."""
        with self._turns.person(PERSON_TIMEOUT_S):
            self._max_bytes = max_bytes
            self._disconnect()
            self._make_engines()

    def close(self) -> None:
        """Close what is idle; what is in use closes when it is given back."""
        self._disconnect()

    def _connect(self, timeout_s: float) -> Upgrade:
        with store_error_on_trouble(self.name):
            return self._prepare(timeout_s)

    def _prepare(self, timeout_s: float) -> Upgrade:
        if self._watch is not None:
            prepare_file(self._watch.path, timeout_s)
            self._watch.remember()
        migrator = make_engine(self._url, Access.WRITE, timeout_s, self._max_bytes, self.check)
        try:
            upgrade = migrate(migrator)
        finally:
            migrator.dispose()
        self._make_engines()
        return upgrade

    def _make_engines(self) -> None:
        self._writer = self._make_engine(Access.WRITE)
        self._reader = self._make_engine(Access.READ)

    def _make_engine(self, access: Access) -> Engine:
        max_bytes = self._max_bytes if access is Access.WRITE else None
        return make_engine(self._url, access, self.busy_timeout_s, max_bytes, self.check)

    def _disconnect(self) -> None:
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        for engine in (writer, reader):
            if engine is not None:
                engine.dispose()

    def _opened(self, engine: Engine | None) -> Engine:
        if engine is None:
            raise StoreUnavailable(f"the database {self.name} is not open")
        return engine


@contextmanager
def store_error_on_trouble(name: str) -> Iterator[None]:
    """Turn what keeps a database from being opened or migrated into `StoreError`, with what to do about it."""
    try:
        yield
    except NoSuchModuleError as error:
        raise StoreError(f"KVFERRY_DATABASE_URL: {name}: this kind of database is not known; use sqlite") from error
    except ImportError as error:
        raise StoreError(
            f"KVFERRY_DATABASE_URL: {name}: its driver is not installed ({error.name}); "
            "pip install 'kvferry[postgresql]' brings PostgreSQL's"
        ) from error
    except CommandError as error:
        raise StoreError(
            f"the database {name} cannot be migrated: {error}. It was probably written by a newer version: "
            "install that, or set KVFERRY_DATABASE_URL to another database"
        ) from error
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise StoreError(_advice(error, name)) from error


_PLACE = "set KVFERRY_STATE_DIR or KVFERRY_DATABASE_URL to a place that can be written"
_ADVICE = {
    Trouble.LOCKED: "end what holds it, or set KVFERRY_DATABASE_URL to another database",
    Trouble.UNREACHABLE: "start its server, or correct host and port in KVFERRY_DATABASE_URL",
    Trouble.DENIED: "correct user, password and database in KVFERRY_DATABASE_URL, or grant the user what it needs",
    Trouble.BROKEN: "repair it, or set KVFERRY_DATABASE_URL to another database",
}
_ADVICE_OF_CODE = {
    sqlite3.SQLITE_NOTADB: "move the file away, or set KVFERRY_DATABASE_URL to another path",
    sqlite3.SQLITE_READONLY: f"make it writable, or {_PLACE}",
    sqlite3.SQLITE_CANTOPEN: _PLACE,
}


def _advice(error: SQLAlchemyError | sqlite3.Error | OSError, name: str) -> str:
    """What is wrong with a database, and what to do about that cause."""
    if isinstance(error, OSError):
        reason = f"the database {name} cannot be opened: {error.strerror or error} ({error.filename})"
        return f"{reason}; {_PLACE}"
    found = diagnose(error, name)
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None) or 0
    advice = _ADVICE_OF_CODE.get(code & 0xFF) or _ADVICE.get(found.trouble)
    return found.text if advice is None else f"{found.text}; {advice}"


def check_database(url: str) -> None:
    """Raise `StoreError` for a database that could not be opened; create and change nothing."""
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    with store_error_on_trouble(shown(parsed)):
        if path is not None:
            found = nearest_folder(path)
            if not os.access(found, os.W_OK) or (found != path and not found.is_dir()):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(found))
            if found != path:
                return
        engine = make_engine(parsed, Access.READ, OPEN_TIMEOUT_S, None, lambda: None)
        try:
            with engine.connect() as connection:
                check_revision(connection)
        finally:
            engine.dispose()


def upgrade(url: str) -> Upgrade:
    """Bring a database to this version's schema, creating it where it is missing. Raises `StoreError`."""
    database = Database(url)
    try:
        return database.open()
    finally:
        database.close()


def downgrade(url: str, revision: str) -> Upgrade:
    """Undo migrations down to `revision`, for a way back to an older version. `base` drops every table."""
    engine = make_engine(parse_url(url), Access.WRITE, OPEN_TIMEOUT_S, None, lambda: None)
    try:
        return unmigrate(engine, revision)
    finally:
        engine.dispose()
