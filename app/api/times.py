"""Times as the API writes them: RFC 3339, UTC, with a Z."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(unix_s: float) -> str:
    """A Unix time in seconds as RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rfc3339_or_none(unix_s: float | None) -> str | None:
    """Like `rfc3339`; None for a time that has not been (None or 0)."""
    return rfc3339(unix_s) if unix_s else None
