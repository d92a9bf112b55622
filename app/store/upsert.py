"""Insert or update, the one statement that each kind of database says in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

from app.store.errors import StoreError

_INSERTS: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def upsert(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]], keep: tuple[str, ...] = ()
) -> None:
    """Write rows by primary key: new ones are inserted, others overwritten but for the columns in `keep`."""
    if not rows:
        return
    insert = _INSERTS.get(connection.dialect.name)
    if insert is None:
        raise StoreError(f"databases of kind {connection.dialect.name} are not supported; use {' or '.join(_INSERTS)}")
    table = model.__table__
    if not isinstance(table, Table):
        raise TypeError(f"{model.__name__} is not mapped to a table")
    primary = [column.name for column in table.primary_key]
    statement = insert(table)
    changed = {name: statement.excluded[name] for name in rows[0] if name not in primary and name not in keep}
    connection.execute(statement.on_conflict_do_update(index_elements=primary, set_=changed), rows)
