"""Errors and failures that several packages share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StartError(ValueError):
    """kvferry cannot start as configured; the message names the setting, its value and what to do."""


class RequestFailed(Exception):
    """An unexpected error, the cause of this exception, that concerns one request only.

    Nothing but that request has changed, and it is computed without offloading from now on.
    """


class FailureCause(StrEnum):
    """Causes of a failure that callers treat differently."""

    LOCKED = "locked"
    FULL = "full"
    DENIED = "denied"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part of kvferry does less than it should, as listed by `/readyz`.

    `text` is one sentence for operators, without secrets. `since_s` is when it began, on the clock of its owner; 0 if
    that is not recorded.
    """

    cause: FailureCause
    text: str
    since_s: float = 0.0
