"""Logging inside somebody else's process: one pipe, however many parts of kvferry live there."""

from __future__ import annotations

import threading
from typing import ClassVar

from kvferry.app.logs import LogPipe, start_logging
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import LogLevel


class GuestLogs:
    """A share in the process's log pipe, which closes with the last share. Scheduler and worker may be one process."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _pipe: ClassVar[LogPipe | None] = None
    _shares: ClassVar[int] = 0

    def __init__(self, settings: Settings) -> None:
        self._is_open = True
        with GuestLogs._lock:
            if GuestLogs._pipe is None:
                GuestLogs._pipe = start_logging(settings, guest=True)
            GuestLogs._shares += 1

    def set_level(self, level: LogLevel) -> None:
        """Change the least that is logged, now."""
        with GuestLogs._lock:
            if GuestLogs._pipe is not None:
                GuestLogs._pipe.set_level(level)

    def close(self) -> None:
        """Give the share back; may be called again."""
        with GuestLogs._lock:
            if not self._is_open:
                return
            self._is_open = False
            GuestLogs._shares -= 1
            if not GuestLogs._shares and GuestLogs._pipe is not None:
                GuestLogs._pipe.close()
                GuestLogs._pipe = None
