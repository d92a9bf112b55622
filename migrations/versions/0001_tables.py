"""Slots, evictions, resets, overrides, rules, audit and engines."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("what", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_engine_time_id"), "audit", ["engine", "time", "id"], unique=False)
    op.create_table(
        "engines",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pool_kind", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("eviction_rows", sa.BigInteger(), nullable=False),
        sa.Column("eviction_days", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_engines")),
    )
    op.create_table(
        "evictions",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("age_s", sa.Double(), nullable=False),
        sa.Column("idle_s", sa.Double(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("needed_by", sa.Text(), nullable=True),
        sa.Column("regretted_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evictions")),
    )
    op.create_index(op.f("ix_evictions_engine_key_id"), "evictions", ["engine", "key", "id"], unique=False)
    op.create_index(
        op.f("ix_evictions_engine_reason_time_id"), "evictions", ["engine", "reason", "time", "id"], unique=False
    )
    op.create_index(
        op.f("ix_evictions_engine_request_time_id"), "evictions", ["engine", "request", "time", "id"], unique=False
    )
    op.create_index(
        op.f("ix_evictions_engine_tenant_time_id"), "evictions", ["engine", "tenant", "time", "id"], unique=False
    )
    op.create_index(op.f("ix_evictions_engine_time_id"), "evictions", ["engine", "time", "id"], unique=False)
    op.create_table(
        "overrides",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.Column("set_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "request", name=op.f("pk_overrides")),
    )
    op.create_index(op.f("ix_overrides_engine_expires_at"), "overrides", ["engine", "expires_at"], unique=False)
    op.create_table(
        "resets",
        sa.Column("id", _ROW_ID, nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resets")),
    )
    op.create_index(op.f("ix_resets_engine_time_id"), "resets", ["engine", "time", "id"], unique=False)
    op.create_table(
        "rules",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("rule_order", sa.BigInteger(), nullable=False),
        sa.Column("match", sa.JSON(), nullable=False),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "name", name=op.f("pk_rules")),
    )
    op.create_index(op.f("ix_rules_engine_rule_order_name"), "rules", ["engine", "rule_order", "name"], unique=False)
    op.create_table(
        "slots",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("lora", sa.Text(), nullable=True),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.Column("last_hit_at", sa.Double(), nullable=True),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "slot", name=op.f("pk_slots")),
    )
    op.create_index(op.f("ix_slots_engine_key"), "slots", ["engine", "key"], unique=False)
