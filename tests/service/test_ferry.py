"""A ferry ends as it began: what it opened is closed, however far it came, and nothing is started again."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.app.api.context import EngineInfo
from kvferry.app.ferry import EngineSide, Ferry, PoolSide
from kvferry.app.settings import Settings
from kvferry.app.upkeep import Upkeep
from kvferry.app.wiring import NoDevice
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.waiting import wait_until

SLOTS, SLOT_BYTES, EXTENT_SLOTS = 16, 4096, 4


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


def file_tier(folder: Path) -> dict[str, str]:
    return {"type": "fs", "name": folder.name, "path": str(folder), "max_bytes": "1MiB"}


def make_ferry(folder: Path, pool: HostPool, stopping: threading.Event, **settings: object) -> Ferry:
    engine = EngineSide(
        name="test",
        info=EngineInfo("toy", "toy", "cpu", 16, groups=1, workers=1),
        layout=GroupLayout([GroupSpec(16, SLOT_BYTES)]),
        fingerprint={},
        device=NoDevice(),
        watermark_blocks=1,
    )
    side = PoolSide(PoolPlan(SLOTS, EXTENT_SLOTS, SLOTS), pool, pool)
    given = Settings(_env_file=None, state_dir=folder / "state", **settings)
    return Ferry(given, engine, side, lambda level: None, stopping)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(SLOTS, SLOT_BYTES, EXTENT_SLOTS * SLOT_BYTES)
    yield pool
    pool.close()


def open_below(folder: Path) -> list[str]:
    """The files in this folder that this process has open."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [file for file in files if file.startswith(str(folder))]


NewThreads = Callable[[], list[str]]


@pytest.fixture
def new_threads() -> NewThreads:
    """The names of the threads that have begun with the test, and run."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


def test_a_ferry_that_cannot_be_made_leaves_nothing_behind(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads
) -> None:
    (tmp_path / "file").write_text("no folder")
    tiers = json.dumps([file_tier(tmp_path / "good"), file_tier(tmp_path / "file")])
    with pytest.raises(ValueError, match="tier file"):
        make_ferry(tmp_path, pool, threading.Event(), tiers=tiers)
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)


@pytest.mark.parametrize("started", [True, False])
def test_a_ferry_closes_all_that_it_opened(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads, started: bool
) -> None:
    ferry = make_ferry(tmp_path, pool, threading.Event(), tiers=json.dumps([file_tier(tmp_path / "good")]))
    if started:
        ferry.start()
        assert ferry.readiness() == []
        assert open_below(tmp_path)
    ferry.stop()
    assert ferry.readiness()[0] == "stopping"
    ferry.close()
    ferry.close()
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)


def test_readiness_when_the_database_is_gone_is_degraded_only(tmp_path: Path, pool: HostPool) -> None:
    ferry = make_ferry(tmp_path, pool, threading.Event())
    ferry.start()
    degraded = ferry.context(lambda: False).degraded
    database = tmp_path / "state" / "kvferry.db"
    away = database.rename(database.with_name("away.db"))
    wait_until(lambda: degraded() != [], "the loss shows", 10.0)
    assert "kvferry.db" in degraded()[0]
    assert ferry.readiness() == []
    away.rename(database)
    wait_until(lambda: degraded() == [], "its return shows", 10.0)
    ferry.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_tiers_and_history_end_though_what_is_beside_them_does_not(
    tmp_path: Path,
    pool: HostPool,
    new_threads: NewThreads,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    stop, calls = Upkeep.close, []

    def interrupted(upkeep: Upkeep) -> None:
        calls.append(upkeep)
        stop(upkeep)
        raise error

    monkeypatch.setattr(Upkeep, "close", interrupted)
    ferry = make_ferry(tmp_path, pool, threading.Event(), tiers=json.dumps([file_tier(tmp_path / "good")]))
    ferry.start()
    with pytest.raises(error):
        ferry.close()
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)
    ferry.stop()
    ferry.close()
    assert len(calls) == 1, "nobody waits for the same thread twice"


def test_a_round_that_has_begun_as_all_stops_starts_nothing_again(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads, caplog: pytest.LogCaptureFixture
) -> None:
    closed = threading.Event()
    ferry = make_ferry(tmp_path, pool, LateRound(closed))
    ferry.start()
    caplog.set_level(logging.INFO)
    ferry.close()
    closed.set()
    wait_until(lambda: "kvferry-supervisor" not in new_threads(), "it is over", 10.0)
    assert not ferry.store.journal.is_alive()
    assert "died" not in caplog.text
    assert "kvferry-resize" not in new_threads()
