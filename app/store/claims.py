"""Outcome of a database write with a time limit: decided once, by the commit or by the caller that stops waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvferry.app.store.errors import StoreUnavailable


class Claim:
    """The first of `commit` and `abandon` decides. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed: bool | None = None

    def commit(self) -> bool:
        """Return whether the write may be committed, and decide so if nothing is decided."""
        return self._decide(True) is True

    def abandon(self) -> bool:
        """Return whether the write is rolled back, and decide so if nothing is decided."""
        return self._decide(False) is False

    def _decide(self, committed: bool) -> bool:
        with self._lock:
            if self._committed is None:
                self._committed = committed
            return self._committed


_current: ContextVar[Claim | None] = ContextVar("claim", default=None)


@contextmanager
def deciding(claim: Claim) -> Iterator[None]:
    """Have the writes of this context ask `claim` before they commit."""
    token = _current.set(claim)
    try:
        yield
    finally:
        _current.reset(token)


def claim_commit() -> None:
    """Raise `StoreUnavailable`, which rolls back, if the caller of this write has stopped waiting."""
    claim = _current.get()
    if claim is not None and not claim.commit():
        raise StoreUnavailable("the caller stopped waiting before the commit")
