"""Table of the counters of each minute, so that their history outlives the process."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stats_rows",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("counts", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stats_rows")),
    )
    op.create_index(op.f("ix_stats_rows_engine_time_id"), "stats_rows", ["engine", "time", "id"])
