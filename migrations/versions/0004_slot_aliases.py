"""Other ids of the request that stored a block, so that a reset can match them after a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("slots", sa.Column("aliases", sa.Text(), nullable=True))
