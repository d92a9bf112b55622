"""Session of the request that stored a block, so that a reset can match it after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("slots", "evictions"):
        op.add_column(table, sa.Column("session", sa.Text(), nullable=True))
