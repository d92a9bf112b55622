"""Circuit breaker of a block store: after repeated failures nothing is tried but a probe."""

from __future__ import annotations

import threading

from kvferry.app.tiers.block_store import StoreUnavailable, TierRefused

OPEN_AFTER = 5
"""Failed calls in a row that open the breaker."""


class CircuitBreaker:
    """Open until the first probe succeeds, and again from several failed calls in a row, or one that needs a probe, to
    the next successful probe.

    Its texts are constant, apart from names of types: messages of exceptions may contain addresses and passwords.
    Thread: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = "its store has not answered yet"
        self._num_failed = 0
        self.num_outages = 0
        self.num_retries = 0

    @property
    def reason(self) -> str | None:
        """Why the breaker is open; None if it is closed."""
        return self._reason

    def record_failure(self, error: Exception) -> bool:
        """Count a failed call, or a failed probe; return whether it opened the breaker."""
        with self._lock:
            self._num_failed += 1
            needs_probe = isinstance(error, StoreUnavailable) and error.needs_probe
            opens = self._reason is None and (needs_probe or self._num_failed >= OPEN_AFTER)
            if opens or (self._reason is not None and not self.num_outages):
                # The second: the first probe of all.
                self.num_outages += 1
            if opens or self._reason is not None:
                self._reason = text_of(error)
            return opens

    def record_success(self) -> None:
        """Note that a call succeeded. Does not close the breaker: the call may have begun before it opened."""
        self._num_failed = 0

    def record_retry(self) -> None:
        """Count the repetition of a call."""
        with self._lock:
            self.num_retries += 1

    def close(self) -> None:
        """Use the store again: a probe succeeded."""
        with self._lock:
            self._num_failed = 0
            self._reason = None


def text_of(error: Exception) -> str:
    """Return what operators may read of an exception of a store."""
    if isinstance(error, StoreUnavailable):
        return error.text
    return "its settings are refused" if isinstance(error, TierRefused) else f"unexpected {type(error).__name__}"
