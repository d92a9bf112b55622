"""Table of the limits that operators set for single tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenant_limits",
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("max_bytes", sa.BigInteger, nullable=True),
        sa.Column("set_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("engine", "tenant", name=op.f("pk_tenant_limits")),
    )
