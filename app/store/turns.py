"""Whose turn it is to write: one writer at a time in this process, and people before the journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.store.errors import StoreUnavailable


class WriteTurns:
    """SQLite lets waiting writers poll, so a busy journal could keep an operator's call out for ever. This does not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._people_waiting = 0

    @contextmanager
    def person(self, timeout_s: float) -> Iterator[None]:
        """A turn for a call that somebody waits for; `StoreUnavailable` when it does not come in time."""
        with self._changed:
            self._people_waiting += 1
            try:
                free = self._changed.wait_for(lambda: not self._taken, timeout_s)
            finally:
                self._people_waiting -= 1
                self._changed.notify_all()
            if not free:
                raise StoreUnavailable(f"the database was busy for {timeout_s:g} s")
            self._taken = True
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def journal(self, timeout_s: float) -> Iterator[None]:
        """A turn for work that nobody waits for; it comes when no person wants one."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not self._people_waiting, timeout_s)
            # People who keep coming may delay the journal, not stop it.
            while self._taken:
                if not self._changed.wait(deadline_s + timeout_s - time.monotonic()):
                    raise StoreUnavailable(f"the database was busy for {2 * timeout_s:g} s")
            self._taken = True
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()
