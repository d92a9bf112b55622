"""Times that run out: which keys are over, soonest first, however often they are renewed."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", str, bytes)

_SLACK = 64


class Expiries(Generic[K]):
    """Keys with the time that each lasts until. Renewing one costs O(log n) amortized, and no memory for long."""

    def __init__(self) -> None:
        self._until_s: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: K) -> bool:
        return key in self._until_s

    def keys(self) -> list[K]:
        """Every key that has a time."""
        return list(self._until_s)

    def until_s(self, key: K) -> float | None:
        """When a key's time is over, or None if it has none."""
        return self._until_s.get(key)

    def set(self, key: K, until_s: float) -> None:
        """Give a key a time, or another one."""
        self._until_s[key] = until_s
        heapq.heappush(self._heap, (until_s, key))
        if len(self._heap) > 2 * len(self._until_s) + _SLACK:
            self._heap = [(until_s, key) for key, until_s in self._until_s.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> bool:
        """Take a key's time away; False if it had none."""
        return self._until_s.pop(key, None) is not None

    def pop_due(self, now_s: float, limit: int) -> list[K]:
        """Take out the keys whose time is over, looking at no more than `limit`."""
        due: list[K] = []
        for _ in range(limit):
            if not self._heap or self._heap[0][0] > now_s:
                break
            until_s, key = heapq.heappop(self._heap)
            if self._until_s.get(key) == until_s:
                del self._until_s[key]
                due.append(key)
        return due

    def is_due(self, now_s: float) -> bool:
        """Whether `pop_due` has more to look at."""
        return bool(self._heap) and self._heap[0][0] <= now_s

    def clear(self) -> None:
        """Forget every key."""
        self._until_s.clear()
        self._heap.clear()
