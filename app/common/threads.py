"""Threads that a service needs as long as it runs: watched, started again when they die, and counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.core.counters import counter, gauge

_log = logging.getLogger(__name__)

SHOWN_S = 60.0
"""Time for which `/readyz` lists a thread that died and runs again, so that no probe misses it."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Watched threads."""

    dead: int = gauge("Watched threads that do not run", "threads_dead")
    died: dict[str, int] = counter(
        "Deaths of watched threads, by name of the thread", "thread_deaths", label=("thread", ""), factory=dict
    )


class WatchedThread:
    """A thread from `start` to `close`, or until its work is done. `start` starts it again if it died."""

    def __init__(self, name: str, run: Callable[[], None], effect: str) -> None:
        """Prepare the thread.

        Args:
            name: Name of the thread.
            run: Called on the thread, and again on a new one after it raised. Returns soon after `closing` was set, or
                when nothing is left to do.
            effect: What does not happen while the thread does not run, for `/readyz`.
        """
        self.name = name
        self.closing = threading.Event()
        """Set by `close` or before: the thread has to end, and is not started again."""
        self.is_done = False
        """Whether `run` returned: the thread has ended, and is not started again."""
        self.num_deaths = 0
        self._run = run
        self._effect = effect
        self._died_s = float("-inf")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run; do nothing after `close` or the end of its work. Thread: any."""
        with self._lock:
            if self.closing.is_set() or self.is_done or self.is_alive():
                return
            if self._thread is not None:
                _log.error("thread died and is started again: %s", self.name)
            thread = threading.Thread(target=self._run_until_done, name=self.name, daemon=True)
            thread.start()
            if self._thread is not None:
                self.num_deaths += 1
                self._died_s = time.monotonic()
            self._thread = thread

    def close(self, timeout_s: float) -> bool:
        """Set `closing` and wait for the thread to end; return whether it has. May be called before `start`."""
        self.closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_dead(self) -> bool:
        """Whether the thread was started, was not closed, and ended before its work was done."""
        is_over = self.closing.is_set() or self.is_done
        return self._thread is not None and not is_over and not self._thread.is_alive()

    def degraded(self) -> list[str]:
        """Return why the thread's work is not done, or was interrupted lately; empty if neither."""
        if self.is_dead:
            return [f"the thread {self.name} does not run: {self._effect}"]
        ago_s = time.monotonic() - self._died_s
        return [f"the thread {self.name} died {ago_s:.0f} s ago, and runs again"] if ago_s < SHOWN_S else []

    def _run_until_done(self) -> None:
        self._run()
        self.is_done = True


class ThreadWatch:
    """The watched threads of a service; `check` is called again and again."""

    def __init__(self, threads: Callable[[], Iterable[WatchedThread]]) -> None:
        """`threads` returns them; it is called again each time, since an engine may add some."""
        self._threads = threads

    def check(self) -> None:
        """Start dead threads again, except the one that calls."""
        for thread in self._threads():
            if thread.is_dead:
                thread.start()

    def counts(self) -> ThreadCounts:
        """Return how many do not run, and how often each has died."""
        threads = list(self._threads())
        return ThreadCounts(
            sum(thread.is_dead for thread in threads),
            {thread.name: thread.num_deaths + thread.is_dead for thread in threads},
        )

    def degraded(self) -> list[str]:
        """Return the reasons of all threads."""
        return [text for thread in self._threads() for text in thread.degraded()]
