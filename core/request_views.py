"""Requests as operators see them: copies, with the policy as it is at that moment."""

from __future__ import annotations

from bisect import bisect_left
from threading import RLock

from kvferry.core.policy import PolicyResolver
from kvferry.core.requests import RequestState, RequestTable, RequestView

_BATCH_REQUESTS = 50
"""Requests that are copied under one hold of the lock."""


class RequestViews:
    """Any thread: each method takes the lock itself, which is the manager's."""

    def __init__(self, requests: RequestTable, policies: PolicyResolver, lock: RLock) -> None:
        self._requests = requests
        self._policies = policies
        self._lock = lock

    def page(self, after: int | None, limit: int, now_s: float) -> list[RequestView]:
        """Live and recent requests, the latest first; `after` is the sequence that the page before ended with."""
        with self._lock:
            sequences = self._requests.sequences()
        end = len(sequences) if after is None else bisect_left(sequences, after)
        views: list[RequestView] = []
        while end > 0 and len(views) < limit:
            start = max(end - min(limit - len(views), _BATCH_REQUESTS), 0)
            with self._lock:
                views += [self._view(found, now_s) for found in self._requests.some(reversed(sequences[start:end]))]
            end = start
        return views

    def find(self, request_id: str, now_s: float) -> RequestView | None:
        """The latest request that goes by this id."""
        with self._lock:
            found = self._requests.find(request_id)
            return None if found is None else self._view(found, now_s)

    def _view(self, found: RequestState | RequestView, now_s: float) -> RequestView:
        """The policy of a finished request stays what it was."""
        if isinstance(found, RequestView):
            return found.copy()
        found.settle(self._policies, now_s)
        return found.view().copy()
