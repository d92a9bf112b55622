"""The thread that owns the extents: it adds memory before it is used, and frees none that somebody still looks at."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from app.pool_size import PoolSize
from app.settings import BadSettings
from core.events import Origin
from core.manager import OffloadManager
from core.resize import PoolResize
from cuda_ops.extents import plan_pool
from cuda_ops.host_pool import HostPool
from cuda_ops.limits import NotEnoughMemory
from tests.service.process import wait_until

SLOT_BYTES = 4096
START_BYTES = 64 * SLOT_BYTES


class FullPool(HostPool):
    """A pool whose memory is gone by the time that it is taken, although the limits had room."""

    is_full = False

    def add_slots(self, num_slots: int) -> None:
        if self.is_full:
            raise NotEnoughMemory("somebody else has taken it")
        super().add_slots(num_slots)


@dataclass
class Rig:
    pool: FullPool
    manager: OffloadManager
    size: PoolSize
    settled: threading.Event
    asked: threading.Event
    told: list[Mapping[str, Any]] = field(default_factory=list)

    def to(self, num_bytes: int) -> None:
        self.size.check(num_bytes)
        self.size.begin()

    def has(self, num_slots: int) -> bool:
        return self.pool.num_slots == self.manager.inventory.counts().slots == num_slots


@pytest.fixture
def rig() -> Iterator[Rig]:
    plan = plan_pool(START_BYTES, SLOT_BYTES, 1 << 40)
    assert (plan.num_slots, plan.extent_slots, plan.max_slots) == (64, 8, 64 * 64)
    pool = FullPool(plan.num_slots, SLOT_BYTES, plan.extent_slots * SLOT_BYTES)
    manager = OffloadManager(plan.num_slots, SLOT_BYTES, max_slots=plan.max_slots)
    settled, asked, told = threading.Event(), threading.Event(), list[Mapping[str, Any]]()
    settled.set()

    def settle(timeout_s: float) -> bool:
        asked.set()
        return settled.wait(timeout_s / 100)

    resize = PoolResize(manager, plan.extent_slots)
    size = PoolSize(resize, pool, plan, settle=settle, wake=lambda: None, tell=told.append)
    size.start()
    yield Rig(pool, manager, size, settled, asked, told)
    size.close()


def test_the_pool_comes_to_each_size_and_says_so(rig: Rig) -> None:
    for num_slots in (640, 8, 128):
        rig.to(num_slots * SLOT_BYTES + 100)
        wait_until(lambda: rig.has(num_slots), "the size")  # noqa: B023
    wait_until(lambda: rig.told and rig.told[-1]["slots"] == 128, "the event")
    assert rig.told[-1] == {"slots": 128, "bytes": 128 * SLOT_BYTES, "error": None}


def test_memory_is_freed_only_once_nobody_looks_at_it_any_more(rig: Rig) -> None:
    """Checksums of what was stored may still be made when its blocks have left the pool."""
    rig.settled.clear()
    rig.to(8 * SLOT_BYTES)
    assert rig.asked.wait(60)
    assert rig.pool.num_slots == 64
    rig.settled.set()
    wait_until(lambda: rig.has(8), "the size")


def test_memory_that_is_gone_when_it_is_taken_leaves_the_pool_as_it_is(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.pool.is_full = True
    rig.to(640 * SLOT_BYTES)
    wait_until(lambda: rig.told, "the event")
    assert rig.told[-1]["error"] == "somebody else has taken it"
    assert rig.has(64)
    assert rig.manager.inventory.counts().wanted_slots == 64
    assert "the pool stays at 64 slots: somebody else has taken it" in caplog.text
    rig.pool.is_full = False
    rig.to(640 * SLOT_BYTES)
    wait_until(lambda: rig.has(640), "the size")


def test_what_was_not_checked_is_not_begun(rig: Rig) -> None:
    with pytest.raises(BadSettings, match="holds no extent of this pool, which takes 32,768 bytes"):
        rig.size.check(SLOT_BYTES)
    with pytest.raises(BadSettings, match="more than this process can come to have, which is 16,777,216 bytes"):
        rig.size.check(1 << 40)
    rig.size.begin()
    assert rig.manager.inventory.counts().wanted_slots == 64


def test_a_size_whose_memory_is_being_taken_may_be_asked_for_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then there may be no room for it a second time."""
    taking, go_on = threading.Event(), threading.Event()

    def refuse(num_slots: int) -> None:
        raise NotEnoughMemory("no room for it twice")

    def take(num_slots: int) -> None:
        taking.set()
        assert go_on.wait(60)
        HostPool.add_slots(rig.pool, num_slots)

    monkeypatch.setattr(rig.pool, "add_slots", take)
    rig.to(640 * SLOT_BYTES)
    assert taking.wait(60)
    monkeypatch.setattr(rig.pool, "check_room", refuse)
    rig.to(640 * SLOT_BYTES)
    with pytest.raises(BadSettings, match="no room for it twice"):
        rig.size.check(648 * SLOT_BYTES)
    go_on.set()
    wait_until(lambda: rig.has(640), "the size")


def test_memory_that_cannot_be_had_for_whatever_reason_ends_the_resize(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(num_slots: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rig.pool, "add_slots", fail)
    rig.to(640 * SLOT_BYTES)
    wait_until(lambda: rig.told, "the event")
    assert rig.told[-1]["error"] == "can't start new thread"
    assert rig.manager.inventory.counts().wanted_slots == 64


def test_slots_that_stay_in_use_are_told_of_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.pool_size.LONG_WAIT_STEPS", 2)
    keys = [bytes([number]) * 33 for number in range(64)]
    slots = rig.manager.offer(keys, Origin("r"), np.arange(64), 1, 1.0).slots
    rig.to(8 * SLOT_BYTES)
    wait_until(lambda: "some that are to go are in use" in caplog.text, "the line in the log")
    rig.manager.abandon(slots)
    wait_until(lambda: rig.has(8), "the size")
    assert caplog.text.count("some that are to go are in use") == 1


@pytest.mark.parametrize(
    ("pool_bytes", "row_bytes", "largest", "expected"),
    [
        (0, 10, 1000, (0, 1, 0)),
        (70, 10, 10_000, (7, 1, 448)),
        (239, 10, 10_000, (22, 2, 1000)),
        (1 << 30, 1 << 20, 4 << 30, (1024, 128, 4096)),
        (100 << 30, 1 << 20, 1 << 40, (102_400, 1024, 1 << 20)),
        (1 << 40, 1 << 20, 1 << 30, (1 << 20, 1024, 1 << 20)),
    ],
)
def test_a_pool_is_divided_into_at_least_eight_extents_of_at_most_a_gibibyte(
    pool_bytes: int, row_bytes: int, largest: int, expected: tuple[int, int, int]
) -> None:
    plan = plan_pool(pool_bytes, row_bytes, largest)
    assert (plan.num_slots, plan.extent_slots, plan.max_slots) == expected
