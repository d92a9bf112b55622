"""PoolResizer: memory is added before it is used, and freed once it is not accessed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvferry.app.pool.resizer import PoolResizer, ResizeEnd, SizeNotPossible
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.resize import PoolResize
from kvferry.cuda_ops.pool.extents import plan_pool
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory
from tests.harness.waiting import DEADLINE_S, wait_until

SLOT_BYTES = 4096
START_BYTES = 64 * SLOT_BYTES


class FullPool(HostPool):
    """A pool whose memory is gone by the time that it is taken, although the limits had room."""

    full_at = 1 << 40

    def add_slots(self, num_slots: int) -> None:
        if self.num_slots >= self.full_at:
            raise NotEnoughMemory("another process has taken it")
        super().add_slots(num_slots)


@dataclass
class Rig:
    pool: FullPool
    manager: OffloadManager
    size: PoolResizer
    settled: threading.Event
    asked: threading.Event
    told: list[ResizeEnd] = field(default_factory=list)

    def to(self, num_bytes: int) -> None:
        self.size.check(num_bytes)
        self.size.begin(num_bytes)

    def has(self, num_slots: int) -> bool:
        return self.pool.num_slots == self.manager.counts().slots == num_slots


@pytest.fixture
def rig() -> Iterator[Rig]:
    plan = plan_pool(START_BYTES, SLOT_BYTES, 1 << 40)
    assert (plan.num_slots, plan.extent_slots, plan.max_slots) == (64, 8, 64 * 64)
    pool = FullPool(plan.num_slots, SLOT_BYTES, plan.extent_slots * SLOT_BYTES)
    manager = OffloadManager(plan.num_slots, SLOT_BYTES, max_slots=plan.max_slots)
    settled, asked, told = threading.Event(), threading.Event(), list[ResizeEnd]()
    settled.set()

    def settle(timeout_s: float) -> bool:
        asked.set()
        return settled.wait(timeout_s / 100)

    resize = PoolResize(manager, plan.extent_slots)
    size = PoolResizer(
        resize,
        pool,
        plan,
        wait_for_readers=settle,
        wake=lambda: None,
        on_end=told.append,
        step_bytes=16 * SLOT_BYTES,
        long_wait_s=0.1,
    )
    size.start()
    yield Rig(pool, manager, size, settled, asked, told)
    size.close()


def test_shrink_when_slots_are_accessed_frees_memory_later(rig: Rig) -> None:
    """Checksums of what was stored may still be made when its blocks have left the pool."""
    rig.settled.clear()
    rig.to(8 * SLOT_BYTES)
    assert rig.asked.wait(DEADLINE_S)
    assert rig.pool.num_slots == 64
    wait_until(rig.size.degraded, "a long wait is named")
    assert "waits for slots in use: removed ones, being read for their checksums" in rig.size.degraded()[0]
    rig.settled.set()
    wait_until(lambda: rig.has(8), "the size")
    wait_until(lambda: not rig.size.degraded(), "the wait is over")


def test_growth_when_memory_runs_out_midway_frees_its_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def take(num_slots: int) -> None:
        taken.append(num_slots)
        FullPool.add_slots(rig.pool, num_slots)

    monkeypatch.setattr(rig.pool, "add_slots", take)
    rig.pool.full_at = 96
    rig.to(640 * SLOT_BYTES)
    wait_until(lambda: rig.told, "the event")
    assert rig.told[-1] == ResizeEnd(64, 64 * SLOT_BYTES, 640 * SLOT_BYTES, "another process has taken it")
    assert rig.has(64)
    assert taken == [16, 16, 16], "never more than a step at a time"
    assert rig.manager.counts().wanted_slots == 64
    assert "pool resize: failed, the pool keeps 64 slots: another process has taken it" in caplog.text
    rig.pool.full_at = 1 << 40
    rig.to(104 * SLOT_BYTES)
    wait_until(lambda: rig.has(104), "the size")
    assert taken[3:] == [16, 16, 8]


def test_growth_when_a_smaller_size_is_requested_returns_its_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a large pool takes minutes, so a growth can be stopped."""
    taking, go_on, taken = threading.Event(), threading.Event(), list[int]()

    def take(num_slots: int) -> None:
        taken.append(num_slots)
        taking.set()
        assert go_on.wait(DEADLINE_S)
        FullPool.add_slots(rig.pool, num_slots)

    monkeypatch.setattr(rig.pool, "add_slots", take)
    rig.to(640 * SLOT_BYTES)
    assert taking.wait(DEADLINE_S)
    rig.to(64 * SLOT_BYTES)
    go_on.set()
    wait_until(lambda: rig.told, "the event")
    assert rig.told[-1] == ResizeEnd(64, 64 * SLOT_BYTES, 64 * SLOT_BYTES, None)
    assert rig.has(64)
    assert taken == [16]


def test_resize_to_the_size_under_way_is_accepted_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then there may be no room for it a second time."""
    taking, go_on = threading.Event(), threading.Event()

    def refuse(num_slots: int) -> None:
        raise NotEnoughMemory("no room for it twice")

    def take(num_slots: int) -> None:
        taking.set()
        assert go_on.wait(DEADLINE_S)
        HostPool.add_slots(rig.pool, num_slots)

    monkeypatch.setattr(rig.pool, "add_slots", take)
    rig.to(640 * SLOT_BYTES)
    assert taking.wait(DEADLINE_S)
    monkeypatch.setattr(rig.pool, "check_room", refuse)
    rig.to(640 * SLOT_BYTES)
    with pytest.raises(SizeNotPossible, match="no room for it twice"):
        rig.size.check(648 * SLOT_BYTES)
    go_on.set()
    wait_until(lambda: rig.has(640), "the size")


def test_growth_when_memory_fails_with_any_error_ends_the_resize(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_slots: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rig.pool, "add_slots", fail)
    rig.to(640 * SLOT_BYTES)
    wait_until(lambda: rig.told, "the event")
    assert rig.told[-1].error == "can't start new thread"
    assert rig.manager.counts().wanted_slots == 64


def test_shrink_when_slots_stay_in_use_logs_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove, told_by_then = rig.pool.remove_extents, []

    def note_and_remove(count: int) -> None:
        remove(count)
        told_by_then.extend(rig.size.degraded())

    monkeypatch.setattr(rig.pool, "remove_extents", note_and_remove)
    keys = [bytes([number]) * 33 for number in range(64)]
    slots = rig.manager.prepare_store(keys, RequestIdentity("r"), np.arange(64), 1, 1.0).slots
    rig.to(8 * SLOT_BYTES)
    assert rig.size.degraded() == []
    wait_until(lambda: "pool resize: waiting for slots in use" in caplog.text, "the line in the log")
    assert rig.size.degraded() == [
        "pool_bytes: the resize from 64 to 8 slots waits for slots in use: 56 being stored, or promoted from a tier"
    ]
    rig.manager.abort_store(slots)
    wait_until(lambda: rig.has(8), "the size")
    assert caplog.text.count("waiting for slots in use") == 1
    # Also as soon as the new size can be seen.
    assert told_by_then == rig.size.degraded() == []


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
def test_pool_has_at_least_eight_extents_of_at_most_a_gibibyte(
    pool_bytes: int, row_bytes: int, largest: int, expected: tuple[int, int, int]
) -> None:
    plan = plan_pool(pool_bytes, row_bytes, largest)
    assert (plan.num_slots, plan.extent_slots, plan.max_slots) == expected
