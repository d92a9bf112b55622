"""OffloadService closes all that it opened, however far its start came, and restarts nothing after that."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.app.api.context import EngineInfo
from kvferry.app.api.routes.events import render
from kvferry.app.common.threads import ThreadCounts
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.service.service import EngineBinding, EngineHooks, OffloadService, PoolBinding
from kvferry.app.service.supervisor import Supervisor
from kvferry.app.settings import Settings
from kvferry.core.auto_pause import WINDOW_S
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import make_keys
from kvferry.core.pool.events import CacheEvent, EventSink, RequestBlocks
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.tier_slots import ORIGIN
from tests.harness.waiting import wait_until

SLOTS, SLOT_BYTES, EXTENT_SLOTS = 16, 4096, 4


class LateRound(threading.Event):
    """Lets one more round of the supervisor begin during the stop; it ends once `closed` is set, or after a while."""

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


def make_service(
    folder: Path,
    pool: HostPool,
    stopping: threading.Event,
    hooks: EngineHooks | None = None,
    sinks: Sequence[EventSink] = (),
    **settings: object,
) -> OffloadService:
    engine = EngineBinding(
        name="test",
        info=EngineInfo("toy", "toy", "cpu", 16, groups=1, workers=1),
        layout=GroupLayout([GroupSpec(16, SLOT_BYTES)]),
        fingerprint={},
        device=BlockPool(0),
        watermark_blocks=1,
        hooks=hooks or EngineHooks(),
        sinks=sinks,
    )
    side = PoolBinding(PoolPlan(SLOTS, EXTENT_SLOTS, SLOTS), pool, pool)
    given = Settings(_env_file=None, state_dir=folder / "state", **settings)
    return OffloadService(given, engine, side, lambda settings: None, stopping)


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


def test_a_service_that_cannot_be_made_leaves_nothing_behind(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads
) -> None:
    (tmp_path / "file").write_text("no folder")
    tiers = json.dumps([file_tier(tmp_path / "good"), file_tier(tmp_path / "file")])
    with pytest.raises(ValueError, match="tier file"):
        make_service(tmp_path, pool, threading.Event(), tiers=tiers)
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)


@pytest.mark.parametrize("started", [True, False])
def test_a_service_closes_all_that_it_opened(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads, started: bool
) -> None:
    service = make_service(tmp_path, pool, threading.Event(), tiers=json.dumps([file_tier(tmp_path / "good")]))
    if started:
        service.start()
        assert service.readiness() == []
        assert open_below(tmp_path)
    service.stop()
    assert service.readiness()[0] == "stopping"
    service.close()
    service.close()
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)


def test_error_of_an_event_sink_is_logged_once_without_the_manager_lock(
    tmp_path: Path, pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: CacheEvent) -> None:
        raise RuntimeError("no event, says the test")

    service = make_service(tmp_path, pool, threading.Event(), sinks=[fail])
    for _ in range(2):
        with service.manager.lock:
            service.scheduler.resets.reset(time.time())
            assert "says the test" not in caplog.text
    assert service.guard.status.num_errors == 2
    service.start()
    wait_until(lambda: "no event, says the test" in caplog.text, "the supervisor has logged it", 20.0)
    service.close()
    assert caplog.text.count("unexpected error in event ResetEvent") == 1


def test_samples_of_a_started_service_are_taken_every_second(tmp_path: Path, pool: HostPool) -> None:
    service = make_service(tmp_path, pool, threading.Event())
    samples = service.context(lambda: False).samples
    assert samples.rows(900) == (1, [])
    service.start()
    wait_until(lambda: len(samples.rows(900)[1]) >= 2, "two intervals have passed", 20.0)
    service.close()


def test_auto_pause_degrades_the_service_until_it_is_switched_off(tmp_path: Path, pool: HostPool) -> None:
    service = make_service(tmp_path, pool, threading.Event(), auto_pause=True)
    samples = service.context(lambda: False).samples
    for second in range(int(1.2 * WINDOW_S)):
        service.guard.hook_timer.add(0.1)
        samples.add(service.scheduler.snapshot(), float(second))
        service.balance.check(float(second))
    assert "storing is paused: in the last 600 s offloading cost 60." in service.degraded()[0]
    assert service.readiness() == []
    service.settings.change({"auto_pause": False})
    assert not any("paused" in text for text in service.degraded())
    events = [json.loads(render(event)) for event in service.feed.read(0, 10)[1]]
    assert [(event["type"], event["storing"]) for event in events] == [("storing", "paused"), ("storing", "on")]
    service.close()


def test_engine_that_is_not_ready_takes_steps_without_traffic(tmp_path: Path, pool: HostPool) -> None:
    reasons = ["the copy engine does not run"]
    # A step starts dead copy threads again.
    service = make_service(tmp_path, pool, threading.Event(), EngineHooks(step=reasons.clear, reasons=lambda: reasons))
    service.start()
    wait_until(lambda: service.readiness() == [], "a step was taken", 20.0)
    service.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_of_a_service_when_dead_are_reported_and_restarted(
    tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(tmp_path, pool, threading.Event())
    service.start()
    context = service.context(lambda: False)
    assert context.threads() == ThreadCounts(
        0, {f"kvferry-{name}": 0 for name in ("supervisor", "journal", "resize", "prompts")}
    )
    assert service.degraded() == []
    with monkeypatch.context() as patch:
        patch.setattr(service.what_if, "read", lambda requests: sys.exit(1))
        service.prompts.receive(RequestBlocks(0.0, 1, ORIGIN, make_keys([bytes(32)], 0), 16, 1, 1, 0))
        wait_until(lambda: context.threads().died["kvferry-prompts"] == 1, "it is dead", 20.0)
    wait_until(lambda: context.threads().dead == 0, "the supervisor has started it again", 20.0)
    assert context.threads().died["kvferry-prompts"] == 1
    (reason,) = service.degraded()
    assert reason.startswith("the thread kvferry-prompts died ")
    assert service.readiness() == []
    assert "thread died and is started again: kvferry-prompts" in caplog.text
    service.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_close_when_supervision_raises_ends_tiers_and_history(
    tmp_path: Path,
    pool: HostPool,
    new_threads: NewThreads,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    stop, calls = Supervisor.close, []

    def interrupted(supervisor: Supervisor) -> None:
        calls.append(supervisor)
        stop(supervisor)
        raise error

    monkeypatch.setattr(Supervisor, "close", interrupted)
    service = make_service(tmp_path, pool, threading.Event(), tiers=json.dumps([file_tier(tmp_path / "good")]))
    service.start()
    with pytest.raises(error):
        service.close()
    assert not open_below(tmp_path)
    wait_until(lambda: not new_threads(), "its threads are gone", 10.0)
    service.stop()
    service.close()
    assert len(calls) == 1, "the thread is joined once"


def test_a_round_that_has_begun_as_all_stops_starts_nothing_again(
    tmp_path: Path, pool: HostPool, new_threads: NewThreads, caplog: pytest.LogCaptureFixture
) -> None:
    closed = threading.Event()
    service = make_service(tmp_path, pool, LateRound(closed))
    service.start()
    caplog.set_level(logging.INFO)
    service.close()
    closed.set()
    wait_until(lambda: "kvferry-supervisor" not in new_threads(), "it is over", 10.0)
    assert not service.store.journal.is_alive()
    assert "died" not in caplog.text
    assert "kvferry-resize" not in new_threads()
