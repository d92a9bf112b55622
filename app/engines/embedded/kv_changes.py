"""Changes of the pool and of the device's prefix cache, queued for the thread that publishes KV events.

The queue is bounded. Once a change found no space, all later ones are dropped too, until the publisher begins anew from
what pool and device hold.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.keys import Key
from kvferry.core.pool.events import CacheEvent, EvictionBatch, ResetEvent, StoreBatch

if TYPE_CHECKING:
    from kvferry.app.engines.embedded.request import Request

MAX_QUEUED_KEYS = 1 << 16
"""Keys and blocks in all queued changes."""


class Stored(NamedTuple):
    """Slots that entered the pool."""

    keys: Sequence[Key]


class Evicted(NamedTuple):
    """Slots that left the pool."""

    keys: Sequence[Key]


class PoolCleared(NamedTuple):
    """A reset of the whole pool."""


class Filled(NamedTuple):
    """Blocks of a request from `first_block` on that were computed or loaded, and whether their hashes are new.

    Token ids and hashes of a request only grow, so that they may be read later, by any thread.
    """

    request: Request
    first_block: int
    are_new: Sequence[bool]


class Removed(NamedTuple):
    """Hashes that left the device's prefix cache."""

    hashes: Sequence[bytes]


Change = Stored | Evicted | PoolCleared | Filled | Removed


class ChangeQueue:
    """Bounded queue of changes, in their order. Its methods only append.

    The device changes before its changes are recorded, so that a copy made after `restart` has all that were dropped.
    """

    def __init__(self) -> None:
        self.has_overflowed = False
        """Whether changes were dropped since the last restart."""
        self.num_dropped = 0
        """Blocks and slots of all changes that were dropped."""
        self._queue: deque[Change] = deque()
        self._num_keys = 0
        self._lock = threading.Lock()

    def receive(self, event: CacheEvent) -> None:
        """Queue a change of the pool. Requires: manager lock held."""
        if isinstance(event, StoreBatch):
            self._append(Stored(event.keys), len(event.keys))
        elif isinstance(event, EvictionBatch):
            self._append(Evicted(event.rows.keys), len(event.rows.keys))
        elif isinstance(event, ResetEvent):
            self._append(PoolCleared(), 1)

    def record_filled(self, request: Request, first_block: int, are_new: Sequence[bool]) -> None:
        """Queue blocks that were computed or loaded. Thread: engine."""
        self._append(Filled(request, first_block, are_new), len(are_new))

    def record_removed(self, hashes: Sequence[bytes]) -> None:
        """Queue hashes that left the device's prefix cache. Thread: engine."""
        self._append(Removed(hashes), len(hashes))

    def take(self, max_changes: int) -> list[Change]:
        """Remove and return up to `max_changes` changes, the oldest first."""
        with self._lock:
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), max_changes))]
            self._num_keys -= sum(map(_num_keys, taken))
        return taken

    def restart(self) -> None:
        """Drop all changes, and accept changes again. Requires: manager lock held."""
        with self._lock:
            if self.has_overflowed:
                self.num_dropped += self._num_keys
            self._queue.clear()
            self._num_keys = 0
            self.has_overflowed = False

    def _append(self, change: Change, num_keys: int) -> None:
        with self._lock:
            if self.has_overflowed or self._num_keys + num_keys > MAX_QUEUED_KEYS:
                self.has_overflowed = True
                self.num_dropped += num_keys
                return
            self._queue.append(change)
            self._num_keys += num_keys


def _num_keys(change: Change) -> int:
    if isinstance(change, Filled):
        return len(change.are_new)
    if isinstance(change, PoolCleared):
        return 1
    return len(change.hashes if isinstance(change, Removed) else change.keys)
