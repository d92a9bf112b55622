"""Guard between an engine and offloading: an exception in offloading becomes a miss and does not fail the engine."""

from kvferry.app.guard.guard import ERROR_WINDOW_S, MAX_ERRORS, OffloadGuard, OffloadStatus
from kvferry.app.guard.wrappers import ErrorLog, GuardedCopies, HookTimer, guarded_sink

__all__ = [
    "ERROR_WINDOW_S",
    "MAX_ERRORS",
    "ErrorLog",
    "GuardedCopies",
    "HookTimer",
    "OffloadGuard",
    "OffloadStatus",
    "guarded_sink",
]
