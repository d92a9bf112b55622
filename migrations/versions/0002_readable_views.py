"""Views that show times as UTC text, newest first, for reading the database in a shell."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_VIEWS = {
    "evictions": (["time", "regretted_at"], "time DESC, id DESC"),
    "slots": (["stored_at", "last_hit_at"], "engine, slot"),
    "overrides": (["set_at", "expires_at"], "engine, request"),
    "audit": (["time"], "time DESC, id DESC"),
}
"""The instants of each table, and the order of its view."""


def _as_text(column: str) -> str:
    if op.get_bind().dialect.name == "sqlite":
        return f"strftime('%Y-%m-%dT%H:%M:%fZ', {column}, 'unixepoch') AS {column}"
    return f"to_char(to_timestamp({column}) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') AS {column}"


def upgrade() -> None:
    for table, (instants, order) in _VIEWS.items():
        columns = [column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)]
        shown = ", ".join(_as_text(name) if name in instants else name for name in columns)
        ordered = ", ".join(f"{table}.{part.strip()}" for part in order.split(","))
        op.execute(f"CREATE VIEW readable_{table} AS SELECT {shown} FROM {table} ORDER BY {ordered}")
