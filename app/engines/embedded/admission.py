"""Fairness among callers: admission of completion calls, and the queue of waiting requests.

The expected wait is bounded, and one client gets at most half of the free places. Waiting calls and callers take turns.
Otherwise a client that sends thousands of calls at once delays all others by as long as the engine takes for them.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvferry.app.engines.embedded.request import Call, Request

CALLS_PER_RUNNING = 32
"""Calls accepted for each request that may run at once, however slow the engine is."""
MIN_CALLS = 64
RATE_REQUESTS = 64
"""Number of the latest requests over which the rate is measured."""
MAX_RETRY_AFTER_S = 60

_FIRST = -1
"""Turn of requests that have run before: they start before all others."""
MAX_IDLE_CALLERS = 64
"""Callers remembered without waiting requests, besides one for each waiting request."""
_QueueKey = tuple[int, int, int, str]


class Admission:
    """Counts open calls by client address, and measures the rate at which requests end. Thread-safe."""

    def __init__(self, max_running: int, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_calls = max(MIN_CALLS, CALLS_PER_RUNNING * max_running)
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_calls = 0
        self._calls_of: Counter[str] = Counter()
        self._ended_s: deque[float] = deque(maxlen=RATE_REQUESTS)

    def retry_after_s(self, client: str) -> int | None:
        """Return after how many seconds a client should call again, or None if a call is accepted now.

        A client may have as many open calls as places are left for others.
        """
        num_calls = self._num_calls
        rate = self._ended_per_s()
        limit = max(self._min_calls, rate * self._max_wait_s)
        if num_calls + self._calls_of[client] < limit:
            return None
        return min(max(math.ceil(num_calls / rate), 1), MAX_RETRY_AFTER_S) if rate else 1

    def begin(self, client: str) -> Call:
        """Count a call, which the caller must pass to the engine or end."""
        with self._lock:
            self._num_calls += 1
            self._calls_of[client] += 1
        return Call(client)

    def end(self, call: Call) -> None:
        """Remove a call; harmless if it has ended."""
        with self._lock:
            if call.has_ended:
                return
            call.has_ended = True
            self._num_calls -= 1
            self._calls_of[call.client] -= 1
            if not self._calls_of[call.client]:
                del self._calls_of[call.client]

    def end_request(self, call: Call | None, *, has_run: bool) -> None:
        """Count the end of a request in the engine, and end its call with the last one."""
        if has_run:
            self._ended_s.append(self._clock())
        if call is not None:
            call.num_open -= 1
            if not call.num_open:
                self.end(call)

    def _ended_per_s(self) -> float:
        """Return the requests that ended per second, over the latest ones; 0 with too few samples."""
        if len(self._ended_s) < RATE_REQUESTS:
            return 0.0
        return (RATE_REQUESTS - 1) / max(self._clock() - self._ended_s[0], 1e-3)


class WaitingQueue:
    """Requests by id, ordered by turn, rank in the turn, and arrival. Thread: engine.

    A call's first prompt is one rank behind the request that started last, and behind the caller's previous call.
    Prompt number i is i turns behind the first one. So a caller's only call waits for one prompt of each other caller,
    and a call of one prompt for one prompt of each call of its own caller.
    """

    def __init__(self) -> None:
        self._order: list[_QueueKey] = []
        self._requests: dict[str, tuple[Request, _QueueKey]] = {}
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
            self._last_of = {caller: key for caller, key in self._last_of.items() if key > self._started}

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request.request_id in self._requests:
            self._remove(request.request_id)

    def _insert(self, request: Request, key: _QueueKey) -> None:
        insort(self._order, key)
        self._requests[request.request_id] = request, key

    def _remove(self, request_id: str) -> _QueueKey:
        _, key = self._requests.pop(request_id)
        del self._order[bisect_left(self._order, key)]
        return key
