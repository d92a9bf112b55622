"""Insert or update, by overwriting or by adding: the one statement that each kind of database says in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, case
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

from kvferry.app.store.errors import StoreError

_INSERTS: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def upsert(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]], keep: tuple[str, ...] = ()
) -> None:
    """Write rows by primary key: new ones are inserted, others overwritten but for the columns in `keep`."""
    if rows:
        table, statement = _insert(connection, model)
        primary = [column.name for column in table.primary_key]
        changed = {name: statement.excluded[name] for name in rows[0] if name not in primary and name not in keep}
        connection.execute(statement.on_conflict_do_update(index_elements=primary, set_=changed), rows)


def accumulate(
    connection: Connection,
    model: type[DeclarativeBase],
    rows: list[dict[str, Any]],
    sums: tuple[str, ...],
    least: tuple[str, ...] = (),
    greatest: tuple[str, ...] = (),
) -> None:
    """Write rows by primary key: to those that are there, the columns in `sums` are added.

    Of the columns in `least` and `greatest` the lesser and the greater value stays; others are as they were.
    """
    if rows:
        table, statement = _insert(connection, model)
        new = statement.excluded
        changed: dict[str, ColumnElement[Any]] = {name: table.c[name] + new[name] for name in sums}
        changed |= {name: case((new[name] < table.c[name], new[name]), else_=table.c[name]) for name in least}
        changed |= {name: case((new[name] > table.c[name], new[name]), else_=table.c[name]) for name in greatest}
        primary = [column.name for column in table.primary_key]
        connection.execute(statement.on_conflict_do_update(index_elements=primary, set_=changed), rows)


def _insert(connection: Connection, model: type[DeclarativeBase]) -> tuple[Table, sqlite.Insert | postgresql.Insert]:
    insert = _INSERTS.get(connection.dialect.name)
    if insert is None:
        raise StoreError(f"databases of kind {connection.dialect.name} are not supported; use {' or '.join(_INSERTS)}")
    table = model.__table__
    if not isinstance(table, Table):
        raise TypeError(f"{model.__name__} is not mapped to a table")
    return table, insert(table)
