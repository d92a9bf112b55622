"""No indexes of keys, which cost each stored and evicted block most of its time, and none of rows without a tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_BY_TENANT = (["engine", "tenant", "time", "id"], ["engine", "tenant", "reason", "time", "id"])


def upgrade() -> None:
    op.drop_index(op.f("ix_slots_engine_key"), "slots")
    op.drop_index(op.f("ix_evictions_engine_key_id"), "evictions")
    has_tenant = sa.text("tenant IS NOT NULL")
    for columns in _BY_TENANT:
        name = op.f(f"ix_evictions_{'_'.join(columns)}")
        op.drop_index(name, "evictions")
        op.create_index(name, "evictions", columns, sqlite_where=has_tenant, postgresql_where=has_tenant)
