"""Bytes arrive where they belong, and every job ends exactly once, whatever becomes of the engine and its threads."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine, default_threads
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable
from tests.harness.copy_jobs import assert_moved, job, store
from tests.harness.drawn_devices import Device, contents, devices, jobs, pools
from tests.harness.effort import examples
from tests.harness.waiting import wait_until

PINNED_WAIT_S = 30.0


def engine_over(
    blocks: NDArray[np.uint8], pool: HostPool, on_finished=lambda: None, num_threads: int = 2
) -> CpuCopyEngine:
    return CpuCopyEngine(DeviceLayout.of_arrays([blocks]), pool, on_finished, num_threads=num_threads)


def results_of(copies: CpuCopyEngine, wanted: list[TransferJob]) -> dict[int, TransferResult]:
    for one in wanted:
        copies.submit(one)
    assert copies.wait([one.job_id for one in wanted], PINNED_WAIT_S)
    results = copies.poll()
    assert sorted(result.job_id for result in results) == sorted(one.job_id for one in wanted)
    return {result.job_id: result for result in results}


@settings(max_examples=examples(150))
@given(device=devices(), threads=st.integers(1, 3), data=st.data())
def test_a_store_and_a_load_of_any_layout_move_exactly_their_bytes(
    device: Device, threads: int, data: st.DataObject
) -> None:
    pool = data.draw(pools(device.layout))
    copies = CpuCopyEngine(device.layout, pool, lambda: None, num_threads=threads)
    try:
        for direction in (Direction.STORE, Direction.LOAD):
            one = data.draw(jobs(device.layout, pool, direction))
            assert_moved(copies, one, device, pool, device.memory.copy())
    finally:
        copies.close()
        pool.close()


def test_a_large_job_is_shared_among_the_threads_and_arrives_whole() -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (100, 256 << 10), dtype=np.uint8)
    before = blocks.copy()
    pool = HostPool(100, 256 << 10, extent_bytes=7 << 20)
    copies = engine_over(blocks, pool, num_threads=3)
    order = np.random.default_rng(2).permutation(100).tolist()
    assert results_of(copies, [job(1, Direction.STORE, list(range(100)), order)])[1].num_bytes == blocks.nbytes
    blocks[:] = 0
    assert results_of(copies, [job(2, Direction.LOAD, list(range(100)), order)])[2].error is None
    assert np.array_equal(blocks, before)
    copies.close()


def test_a_job_ends_when_the_last_of_its_shares_has() -> None:
    """Looked at by the thread that ends it, at once: a share that still runs would be seen, if not each time."""
    blocks, seen = np.zeros((24, 1 << 20), dtype=np.uint8), list[set[int]]()
    pool = HostPool(24, 1 << 20)
    copies = engine_over(blocks, pool, lambda: seen.append({int(pool.slot(i)[-1]) for i in range(24)}), num_threads=3)
    for number in range(1, 41):
        blocks[:, -1] = number
        results_of(copies, [job(number, Direction.STORE, list(range(24)), list(range(24)))])
    copies.close()
    assert seen == [{number} for number in range(1, 41)]


def test_job_with_an_unknown_block_or_slot_fails_before_it_writes() -> None:
    blocks, pool = np.ones((4, 64), dtype=np.uint8), HostPool(4, 64)
    copies = engine_over(blocks, pool)
    results = results_of(
        copies,
        [
            job(1, Direction.STORE, [0, 9], [0, 1]),
            job(2, Direction.LOAD, [0, -1], [1, 1]),
            job(3, Direction.STORE, [0, 1], [0]),
            job(4, Direction.STORE, [3], [3]),
        ],
    )
    assert "blocks of group 0 0 to 9: must be in 0..3" in str(results[1].error)
    assert [results[number].error is None for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert [results[number].num_bytes for number in (1, 2, 3, 4)] == [0, 0, 0, 64]
    assert contents(pool).sum(axis=(1, 2)).tolist() == [0, 0, 0, 64]
    assert blocks.all()
    copies.close()


def test_a_store_ahead_has_been_copied_when_the_call_returns() -> None:
    """Also while the other threads are busy with a job that does not end."""
    blocks, pool, busy, go_on = np.ones((2, 64), dtype=np.uint8), HostPool(2, 64), threading.Event(), threading.Event()

    def before(one: TransferJob) -> None:
        if one.job_id == 1:
            busy.set()
            assert go_on.wait(PINNED_WAIT_S)

    layout = DeviceLayout.of_arrays([blocks])
    copies = CpuCopyEngine(layout, pool, lambda: None, num_threads=1, before=before)
    copies.submit(store(1, 1))
    assert busy.wait(PINNED_WAIT_S)
    copies.submit_ahead(store(2, 0))
    blocks[0] = 77
    assert [(result.job_id, result.error) for result in copies.poll()] == [(2, None)]
    assert pool.slot(0).tolist() == [1] * 64
    go_on.set()
    copies.close()


def test_a_store_ahead_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cuda_ops.copy.cpu_copy.AHEAD_S", 0.01)
    blocks, pool, go_on = np.ones((2, 64), dtype=np.uint8), HostPool(2, 64), threading.Event()
    layout = DeviceLayout.of_arrays([blocks])
    copies = CpuCopyEngine(layout, pool, lambda: None, before=lambda one: (go_on.wait(PINNED_WAIT_S), None)[1])
    copies.submit_ahead(store(1, 0))
    copies.submit_ahead(store(2, 1))
    blocks[0] = 77
    assert copies.wait([2], 0.0), "no step waits for a second one meanwhile"
    go_on.set()
    assert copies.wait([1], PINNED_WAIT_S)
    assert ["overtaken" in str(result.error) for result in copies.poll()] == [True, True]
    copies.submit_ahead(store(3, 0))
    copies.close()
    assert [result.error for result in copies.poll()] == [None]
    copies.submit_ahead(store(4, 0))
    (result,) = copies.poll()
    assert result.error == "the copy engine is closed"


def test_an_empty_job_ends_too() -> None:
    copies = engine_over(np.ones((4, 64), dtype=np.uint8), HostPool(4, 64))
    assert results_of(copies, [job(1, Direction.STORE, [], []), TransferJob(2, Direction.LOAD, ())])[2].error is None
    copies.close()


class Dying:
    """An `on_finished` under which copy threads die, at the ends named."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count += 1
            die = self._count in self._ends
        if die and threading.current_thread().name == "kvferry-copy":
            raise SystemExit


@pytest.fixture
def copy_threads() -> Callable[[], list[threading.Thread]]:
    """Copy threads that were started since; services of other suites may have some of their own."""
    before = set(threading.enumerate())
    return lambda: [each for each in threading.enumerate() if each.name == "kvferry-copy" and each not in before]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_copy_thread_is_restarted_and_copies_waiting_jobs(copy_threads) -> None:
    """LMCache#4817: a background thread died, and nobody noticed."""
    copies = engine_over(np.ones((4, 64), dtype=np.uint8), HostPool(4, 64), Dying(1), num_threads=1)
    (thread,) = copy_threads()
    copies.submit(store(1, 0))
    thread.join(PINNED_WAIT_S)
    assert not copies.is_alive()
    copies.submit(store(2, 1))
    assert copies.wait([2], PINNED_WAIT_S)
    assert copies.is_alive()
    assert {result.job_id: result.error for result in copies.poll()} == {1: None, 2: None}
    copies.close()


class DyingPool(HostPool):
    """A pool that kills the thread which asks it where its slots are."""

    def hold(self) -> PoolTable:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ending", ["poll", "wait", "close"])
def test_job_of_a_dead_copy_thread_fails(copy_threads, ending: str) -> None:
    copies = engine_over(np.ones((4, 64), dtype=np.uint8), DyingPool(4, 64), num_threads=1)
    (thread,) = copy_threads()
    copies.submit(store(1, 0))
    thread.join(PINNED_WAIT_S)
    if ending == "wait":
        assert copies.wait([1], PINNED_WAIT_S)
    if ending == "close":
        copies.close()
    assert [(result.job_id, result.error) for result in copies.poll()] == [(1, "the copy thread died")]
    copies.close()
    assert copies.poll() == []


def test_jobs_not_started_at_close_and_later_jobs_fail(copy_threads) -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        go_on.wait(PINNED_WAIT_S)

    copies = engine_over(np.ones((4, 64), dtype=np.uint8), HostPool(4, 64), hold, num_threads=1)
    copies.submit(store(1, 0))
    assert started.wait(PINNED_WAIT_S)
    copies.submit(store(2, 1))
    closing = threading.Thread(target=copies.close)
    closing.start()
    wait_until(lambda: not copies.is_alive(), "the engine is closing", PINNED_WAIT_S)
    go_on.set()
    closing.join(PINNED_WAIT_S)
    copies.submit(store(3, 2))
    errors = {result.job_id: result.error for result in copies.poll()}
    assert errors[1] is None
    assert "closed before the job started" in str(errors[2])
    assert errors[3] == "the copy engine is closed"
    assert not copy_threads()


def test_waiting_is_bounded_and_ended_or_unknown_jobs_are_not_waited_for() -> None:
    go_on = threading.Event()
    copies = engine_over(
        np.ones((4, 64), dtype=np.uint8), HostPool(4, 64), lambda: go_on.wait(PINNED_WAIT_S) and None, num_threads=1
    )
    copies.submit(store(1, 0))
    assert copies.wait([1, 77], PINNED_WAIT_S)
    copies.submit(store(2, 1))
    assert not copies.wait([1, 2], 0.01)
    go_on.set()
    assert copies.wait([1, 2], PINNED_WAIT_S)
    assert [result.job_id for result in copies.poll()] == [1, 2]
    copies.close()


def test_on_finished_that_raises_does_not_stop_copies(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("nobody home")

    copies = engine_over(np.ones((4, 64), dtype=np.uint8), HostPool(4, 64), fail)
    assert len(results_of(copies, [store(1, 0), store(2, 1)])) == 2
    assert copies.is_alive()
    copies.close()
    assert "nobody home" in caplog.text


def test_the_pool_stays_mapped_under_a_copy_that_its_owner_forgot() -> None:
    blocks = np.ones((64, 1 << 20), dtype=np.uint8)
    pool = HostPool(64, 1 << 20)
    copies = engine_over(blocks, pool)
    copies.submit(job(1, Direction.STORE, list(range(64)), list(range(64))))
    pool.close()
    copies.close()
    assert [result.job_id for result in copies.poll()] == [1]


def test_copy_threads_run_on_the_given_cpus() -> None:
    (first, *_) = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    copies = CpuCopyEngine(
        DeviceLayout.of_arrays([np.ones((4, 64), dtype=np.uint8)]),
        HostPool(4, 64),
        lambda: seen.append(os.sched_getaffinity(0)),
        cpus=[first],
    )
    results_of(copies, [store(1, 0)])
    copies.close()
    assert seen == [{first}]


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (8, 2), (64, 4)])
def test_the_threads_leave_most_processors_to_the_engine(cpus: int, threads: int) -> None:
    assert default_threads(cpus) == threads


def test_idle_copy_thread_releases_memory_of_removed_extents() -> None:
    """The memory of a pool that shrinks is wanted elsewhere, also when nobody stores or loads any more."""
    blocks = np.zeros((64, 64), dtype=np.uint8)
    pool = HostPool(64, 64, extent_bytes=16 * 64)
    copies = engine_over(blocks, pool, num_threads=3)
    try:
        results_of(copies, [store(number, number) for number in range(64)])
        left = weakref.ref(pool.slot(63).base)
        pool.remove_extents(2)
        wait_until(lambda: left() is None, "the memory to go", PINNED_WAIT_S)
    finally:
        copies.close()
        pool.close()
