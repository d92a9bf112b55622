"""The manager lock for calls that change the pool, and the note that an exception interrupted one of them."""

from __future__ import annotations

from threading import RLock
from types import TracebackType


class ChangeLock:
    """Acquires the manager lock, and marks the pool as torn when an exception leaves the context.

    The index, slots, pins and eviction policy of a torn pool may disagree. Re-entrant, as the lock is.
    """

    __slots__ = ("is_torn",)

    def __init__(self) -> None:
        self.is_torn = False

    def __enter__(self) -> bool:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError


def change_lock(lock: RLock) -> ChangeLock:
    """Return the `ChangeLock` of a lock.

    Its class is made for this lock, whose own `__enter__` it has: two calls less on the engine thread, in each context.
    """
    release = lock.__exit__

    def leave(
        self: ChangeLock, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.is_torn = True
        release(kind, error, trace)

    namespace = {"__slots__": (), "__enter__": lock.__enter__, "__exit__": leave}
    made: ChangeLock = type("BoundChangeLock", (ChangeLock,), namespace)()
    return made
