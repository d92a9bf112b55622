"""Times in queries, responses and events: RFC 3339; ours are UTC, with a Z."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

from pydantic import AwareDatetime, BeforeValidator

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def rfc3339(unix_s: float) -> str:
    """Return a Unix time in seconds as RFC 3339 with milliseconds."""
    second, micros = divmod(round(unix_s * 1e6), 1_000_000)
    return f"{_second(second)}.{micros // 1000:03d}Z"


@lru_cache(maxsize=16)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()[:19]


def rfc3339_or_none(unix_s: float | None) -> str | None:
    """Return a Unix time as `rfc3339` does, None for None or 0."""
    return rfc3339(unix_s) if unix_s else None


def _check_rfc3339(value: object) -> object:
    if not isinstance(value, str) or not _RFC3339.fullmatch(value):
        raise ValueError("must be RFC 3339 with Z or an offset, such as 2026-01-31T12:00:00Z; in a URL a + is %2B")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_check_rfc3339)]
"""A time in a query."""
