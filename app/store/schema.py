"""Tables, and the statements and values that depend on the kind of database.

Made to be read in a shell as well. A key is the hex text that the HTTP API shows, so that a hash copied from a response
finds its row. Instants are Unix seconds in a double; their names end in `_at`, or are `time`. The `readable_*` views
show them as UTC text. Durations end in `_s`. Each row names its engine, since several may share one database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Connection,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    case,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from kvferry.app.store.errors import StoreError

MAX_TEXT_CHARS = 512

_NAMING = {"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}

# SQLite numbers rows only where the type is INTEGER.
_RowId = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Base of all tables, with one SQL type per Python type."""

    metadata = MetaData(naming_convention=_NAMING)
    type_annotation_map = {str: Text(), float: Double(), int: BigInteger(), dict[str, Any]: JSON()}  # noqa: RUF012


class EngineRow(Base):
    """An engine that uses this database, and its limits of history."""

    __tablename__ = "engines"

    name: Mapped[str] = mapped_column(primary_key=True)
    pool_kind: Mapped[str]
    epoch: Mapped[int]
    started_at: Mapped[float]
    seen_at: Mapped[float]
    eviction_rows: Mapped[int]
    eviction_days: Mapped[float]


class SlotRow(Base):
    """A loadable block and the slot that holds it: a projection of memory, updated in checkpoints.

    `aliases` is a JSON array of the request's other ids, NULL without any. `priority` is the slot's eviction class;
    NULL, in rows of an older version, is `normal`.
    """

    __tablename__ = "slots"

    engine: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str]
    group_index: Mapped[int] = mapped_column(Integer)
    generation: Mapped[int]
    epoch: Mapped[int]
    size_bytes: Mapped[int]
    position: Mapped[int]
    request: Mapped[str]
    tenant: Mapped[str | None]
    lora: Mapped[str | None]
    stored_at: Mapped[float]
    last_hit_at: Mapped[float | None]
    hits: Mapped[int]
    aliases: Mapped[str | None]
    priority: Mapped[str | None]

    __table_args__ = (Index(None, "engine", "key"),)


class EvictionRow(Base):
    """A block that left the pool, the reason, and whether it was requested again."""

    __tablename__ = "evictions"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    engine: Mapped[str]
    time: Mapped[float]
    key: Mapped[str]
    group_index: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str]
    policy: Mapped[str]
    age_s: Mapped[float]
    idle_s: Mapped[float]
    hits: Mapped[int]
    position: Mapped[int]
    size_bytes: Mapped[int]
    request: Mapped[str]
    tenant: Mapped[str | None]
    needed_by: Mapped[str | None]
    regretted_at: Mapped[float | None]

    # One index per filter, in the order of the listing, so that a page is read from its start.
    __table_args__ = (
        Index(None, "engine", "time", "id"),
        Index(None, "engine", "reason", "time", "id"),
        Index(None, "engine", "request", "time", "id"),
        Index(None, "engine", "tenant", "time", "id"),
        Index(None, "engine", "key", "id"),
    )


class EvictionSumRow(Base):
    """Sums of evictions in `span` (five minutes, counted from 1970) by reason and bucket of ages."""

    __tablename__ = "eviction_sums"

    engine: Mapped[str] = mapped_column(primary_key=True)
    span: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reason: Mapped[str] = mapped_column(primary_key=True)
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]
    never_hit: Mapped[int]
    regretted: Mapped[int]
    age_min: Mapped[float]
    age_sum: Mapped[float]
    age_max: Mapped[float]


class ResetRow(Base):
    """A whole reset and the number of dropped blocks, which have no eviction rows, since a reset costs O(1)."""

    __tablename__ = "resets"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    engine: Mapped[str]
    time: Mapped[float]
    epoch: Mapped[int]
    dropped: Mapped[int]

    __table_args__ = (Index(None, "engine", "time", "id"),)


class OverrideRow(Base):
    """Policy fields set by an operator for one request id."""

    __tablename__ = "overrides"

    engine: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[dict[str, Any]]
    set_at: Mapped[float]
    expires_at: Mapped[float]

    __table_args__ = (Index(None, "engine", "expires_at"),)


class RuleRow(Base):
    """A named policy rule; the first match by `rule_order`, then name, applies."""

    __tablename__ = "rules"

    engine: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    rule_order: Mapped[int]
    match: Mapped[dict[str, Any]]
    policy: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    updated_at: Mapped[float]

    __table_args__ = (Index(None, "engine", "rule_order", "name"),)


class AuditRow(Base):
    """A mutating call: time, name of the token, client, body, and outcome."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    engine: Mapped[str]
    time: Mapped[float]
    token: Mapped[str]
    client: Mapped[str]
    request_id: Mapped[str]
    method: Mapped[str]
    path: Mapped[str]
    what: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    status: Mapped[int | None] = mapped_column(Integer)
    outcome: Mapped[str | None]

    __table_args__ = (Index(None, "engine", "time", "id"),)


_INSERTS: dict[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def upsert(
    connection: Connection, model: type[DeclarativeBase], rows: list[dict[str, Any]], keep: tuple[str, ...] = ()
) -> None:
    """Write rows by primary key: insert new ones, overwrite others except for the columns in `keep`."""
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
    """Write rows by primary key: insert new ones, and add the columns in `sums` to existing ones.

    Columns in `least` and `greatest` keep the lesser and the greater value; other columns are unchanged.
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


@overload
def clean(text: str) -> str: ...
@overload
def clean(text: None) -> None: ...
def clean(text: str | None) -> str | None:
    """Return a text of bounded length without NULs and lone surrogates. Filters use it too, so that they match."""
    if text is None:
        return None
    cut = text[:MAX_TEXT_CHARS]
    if cut.isascii() and "\0" not in cut:
        return cut
    return cut.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
