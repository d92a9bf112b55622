"""Errors of the metadata store, and which of them are the database's fault and which are a row's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from alembic.util.exc import CommandError
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError, OperationalError, SQLAlchemyError

from kvferry.core.errors import Failure, FailureCause, StartError


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


class _Trouble(NamedTuple):
    """Errors whose name in SQLite, or SQLSTATE in PostgreSQL, begins with one of `names`.

    `text` is a predicate of "the database", and `advice` is for a start.
    """

    names: tuple[str, ...]
    cause: FailureCause
    text: str
    advice: str


_ANOTHER = "set KVFERRY_DATABASE_URL to another database"
_WRITABLE_PLACE = "set KVFERRY_STATE_DIR or KVFERRY_DATABASE_URL to a place that can be written"
_MORE_SPACE = "free disk space, raise the limit on its size, or lower KVFERRY_EVICTION_HISTORY_ROWS"
_LOCKED = f"end the process that holds the lock, or {_ANOTHER}"
_REACHABLE = "start its server, or correct host, port, database, user and password in KVFERRY_DATABASE_URL"
_GRANTED = "correct user and database in KVFERRY_DATABASE_URL, or grant the user what it needs"
_BROKEN = _Trouble((), FailureCause.BROKEN, "does not work", f"repair it, or {_ANOTHER}")
_UNREACHABLE = _Trouble(("08", "53", "57P"), FailureCause.UNREACHABLE, "cannot be reached", _REACHABLE)
_TROUBLES = (
    _Trouble(
        ("SQLITE_BUSY", "SQLITE_LOCKED", "40", "55"), FailureCause.LOCKED, "is locked by another connection", _LOCKED
    ),
    _Trouble(("57014",), FailureCause.LOCKED, "takes too long to answer", _LOCKED),
    _Trouble(("SQLITE_FULL", "53100"), FailureCause.FULL, "is full", _MORE_SPACE),
    _Trouble(("SQLITE_IOERR_WRITE",), FailureCause.FULL, "cannot grow", _MORE_SPACE),
    _Trouble(("SQLITE_READONLY", "25"), FailureCause.BROKEN, "is read-only", f"make it writable, or {_WRITABLE_PLACE}"),
    _Trouble(("SQLITE_CANTOPEN",), FailureCause.BROKEN, "cannot be opened", _WRITABLE_PLACE),
    _Trouble(
        ("SQLITE_NOTADB", "SQLITE_CORRUPT"),
        FailureCause.BROKEN,
        "is damaged",
        "move the file away, or set KVFERRY_DATABASE_URL to another path",
    ),
    _Trouble(("28", "3D", "42"), FailureCause.DENIED, "refuses access", _GRANTED),
    _UNREACHABLE,
)


def diagnose(error: BaseException) -> Failure:
    """Return the cause of an exception, with a constant text: see `explain` for the message of the driver."""
    if isinstance(error, DatabaseUnavailable):
        return Failure(error.cause, str(error))
    if isinstance(error, (SQLAlchemyError, sqlite3.Error)):
        trouble, text = _diagnose(error)
        advice = f"; {trouble.advice}" if trouble.cause is FailureCause.FULL else ""
        return Failure(trouble.cause, f"the database {text}{advice}")
    if isinstance(error, OSError):
        return Failure(FailureCause.BROKEN, "the database cannot be reached")
    return Failure(FailureCause.INTERNAL, f"unexpected {type(error).__name__}")


def explain(error: BaseException, database: str) -> str:
    """Return the database's name and the message of its driver, which may name hosts and users: for logs only."""
    cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
    return database if cause is None else f"{database}: {_first_line(cause)}"


def _diagnose(error: SQLAlchemyError | sqlite3.Error) -> tuple[_Trouble, str]:
    """Return the kind of an error, and its text with the name that the database gives it."""
    cause = _of_driver(error)
    name = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    if name is None:
        # Not an answer of a server: psycopg does not even report the code of a refused connection.
        trouble = _UNREACHABLE if isinstance(error, OperationalError) else _BROKEN
        return trouble, trouble.text
    trouble = next((known for known in _TROUBLES if name.startswith(known.names)), _BROKEN)
    return trouble, f"{trouble.text} ({name})"


def _of_driver(error: BaseException) -> BaseException:
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _first_line(error: BaseException) -> str:
    cause = _of_driver(error)
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]


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


def _with_advice(error: SQLAlchemyError | sqlite3.Error | OSError, name: str) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        reason = f"the database {name} cannot be opened: {error.strerror or error}{where}"
        return f"{reason}; {_WRITABLE_PLACE}"
    trouble, text = _diagnose(error)
    return f"the database {name} {text}: {_first_line(error)}; {trouble.advice}"
