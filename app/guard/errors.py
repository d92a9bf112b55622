"""Unexpected errors: counted, logged once per place, and offloading switched off when they repeat."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

_log = logging.getLogger(__name__)

MAX_ERRORS = 10
"""Offloading is switched off after this many unexpected errors within `ERROR_WINDOW_S`."""
ERROR_WINDOW_S = 60.0
_MAX_PLACES = 200
_MAX_TEXT = 300


class ErrorLog:
    """Unexpected errors: counted, and logged with the traceback once per place in the code. Thread: any."""

    def __init__(self) -> None:
        self.count = 0
        self.last: str | None = None
        self._lock = threading.Lock()
        self._places: set[tuple[object, ...]] = set()

    def count_logged(self, text: str) -> None:
        """Count an error that was logged elsewhere."""
        with self._lock:
            self.count += 1
            self.last = text

    def record(self, where: str, error: BaseException) -> str:
        """Count an error that was raised in `where`; return its text without the traceback, limited in length."""
        text = f"{where}: {type(error).__name__}: {error}"[:_MAX_TEXT]
        # Not `traceback.extract_tb`, which reads source files: this may be the engine thread.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (where, type(error), trace and trace.tb_frame.f_code.co_filename, trace and trace.tb_lineno)
        with self._lock:
            self.count += 1
            self.last = text
            is_new = place not in self._places and len(self._places) < _MAX_PLACES
            if is_new:
                self._places.add(place)
        if is_new:
            _log.error("unexpected error in %s (logged once per place)", where, exc_info=error)
        return text


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """Whether offloading is on, why it is off, and the unexpected errors so far."""

    is_on: bool
    reason: str | None
    num_errors: int
    last_error: str | None


class OffloadSwitch:
    """Whether offloading is on. Repeated errors switch it off, an operator's reset on again. Thread: any."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._lock = threading.Lock()
        self._recent_s: deque[float] = deque(maxlen=MAX_ERRORS)
        self._off_reason: str | None = None
        self._is_shut = False

    @property
    def is_on(self) -> bool:
        """Whether offloading is on."""
        return self._off_reason is None

    @property
    def status(self) -> OffloadStatus:
        """Whether offloading is on, and the errors so far."""
        reason = self._off_reason
        return OffloadStatus(reason is None, reason, self._errors.count, self._errors.last)

    def degraded(self) -> list[str]:
        """Return why offloading is off; empty while it is on, or shut, which is reported by its cause."""
        reason = self._off_reason
        if reason is None or self._is_shut:
            return []
        return [f"offloading is off: {reason}; see the log, then POST /admin/v1/reset"]

    def count(self, text: str, now_s: float) -> bool:
        """Count an unexpected error; switch offloading off if errors repeat, and return whether it was switched."""
        with self._lock:
            self._recent_s.append(now_s)
            repeats = len(self._recent_s) == MAX_ERRORS and now_s - self._recent_s[0] <= ERROR_WINDOW_S
        if not repeats or not self.is_on:
            return False
        self.switch_off(f"{MAX_ERRORS} unexpected errors within {ERROR_WINDOW_S:g} s, the last one {text}")
        return True

    def switch_off(self, reason: str) -> None:
        """Switch offloading off until `resume`."""
        self._off_reason = reason
        _log.error("offloading is switched off: %s; POST /admin/v1/reset switches it on again", reason)

    def shut(self, reason: str) -> None:
        """Switch offloading off for the rest of the process."""
        self._is_shut = True
        self._off_reason = reason

    def resume(self) -> bool:
        """Switch offloading on again, unless it was shut; return whether it was switched."""
        with self._lock:
            self._recent_s.clear()
            if self._off_reason is None or self._is_shut:
                return False
            _log.warning("offloading is switched on again")
            self._off_reason = None
            return True
