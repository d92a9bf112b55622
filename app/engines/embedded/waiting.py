"""The requests that wait to start: calls take turns, so that one of many prompts does not delay all others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from app.engines.embedded.request import Request

_FIRST = -1
"""Turn of requests that have run before: they start before all others."""


class WaitingQueue:
    """Requests by id, ordered by turn and arrival.

    Prompt number i of a call is i turns behind its first one, which is a turn behind the request that started last.
    A call of one prompt so waits for one prompt of each call that waits already. Thread: engine.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, str]] = []
        self._requests: dict[str, tuple[Request, tuple[int, int, str]]] = {}
        self._turn = 0
        self._last_first = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order in which they start."""
        return (self._requests[request_id][0] for _, _, request_id in self._order)

    def get(self, request_id: str) -> Request | None:
        """The request of this id, if it waits."""
        found = self._requests.get(request_id)
        return None if found is None else found[0]

    def add(self, request: Request) -> None:
        """Queue a new request. Cost: a search and a move within a list of at most `MAX_WAITING` entries."""
        self._insert(request, (self._turn + 1 + request.number_in_call, request.arrival, request.request_id))

    def add_first(self, request: Request) -> None:
        """Queue a request that has run before, ahead of all others."""
        self._last_first -= 1
        self._insert(request, (_FIRST, self._last_first, request.request_id))

    def start(self, request: Request) -> None:
        """Remove a request, since it starts."""
        turn = self._remove(request.request_id)
        self._turn = max(self._turn, turn)

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request.request_id in self._requests:
            self._remove(request.request_id)

    def _insert(self, request: Request, place: tuple[int, int, str]) -> None:
        insort(self._order, place)
        self._requests[request.request_id] = request, place

    def _remove(self, request_id: str) -> int:
        _, place = self._requests.pop(request_id)
        del self._order[bisect_left(self._order, place)]
        return place[0]
