"""Expiry times of keys, which may be renewed any number of times."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

K = TypeVar("K", str, bytes, int)

_SLACK = 64


class Expiries(Generic[K]):
    """Keys and their expiry times. Renewing a key takes O(log n) amortized; memory is O(n)."""

    def __init__(self) -> None:
        self._until_s: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []
        self.next_s = math.inf
        """Earliest time at which `pop_due` may return a key."""

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: K) -> bool:
        return key in self._until_s

    def keys(self) -> list[K]:
        """Return all keys."""
        return list(self._until_s)

    def until_s(self, key: K) -> float | None:
        """Return the expiry time of a key, None if it has none."""
        return self._until_s.get(key)

    def set(self, key: K, until_s: float) -> None:
        """Set the expiry time of a key."""
        self._until_s[key] = until_s
        heapq.heappush(self._heap, (until_s, key))
        if len(self._heap) > 2 * len(self._until_s) + _SLACK:
            self._heap = [(until_s, key) for key, until_s in self._until_s.items()]
            heapq.heapify(self._heap)
        self.next_s = self._heap[0][0]

    def first(self) -> K:
        """Return the key that expires first; O(log n) amortized. Requires: there is one."""
        while self._until_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def discard(self, key: K) -> bool:
        """Remove a key. Returns False if it is absent."""
        return self._until_s.pop(key, None) is not None

    def pop_due(self, now_s: float, limit: int) -> list[K]:
        """Remove and return expired keys, checking at most `limit` entries."""
        due: list[K] = []
        for _ in range(limit):
            if not self._heap or self._heap[0][0] > now_s:
                break
            until_s, key = heapq.heappop(self._heap)
            if self._until_s.get(key) == until_s:
                del self._until_s[key]
                due.append(key)
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return due

    def clear(self) -> None:
        """Remove all keys."""
        self._until_s.clear()
        self._heap.clear()
        self.next_s = math.inf
