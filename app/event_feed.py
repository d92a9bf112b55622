"""What the cache did, for those who watch it while it happens: a bounded ring of events that watchers read from.

Nobody waits for a watcher. The ring is filled only while there is one, or was a moment ago; whoever reads too slowly
finds that the ring went on, and learns how many events were lost. What is queued here is rendered by its readers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from kvferry.core.keys import Key
from kvferry.core.pool.events import EventSink, EvictionBatch, RequestEnd, ResetEvent, StoreBatch

MAX_EVENTS = 4096
MAX_KEYS = 65_536
"""Keys that the ring's events may name together: events differ in size."""
RESUME_S = 60.0
"""For how long the ring is still filled once the last watcher has gone, so that one who comes back misses nothing."""


class EventType(StrEnum):
    """What happened. The last six are what operators did, and how it ended."""

    STORED = "stored"
    EVICTED = "evicted"
    REGRETTED = "regretted"
    RESET = "reset"
    FINISHED = "finished"
    POLICY = "policy"
    OVERRIDE = "override"
    RULE = "rule"
    CONFIG = "config"
    RESIZED = "resized"


class Regret(NamedTuple):
    """Evicted keys that were asked for again."""

    time_s: float
    keys: Sequence[Key]


class Change(NamedTuple):
    """Something that an operator changed, as JSON values."""

    time_s: float
    what: Mapping[str, Any]


Happening = StoreBatch | EvictionBatch | ResetEvent | RequestEnd | Regret | Change


@dataclass(frozen=True, slots=True)
class Event:
    """One event; numbers grow by one, also over events that nobody was there to see."""

    number: int
    type: EventType
    item: Happening
    num_keys: int


class EventFeed:
    """An `EventSink` that passes everything on, and keeps it for a while if somebody watches. Any thread may call."""

    def __init__(self, inner: EventSink, clock: Callable[[], float] = time.monotonic) -> None:
        """`inner` is told everything first, as if there were nothing in between."""
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._ring: deque[Event] = deque()
        self._num_keys = 0
        self._last_number = 0
        self._num_watchers = 0
        self._record_until_s: float | None = None
        self.name = secrets.token_hex(4)
        """Tells the numbers of this process from those of another."""

    # --- the sink: called under the manager's lock ---------------------------------------------------------------

    def stored(self, batch: StoreBatch) -> None:
        """Blocks can be loaded from now on."""
        self._inner.stored(batch)
        self._push(EventType.STORED, batch, len(batch.keys))

    def evicted(self, batch: EvictionBatch) -> None:
        """Blocks have left the pool."""
        self._inner.evicted(batch)
        self._push(EventType.EVICTED, batch, len(batch.rows.keys))

    def was_reset(self, event: ResetEvent) -> None:
        """All blocks have left the pool."""
        self._inner.was_reset(event)
        self._push(EventType.RESET, event, 0)

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Evicted blocks were asked for again."""
        self._inner.regretted(keys, time_s)
        self._push(EventType.REGRETTED, Regret(time_s, keys), len(keys))

    def request_ended(self, end: RequestEnd) -> None:
        """A request is over."""
        self._inner.request_ended(end)
        self._push(EventType.FINISHED, end, 0)

    # --- what operators did --------------------------------------------------------------------------------------

    def changed(self, type_: EventType, what: Mapping[str, Any], now_s: float) -> None:
        """An operator changed something; `what` are JSON values without secrets."""
        self._push(type_, Change(now_s, what), 0)

    # --- watchers ------------------------------------------------------------------------------------------------

    @property
    def num_watchers(self) -> int:
        """How many watch now."""
        return self._num_watchers

    @contextmanager
    def watching(self) -> Iterator[int]:
        """Have events kept for as long as this lasts; the number of the last one before."""
        with self._lock:
            self._num_watchers += 1
            self._record_until_s = None
            last_number = self._last_number
        try:
            yield last_number
        finally:
            with self._lock:
                self._num_watchers -= 1
                if not self._num_watchers:
                    self._record_until_s = self._clock() + RESUME_S

    def read(self, after: int, limit: int) -> tuple[int, list[Event]]:
        """How many events after number `after` are lost, and up to `limit` of those that follow them."""
        with self._lock:
            oldest = self._last_number - len(self._ring) + 1
            lost = max(0, oldest - after - 1)
            start = max(0, after + 1 - oldest)
            return lost, list(islice(self._ring, start, start + limit))

    def _push(self, type_: EventType, item: Happening, num_keys: int) -> None:
        with self._lock:
            self._last_number += 1
            if not self._num_watchers and not self._lingers():
                return
            self._ring.append(Event(self._last_number, type_, item, num_keys))
            self._num_keys += num_keys
            while len(self._ring) > MAX_EVENTS or self._num_keys > MAX_KEYS:
                self._num_keys -= self._ring.popleft().num_keys

    def _lingers(self) -> bool:
        """Whether a watcher has gone so lately that it may come back; forgets everything once that is over."""
        if self._record_until_s is None:
            return False
        if self._clock() < self._record_until_s:
            return True
        self._record_until_s = None
        self._ring.clear()
        self._num_keys = 0
        return False
