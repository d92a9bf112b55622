"""Admission of completion calls: the expected wait is bounded, and one client gets at most half of the free places.

Otherwise a client that sends thousands of calls at once delays all others by as long as the engine takes for them. A
client without an open call has a place of its own, whatever others have taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from kvferry.app.callers import caller_of
from kvferry.app.engines.embedded.request import Call

CALLS_PER_RUNNING = 32
"""Calls accepted for each request that may run at once, however slow the engine is."""
MIN_CALLS = 64
MAX_OWN_PLACES = 64
"""Callers beyond which none has a place of its own."""
RATE_REQUESTS = 64
"""Number of the latest requests over which the rate is measured."""
MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts open calls by caller, and measures the rate at which requests end. Thread-safe.

    `client` is the address that a call comes from; see `caller_of` for those that count as one.
    """

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
        if self.has_own_place(client, 0):
            return None
        num_calls = self._num_calls
        rate = self._ended_per_s()
        limit = max(self._min_calls, rate * self._max_wait_s)
        if num_calls + self._calls_of[caller_of(client)] < limit:
            return None
        return min(max(math.ceil(num_calls / rate), 1), MAX_RETRY_AFTER_S) if rate else 1

    def has_own_place(self, client: str, num_own: int) -> bool:
        """Return whether a client with at most `num_own` open calls has the place that it gets in any case."""
        return self._calls_of[caller_of(client)] <= num_own and len(self._calls_of) <= MAX_OWN_PLACES

    def begin(self, client: str) -> Call:
        """Count a call, which the caller must pass to the engine or end."""
        caller = caller_of(client)
        with self._lock:
            self._num_calls += 1
            self._calls_of[caller] += 1
        return Call(caller)

    def end(self, call: Call) -> None:
        """Remove a call; harmless if it has ended."""
        with self._lock:
            if call.has_ended:
                return
            call.has_ended = True
            self._num_calls -= 1
            self._calls_of[call.caller] -= 1
            if not self._calls_of[call.caller]:
                del self._calls_of[call.caller]

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
