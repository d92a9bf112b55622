"""Eviction class of a slot, so that it is kept across restarts."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("slots", sa.Column("priority", sa.Text(), nullable=True))
