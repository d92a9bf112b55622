"""Guard between an engine and offloading: an exception in offloading becomes a miss and does not fail the engine."""

from kvferry.app.guard.errors import ERROR_WINDOW_S, MAX_ERRORS, ErrorLog, OffloadStatus
from kvferry.app.guard.guard import OffloadGuard
from kvferry.app.guard.wrappers import GuardedCopies, GuardedSink

__all__ = [
    "ERROR_WINDOW_S",
    "MAX_ERRORS",
    "ErrorLog",
    "GuardedCopies",
    "GuardedSink",
    "OffloadGuard",
    "OffloadStatus",
]
