"""Tables of the metadata store.

They are made to be read in a shell, too. A key is the hex text that the HTTP API shows, so that a hash copied from it
finds its row. Instants are Unix seconds in a double; their names end in `_at`, or are `time`. The `readable_*` views
show them as UTC text. Durations end in `_s`. Each row names its engine, since several may share one database.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)

ALIVE_S = 30.0
"""Age of an engine's last heartbeat up to which it counts as alive."""

_NAMING = {"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}

METADATA = MetaData(naming_convention=_NAMING)

_required = partial(Column, nullable=False)
# SQLite numbers rows only where the type is INTEGER.
_RowId = BigInteger().with_variant(Integer(), "sqlite")
_of_tenants: dict[str, Any] = dict.fromkeys(("sqlite_where", "postgresql_where"), text("tenant IS NOT NULL"))

ENGINES = Table(
    "engines",
    METADATA,
    Column("name", Text, primary_key=True),
    _required("pool_kind", Text),
    _required("seen_at", Double),
    Column("ended_at", Double),
    _required("eviction_rows", BigInteger),
    _required("eviction_days", Double),
)
"""An engine that uses this database: its last heartbeat, its end if that was clean, and its limits of history."""

SLOTS = Table(
    "slots",
    METADATA,
    Column("engine", Text, primary_key=True),
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    _required("key", Text),
    _required("group_index", Integer),
    _required("generation", BigInteger),
    _required("epoch", BigInteger),
    _required("size_bytes", BigInteger),
    _required("position", BigInteger),
    _required("request", Text),
    Column("tenant", Text),
    Column("lora", Text),
    _required("stored_at", Double),
    Column("last_hit_at", Double),
    _required("hits", BigInteger),
    Column("aliases", Text),
    Column("priority", Text),
    Column("session", Text),
)
"""A loadable block and the slot that holds it: a projection of memory, updated in checkpoints.

`aliases` is a JSON array of the request's other ids, NULL without any. `priority` is the slot's eviction class;
NULL, in rows of an older version, is `normal`.
"""

EVICTIONS = Table(
    "evictions",
    METADATA,
    Column("id", _RowId, primary_key=True),
    _required("engine", Text),
    _required("time", Double),
    _required("key", Text),
    _required("group_index", Integer),
    _required("reason", Text),
    _required("policy", Text),
    _required("age_s", Double),
    _required("idle_s", Double),
    _required("hits", BigInteger),
    _required("position", BigInteger),
    _required("size_bytes", BigInteger),
    _required("request", Text),
    Column("tenant", Text),
    Column("needed_by", Text),
    Column("regretted_at", Double),
    Column("session", Text),
    # One index per filter, in the order of the listing, so that a page is read from its start. A filter by request and
    # others reads the index of requests: one has few rows. None by key: at random places, each row would cost it more
    # than all others together.
    Index(None, "engine", "time", "id"),
    Index(None, "engine", "reason", "time", "id"),
    Index(None, "engine", "request", "time", "id"),
    Index(None, "engine", "tenant", "time", "id", **_of_tenants),
    Index(None, "engine", "tenant", "reason", "time", "id", **_of_tenants),
)
"""A block that left the pool, the reason, and whether it was requested again."""

RESETS = Table(
    "resets",
    METADATA,
    Column("id", _RowId, primary_key=True),
    _required("engine", Text),
    _required("time", Double),
    _required("epoch", BigInteger),
    _required("dropped", BigInteger),
    Index(None, "engine", "time", "id"),
)
"""A whole reset and the number of dropped blocks, which have no eviction rows, since a reset costs O(1)."""

STATS_ROWS = Table(
    "stats_rows",
    METADATA,
    Column("id", _RowId, primary_key=True),
    _required("engine", Text),
    _required("time", Double),
    _required("started_at", Double),
    _required("counts", JSON),
    Index(None, "engine", "time", "id"),
)
"""Counters of the minute up to `time`, of the process that started then: JSON with the columns of `stats/history`."""

TIER_RESETS = Table(
    "tier_resets",
    METADATA,
    Column("id", _RowId, primary_key=True),
    _required("engine", Text),
    _required("time", Double),
    _required("tier", Text),
    Column("match", JSON(none_as_null=True)),
    Column("key", Text),
    Index(None, "engine", "id"),
)
"""A reset that a tier has not completed, of the blocks that `match` names, of one `key`, or without both of all."""

OVERRIDES = Table(
    "overrides",
    METADATA,
    Column("engine", Text, primary_key=True),
    Column("request", Text, primary_key=True),
    _required("policy", JSON),
    _required("set_at", Double),
    _required("expires_at", Double),
    Index(None, "engine", "expires_at"),
)
"""Policy fields set by an operator for one request id."""

RULES = Table(
    "rules",
    METADATA,
    Column("engine", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    _required("rule_order", BigInteger),
    _required("match", JSON),
    _required("policy", JSON),
    _required("created_at", Double),
    _required("updated_at", Double),
    Index(None, "engine", "rule_order", "name"),
)
"""A named policy rule; the first match by `rule_order`, then name, applies."""

TENANT_LIMITS = Table(
    "tenant_limits",
    METADATA,
    Column("engine", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("max_bytes", BigInteger),
    _required("set_at", Double),
)
"""The bytes that one tenant may have in the pool, set by an operator; without a number it has no limit."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("id", _RowId, primary_key=True),
    _required("engine", Text),
    _required("time", Double),
    _required("token", Text),
    _required("client", Text),
    _required("request_id", Text),
    _required("method", Text),
    _required("path", Text),
    Column("what", JSON(none_as_null=True)),
    Column("status", Integer),
    Column("outcome", Text),
    Index(None, "engine", "time", "id"),
)
"""A mutating call: time, name of the token, client, body, and outcome."""
