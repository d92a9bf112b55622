"""Table of resets that tiers have not completed, which the next process of an engine repeats."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tier_resets",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("tier", sa.Text, nullable=False),
        sa.Column("match", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("key", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tier_resets")),
    )
    op.create_index(op.f("ix_tier_resets_engine_id"), "tier_resets", ["engine", "id"])
