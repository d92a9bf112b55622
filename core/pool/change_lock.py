"""The manager lock as it is held for changes of the pool."""

from __future__ import annotations

import threading
from types import TracebackType


class ChangeLock:
    """Acquires the manager lock, and marks the pool as torn when an exception leaves the context.

    Index, slots, pins and eviction policy of a torn pool may disagree. Re-entrant, as the lock is.
    """

    __slots__ = ("_lock", "is_torn")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.is_torn = False

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.is_torn = True
        self._lock.__exit__(kind, error, trace)
