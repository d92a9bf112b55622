"""What engines report about themselves with each heartbeat, for the list of all engines."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COLUMNS = {
    "host": sa.Text(),
    "url": sa.Text(),
    "kind": sa.Text(),
    "model": sa.Text(),
    "version": sa.Text(),
    "ended_at": sa.Double(),
    "slots": sa.BigInteger(),
    "used_slots": sa.BigInteger(),
    "pool_bytes": sa.BigInteger(),
    "recent": sa.JSON(none_as_null=True),
    "tiers": sa.JSON(none_as_null=True),
}


def upgrade() -> None:
    for name, kind in _COLUMNS.items():
        op.add_column("engines", sa.Column(name, kind, nullable=True))
