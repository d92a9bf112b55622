"""Supervision of a process's threads and files, away from the engine thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvferry.app.common.threads import WatchedThread

_log = logging.getLogger(__name__)

SUPERVISE_S = 1.0
CLOSE_S = 5.0


class Supervisor:
    """A thread that runs checks once a second, from `start` until `stopping` is set.

    A check that raises is logged, and runs again in the next round.
    """

    def __init__(self, stopping: threading.Event, checks: Sequence[Callable[[], None]]) -> None:
        self._stopping = stopping
        self._checks = checks
        self.thread = WatchedThread(
            "kvferry-supervisor", self._run, "dead threads are not started again, and nothing expires"
        )

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Wait for the thread to end. Requires: `stopping` is set. May be called before `start`."""
        self.thread.close(CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.wait(SUPERVISE_S):
            for check in self._checks:
                try:
                    check()
                except Exception:  # noqa: BLE001 - the thread must not die
                    _log.exception("supervisor: a check failed")
