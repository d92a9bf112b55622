"""Errors of the metadata store, and which of them are the database's fault and which are a row's."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from alembic.util.exc import CommandError
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kvferry.core.errors import Failure, FailureCause, StartError


class StoreError(StartError):
    """The store cannot be opened or migrated, so that the service refuses to start. The message names the remedy."""


class StoreUnavailable(Exception):
    """The database does not answer. Nothing was changed; a later call may succeed."""

    def __init__(self, text: str, cause: FailureCause = FailureCause.LOCKED) -> None:
        super().__init__(text)
        self.cause = cause


class OutcomeUnknown(StoreUnavailable):
    """The database began to commit a write and did not end in time, or its connection was lost."""


_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# PostgreSQL: lock not available, statement timeout, serialization failure, deadlock.
_STATES_LOCKED = {"55P03", "57014", "40001", "40P01"}
# Disk full.
_STATES_FULL = {"53100"}
# Authorization, password, unknown database, privilege.
_STATES_DENIED = {"28000", "28P01", "3D000", "42501"}
# Shutdown, crash, starting up, too many connections, connection failures.
_STATES_UNREACHABLE = {"57P01", "57P02", "57P03", "53300", "08000", "08001", "08003", "08004", "08006"}
# psycopg does not report the code of a refused connection.
_DENIED = re.compile(r"authentication failed|does not exist|pg_hba\.conf|permission denied|no password supplied")
_FREE_SPACE = "free disk space, raise the limit on its size, or lower KVFERRY_EVICTION_HISTORY_ROWS"


def diagnose(error: BaseException, database: str) -> Failure:
    """Return the cause of an exception. `database` is the database's name without credentials."""
    if isinstance(error, StoreUnavailable):
        return Failure(error.cause, str(error))
    if isinstance(error, StoreError):
        return Failure(FailureCause.BROKEN, str(error))
    if isinstance(error, PoolTimeoutError):
        return Failure(FailureCause.LOCKED, f"the database {database} is busy: all connections to it are in use")
    if isinstance(error, (SQLAlchemyError, sqlite3.Error)):
        cause, text = _diagnose_database(error)
        return Failure(cause, f"the database {database} {text}")
    if isinstance(error, OSError):
        return Failure(FailureCause.BROKEN, f"the database {database} cannot be reached: {error.strerror or error}")
    return Failure(FailureCause.INTERNAL, f"{type(error).__name__}: {_first_line(error)}")


def _diagnose_database(error: SQLAlchemyError | sqlite3.Error) -> tuple[FailureCause, str]:
    cause: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        cause = error.orig
    code = getattr(cause, "sqlite_errorcode", None)
    name = getattr(cause, "sqlite_errorname", None)
    # The low byte of an extended code is the primary code.
    primary = code & 0xFF if isinstance(code, int) else None
    if primary in _LOCKED:
        return FailureCause.LOCKED, "is locked by another connection"
    if primary == sqlite3.SQLITE_FULL:
        return FailureCause.FULL, f"is full: {_FREE_SPACE}"
    if name == "SQLITE_IOERR_WRITE":
        return FailureCause.FULL, f"cannot grow ({_first_line(cause)}, {name}): {_FREE_SPACE}"
    state = getattr(cause, "sqlstate", None)
    if state in _STATES_LOCKED:
        return FailureCause.LOCKED, f"is locked by another connection, or too slow ({state})"
    if state in _STATES_FULL:
        return FailureCause.FULL, f"is full ({state}): {_FREE_SPACE}"
    if state in _STATES_DENIED or (state is None and _DENIED.search(str(cause))):
        return FailureCause.DENIED, f"refuses access: {_first_line(cause)}"
    if state in _STATES_UNREACHABLE or (state is None and name is None and isinstance(error, OperationalError)):
        # An error without a code did not come from the server.
        return FailureCause.UNREACHABLE, f"cannot be reached: {_first_line(cause)}"
    name = name or state
    return FailureCause.BROKEN, f"does not work: {_first_line(cause)}" + (f" ({name})" if name else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def is_rejected(error: BaseException) -> bool:
    """Return whether the rows are at fault and not the database, so that writing them again fails again."""
    if isinstance(error, (DataError, IntegrityError)):
        return True
    return not isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError, MemoryError, StoreUnavailable, StoreError))


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
    FailureCause.UNREACHABLE: "start its server, or correct host and port in KVFERRY_DATABASE_URL",
    FailureCause.DENIED: "correct user, password and database in KVFERRY_DATABASE_URL, or grant the user what it needs",
    FailureCause.BROKEN: "repair it, or set KVFERRY_DATABASE_URL to another database",
}
_ADVICE_OF_CODE = {
    sqlite3.SQLITE_NOTADB: "move the file away, or set KVFERRY_DATABASE_URL to another path",
    sqlite3.SQLITE_READONLY: f"make it writable, or {_WRITABLE_PLACE}",
    sqlite3.SQLITE_CANTOPEN: _WRITABLE_PLACE,
}


def _with_advice(error: SQLAlchemyError | sqlite3.Error | OSError, name: str) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        reason = f"the database {name} cannot be opened: {error.strerror or error}{where}"
        return f"{reason}; {_WRITABLE_PLACE}"
    found = diagnose(error, name)
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None) or 0
    advice = _ADVICE_OF_CODE.get(code & 0xFF) or _ADVICE.get(found.cause)
    return found.text if advice is None else f"{found.text}; {advice}"
