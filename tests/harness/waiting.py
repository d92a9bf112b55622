"""Waiting for what another thread or process does: ask again and again, with a bound, and say what did not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.05
"""Pauses between looks: short at first, and longer since a look may be a call of a service, of milliseconds."""
DEADLINE_S = 120.0
"""Limit of each wait for what must happen, far above what it takes on a busy machine."""


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once the condition holds; `TimeoutError` if it does not within the deadline."""
    pause, pause_s = threading.Event(), _FIRST_PAUSE_S
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"after {deadline_s:.0f} s still not: {what}")
        pause.wait(pause_s)
        pause_s = min(1.5 * pause_s, _MAX_PAUSE_S)
