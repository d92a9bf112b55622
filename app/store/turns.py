"""Whose turn it is to write: one writer at a time in this process, and people before the journal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.app.store.errors import StoreUnavailable

JOURNAL_PATIENCE_S = 0.1
"""How long people may go before the journal; then it is its turn, or those who keep coming would stop it."""


class WriteTurns:
    """SQLite lets waiting writers poll, so a busy journal could keep an operator's call out for ever. This does not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._people_waiting = 0
        self._journal_is_next = False

    @contextmanager
    def person(self, timeout_s: float) -> Iterator[None]:
        """A turn for a call that somebody waits for; `StoreUnavailable` when it does not come in time."""
        with self._changed:
            self._people_waiting += 1
            try:
                free = self._changed.wait_for(lambda: not self._taken and not self._journal_is_next, timeout_s)
            finally:
                self._people_waiting -= 1
                self._changed.notify_all()
            self._take(free, timeout_s)
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def journal(self, timeout_s: float) -> Iterator[None]:
        """A turn for work that nobody waits for: people go first, but for so long only."""
        with self._changed:
            free = self._changed.wait_for(lambda: not self._taken and not self._people_waiting, JOURNAL_PATIENCE_S)
            if not free:
                self._journal_is_next = True
                try:
                    free = self._changed.wait_for(lambda: not self._taken, timeout_s)
                finally:
                    self._journal_is_next = False
                    self._changed.notify_all()
            self._take(free, timeout_s)
        try:
            yield
        finally:
            self._give_back()

    def _take(self, free: bool, timeout_s: float) -> None:
        if not free:
            raise StoreUnavailable(f"the database was busy for {timeout_s:g} s, and nothing was written")
        self._taken = True

    def _give_back(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()
