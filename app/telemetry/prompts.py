"""Requests that have ended, on their way from the engine thread to what studies their prompts."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvferry.app.common.threads import WatchedThread
from kvferry.core.partings import KeepTokenIds
from kvferry.core.pool.events import CacheEvent, RequestBlocks, ResetEvent

_log = logging.getLogger(__name__)

MAX_QUEUED_KEYS = 1 << 16
"""Keys that may wait for the thread, or one longer request; requests beyond that are dropped and counted."""
CLOSE_S = 5.0
_POLL_S = 0.5
_BATCH_REQUESTS = 16
"""Requests that a reader receives at once. An API call may wait while they are read."""

PromptEvent = RequestBlocks | ResetEvent | KeepTokenIds


class PromptReader(Protocol):
    """Studies prompts. Requires: the feed's lock held, but for answers from single fields."""

    def read(self, batch: Sequence[PromptEvent]) -> None:
        """Study requests that have ended, and resets, in their order."""

    def begin_anew(self) -> None:
        """Forget everything: an earlier call may have failed within a change, or the thread died in it."""


class PromptFeed:
    """A bounded queue of requests that have ended, and the thread that hands them to readers."""

    def __init__(self, readers: Sequence[PromptReader]) -> None:
        self.lock = threading.Lock()
        """Held while a batch is read; what readers found is listed, and they are changed, under it."""
        self._readers = readers
        self._queue: deque[PromptEvent] = deque()
        # Each is written by one thread, so that no lock is needed.
        self._num_queued_keys = 0
        self._num_taken_keys = 0
        self.num_dropped = 0
        """Requests that were dropped since the queue was full."""
        self._fault: str | None = None
        self.thread = WatchedThread("kvferry-prompts", self._run, "prompts are not studied")

    @property
    def num_queued_keys(self) -> int:
        """Number of keys of the requests that wait for the thread."""
        return self._num_queued_keys - self._num_taken_keys

    def receive(self, event: CacheEvent) -> None:
        """Queue a request that has ended, or a reset. Requires: manager lock held."""
        if isinstance(event, ResetEvent):
            self.send(event)
        elif isinstance(event, RequestBlocks):
            # A request longer than the queue may wait alone.
            if self.num_queued_keys and self.num_queued_keys + _weight(event) > MAX_QUEUED_KEYS:
                self.num_dropped += 1
                return
            self._num_queued_keys += _weight(event)
            self._queue.append(event)

    def send(self, event: ResetEvent | KeepTokenIds) -> None:
        """Queue a change. Thread: any."""
        self._queue.append(event)

    def degraded(self) -> list[str]:
        """Return why prompts are not studied; empty if they are."""
        fault = self._fault
        return [] if fault is None else [f"prompts: {fault}; the curve of hit rates and partings have begun anew"]

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """End the thread. May be called before `start`."""
        self.thread.close(CLOSE_S)

    def _run(self) -> None:
        self._begin_anew()
        while not self.thread.closing.wait(_POLL_S):
            while self._queue and not self.thread.closing.is_set():
                try:
                    batch = self._take()
                    with self.lock:
                        for reader in self._readers:
                            reader.read(batch)
                    self._fault = None
                except Exception as error:  # noqa: BLE001 - the thread must not die
                    if self._fault is None:
                        _log.exception("prompts: requests were not studied")
                    self._fault = f"requests were not studied: {type(error).__name__}"
                    self._begin_anew()

    def _begin_anew(self) -> None:
        with self.lock:
            for reader in self._readers:
                reader.begin_anew()

    def _take(self) -> list[PromptEvent]:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_REQUESTS))]
        self._num_taken_keys += sum(_weight(event) for event in batch if isinstance(event, RequestBlocks))
        return batch


def _weight(request: RequestBlocks) -> int:
    """Return what a request counts in the queue: its keys, and one without any."""
    return max(len(request.keys), 1)
