"""The table of engines without what engines reported about themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_REQUIRED = ("epoch", sa.BigInteger()), ("started_at", sa.Double())
_REPORTED = (
    ("host", sa.Text()),
    ("url", sa.Text()),
    ("kind", sa.Text()),
    ("model", sa.Text()),
    ("version", sa.Text()),
    ("slots", sa.BigInteger()),
    ("used_slots", sa.BigInteger()),
    ("pool_bytes", sa.BigInteger()),
    ("recent", sa.JSON(none_as_null=True)),
    ("tiers", sa.JSON(none_as_null=True)),
)


def upgrade() -> None:
    op.drop_table("tenant_use")
    for name, _ in (*_REQUIRED, *_REPORTED):
        op.drop_column("engines", name)
