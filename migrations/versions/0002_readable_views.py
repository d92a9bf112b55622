"""Views that show times as UTC text, newest first, for reading the database in a shell."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_VIEWS = {
    "evictions": (
        [
            "id",
            "engine",
            "time",
            "key",
            "group_index",
            "reason",
            "policy",
            "age_s",
            "idle_s",
            "hits",
            "position",
            "size_bytes",
            "request",
            "tenant",
            "needed_by",
            "regretted_at",
        ],
        ["time", "regretted_at"],
        "time DESC, id DESC",
    ),
    "slots": (
        [
            "engine",
            "slot",
            "key",
            "group_index",
            "generation",
            "epoch",
            "size_bytes",
            "position",
            "request",
            "tenant",
            "lora",
            "stored_at",
            "last_hit_at",
            "hits",
        ],
        ["stored_at", "last_hit_at"],
        "engine, slot",
    ),
    "overrides": (
        ["engine", "request", "policy", "set_at", "expires_at"],
        ["set_at", "expires_at"],
        "engine, request",
    ),
    "audit": (
        ["id", "engine", "time", "token", "client", "request_id", "method", "path", "what", "status", "outcome"],
        ["time"],
        "time DESC, id DESC",
    ),
}


def _as_text(column: str) -> str:
    if op.get_bind().dialect.name == "sqlite":
        return f"strftime('%Y-%m-%dT%H:%M:%fZ', {column}, 'unixepoch') AS {column}"
    return f"to_char(to_timestamp({column}) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') AS {column}"


def upgrade() -> None:
    for table, (columns, instants, order) in _VIEWS.items():
        shown = ", ".join(_as_text(name) if name in instants else name for name in columns)
        ordered = ", ".join(f"{table}.{part.strip()}" for part in order.split(","))
        op.execute(f"CREATE VIEW readable_{table} AS SELECT {shown} FROM {table} ORDER BY {ordered}")


def downgrade() -> None:
    for table in _VIEWS:
        op.execute(f"DROP VIEW readable_{table}")
