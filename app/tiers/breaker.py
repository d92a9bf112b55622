"""Circuit breaker of a block store: after repeated failures nothing is tried but a probe."""

from __future__ import annotations

import threading
import time

from kvferry.app.tiers.block_store import StoreUnavailable, TierRefused

OPEN_AFTER = 5
"""Failed calls in a row that open the breaker."""
FAILURE_S = 60.0
"""How long a failed call is a problem, unless the same call succeeds before."""


class CircuitBreaker:
    """Open until the first probe succeeds, and again from several failed calls in a row, or one that needs a probe, to
    the next successful probe.

    Its texts are constant, apart from names of types: messages of exceptions may contain addresses and passwords.
    Thread: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reason: str | None = "its store has not answered yet"
        """Why the breaker is open; None if it is closed."""
        self._num_failed = 0
        self._latest: dict[str, tuple[str, float]] = {}
        """Text and time of the latest failure of each kind of call that has not succeeded since."""
        self.num_outages = 0
        self.num_retries = 0

    def problems(self) -> list[str]:
        """Return why the store is not used, or which calls failed lately."""
        if self.reason is not None:
            return [f"{self.reason}; no block is kept or found"]
        now_s = time.monotonic()
        latest = self._latest.copy().items()
        return [f"the latest {what} failed: {text}" for what, (text, since_s) in latest if now_s - since_s < FAILURE_S]

    def record_failure(self, error: BaseException, what: str | None = None) -> bool:
        """Count a failed call, by its kind `what`, or a failed probe; return whether it opened the breaker."""
        with self._lock:
            self._num_failed += 1
            if what is not None:
                self._latest[what] = text_of(error), time.monotonic()
            needs_probe = isinstance(error, StoreUnavailable) and error.needs_probe
            opens = self.reason is None and (needs_probe or self._num_failed >= OPEN_AFTER)
            if opens or (self.reason is not None and not self.num_outages):
                # The second: the first probe of all.
                self.num_outages += 1
            if opens or self.reason is not None:
                self.reason = text_of(error)
            return opens

    def record_success(self, what: str) -> None:
        """Note that a call succeeded. Does not close the breaker: the call may have begun before it opened."""
        self._num_failed = 0
        self._latest.pop(what, None)

    def record_retry(self) -> None:
        """Count the repetition of a call."""
        with self._lock:
            self.num_retries += 1

    def close(self) -> None:
        """Use the store again: a probe succeeded."""
        with self._lock:
            self._num_failed = 0
            self._latest.clear()
            self.reason = None


def text_of(error: BaseException) -> str:
    """Return what operators may read of an exception of a store."""
    if isinstance(error, StoreUnavailable):
        return error.text
    return "its settings are refused" if isinstance(error, TierRefused) else f"unexpected {type(error).__name__}"
