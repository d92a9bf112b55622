"""No sums of evictions: a summary counts the rows themselves."""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("eviction_sums")
