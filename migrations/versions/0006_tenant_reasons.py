"""Index of evictions by tenant and reason, so that a page with both filters does not read all rows of a tenant."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NAME = "ix_evictions_engine_tenant_reason_time_id"


def upgrade() -> None:
    op.create_index(_NAME, "evictions", ["engine", "tenant", "reason", "time", "id"])
