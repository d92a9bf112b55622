"""The bounded queue between whoever must not wait and the journal: it holds so many rows, and beyond that drops."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.keys import Key
from kvferry.core.pool.events import EvictionBatch, ResetEvent


@dataclass(frozen=True, slots=True)
class Regrets:
    """Evicted keys that were asked for again at `time_s`."""

    keys: Sequence[Key]
    time_s: float


HistoryItem = EvictionBatch | ResetEvent | Regrets


@dataclass(frozen=True, slots=True)
class Entry:
    """An item, the rows it stands for, and when it was queued by the monotonic clock."""

    item: HistoryItem
    rows: int
    queued_s: float


class HistoryQueue:
    """One side appends, under the manager's lock; the other takes and settles, on the journal's thread.

    There is no lock: each counter has one writer, and the deque's own operations are atomic. An entry counts as queued
    until it is settled, so that `appended = queued + settled` whatever becomes of it.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.appended_rows = 0
        self.dropped_rows = 0
        self.settled_rows = 0
        self._entries: deque[Entry] = deque()
        self._in_hand: list[Entry] = []

    def append(self, item: HistoryItem, rows: int) -> None:
        """Queue an item, or drop and count it where it does not fit. Never waits."""
        if not rows:
            return
        if self.queued_rows + rows > self.max_rows:
            self.dropped_rows += rows
            return
        self.appended_rows += rows
        self._entries.append(Entry(item, rows, time.monotonic()))

    @property
    def queued_rows(self) -> int:
        """Rows waiting, those in hand among them."""
        return self.appended_rows - self.settled_rows

    def take(self, max_rows: int) -> list[Entry]:
        """The oldest entries, of `max_rows` rows or a single larger one. They stay queued until settled."""
        rows = sum(entry.rows for entry in self._in_hand)
        while self._entries and rows < max_rows:
            entry = self._entries.popleft()
            self._in_hand.append(entry)
            rows += entry.rows
        return list(self._in_hand)

    def settle(self, count: int) -> None:
        """The first `count` entries taken are done with."""
        self.settled_rows += sum(entry.rows for entry in self._in_hand[:count])
        self._in_hand = self._in_hand[count:]

    def oldest_s(self) -> float | None:
        """When the oldest entry still queued was appended, by the monotonic clock."""
        for entries in (self._in_hand, self._entries):
            try:
                return entries[0].queued_s
            except IndexError:
                continue
        return None
