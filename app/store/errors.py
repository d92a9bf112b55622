"""What can go wrong with the metadata store, and which of it is the database's doing and which one row's."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError


class StoreError(Exception):
    """The store cannot be opened or migrated: the service refuses to start. The message says what to do."""


class StoreUnavailable(Exception):
    """The database does not answer right now. Nothing was changed; trying again later may work."""


class DatabaseReplaced(StoreUnavailable):
    """The file under the database's path is no longer the one that was opened."""


class Trouble(StrEnum):
    """What keeps the journal from writing."""

    LOCKED = "locked"
    FULL = "full"
    REPLACED = "replaced"
    UNREACHABLE = "unreachable"
    DENIED = "denied"
    BROKEN = "broken"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure as operators are told of it, in a sentence: never a statement or its values, which belong to users."""

    trouble: Trouble
    text: str


_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# Codes of PostgreSQL: lock not available, statement timeout, serialization failure, deadlock; then disk full.
_STATES_LOCKED = {"55P03", "57014", "40001", "40P01"}
_STATES_FULL = {"53100"}
# Then authorization, password, unknown database, privilege; last shutdown, crash, starting up, too many connections.
_STATES_DENIED = {"28000", "28P01", "3D000", "42501"}
_STATES_UNREACHABLE = {"57P01", "57P02", "57P03", "53300", "08000", "08001", "08003", "08004", "08006"}
# What refuses a connection comes without its code.
_DENIED = re.compile(r"authentication failed|does not exist|pg_hba\.conf|permission denied|no password supplied")
_MAKE_ROOM = "free disk space, raise the limit on its size, or lower KVFERRY_EVICTION_HISTORY_ROWS"


def diagnose(error: BaseException, database: str) -> Diagnosis:
    """Name the trouble behind an exception; `database` is its name as it may be shown."""
    if isinstance(error, DatabaseReplaced):
        return Diagnosis(Trouble.REPLACED, str(error))
    if isinstance(error, StoreUnavailable):
        return Diagnosis(Trouble.LOCKED, str(error))
    if isinstance(error, StoreError):
        return Diagnosis(Trouble.BROKEN, str(error))
    if isinstance(error, PoolTimeoutError):
        return Diagnosis(Trouble.LOCKED, f"the database {database} is busy: all connections to it are in use")
    if isinstance(error, (SQLAlchemyError, sqlite3.Error)):
        trouble, what = _diagnose_database(error)
        return Diagnosis(trouble, f"the database {database} {what}")
    if isinstance(error, OSError):
        return Diagnosis(Trouble.BROKEN, f"the database {database} cannot be reached: {error.strerror or error}")
    return Diagnosis(Trouble.INTERNAL, f"{type(error).__name__}: {_first_line(error)}")


def _diagnose_database(error: SQLAlchemyError | sqlite3.Error) -> tuple[Trouble, str]:
    cause: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        cause = error.orig
    code = getattr(cause, "sqlite_errorcode", None)
    name = getattr(cause, "sqlite_errorname", None)
    # The low byte of an extended code is the primary one.
    primary = code & 0xFF if isinstance(code, int) else None
    if primary in _LOCKED:
        return Trouble.LOCKED, "is locked by another connection"
    if primary == sqlite3.SQLITE_FULL:
        return Trouble.FULL, f"is full: {_MAKE_ROOM}"
    if name == "SQLITE_IOERR_WRITE":
        return Trouble.FULL, f"cannot grow ({_first_line(cause)}, {name}): {_MAKE_ROOM}"
    state = getattr(cause, "sqlstate", None)
    if state in _STATES_LOCKED:
        return Trouble.LOCKED, f"is locked by another connection, or too slow ({state})"
    if state in _STATES_FULL:
        return Trouble.FULL, f"is full ({state}): {_MAKE_ROOM}"
    if state in _STATES_DENIED or (state is None and _DENIED.search(str(cause))):
        return Trouble.DENIED, f"does not let kvferry in: {_first_line(cause)}"
    if state in _STATES_UNREACHABLE or (state is None and name is None and isinstance(error, OperationalError)):
        # Without a code there was no answer of a server.
        return Trouble.UNREACHABLE, f"cannot be reached: {_first_line(cause)}"
    name = name or state
    return Trouble.BROKEN, f"does not work: {_first_line(cause)}" + (f" ({name})" if name else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def is_refused(error: BaseException) -> bool:
    """Whether the rows are at fault and not the database, so that writing them again would fail for ever."""
    if isinstance(error, (DataError, IntegrityError)):
        return True
    return not isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError, StoreUnavailable, StoreError))


@contextmanager
def unavailable_on_trouble(name: str) -> Iterator[None]:
    """Turn a failing database into `StoreUnavailable`; rows that it refuses stay what they are."""
    try:
        yield
    except (DataError, IntegrityError):
        raise
    except SQLAlchemyError as error:
        raise StoreUnavailable(diagnose(error, name).text) from error
