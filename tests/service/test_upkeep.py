"""What goes on beside an engine ends with it: nothing is started again that has just been stopped."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from app.api.live_settings import LiveSettings
from app.event_feed import EventFeed
from app.pool_size import PoolSize
from app.settings import Settings
from app.store import Store
from app.upkeep import Upkeep
from core.groups import GroupLayout, GroupSpec
from core.manager import OffloadManager
from core.policy import PolicyBook, RequestPolicy
from core.resize import PoolResize
from core.scheduler import OffloadScheduler
from cuda_ops.extents import PoolPlan
from cuda_ops.host_pool import HostPool
from tests.waiting import wait_until

SLOTS, SLOT_BYTES, EXTENT_SLOTS = 16, 4096, 4


class NoDevice:
    """Nothing is stored or loaded here."""

    def hold(self, block_ids: object) -> None: ...
    def release(self, block_ids: object, *, reuse_first: bool = False) -> None: ...
    def free_blocks(self, after: int | None) -> None: ...
    def contents(self, block_ids: object) -> list[bytes | None]:
        return []

    def resident(self, keys: object) -> list[bool]:
        return []


class LateRound(threading.Event):
    """Lets one more round begin at the very moment at which everything is to stop, and go on once `closed` is set, or
    whoever stops has come to wait for it."""

    def __init__(self, closed: threading.Event) -> None:
        super().__init__()
        self._closed = closed
        self._rounds = 0

    def wait(self, timeout: float | None = None) -> bool:
        super().wait()
        self._rounds += 1
        if self._rounds > 1:
            return True
        self._closed.wait(0.2)
        return False


def test_a_round_that_has_begun_as_all_stops_starts_nothing_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed = threading.Event()
    stopping = LateRound(closed)
    store = Store(f"sqlite:///{tmp_path / 'kvferry.db'}", "test", "pinned")
    feed = EventFeed(store.journal)
    manager = OffloadManager(SLOTS, SLOT_BYTES, sink=feed)
    layout = GroupLayout([GroupSpec(16, SLOT_BYTES)])
    scheduler = OffloadScheduler(
        manager,
        PolicyBook(RequestPolicy(), {}, manager.lock),
        NoDevice(),
        layout,  # type: ignore[arg-type]
    )
    pool = HostPool(SLOTS, SLOT_BYTES, EXTENT_SLOTS * SLOT_BYTES)
    size = PoolSize(
        PoolResize(manager, EXTENT_SLOTS),
        pool,
        PoolPlan(SLOTS, EXTENT_SLOTS, SLOTS),
        settle=lambda timeout_s: True,
        wake=lambda: None,
        tell=lambda end: None,
    )
    settings = LiveSettings(Settings(_env_file=None), lambda changed: None)
    upkeep = Upkeep(settings, lambda level: None, store, feed, scheduler, manager, size, stopping)
    store.start(manager.inventory)
    upkeep.start()
    caplog.set_level(logging.INFO)
    stopping.set()
    upkeep.close()
    store.close(5.0)
    closed.set()
    wait_until(lambda: not any(t.name == "kvferry-supervisor" for t in threading.enumerate()), "it is over", 10.0)
    pool.close()
    assert not store.journal.is_alive()
    assert "died" not in caplog.text
    names = {thread.name for thread in threading.enumerate()}
    assert "kvferry-resize" not in names
