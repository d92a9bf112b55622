"""Dropped keys of a store that engines share, until their blocks are removed from the medium."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from kvferry.core.keys import Key


class DroppedKeys:
    """Keys that a store does not find any more, and whose blocks are still to be removed. Thread-safe.

    A key that is dropped while its block is being stored stays here until that store has ended: the block may appear in
    the medium after a removal. A store therefore enters `storing` first, and then stores no key that is `in` here.
    Nor is the key forgotten before the store has ended, which may have read the medium before a removal.
    """

    def __init__(self) -> None:
        self._keys: dict[Key, int] = {}
        """Keys, and the number of the call that dropped each last."""
        self._num_calls = 0
        self._storing: Counter[Key] = Counter()
        """How many stores of a key are under way."""
        self._lock = threading.Lock()

    def add(self, keys: Iterable[Key]) -> None:
        """Drop keys."""
        with self._lock:
            self._num_calls += 1
            self._keys.update(dict.fromkeys(keys, self._num_calls))

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def all(self) -> list[Key]:
        """Return all keys that are dropped and not removed."""
        with self._lock:
            return list(self._keys)

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Return whether one of these keys is dropped and not removed."""
        return any(key in self._keys for key in keys)

    @contextmanager
    def storing(self, keys: Sequence[Key]) -> Iterator[None]:
        """Keep these keys out of `removals` meanwhile, and do not forget those that are dropped."""
        with self._lock:
            self._storing.update(keys)
        try:
            yield
        finally:
            with self._lock:
                # The operators of a counter look at all keys.
                for key in keys:
                    self._storing[key] -= 1
                    if not self._storing[key]:
                        del self._storing[key]

    def removals(self, limit: int) -> Iterator[list[Key]]:
        """Yield keys whose blocks are to be removed from the medium, up to `limit` at once, until there are none.

        Those that were yielded are forgotten when the next ones are requested, unless they were dropped once more in
        between: another engine may have stored them before that. Those that are being stored then are removed again.
        """
        while found := self._removable(limit):
            yield list(found)
            with self._lock:
                for key, number in found.items():
                    if self._keys.get(key) == number and key not in self._storing:
                        del self._keys[key]

    def _removable(self, limit: int) -> dict[Key, int]:
        with self._lock:
            return dict(islice((one for one in self._keys.items() if one[0] not in self._storing), limit))
