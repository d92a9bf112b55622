"""Exclusive use of an engine's name on a database: one process at a time writes rows under a name.

The claim is a lock on a file beside a SQLite database, or an advisory lock of a PostgreSQL session, so that it is
released when its process ends, also by a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import SQLAlchemyError

from kvferry.app.store.database import make_engine, masked, parse_url, sqlite_path
from kvferry.app.store.errors import StoreError, raising_store_error
from kvferry.cuda_ops.persistent.lock import is_ending, take_when_ended

_log = logging.getLogger(__name__)

MAX_NUMBER = 100
_PREFIX = "kvferry "
_KEEPALIVES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""Make a server release the locks of a crashed host within seconds instead of hours."""
_UNLIMITED = {"idle_session_timeout": 0}
"""A claim's session is idle for most of its time."""


def claim_name(url: str, name: str, *, is_default: bool = False, connect_s: float = 2.0) -> NameClaim:
    """Claim an engine's name on the database at `url`.

    Args:
        is_default: the name was not set by the operator, so a number is appended where another process has it.
        connect_s: time in which a server has to accept a connection, also later.

    Raises:
        StoreError: the name is taken, or the database cannot be reached.
    """
    parsed = parse_url(url)
    for number in range(1, MAX_NUMBER + 1 if is_default else 2):
        wanted = name if number == 1 else f"{name}-{number}"
        with raising_store_error(masked(parsed)):
            is_file = sqlite_path(parsed) is not None
            claim = _FileClaim(parsed, wanted) if is_file else _ServerClaim(parsed, wanted, connect_s)
            try:
                if _take(claim, number == 1):
                    if number > 1:
                        _log.warning(
                            "KVFERRY_ENGINE_NAME is not set, and another process uses the name %s on the database %s: "
                            "this one uses %s; set KVFERRY_ENGINE_NAME for a permanent name",
                            name,
                            masked(parsed),
                            wanted,
                        )
                    return claim
                holder = claim.holder()
            except BaseException:
                claim.close()
                raise
        claim.close()
    raise StoreError(
        f"KVFERRY_ENGINE_NAME={name}: another process ({holder}) uses this name on the database {masked(parsed)}; stop "
        "it, or set KVFERRY_ENGINE_NAME to another name"
    )


def _take(claim: NameClaim, is_first: bool) -> bool:
    """Claim a name, also if its process was just killed: with another, a start would not find the pool of that."""
    if is_first:
        return take_when_ended(claim.take, partial(_pid_here, claim))
    if claim.take():
        return True
    # The wait for the first name was long enough for a kill to show.
    pid = _pid_here(claim)
    return pid is not None and is_ending(pid) and take_when_ended(claim.take, lambda: pid)


def check_name(url: str, name: str) -> None:
    """Raise `StoreError` for a name that another process uses; create nothing."""
    parsed = parse_url(url)
    if sqlite_path(parsed) is None or _FileClaim.path_of(parsed, name).exists():
        claim_name(url, name).close()


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _pid_here(claim: NameClaim) -> int | None:
    """Return the id of the process that has the name, if it is on this host."""
    holder = claim.holder()
    match = re.fullmatch(r"pid (\d{1,10}) on .*", holder)
    if match is None:
        return None
    here = f"pid {match[1]} on {socket.gethostname()}"
    return int(match[1]) if holder in (here, _shown(here).removeprefix(_PREFIX)) else None


def _shown(process: str) -> str:
    """Return a process's `application_name`, which PostgreSQL cuts after 63 bytes."""
    return f"{_PREFIX}{process}"[:63]


class _FileClaim:
    """A claim by a lock on a file beside a SQLite database."""

    check_interval_s = 1.0
    """How often `keep` is worth its cost."""

    def __init__(self, url: URL, name: str) -> None:
        self.name = name
        self._path = self.path_of(url, name)
        self._file = -1

    @staticmethod
    def path_of(url: URL, name: str) -> Path:
        """Return the path of the lock's file; the same for every link to the database."""
        database = Path(url.database or "").resolve()
        return database.with_name(f"{database.name}.{name}.lock")

    def take(self) -> bool:
        """Take the name; return False if another process has it. Raises `OSError`."""
        self.close()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # On a full disk the claim holds without a description of its process.
            with suppress(OSError):
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
        """Return whether this process has the name; take it again if the lock was lost. Raises `OSError`."""
        # If the file was deleted, another process would lock a new one.
        with suppress(FileNotFoundError):
            if self._file >= 0 and os.path.samestat(os.fstat(self._file), self._path.stat()):
                return True
        return self.take()

    def holder(self) -> str:
        """Return a description of the process that has the name."""
        with suppress(OSError):
            return self._path.read_text(errors="replace").strip() or "unknown"
        return "unknown"

    def close(self) -> None:
        """Release the name. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _ServerClaim:
    """A claim by an advisory lock of PostgreSQL, held by a session of its own. Raises `SQLAlchemyError`."""

    check_interval_s = 10.0
    """See `_FileClaim`. It is a statement, of each engine."""

    def __init__(self, url: URL, name: str, connect_s: float) -> None:
        self.name = name
        self._engine = make_engine(url, connect_s)
        self._session: Connection | None = None
        self._is_held = False

    def take(self) -> bool:
        """See `_FileClaim`."""
        session = self._connect()
        values = {"key": self._key(session)}
        self._is_held = bool(session.execute(text("SELECT pg_try_advisory_lock(:key)"), values).scalar_one())
        return self._is_held

    def keep(self) -> bool:
        """See `_FileClaim`."""
        try:
            if self._is_held and self._has_session():
                return True
            return self.take()
        except SQLAlchemyError:
            self._disconnect()
            raise

    def holder(self) -> str:
        """See `_FileClaim`."""
        session = self._connect()
        row = session.execute(
            text(
                "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
                "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND (classid::bigint << 32) | objid::bigint = :key"
            ),
            {"key": self._key(session)},
        ).scalar()
        return str(row or "unknown").removeprefix(_PREFIX)

    def close(self) -> None:
        """See `_FileClaim`."""
        self._disconnect()
        self._engine.dispose()

    def _connect(self) -> Connection:
        if self._session is None:
            session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session = session
            settings = {**_KEEPALIVES, **_UNLIMITED, "application_name": _shown(_this_process())}
            # Older servers do not have all of them.
            statement = text("SELECT set_config(name, :value, false) FROM pg_settings WHERE name = :name")
            for name, value in settings.items():
                session.execute(statement, {"name": name, "value": str(value)})
        return self._session

    def _has_session(self) -> bool:
        """Return whether the session that has the lock still exists; disconnect if not."""
        try:
            self._connect().execute(text("SELECT 1"))
        except SQLAlchemyError:
            self._disconnect()
        return self._is_held

    def _disconnect(self) -> None:
        session, self._session, self._is_held = self._session, None, False
        if session is not None:
            # In the pool, the connection would keep the lock.
            with suppress(SQLAlchemyError):
                session.invalidate()
            with suppress(SQLAlchemyError):
                session.close()

    def _key(self, session: Connection) -> int:
        """Return a number for the name within this database and schema."""
        schema = session.execute(text("SELECT current_schema()")).scalar()
        digest = hashlib.sha256(f"{schema}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


NameClaim = _FileClaim | _ServerClaim
"""An engine's name that this process may use on a database, until closed."""
