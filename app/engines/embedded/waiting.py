"""Queue of waiting requests: calls and callers take turns, so that many requests of one do not delay all others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvferry.app.engines.embedded.request import Request

_FIRST = -1
"""Turn of requests that have run before: they start before all others."""
MAX_IDLE_CALLERS = 64
"""Callers remembered without waiting requests, besides one for each waiting request."""
_Place = tuple[int, int, int, str]


class WaitingQueue:
    """Requests by id, ordered by turn, rank in the turn, and arrival. Thread: engine.

    A call's first prompt is one rank behind the request that started last, and behind the caller's previous call.
    Prompt number i is i turns behind the first one. So a caller's only call waits for one prompt of each other caller,
    and a call of one prompt for one prompt of each call of its own caller.
    """

    def __init__(self) -> None:
        self._order: list[_Place] = []
        self._requests: dict[str, tuple[Request, _Place]] = {}
        self._started = (0, 0)
        self._last_of: dict[tuple[str, str | None], tuple[int, int]] = {}
        self._last_again = (0, 0)
        self._last_first = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order in which they start."""
        return (self._requests[request_id][0] for *_, request_id in self._order)

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id if it waits, else None."""
        found = self._requests.get(request_id)
        return None if found is None else found[0]

    def add(self, request: Request) -> None:
        """Queue a new request. Costs a search and a move within a list of at most `MAX_WAITING` entries."""
        caller = request.caller
        turn, rank = max(self._started, self._last_of.get(caller, self._started))
        if request.number_in_call == 0:
            rank += 1
            self._last_of[caller] = turn, rank
        self._insert(request, (turn + request.number_in_call, rank, request.arrival, request.request_id))

    def add_first(self, request: Request) -> None:
        """Queue a preempted request ahead of all others."""
        self._last_first -= 1
        self._insert(request, (_FIRST, 0, self._last_first, request.request_id))

    def add_again(self, request: Request) -> None:
        """Queue a request whose slice is over, a turn behind the request that started last."""
        turn, rank = max(self._last_again, (self._started[0] + 1, 0))
        self._last_again = turn, rank + 1
        self._insert(request, (turn, rank + 1, request.arrival, request.request_id))

    def start(self, request: Request) -> None:
        """Remove a request that starts."""
        turn, rank, *_ = self._remove(request.request_id)
        self._started = max(self._started, (turn, rank))
        if len(self._last_of) > 2 * len(self._order) + MAX_IDLE_CALLERS:
            self._last_of = {caller: place for caller, place in self._last_of.items() if place > self._started}

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request.request_id in self._requests:
            self._remove(request.request_id)

    def _insert(self, request: Request, place: _Place) -> None:
        insort(self._order, place)
        self._requests[request.request_id] = request, place

    def _remove(self, request_id: str) -> _Place:
        _, place = self._requests.pop(request_id)
        del self._order[bisect_left(self._order, place)]
        return place
