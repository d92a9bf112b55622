"""A manager lock whose release a test sees, to act between two holds as another thread could."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


class WatchedLock:
    """A re-entrant lock that calls `released` whenever it is not held any more."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0
        self.released: Callable[[], object] = lambda: None

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()
        if not self._depth:
            self.released()


@contextmanager
def watched_locks() -> Iterator[None]:
    """Managers that are made meanwhile have such a lock."""
    with patch("kvferry.core.pool.manager.threading", SimpleNamespace(RLock=WatchedLock)):
        yield


def call_on_release(offload: Any, act: Callable[[], object], *others: tuple[Any, str]) -> None:
    """Call `act` at each release of the manager lock within `plan_step`; its own releases do not count.

    `others` are further methods, each with its owner, within which it is called too.
    """
    lock = offload.manager.lock

    def released() -> None:
        lock.released = lambda: None
        try:
            act()
        finally:
            lock.released = released

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **fields: Any) -> Any:
            before, lock.released = lock.released, released
            try:
                return method(*args, **fields)
            finally:
                lock.released = before

        setattr(owner, name, watched)

    for owner, name in ((offload, "plan_step"), *others):
        watch(owner, name)
