"""Why a part of kvferry does less than it should, as listed by `/readyz`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Causes of a shortfall that callers treat differently."""

    LOCKED = "locked"
    FULL = "full"
    DENIED = "denied"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A cause, one sentence for operators without secrets, and when it began on the monotonic clock."""

    cause: Cause
    text: str
    since_s: float = 0.0
