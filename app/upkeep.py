"""What goes on beside an engine while it serves: settings that change reach whoever holds a copy, what dies is started
again, and what is over ends. The same whichever engine it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict

from kvferry.app.event_feed import EventFeed, EventType
from kvferry.app.offload_guard import OffloadGuard
from kvferry.app.pool_size import PoolSize, ResizeEnd
from kvferry.app.pool_watch import PoolWatch
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import LogLevel
from kvferry.app.settings.live import LiveSettings
from kvferry.app.store import HistoryLimits, MetadataStore
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler

_log = logging.getLogger(__name__)

SUPERVISE_S = 1.0
CLOSE_S = 5.0


class Upkeep:
    """Made once the parts are there; `start` has a thread look after them until `stopping` is set."""

    def __init__(
        self,
        settings: LiveSettings,
        set_log_level: Callable[[LogLevel], None],
        store: MetadataStore,
        feed: EventFeed,
        scheduler: OffloadScheduler,
        manager: OffloadManager,
        guard: OffloadGuard,
        pool_size: PoolSize,
        stopping: threading.Event,
        pool_watch: PoolWatch | None = None,
    ) -> None:
        self._settings = settings
        self._set_log_level = set_log_level
        self._store = store
        self._feed = feed
        self._scheduler = scheduler
        self._manager = manager
        self._guard = guard
        self._pool_size = pool_size
        self._stopping = stopping
        self._pool_watch = pool_watch
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to resize when asked to, and to look after the threads."""
        self._pool_size.start()
        self._thread = threading.Thread(target=self._supervise, name="kvferry-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking after the threads, once `stopping` is set, and resizing: what is closed next stays closed."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._pool_size.close()

    def apply(self, settings: Settings) -> None:
        """Carry settings that changed while running to whoever holds a copy."""
        self._set_log_level(settings.log_level)
        with self._guard.guarding("settings"):
            self._manager.operator_pins.max_fraction = settings.max_pinned_fraction
            self._scheduler.choice.decision = settings.load_decision
            self._scheduler.set_store_mode(settings.store_mode)
            self._manager.admission.threshold = settings.store_threshold
            while self._manager.switch_policy(settings.eviction_policy):
                # In short turns, between which the engine has the lock.
                continue
        self._store.set_limits(history_limits(settings))
        self._pool_size.begin()

    def check(self, settings: Settings, names: Collection[str]) -> None:
        """Refuse what validates and cannot be: raises `BadSettings` or `PinnedBlocks`."""
        if "pool_bytes" in names:
            self._pool_size.check(settings.pool_bytes)

    def note_resize(self, end: ResizeEnd) -> None:
        """A resize has ended: what could not be had is not what the settings say any more."""
        if end.error is not None:
            self._settings.fall_short("pool_bytes", end.asked_bytes, end.bytes, end.error)
        self._feed.changed(EventType.RESIZED, asdict(end), time.time())

    def degraded(self) -> list[str]:
        """What does less than it should, while requests are served all the same."""
        return [
            *self._scheduler.tiers.health(),
            *self._pool_size.reasons(),
            *self._store.health(),
            *([] if self._pool_watch is None else self._pool_watch.degraded()),
            *self._store.degraded(),
            *self._settings.shortfalls.values(),
        ]

    def _supervise(self) -> None:
        """Start dead threads again, and end what is over, away from the engine."""
        while not self._stopping.wait(SUPERVISE_S):
            try:
                if not self._store.journal.is_alive():
                    _log.error("the journal's thread died and is started again")
                    self._store.start(Inventory(self._manager))
                self._pool_size.start()
                if self._pool_watch is not None:
                    self._pool_watch.check()
                with self._guard.guarding("expire"):
                    self._scheduler.expire(time.time())
            except Exception:  # noqa: BLE001 - a supervisor that dies is no supervisor
                _log.exception("the supervisor failed at a round")


def history_limits(settings: Settings) -> HistoryLimits:
    """How much history the settings have the store keep."""
    return HistoryLimits(settings.eviction_history_rows, float(settings.eviction_history_days))
