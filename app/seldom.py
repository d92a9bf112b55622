"""Logging what keeps happening: once a while, with how often it happened since."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable


class SeldomLogger:
    """Logs a message once a key and interval, then says how often it happened in between. Thread-safe, bounded."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 60.0,
        max_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def log(self, level: int, key: str, message: str, *args: object, exc_info: BaseException | None = None) -> bool:
        """Log unless this key was logged within the interval; says whether it was."""
        now_s = self._clock()
        with self._lock:
            last_s, missed = self._seen.get(key, (-float("inf"), 0))
            if now_s - last_s < self._interval_s:
                self._seen[key] = (last_s, missed + 1)
                return False
            self._seen[key] = (now_s, 0)
            self._seen.move_to_end(key)
            if len(self._seen) > self._max_keys:
                self._seen.popitem(last=False)
        if missed:
            message, args = message + " (%d more since the last time)", (*args, missed)
        self._logger.log(level, message, *args, exc_info=exc_info)
        return True
