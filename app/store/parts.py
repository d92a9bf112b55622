"""One transaction for rows of several kinds, so that an engine sends few transactions however much it writes.

A part prepares a bounded number of rows, which it keeps until they are committed. A row that the database rejects is
the affair of its part: the others are written with the next transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from kvferry.app.store.database import Database
from kvferry.app.store.errors import is_rejected


class Part(NamedTuple):
    """Rows of one kind.

    Attributes:
        name: for logs and `/readyz`.
        prepare: makes the next rows, unless there are some; returns whether there are any. Needs no database.
        write: executes the statements. May be called again with the same rows, if the transaction failed.
        confirm: notes that the rows are committed; returns whether more waited when they were prepared.
        reject: gives up what the database rejects; returns False if the rows are tried one by one first.
    """

    name: str
    prepare: Callable[[], bool]
    write: Callable[[Connection], None]
    confirm: Callable[[], bool]
    reject: Callable[[], bool]


class PartFailed(Exception):
    """A transaction that failed while `part` was written; the cause is the error."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


def write_together(database: Database, parts: Sequence[Part]) -> bool:
    """Write the prepared rows of at least one part in one transaction; return whether more wait.

    Raises `PartFailed`; then nothing was written.
    """
    writing = parts[0]
    try:
        with database.write() as connection:
            for part in parts:
                writing = part
                part.write(connection)
    except Exception as error:
        if is_rejected(error) and not writing.reject():
            return True
        raise PartFailed(writing.name) from error
    more = [part.confirm() for part in parts]
    return any(more)
