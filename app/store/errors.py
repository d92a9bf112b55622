"""Errors of the metadata store, and which of them are the database's fault and which are a row's."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from alembic.util.exc import CommandError
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kvferry.core.errors import Failure, FailureCause, StartError

T = TypeVar("T")


class StoreError(StartError):
    """The store cannot be opened or migrated, so that the service refuses to start. The message names the remedy."""


class DatabaseUnavailable(Exception):
    """The database does not answer. Nothing was changed; a later call may succeed.

    The text may be shown in `/readyz`, which needs no token.
    """

    def __init__(self, text: str, cause: FailureCause = FailureCause.LOCKED) -> None:
        super().__init__(text)
        self.cause = cause


class OutcomeUnknown(DatabaseUnavailable):
    """The database began to commit a write and did not end in time, or its connection was lost."""


_Diagnosis = tuple[FailureCause, str]
"""A cause, and a predicate of "the database"."""

_LOCKED = FailureCause.LOCKED, "is locked by another connection"
_FULL = FailureCause.FULL, "is full"
_DENIED = FailureCause.DENIED, "refuses access"
_UNREACHABLE = FailureCause.UNREACHABLE, "cannot be reached"
_READ_ONLY = FailureCause.BROKEN, "is read-only"
_DAMAGED = FailureCause.BROKEN, "is damaged"
_BY_CODE: dict[int | str | None, _Diagnosis] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    "SQLITE_IOERR_WRITE": (FailureCause.FULL, "cannot grow"),
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: (FailureCause.BROKEN, "cannot be opened"),
    # PostgreSQL: lock not available, serialization failure, deadlock.
    **dict.fromkeys(("55P03", "40001", "40P01"), _LOCKED),
    # Statement timeout.
    "57014": (FailureCause.LOCKED, "takes too long to answer"),
    # Disk full.
    "53100": _FULL,
    # Authorization, password, unknown database, privilege.
    **dict.fromkeys(("28000", "28P01", "3D000", "42501"), _DENIED),
    # Shutdown, crash, starting up, too many connections, connection failures.
    **dict.fromkeys(("57P01", "57P02", "57P03", "53300", "08000", "08001", "08003", "08004", "08006"), _UNREACHABLE),
    "25006": _READ_ONLY,
    # Data, index.
    **dict.fromkeys(("XX001", "XX002"), _DAMAGED),
}
_MAX_MESSAGE_CHARS = 4096
# psycopg does not report the code of a refused connection.
_REFUSALS = {
    re.compile(r"authentication failed|no password supplied|role .* (does not exist|is not permitted)"): (
        FailureCause.DENIED,
        "refuses user or password",
    ),
    re.compile(r"does not exist"): (FailureCause.DENIED, "does not exist on its server"),
    re.compile(r"pg_hba\.conf|permission denied"): _DENIED,
}


def diagnose(error: BaseException) -> Failure:
    """Return the cause of an exception, with a constant text: see `explain` for the message of the driver."""
    if isinstance(error, DatabaseUnavailable):
        return Failure(error.cause, str(error))
    if isinstance(error, (SQLAlchemyError, sqlite3.Error)):
        cause, text = _diagnose_database(error)
        advice = f"; {_ADVICE[cause]}" if cause is FailureCause.FULL else ""
        return Failure(cause, f"the database {text}{advice}")
    if isinstance(error, OSError):
        return Failure(FailureCause.BROKEN, "the database cannot be reached")
    return Failure(FailureCause.INTERNAL, f"unexpected {type(error).__name__}")


def explain(error: BaseException, database: str) -> str:
    """Return the database's name and the message of its driver, which may name hosts and users: for logs only."""
    cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
    return database if cause is None else f"{database}: {_first_line(cause)}"


def _diagnose_database(error: SQLAlchemyError | sqlite3.Error) -> _Diagnosis:
    if isinstance(error, PoolTimeoutError):
        return FailureCause.LOCKED, "is busy: all connections to it are in use"
    cause = _of_driver(error)
    name = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    if name is None and isinstance(error, OperationalError):
        # An error without a code did not come from the server.
        text = str(cause)[:_MAX_MESSAGE_CHARS]
        return next((found for words, found in _REFUSALS.items() if words.search(text)), _UNREACHABLE)
    kind, text = _BY_CODE.get(name) or _BY_CODE.get(_primary_code(cause)) or (FailureCause.BROKEN, "does not work")
    return kind, f"{text} ({name})" if name else text


def _of_driver(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _primary_code(error: BaseException) -> int | None:
    """Return the primary code of an error of SQLite, which is the low byte of its extended code."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def _first_line(error: BaseException) -> str:
    cause = _of_driver(error)
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]


def is_rejected(error: BaseException) -> bool:
    """Return whether the rows are at fault and not the database, so that writing them again fails again."""
    if isinstance(error, (DataError, IntegrityError)):
        return True
    return not isinstance(
        error, (SQLAlchemyError, sqlite3.Error, OSError, MemoryError, DatabaseUnavailable, StoreError)
    )


def drop_rejected(items: Sequence[T], call: Callable[[Sequence[T]], object]) -> int:
    """Call with all items, except those that it rejects, which are found by halving; return their number."""
    if not items:
        return 0
    try:
        call(items)
    except Exception as error:
        if not is_rejected(error):
            raise
        if len(items) == 1:
            return 1
        middle = len(items) // 2
        return drop_rejected(items[:middle], call) + drop_rejected(items[middle:], call)
    return 0


@contextmanager
def raising_unavailable() -> Iterator[None]:
    """Raise `DatabaseUnavailable` for a failing database; errors of rejected rows pass."""
    try:
        yield
    except (DataError, IntegrityError):
        raise
    except SQLAlchemyError as error:
        failure = diagnose(error)
        raise DatabaseUnavailable(failure.text, failure.cause) from error


@contextmanager
def raising_store_error(name: str) -> Iterator[None]:
    """Raise `StoreError`, with what to do, for errors of opening or migrating a database."""
    try:
        yield
    except NoSuchModuleError as error:
        raise StoreError(
            f"KVFERRY_DATABASE_URL: {name}: this kind of database is not known; use sqlite or postgresql"
        ) from error
    except ImportError as error:
        raise StoreError(
            f"KVFERRY_DATABASE_URL: {name}: its driver is not installed ({error.name}); "
            "pip install 'kvferry[postgresql]' installs that of PostgreSQL"
        ) from error
    except CommandError as error:
        raise StoreError(
            f"the database {name} cannot be migrated: {error}. It was probably written by a newer version: "
            "install that, or set KVFERRY_DATABASE_URL to another database"
        ) from error
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise StoreError(_with_advice(error, name)) from error
    except UnicodeError as error:
        raise StoreError(f"KVFERRY_DATABASE_URL: {name}: {error}; correct the name of its host") from error


_WRITABLE_PLACE = "set KVFERRY_STATE_DIR or KVFERRY_DATABASE_URL to a place that can be written"
_ADVICE = {
    FailureCause.LOCKED: "end the process that holds the lock, or set KVFERRY_DATABASE_URL to another database",
    FailureCause.FULL: "free disk space, raise the limit on its size, or lower KVFERRY_EVICTION_HISTORY_ROWS",
    FailureCause.UNREACHABLE: "start its server, or correct host and port in KVFERRY_DATABASE_URL",
    FailureCause.DENIED: "correct user, password and database in KVFERRY_DATABASE_URL, or grant the user what it needs",
    FailureCause.BROKEN: "repair it, or set KVFERRY_DATABASE_URL to another database",
}
_ADVICE_OF_CODE: dict[int | None, str] = {
    sqlite3.SQLITE_NOTADB: "move the file away, or set KVFERRY_DATABASE_URL to another path",
    sqlite3.SQLITE_READONLY: f"make it writable, or {_WRITABLE_PLACE}",
    sqlite3.SQLITE_CANTOPEN: _WRITABLE_PLACE,
}


def _with_advice(error: SQLAlchemyError | sqlite3.Error | OSError, name: str) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        reason = f"the database {name} cannot be opened: {error.strerror or error}{where}"
        return f"{reason}; {_WRITABLE_PLACE}"
    cause, text = _diagnose_database(error)
    advice = _ADVICE_OF_CODE.get(_primary_code(_of_driver(error))) or _ADVICE.get(cause)
    reason = f"the database {name} {text}: {_first_line(error)}"
    return reason if advice is None else f"{reason}; {advice}"
