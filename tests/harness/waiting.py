"""Waiting for what another thread or process does: ask again and again, with a bound, and say what did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEADLINE_S = 120.0
"""Limit of each wait for what must happen, far above what it takes on a busy machine."""


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once the condition holds; `TimeoutError` if it does not within the deadline."""
    pause = threading.Event()
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {deadline_s:.0f} s still not: {what}")
        pause.wait(0.01)
