"""The claim of an engine's name on a database: one process at a time writes rows under a name.

The operating system or the server releases a claim when its process ends, however that ends: for SQLite it is a file
lock beside the database, for PostgreSQL an advisory lock of a session that stays open.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from kvferry.app.store.connections import Access, make_engine, parse_url, shown, sqlite_path
from kvferry.app.store.database import store_error_on_trouble
from kvferry.app.store.errors import StoreError, Trouble, diagnose

_log = logging.getLogger(__name__)

MAX_NUMBER = 100
RELEASE_S = 0.5
"""How long a server may take to notice that a process was killed, whose session has the lock."""
_CONNECT_S = 2.0
_KEEPALIVES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""A server releases the locks of a host that has died when these have gone unanswered, not after hours."""


class _Lock(Protocol):
    """What a claim is held by."""

    def take(self) -> bool:
        """Take the lock; False where another process has it. Raises `OSError` and `SQLAlchemyError`."""

    def keep(self) -> bool:
        """Whether it is held still, or was taken again. Raises as `take` does."""

    def holder(self) -> str:
        """The process that has it, in words."""

    def close(self) -> None:
        """Release the lock; may be called again."""


class NameClaim:
    """A name that this process has on a database, until closed."""

    def __init__(self, name: str, lock: _Lock) -> None:
        self.name = name
        self._lock = lock

    def keep(self) -> bool:
        """Whether this process has the name; takes it again where the lock was lost. Thread: journal.

        Raises `OSError` and `SQLAlchemyError` while the database is gone.
        """
        return self._lock.keep()

    def holder(self) -> str:
        """The process that has the name, in words."""
        return self._lock.holder()

    def close(self) -> None:
        """Give the name up; may be called again."""
        self._lock.close()


def claim_name(url: str, name: str, *, is_default: bool = False) -> NameClaim:
    """Claim an engine's name on the database at `url`.

    Args:
        is_default: the name was not set by the operator, so a number is appended where another process has it.

    Raises:
        StoreError: the name is taken, or the database cannot be reached.
    """
    parsed = parse_url(url)
    for number in range(1, MAX_NUMBER + 1 if is_default else 2):
        wanted = name if number == 1 else f"{name}-{number}"
        with store_error_on_trouble(shown(parsed)):
            lock = _lock_of(parsed, wanted)
            try:
                if lock.take():
                    if number > 1:
                        _log.warning(
                            "KVFERRY_ENGINE_NAME is not set, and another process has the name %s on the database %s: "
                            "this one is called %s; set KVFERRY_ENGINE_NAME for a name that stays",
                            name,
                            shown(parsed),
                            wanted,
                        )
                    return NameClaim(wanted, lock)
                holder = lock.holder()
            except BaseException:
                lock.close()
                raise
        lock.close()
    raise StoreError(
        f"KVFERRY_ENGINE_NAME={name}: another process ({holder}) has this name on the database {shown(parsed)}; stop "
        "it, or set KVFERRY_ENGINE_NAME to another name"
    )


def check_name(url: str, name: str) -> None:
    """Raise `StoreError` for a name that another process has; create nothing."""
    parsed = parse_url(url)
    if sqlite_path(parsed) is None or _FileLock.path_of(parsed, name).exists():
        claim_name(url, name).close()


def _lock_of(url: URL, name: str) -> _Lock:
    return _ServerLock(url, name) if sqlite_path(url) is None else _FileLock(url, name)


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


class _FileLock:
    """A lock on a file beside a SQLite database."""

    def __init__(self, url: URL, name: str) -> None:
        self._path = self.path_of(url, name)
        self._file = -1

    @staticmethod
    def path_of(url: URL, name: str) -> Path:
        """Where the lock's file is, whichever links lead to the database."""
        database = Path(url.database or "").resolve()
        return database.with_name(f"{database.name}.{name}.lock")

    def take(self) -> bool:
        self.close()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, _this_process().encode(), 0)
        except BlockingIOError:
            os.close(file)
            return False
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return True

    def keep(self) -> bool:
        # Another process would lock another file, if this one was deleted.
        with suppress(FileNotFoundError):
            if self._file >= 0 and os.path.samestat(os.fstat(self._file), self._path.stat()):
                return True
        return self.take()

    def holder(self) -> str:
        with suppress(OSError):
            return self._path.read_text(errors="replace").strip() or "unknown"
        return "unknown"

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _ServerLock:
    """An advisory lock of PostgreSQL, held by a session of its own."""

    def __init__(self, url: URL, name: str) -> None:
        self._name = name
        self._engine = make_engine(url, Access.WRITE, _CONNECT_S, None, lambda: None)
        self._session: Connection | None = None
        self._is_held = False

    def take(self) -> bool:
        session = self._connect()
        session.execute(text("SELECT set_config('lock_timeout', :ms, false)"), {"ms": str(int(RELEASE_S * 1000))})
        try:
            session.execute(text("SELECT pg_advisory_lock(:key)"), {"key": self._key(session)})
        except DBAPIError as error:
            if diagnose(error, "").trouble is not Trouble.LOCKED:
                raise
            return False
        self._is_held = True
        return True

    def keep(self) -> bool:
        try:
            session = self._connect()
            # Without the lock this takes it; with it, this only says that the session is still there.
            statement = "SELECT true" if self._is_held else "SELECT pg_try_advisory_lock(:key)"
            values = {} if self._is_held else {"key": self._key(session)}
            self._is_held = bool(session.execute(text(statement), values).scalar_one())
        except SQLAlchemyError:
            self._disconnect()
            raise
        return self._is_held

    def holder(self) -> str:
        session = self._connect()
        found = session.execute(
            text(
                "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
                "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND (classid::bigint << 32) | objid::bigint = :key"
            ),
            {"key": self._key(session)},
        ).scalar()
        return str(found or "unknown").removeprefix("kvferry ")

    def close(self) -> None:
        self._disconnect()
        self._engine.dispose()

    def _connect(self) -> Connection:
        if self._session is None:
            session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session = session
            settings = {**_KEEPALIVES, "application_name": f"kvferry {_this_process()}"[:63]}
            for name, value in settings.items():
                session.execute(text("SELECT set_config(:name, :value, false)"), {"name": name, "value": str(value)})
        return self._session

    def _disconnect(self) -> None:
        session, self._session, self._is_held = self._session, None, False
        if session is not None:
            # Given back to the pool it would keep the lock.
            with suppress(SQLAlchemyError):
                session.invalidate()
            with suppress(SQLAlchemyError):
                session.close()

    def _key(self, session: Connection) -> int:
        """A number for the name within this database and schema."""
        schema = session.execute(text("SELECT current_schema()")).scalar()
        digest = hashlib.sha256(f"{schema}/{self._name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
