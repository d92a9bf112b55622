"""One transaction for rows of several kinds, so that an engine sends few transactions however much it writes.

A writer prepares a bounded number of rows, which it keeps until they are committed. After the database has rejected a
row, the rows of the other writers are written with the next transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, TextClause, text

from kvferry.app.store.database import Database
from kvferry.app.store.errors import is_rejected


class RowWriter(NamedTuple):
    """The writer of rows of one kind.

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


class WriterFailed(Exception):
    """A transaction in which `writer` failed; the cause is the error."""

    def __init__(self, writer: str) -> None:
        super().__init__(writer)
        self.writer = writer


def write_together(database: Database, writers: Sequence[RowWriter]) -> bool:
    """Write the prepared rows of at least one writer in one transaction; return whether more wait.

    Raises `WriterFailed`; then nothing was written.
    """
    current = writers[0]

    def write(connection: Connection) -> None:
        nonlocal current
        for writer in writers:
            current = writer
            writer.write(connection)

    try:
        database.write(write)
    except Exception as error:
        if is_rejected(error) and not current.reject():
            return True
        raise WriterFailed(current.name) from error
    more = [writer.confirm() for writer in writers]
    return any(more)


def insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows with the same columns, none of which is JSON or bytes."""
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        connection.execute(table.insert(), rows)
    else:
        # One statement with one parameter: its driver sends a statement for each row otherwise, and as values of one
        # statement they take it several times the processor time.
        statement = _insert_of_json(table, tuple(rows[0]))
        connection.execute(statement, {"rows": json.dumps(rows, allow_nan=False)})


@lru_cache
def _insert_of_json(table: Table, columns: tuple[str, ...]) -> TextClause:
    names = ", ".join(f'"{name}"' for name in columns)
    return text(
        f"INSERT INTO {table.name} ({names}) "  # noqa: S608  names of the schema
        f"SELECT {names} FROM json_populate_recordset(NULL::{table.name}, CAST(:rows AS JSON))"
    )
