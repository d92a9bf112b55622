"""Times in responses and events: RFC 3339, UTC, with a Z."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator


def rfc3339(unix_s: float) -> str:
    """Return a Unix time in seconds as RFC 3339 with milliseconds."""
    second, micros = divmod(round(unix_s * 1e6), 1_000_000)
    return f"{_second(second)}.{micros // 1000:03d}Z"


@lru_cache(maxsize=16)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def rfc3339_or_none(unix_s: float | None) -> str | None:
    """Return a Unix time as `rfc3339` does, None for None or 0."""
    return rfc3339(unix_s) if unix_s else None


Instant = Annotated[str, BeforeValidator(rfc3339)]
"""Field of a response that is read from Unix seconds."""
InstantOrNone = Annotated[str | None, BeforeValidator(rfc3339_or_none)]
