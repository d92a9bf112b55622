"""The schema: what is kept about slots, evictions, resets, overrides, rules, audited calls and engines.

Made to be read in a shell as well. A key is the hex text that the HTTP API shows, so that a hash copied from an answer
finds its row; raw bytes would take half the space and be unreadable. Instants are Unix seconds in a double, which is
what `core` counts in and what an index compares fastest; their names end in `_at`, or are `time`. The `readable_*`
views show them as UTC text. Durations end in `_s`. Each row names its engine, since several may share one database.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, Index, Integer, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_NAMING = {"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}

# SQLite numbers rows by itself only where the type is INTEGER.
_RowId = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Common metadata; a Python type means one SQL type everywhere."""

    metadata = MetaData(naming_convention=_NAMING)
    type_annotation_map = {str: Text(), float: Double(), int: BigInteger(), dict[str, Any]: JSON()}  # noqa: RUF012


class EngineRow(Base):
    """An engine that uses this database, and how much history it wants kept."""

    __tablename__ = "engines"

    name: Mapped[str] = mapped_column(primary_key=True)
    pool_kind: Mapped[str]
    epoch: Mapped[int]
    started_at: Mapped[float]
    seen_at: Mapped[float]
    eviction_rows: Mapped[int]
    eviction_days: Mapped[float]


class SlotRow(Base):
    """A loadable block, by the slot that holds it: a projection of memory, written behind it.

    `aliases` is a JSON array of what else the request goes by, NULL where that is nothing. `priority` is the slot's
    eviction class; NULL, of rows that an older version wrote, is `normal`.
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
    """A block that left the pool, why, and whether it was asked for again."""

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

    # One index a filter, each in the order of the listing, so that a page is read from where it starts.
    __table_args__ = (
        Index(None, "engine", "time", "id"),
        Index(None, "engine", "reason", "time", "id"),
        Index(None, "engine", "request", "time", "id"),
        Index(None, "engine", "tenant", "time", "id"),
        Index(None, "engine", "key", "id"),
    )


class EvictionSumRow(Base):
    """Evictions of `span`, five minutes, counted from 1970, by reason and bucket of ages: see `store.sums`."""

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
    """A whole reset and how many blocks it dropped; they have no eviction rows, since a reset costs O(1)."""

    __tablename__ = "resets"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    engine: Mapped[str]
    time: Mapped[float]
    epoch: Mapped[int]
    dropped: Mapped[int]

    __table_args__ = (Index(None, "engine", "time", "id"),)


class OverrideRow(Base):
    """Policy fields that an operator set for one request id."""

    __tablename__ = "overrides"

    engine: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[dict[str, Any]]
    set_at: Mapped[float]
    expires_at: Mapped[float]

    __table_args__ = (Index(None, "engine", "expires_at"),)


class RuleRow(Base):
    """A named policy rule; the first that matches wins, by `rule_order`, then name."""

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
    """A call that changed something: when, whose token (its name), from where, what, and the outcome."""

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
