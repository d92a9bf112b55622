"""Sums of the eviction history by five minutes, reason and age bucket, initialized from existing rows."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# Copies of the service's constants at the time of this migration; changing them needs another migration.
_SPAN_S = 300
_AGE_BOUNDS_S = (1, 10, 60, 300, 900, 3600, 14400, 86400, 604800)


def upgrade() -> None:
    op.create_table(
        "eviction_sums",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("span", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("never_hit", sa.BigInteger(), nullable=False),
        sa.Column("regretted", sa.BigInteger(), nullable=False),
        sa.Column("age_min", sa.Double(), nullable=False),
        sa.Column("age_sum", sa.Double(), nullable=False),
        sa.Column("age_max", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "span", "reason", "bucket", name=op.f("pk_eviction_sums")),
    )
    bucket = "CASE " + " ".join(f"WHEN age_s <= {bound} THEN {i}" for i, bound in enumerate(_AGE_BOUNDS_S))
    bucket += f" ELSE {len(_AGE_BOUNDS_S)} END"
    span = _span()
    op.execute(
        "INSERT INTO eviction_sums "
        "(engine, span, reason, bucket, number, never_hit, regretted, age_min, age_sum, age_max) "
        f"SELECT engine, {span}, reason, {bucket}, count(*), sum(CASE WHEN hits = 0 THEN 1 ELSE 0 END), "
        "count(regretted_at), min(age_s), sum(age_s), max(age_s) FROM evictions "
        f"GROUP BY engine, {span}, reason, {bucket}"
    )


def _span() -> str:
    # Times are after 1970, so SQLite's truncation rounds down.
    if op.get_bind().dialect.name == "sqlite":
        return f"CAST(time / {_SPAN_S} AS INTEGER)"
    return f"CAST(floor(time / {_SPAN_S}) AS BIGINT)"
