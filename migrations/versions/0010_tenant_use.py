"""Table of the bytes that tenants have in the pools of engines."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenant_use",
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("pool_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("engine", "tenant", name=op.f("pk_tenant_use")),
    )
