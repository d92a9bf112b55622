"""Flushes of the pool to tiers: started, shown and ended for operators, each driven by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvferry.app.common.times import rfc3339, rfc3339_or_none
from kvferry.app.guard import OffloadGuard
from kvferry.app.telemetry.events import EventFeed, EventType
from kvferry.app.tiers.registry import NoSuchTier, TierConflict
from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.rules import RuleSubject
from kvferry.core.scheduler.flushes import Flush, FlushBatch, FlushRefused, FlushState
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.transfers import Slots

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
_POLL_S = 0.02
"""Interval at which results of the tier are processed: an idle engine does it once a second."""
_PAUSE_S = 0.5
"""Pause after a job of which no block was stored."""


@dataclass(frozen=True, slots=True)
class FlushProgress:
    """A flush that is running, or the latest one since the tier was attached."""

    state: FlushState = field(
        metadata={"description": "`canceled` by DELETE; `reset`: a reset of the pool or the tier ended it"}
    )
    tenant: str | None
    num_blocks: int = field(metadata={"description": "blocks that were to be copied; 0 until they are chosen"})
    stored_blocks: int = field(metadata={"description": "blocks that the tier has, those included that it had before"})
    left_blocks: int = field(
        metadata={
            "description": "blocks that were left out: they have left the pool since, are corrupt there, were not "
            "stored in three tries, or had no room in the tier"
        }
    )
    began: str
    ended: str | None
    reason: str | None = field(metadata={"description": "why it failed, or left blocks out"})


class TierFlushes:
    """Starts, shows and ends flushes. Thread: any."""

    def __init__(
        self, scheduler: OffloadScheduler, guard: OffloadGuard, feed: EventFeed, verify: Callable[[Slots], None]
    ) -> None:
        """`verify` verifies recovered slots, and drops those that are corrupt."""
        self._scheduler = scheduler
        self._flushes = scheduler.tiers.flushes
        self._guard = guard
        self._feed = feed
        self._verify = verify
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    def progress(self, name: str) -> FlushProgress | None:
        """Return the flush of a tier that is running or was the latest, None without one."""
        with self._scheduler.manager.lock:
            flush = self._flushes.latest(name)
            return None if flush is None else _progress(flush)

    def begin(self, name: str, tenant: str | None) -> int:
        """Begin to copy the pool's blocks, or those of matching tenants, to a tier; return their number.

        Raises `NoSuchTier`, and `TierConflict` if the tier is being flushed or cannot be used.
        """
        with self._lock:
            if self._stopping.is_set():
                raise TierConflict("the process stops")
            try:
                flush = self._flushes.begin(name, RequestFilter(tenant=tenant), time.time())
            except ValueError as error:
                raise NoSuchTier(str(error)) from None
            except FlushRefused as error:
                raise TierConflict(str(error)) from None
        try:
            num_blocks = self._flushes.choose(flush, self._names_of)
            with self._lock:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._run, args=(flush,), name=f"kvferry-flush-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self._flushes.fail(flush, "it could not be started: see the log, then repeat it", time.time())
            raise
        return num_blocks

    def cancel(self, name: str) -> None:
        """End the flush of a tier, if one is running; jobs under way end. Raises `NoSuchTier`."""
        if name not in self._scheduler.tiers.names:
            raise NoSuchTier(f"there is no tier called {name}")
        flush = self._flushes.latest(name)
        if flush is not None:
            self._flushes.cancel(flush, time.time())

    def close(self) -> None:
        """End all flushes, and wait for a limited time for their threads."""
        with self._lock:
            self._stopping.set()
            threads = self._threads
        for name in self._scheduler.tiers.names:
            self.cancel(name)
        for thread in threads:
            thread.join(CLOSE_S)

    def _names_of(self, origin: RequestIdentity) -> Collection[str] | None:
        policies = self._scheduler.policies
        with policies.lock:
            return policies.resolve(RuleSubject(origin), {}, time.time()).policy.tiers

    def _run(self, flush: Flush) -> None:
        """Drive a flush. Thread: its own."""
        try:
            while flush.is_running:
                self._step(flush)
        except Exception:  # noqa: BLE001 - the process goes on, and the answers say so
            _log.exception("tier flush failed: %s", flush.client.name)
            self._flushes.fail(flush, "an unexpected error ended it: see the log, then repeat it", time.time())
        progress = _progress(flush)
        what = {"tier": flush.client.name, "state": progress.state.value, "num_blocks": progress.num_blocks}
        self._feed.changed(
            EventType.FLUSHED,
            what | {"stored_blocks": progress.stored_blocks, "left_blocks": progress.left_blocks},
            time.time(),
        )
        if progress.state is FlushState.FAILED:
            _log.warning("tier flush ended: %s: %s", flush.client.name, progress)
        else:
            _log.info("tier flush ended: %s: %s", flush.client.name, progress)

    def _step(self, flush: Flush) -> None:
        num_failing = flush.num_failing
        while (batch := self._take(flush)) is not None:
            unverified = self._flushes.unverified(batch)
            if len(unverified):
                self._verify(unverified)
            with self._guard.guarding("flush"):
                self._flushes.submit(flush, batch, time.time())
        self._stopping.wait(_PAUSE_S if flush.num_failing > num_failing else _POLL_S)
        with self._guard.guarding("flush"):
            self._scheduler.tiers.poll(time.time())

    def _take(self, flush: Flush) -> FlushBatch | None:
        with self._guard.guarding("flush"):
            return self._flushes.take(flush, time.time())


def _progress(flush: Flush) -> FlushProgress:
    return FlushProgress(
        flush.state,
        flush.match.tenant,
        flush.num_blocks,
        flush.num_stored,
        flush.num_left,
        rfc3339(flush.began_s),
        rfc3339_or_none(flush.ended_s),
        flush.reason,
    )
