"""The CUDA copy engine over a driver whose work runs late and in any order: bytes, order, errors and the end.

None of this has seen a device but the tests marked `gpu`.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import JobLedger
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.copy.segments import SegmentPlanner
from kvferry.cuda_ops.cuda.cuda_copy import CudaCopyEngine
from kvferry.cuda_ops.cuda.driver import (
    FUNCTIONS,
    CudaDriver,
    CudaError,
    CudaUnavailable,
    MemcpyAttributes,
    load_driver,
)
from kvferry.cuda_ops.cuda.movers import DmaMover
from kvferry.cuda_ops.cuda.registrar import CudaRegistrar
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable
from kvferry.cuda_ops.pool.prepare import Preparation
from tests.harness.copy_jobs import assert_moved, job, store
from tests.harness.drawn_devices import Device, contents, devices, jobs, pools
from tests.harness.effort import examples
from tests.harness.fake_cuda import (
    ALREADY_REGISTERED,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LEAST,
    ORDER_STREAM,
    OUT_OF_MEMORY,
    FakeCuda,
)
from tests.harness.faults import Faults
from tests.harness.waiting import wait_until

PINNED_WAIT_S = 30.0


def load(number: int, block: int) -> TransferJob:
    return job(number, Direction.LOAD, [block], [block])


def engine_on(
    cuda: FakeCuda, layout: DeviceLayout, pool: HostPool, on_finished: Callable[[], object] = lambda: None
) -> CudaCopyEngine:
    driver = CudaDriver(cuda.resolve)
    return CudaCopyEngine(
        layout,
        pool,
        on_finished,
        driver=driver,
        device=0,
        current_stream=lambda: cuda.compute,
        mover=DmaMover(driver),
    )


class Rig:
    """Eight blocks of 64 bytes, block i all i + 1, and as many slots of zeros."""

    def __init__(self, **options: bool) -> None:
        self.cuda = FakeCuda(**options)
        self.blocks = np.repeat(np.arange(1, 9, dtype=np.uint8)[:, None], 64, axis=1)
        self.pool = HostPool(8, 64)
        self.copies = engine_on(self.cuda, DeviceLayout.of_arrays([self.blocks]), self.pool)
        # What a test has fail from here on is a job's, not what the four copy threads begin with.
        began = "cuThreadExchangeStreamCaptureMode"
        wait_until(lambda: self.cuda.calls[began] == 4, "the copy threads have begun", PINNED_WAIT_S)

    def results_of(self, *wanted: TransferJob) -> dict[int, TransferResult]:
        for one in wanted:
            self.copies.submit(one)
        return self.ends([one.job_id for one in wanted])

    def ends(self, wanted: list[int]) -> dict[int, TransferResult]:
        assert self.copies.wait(wanted, PINNED_WAIT_S)
        results = self.copies.poll()
        assert sorted(result.job_id for result in results) == sorted(wanted)
        return {result.job_id: result for result in results}


class GatedPool(HostPool):
    """A pool that tells where its slots are when it is allowed to."""

    def __init__(self) -> None:
        super().__init__(8, 64)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def hold(self) -> PoolTable:
        self.asked.set()
        assert self.go_on.wait(PINNED_WAIT_S)
        return super().hold()


@pytest.fixture(params=[True, False], ids=["batches", "one by one"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(batches=request.param)
    yield made
    made.copies.close()


# ---- bytes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(device=devices(), batches=st.booleans(), seed=st.integers(0, 1000), data=st.data())
def test_a_store_and_a_load_of_any_layout_move_exactly_their_bytes(
    device: Device, batches: bool, seed: int, data: st.DataObject
) -> None:
    pool = data.draw(pools(device.layout))
    cuda = FakeCuda(seed, batches=batches)
    copies = engine_on(cuda, device.layout, pool)
    try:
        for direction in (Direction.STORE, Direction.LOAD):
            one = data.draw(jobs(device.layout, pool, direction))
            fresh = np.random.default_rng(seed).integers(0, 256, device.memory.size, dtype=np.uint8)
            # What computes the device's bytes runs only when it must, and the job is submitted at once.
            cuda.launch(lambda fresh=fresh: np.copyto(device.memory, fresh))
            assert_moved(copies, one, device, pool, fresh)
    finally:
        copies.close()
        pool.close()


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000), batches=st.booleans())
def test_many_jobs_of_both_directions_at_once_arrive_whole_and_end_once(seed: int, batches: bool) -> None:
    cuda, rng = FakeCuda(seed, batches=batches), np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (64, 48), dtype=np.uint8)
    pool = HostPool(64, 48, extent_bytes=48 * 10)
    for slot in range(64):
        pool.slot(slot)[:] = rng.integers(0, 256, 48, dtype=np.uint8)
    device_before, pool_before = blocks.copy(), contents(pool)[:, 0]
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), pool)
    ids, slots = rng.permutation(64), rng.permutation(64)
    directions = {}
    for number in range(16):
        directions[number] = Direction.STORE if rng.integers(2) else Direction.LOAD
        part = slice(4 * number, 4 * number + 4)
        copies.submit(job(number, directions[number], ids[part].tolist(), slots[part].tolist()))
    assert copies.wait(range(16), PINNED_WAIT_S)
    results = copies.poll()
    assert sorted(result.job_id for result in results) == list(range(16))
    assert all(result.error is None and result.num_bytes == 192 and result.seconds > 0 for result in results)
    for number, direction in directions.items():
        part = slice(4 * number, 4 * number + 4)
        expected = device_before[ids[part]] if direction is Direction.STORE else pool_before[slots[part]]
        assert np.array_equal(blocks[ids[part]], expected)
        assert np.array_equal(contents(pool)[slots[part], 0], expected)
    copies.close()


def test_neighbors_go_as_one_copy_and_a_job_as_one_call() -> None:
    rig = Rig()
    assert rig.results_of(job(1, Direction.STORE, [2, 3, 4, 6], [0, 1, 2, 7]))[1].num_bytes == 256
    assert [count for _, count in rig.cuda.batches] == [2]
    assert rig.cuda.calls["cuMemcpyAsync"] == 0
    rig.copies.close()


def test_a_job_without_blocks_ends_too(rig: Rig) -> None:
    results = rig.results_of(job(1, Direction.STORE, [], []), TransferJob(2, Direction.LOAD, ()))
    assert [(result.error, result.num_bytes) for result in results.values()] == [(None, 0), (None, 0)]


# ---- order -----------------------------------------------------------------------------------------------------------


def test_submitting_waits_for_no_compute_and_the_copies_wait_for_it(rig: Rig) -> None:
    """vllm#45704."""
    with rig.cuda.held():
        rig.cuda.launch(lambda: rig.blocks.fill(77))
        rig.copies.submit(store(1, 0))
        rig.copies.submit(load(2, 1))
        assert not rig.copies.wait([1], 0.05)
        assert rig.copies.poll() == []
        assert not contents(rig.pool).any()
    assert rig.ends([1, 2])[1].error is None
    assert rig.pool.slot(0).tolist() == [77] * 64
    assert rig.blocks[1].tolist() == [0] * 64


def test_compute_queued_before_a_load_reads_the_old_bytes(rig: Rig) -> None:
    seen: list[int] = []
    rig.pool.slot(3)[:] = 99
    with rig.cuda.held():
        rig.cuda.launch(lambda: seen.append(int(rig.blocks[3, 0])))
        rig.copies.submit(load(1, 3))
    rig.ends([1])
    rig.cuda.launch(lambda: seen.append(int(rig.blocks[3, 0])))
    rig.cuda.synchronize()
    assert seen == [4, 99]


def test_compute_stream_waits_for_loads_and_not_for_stores(rig: Rig) -> None:
    rig.results_of(store(1, 0))
    before = rig.cuda.calls["cuStreamWaitEvent"]
    rig.copies.poll()
    assert rig.cuda.calls["cuStreamWaitEvent"] == before
    rig.copies.submit(load(2, 0))
    assert rig.copies.wait([2], PINNED_WAIT_S)
    assert rig.cuda.calls["cuStreamWaitEvent"] == before + 1
    assert [result.job_id for result in rig.copies.poll()] == [2]
    assert rig.cuda.calls["cuStreamWaitEvent"] == before + 2


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000), batches=st.booleans())
def test_a_store_ahead_reads_between_earlier_and_later_compute(seed: int, batches: bool) -> None:
    cuda, blocks, pool = FakeCuda(seed, batches=batches), np.ones((8, 64), dtype=np.uint8), HostPool(8, 64)
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), pool)
    pool.slot(7)[:] = 99
    cuda.launch(lambda: blocks.fill(5))
    copies.submit_ahead(job(1, Direction.STORE, [0, 1], [0, 1]))
    copies.submit(job(2, Direction.LOAD, [1], [7]))
    cuda.launch(lambda: blocks[0].fill(77))
    cuda.synchronize()
    assert copies.wait([1, 2], PINNED_WAIT_S)
    assert {result.job_id: result.error for result in copies.poll()} == {1: None, 2: None}
    assert (pool.slot(0) == 5).all()
    assert (pool.slot(1) == 5).all()
    assert (blocks[:2, 0] == [77, 99]).all()
    copies.close()


def test_store_ahead_when_queued_too_late_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cuda_ops.cuda.cuda_copy.AHEAD_S", 0.01)
    cuda, blocks, pool = FakeCuda(), np.ones((8, 64), dtype=np.uint8), GatedPool()
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), pool)
    copies.submit_ahead(store(1, 0))
    copies.submit_ahead(store(2, 1))
    cuda.launch(lambda: blocks.fill(77))
    cuda.synchronize()
    assert copies.wait([2], 0.0), "no step waits for a second one meanwhile"
    pool.go_on.set()
    assert copies.wait([1], PINNED_WAIT_S)
    assert all("overtaken" in str(result.error) for result in copies.poll())
    assert not contents(pool).any()
    copies.submit_ahead(store(3, 0))
    assert copies.wait([3], PINNED_WAIT_S)
    assert [result.error for result in copies.poll()] == [None]
    copies.close()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuEventCreate", "cuStreamCreateWithPriority"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_store_ahead_that_fails_holds_up_neither_caller_nor_compute(rig: Rig, call: str, after: int) -> None:
    rig.cuda.fail(call, INVALID_VALUE, after)
    rig.copies.submit_ahead(store(1, 0))
    rig.cuda.launch(lambda: rig.blocks.fill(77))
    rig.cuda.synchronize()
    first = rig.ends([1])[1]
    assert first.error is not None or rig.pool.slot(0).tolist() == [1] * 64
    assert rig.results_of(store(2, 0))[2].error is None or first.error is None


def test_closing_ends_stores_ahead_and_later_ones_fail(rig: Rig) -> None:
    rig.copies.submit_ahead(store(1, 0))
    rig.copies.close()
    rig.copies.submit_ahead(store(2, 0))
    results = rig.ends([1, 2])
    assert (results[1].error, results[2].error) == (None, "the copy engine is closed")


def test_each_direction_has_a_stream_of_its_own_of_the_lowest_priority() -> None:
    rig = Rig()
    rig.results_of(store(1, 0), load(2, 1))
    assert [(stream.flags, stream.priority) for stream in rig.cuda.copy_streams] == [(1, LEAST), (1, LEAST)]
    assert len({stream for stream, _ in rig.cuda.batches}) == 2
    rig.copies.close()


def test_sources_are_read_in_the_order_of_the_stream() -> None:
    """vllm#39306."""
    rig = Rig()
    rig.results_of(store(1, 0), load(2, 1))
    assert {order for order, _ in rig.cuda.attributes} == {ORDER_STREAM}
    rig.copies.close()


def test_job_seconds_exclude_the_compute_before_its_copies(rig: Rig) -> None:
    began_ms = rig.cuda.time_ms
    with rig.cuda.held():
        for _ in range(300):
            rig.cuda.launch(lambda: None)
        rig.copies.submit(store(1, 0))
        rig.copies.submit(load(2, 1))
    results = rig.ends([1, 2])
    assert rig.cuda.time_ms - began_ms > 50
    assert all(0 < result.seconds < 0.02 for result in results.values())


def test_a_heap_of_jobs_takes_no_heap_of_pinned_memory(rig: Rig) -> None:
    with rig.cuda.held():
        rig.cuda.launch(lambda: None)
        for number in range(200):
            rig.copies.submit(store(number, number % 8))
        wait_until(lambda: rig.cuda.num_queued_copies() >= 8, "copies are queued ahead", PINNED_WAIT_S)
        assert not rig.copies.wait([0], 0.1)
    assert all(result.error is None for result in rig.ends(list(range(200))).values())
    assert len(rig.cuda.allocated) <= 8


def test_events_are_used_again(rig: Rig) -> None:
    for number in range(20):
        rig.results_of(store(number, 0), load(number + 100, 1))
    # Two jobs at a time, each with one event before it and two around it.
    assert rig.cuda.num_events <= 6


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_job_with_an_unknown_block_or_slot_fails_before_it_writes(rig: Rig) -> None:
    results = rig.results_of(
        job(1, Direction.STORE, [0, 9], [0, 1]), job(2, Direction.LOAD, [0, -1], [1, 1]), store(3, 3)
    )
    assert "blocks of group 0 0 to 9: must be in 0..7" in str(results[1].error)
    assert results[2].error is not None
    assert results[3].error is None
    assert contents(rig.pool).sum(axis=(1, 2)).tolist() == [0, 0, 0, 256, 0, 0, 0, 0]
    assert rig.copies.is_alive()


@pytest.mark.parametrize(
    "call",
    [
        "cuCtxPushCurrent",
        "cuEventCreate",
        "cuMemHostAlloc",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyBatchAsync",
        "cuEventSynchronize",
        "cuEventElapsedTime",
    ],
)
def test_driver_error_fails_its_job_and_the_next_is_copied(call: str) -> None:
    rig = Rig()
    rig.cuda.fail(call, INVALID_VALUE)
    one = job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7])
    results = rig.results_of(one)
    assert "CUDA_ERROR_INVALID_VALUE (1)" in str(results[1].error)
    assert call in str(results[1].error)
    assert results[1].num_bytes == 0
    assert rig.cuda.num_queued_copies() == 0
    assert rig.copies.is_alive()
    assert rig.results_of(store(2, 5))[2].error is None
    assert rig.pool.slot(5).tolist() == [6] * 64
    rig.copies.close()


def test_failed_job_is_open_while_its_copies_may_run(rig: Rig) -> None:
    call = "cuMemcpyBatchAsync" if rig.cuda.has_batches else "cuMemcpyAsync"
    rig.cuda.fail(call, INVALID_VALUE, after=0 if rig.cuda.has_batches else 2)
    with rig.cuda.held():
        rig.cuda.launch(lambda: rig.blocks.fill(77))
        rig.copies.submit(job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7]))
        wait_until(lambda: rig.cuda.num_queued_copies() == 2, "half of the job is queued", PINNED_WAIT_S)
        assert not rig.copies.wait([1], 0.05)
    assert call in str(rig.ends([1])[1].error)
    assert rig.cuda.num_queued_copies() == 0


def test_failed_batch_error_contains_the_copy_number() -> None:
    rig = Rig()
    rig.cuda.fail("cuMemcpyBatchAsync", INVALID_VALUE)
    error = str(rig.results_of(job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7]))[1].error)
    assert "at copy 2 of 4" in error
    rig.copies.close()


def test_broken_device_fails_every_job(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with rig.cuda.held():
        for number in range(4):
            rig.copies.submit(store(number, number))
            rig.copies.submit(load(number + 10, number + 4))
        rig.cuda.poison(ILLEGAL_ADDRESS)
    results = rig.ends([*range(4), *range(10, 14)])
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(result.error) for result in results.values())
    assert not rig.copies.is_alive()
    late = rig.results_of(store(20, 0), load(21, 1))
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in str(result.error) for result in late.values())
    assert rig.copies.poll() == []
    rig.copies.close()
    assert caplog.text.count("copy engine stopped") == 1


def test_device_that_broke_while_idle_fails_the_next_job(rig: Rig) -> None:
    rig.cuda.poison(ILLEGAL_ADDRESS)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(rig.results_of(store(1, 0))[1].error)
    assert not rig.copies.is_alive()


def test_job_without_a_compute_stream_fails_and_the_next_is_copied() -> None:
    cuda, broken = FakeCuda(), [True]

    def current_stream() -> int:
        if broken:
            raise LookupError(broken.pop())
        return cuda.compute

    pool = HostPool(8, 64)
    layout = DeviceLayout.of_arrays([np.ones((8, 64), dtype=np.uint8)])
    copies = CudaCopyEngine(
        layout, pool, lambda: None, driver=CudaDriver(cuda.resolve), device=0, current_stream=current_stream
    )
    copies.submit(store(1, 0))
    copies.submit(store(2, 1))
    assert copies.wait([1, 2], PINNED_WAIT_S)
    errors = {result.job_id: result.error for result in copies.poll()}
    assert "LookupError" in str(errors[1])
    assert errors[2] is None
    assert copies.is_alive()
    copies.close()


def test_finished_load_is_reported_when_the_stream_wait_fails(rig: Rig) -> None:
    rig.copies.submit(load(1, 0))
    assert rig.copies.wait([1], PINNED_WAIT_S)
    rig.cuda.fail("cuStreamWaitEvent", INVALID_VALUE)
    assert [result.error for result in rig.copies.poll()] == [None]
    assert rig.copies.is_alive()
    assert rig.results_of(load(2, 1))[2].error is None


def test_finished_load_is_reported_without_a_compute_stream() -> None:
    cuda, broken = FakeCuda(), list[bool]()

    def current_stream() -> int:
        if broken:
            raise LookupError(broken.pop())
        return cuda.compute

    blocks, seen = np.zeros((8, 64), dtype=np.uint8), list[int]()
    pool = HostPool(8, 64)
    pool.slot(1)[:] = 9
    copies = CudaCopyEngine(
        DeviceLayout.of_arrays([blocks]),
        pool,
        lambda: None,
        driver=CudaDriver(cuda.resolve),
        device=0,
        current_stream=current_stream,
    )
    copies.submit(load(1, 1))
    assert copies.wait([1], PINNED_WAIT_S)
    broken.append(True)
    assert [(result.job_id, result.error) for result in copies.poll()] == [(1, None)]
    before = cuda.calls["cuStreamWaitEvent"]
    assert copies.poll() == []
    assert cuda.calls["cuStreamWaitEvent"] == before + 1
    cuda.launch(lambda: seen.append(int(blocks[1, 0])))
    cuda.synchronize()
    assert seen == [9]
    copies.close()


def test_failed_job_is_open_while_the_stream_state_is_unknown(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    call = "cuMemcpyBatchAsync" if rig.cuda.has_batches else "cuMemcpyAsync"
    rig.cuda.fail(call, INVALID_VALUE, after=0 if rig.cuda.has_batches else 2)
    for _ in range(3):
        rig.cuda.fail("cuStreamSynchronize", OUT_OF_MEMORY)
    with rig.cuda.held():
        rig.cuda.launch(lambda: rig.blocks.fill(77))
        rig.copies.submit(job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7]))
        wait_until(lambda: rig.cuda.calls["cuStreamSynchronize"] > 3, "it is asked until it answers", PINNED_WAIT_S)
        assert not rig.copies.wait([1], 0.05)
        assert rig.cuda.num_queued_copies() == 2
    assert call in str(rig.ends([1])[1].error)
    assert rig.cuda.num_queued_copies() == 0
    assert rig.copies.is_alive()
    assert "stream state unknown" in caplog.text
    assert rig.results_of(store(2, 5))[2].error is None


def test_copies_go_on_while_a_graph_is_captured(rig: Rig) -> None:
    """pytorch#104555: a thread that looked at events ruined the captures of another."""
    rig.results_of(store(1, 0), load(2, 1))
    with rig.cuda.capturing():
        rig.copies.submit(store(3, 2))
        rig.copies.submit(load(4, 3))
        assert all(result.error is None for result in rig.ends([3, 4]).values())


def test_an_engine_that_cannot_start_leaves_nothing_behind() -> None:
    cuda = FakeCuda()
    cuda.fail("cuStreamCreateWithPriority", INVALID_VALUE, after=1)
    with pytest.raises(CudaError, match="cuStreamCreateWithPriority failed: CUDA_ERROR_INVALID_VALUE"):
        engine_on(cuda, DeviceLayout.of_arrays([np.ones((4, 64), dtype=np.uint8)]), HostPool(4, 64))
    assert cuda.copy_streams == []
    assert cuda.retained == 0


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    batches=st.booleans(),
    failures=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "cuEventRecord",
                    "cuStreamWaitEvent",
                    "cuMemcpyBatchAsync",
                    "cuMemcpyAsync",
                    "cuEventSynchronize",
                    "cuStreamSynchronize",
                    "cuCtxPushCurrent",
                    "cuCtxPopCurrent",
                    "cuMemHostAlloc",
                ]
            ),
            st.integers(0, 30),
        ),
        max_size=4,
    ),
    poisoned_at=st.none() | st.integers(0, 11),
)
def test_jobs_when_any_call_fails_end_once_with_right_bytes(
    seed: int, batches: bool, failures: list[tuple[str, int]], poisoned_at: int | None
) -> None:
    cuda, rng = FakeCuda(seed, batches=batches), np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (48, 32), dtype=np.uint8)
    pool = HostPool(48, 32)
    for slot in range(48):
        pool.slot(slot)[:] = rng.integers(0, 256, 32, dtype=np.uint8)
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), pool)
    for call, after in failures:
        cuda.fail(call, INVALID_VALUE, after)
    expected = {}
    for number in range(12):
        if number == poisoned_at:
            cuda.poison(ILLEGAL_ADDRESS)
        direction = Direction.STORE if number % 2 else Direction.LOAD
        here = [4 * number, 4 * number + 2, 4 * number + 3]
        source = blocks if direction is Direction.STORE else contents(pool)[:, 0]
        expected[number] = source[here].copy()
        copies.submit(job(number, direction, here, here))
    assert copies.wait(range(12), PINNED_WAIT_S)
    results = copies.poll()
    assert sorted(result.job_id for result in results) == list(range(12))
    for result in results:
        here = [4 * result.job_id, 4 * result.job_id + 2, 4 * result.job_id + 3]
        if result.error is None:
            assert np.array_equal(blocks[here], expected[result.job_id])
            assert np.array_equal(contents(pool)[here, 0], expected[result.job_id])
    assert (poisoned_at is None) or not copies.is_alive()
    copies.close()
    assert cuda.num_queued_copies() == 0


def test_jobs_end_once_when_anything_on_the_copy_threads_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch, 5, probability=0.05, most=1000)
    faults.patch(CudaCopyEngine, ["_begin", "_issue", "_take_buffer", "_finish", "_fail", "_mark_compute"])
    faults.patch(SegmentPlanner, ["plan", "num_bytes"])
    faults.patch(HostPool, ["hold"])
    faults.patch(CudaDriver, ["wait_event", "record_event", "synchronize_event", "synchronize_stream", "elapsed_s"])
    faults.patch(JobLedger, ["end"], after=False)
    with faults.on():
        rig = Rig()
        right = np.repeat(np.arange(1, 9, dtype=np.uint8)[:, None], 64, axis=1)
        num_done = 0
        for first in range(0, 400, 8):
            jobs_of_round = [store(first + block, block) for block in range(8)]
            results = rig.results_of(*jobs_of_round)
            done = [number % 8 for number, result in results.items() if result.error is None]
            assert rig.cuda.num_queued_copies() == 0
            assert np.array_equal(contents(rig.pool)[done, 0], right[done])
            num_done += len(done)
    assert faults.raised.total() > 100
    assert num_done > 100
    assert rig.copies.is_alive()
    assert rig.results_of(store(1000, 5))[1000].error is None
    rig.copies.close()


def test_on_finished_that_raises_does_not_stop_copies(caplog: pytest.LogCaptureFixture) -> None:
    cuda, count = FakeCuda(), itertools.count()

    def fail() -> None:
        raise (SystemExit if next(count) else OSError)("nobody home")

    blocks = np.ones((4, 64), dtype=np.uint8)
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), HostPool(4, 64), fail)
    for number in range(1, 4):
        copies.submit(store(number, number))
        assert copies.wait([number], PINNED_WAIT_S)
    assert [(result.job_id, result.error) for result in copies.poll()] == [(1, None), (2, None), (3, None)]
    assert copies.is_alive()
    copies.close()
    assert "nobody home" in caplog.text


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_fails_queued_jobs_and_waits_for_the_device() -> None:
    cuda, pool = FakeCuda(), GatedPool()
    blocks = np.repeat(np.arange(1, 9, dtype=np.uint8)[:, None], 64, axis=1)
    copies = engine_on(cuda, DeviceLayout.of_arrays([blocks]), pool)
    with cuda.held():
        cuda.launch(lambda: blocks.fill(55))
        copies.submit(store(1, 0))
        assert pool.asked.wait(PINNED_WAIT_S)
        copies.submit(store(2, 1))
        closing = threading.Thread(target=copies.close)
        closing.start()
        wait_until(lambda: not copies.is_alive(), "the engine is closing", PINNED_WAIT_S)
        copies.submit(store(3, 2))
        pool.go_on.set()
        wait_until(lambda: cuda.num_queued_copies() > 0, "the copy is queued", PINNED_WAIT_S)
        assert closing.is_alive()
        # The compute that the copy waits for has not run: the memory must not go yet.
        early = {result.job_id: str(result.error) for result in copies.poll()}
        assert 1 not in early
    closing.join(PINNED_WAIT_S)
    copies.close()
    assert not closing.is_alive()
    assert cuda.num_queued_copies() == 0
    assert pool.slot(0).tolist() == [55] * 64
    errors = early | {result.job_id: result.error for result in copies.poll()}
    assert errors[1] is None
    assert "closed before the job started" in errors[2]
    assert errors[3] == "the copy engine is closed"
    assert (cuda.copy_streams, cuda.num_events, cuda.allocated, cuda.retained) == ([], 0, {}, 0)


def test_the_pool_stays_mapped_under_a_copy_that_its_owner_forgot(rig: Rig) -> None:
    with rig.cuda.held():
        rig.copies.submit(job(1, Direction.STORE, list(range(8)), list(range(8))))
        wait_until(lambda: rig.cuda.num_queued_copies() > 0, "the copy is queued", PINNED_WAIT_S)
        rig.pool.close()
    assert rig.ends([1])[1].error is None


# ---- registration ----------------------------------------------------------------------------------------------------


def test_idle_copy_thread_releases_memory_of_removed_extents() -> None:
    """The memory of a pool that shrinks is wanted elsewhere, also when nobody stores or loads any more."""
    blocks = np.zeros((8, 64), dtype=np.uint8)
    pool = HostPool(8, 64, extent_bytes=2 * 64)
    copies = engine_on(FakeCuda(), DeviceLayout.of_arrays([blocks]), pool)
    try:
        for one in (store(1, 7), load(2, 7)):
            copies.submit(one)
            assert copies.wait([one.job_id], PINNED_WAIT_S)
            assert [result.error for result in copies.poll()] == [None]
        left = weakref.ref(pool.slot(7).base)
        pool.remove_extents(1)
        wait_until(lambda: left() is None, "the memory to go", PINNED_WAIT_S)
    finally:
        copies.close()
        pool.close()


def test_pool_with_an_unregistered_extent_is_copied_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = FakeCuda()
    registrar = CudaRegistrar(CudaDriver(cuda.resolve), 0)
    cuda.fail("cuMemHostRegister", ALREADY_REGISTERED, after=2)
    pool = HostPool(16, 4096, extent_bytes=4 * 4096, preparation=Preparation(registrar=registrar))
    assert not pool.is_pinned
    assert cuda.registered == {}
    assert caplog.text.count("the host pool is not pinned") == 1
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)" in caplog.text
    copies = CudaCopyEngine(
        DeviceLayout.of_arrays([np.full((4, 4096), 3, dtype=np.uint8)]),
        pool,
        lambda: None,
        driver=CudaDriver(cuda.resolve),
        device=0,
        current_stream=lambda: cuda.compute,
    )
    copies.submit(store(1, 0))
    assert copies.wait([1], PINNED_WAIT_S)
    assert pool.slot(0).tolist() == [3] * 4096
    # What a batch does with memory that the device does not know is not said anywhere.
    assert cuda.batches == []
    copies.close()
    pool.close()


# ---- machines without a device ---------------------------------------------------------------------------------------


def test_modules_when_imported_do_not_import_cuda() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        "from kvferry import cuda_ops\n"
        "modules = {module.name for module in pkgutil.walk_packages(cuda_ops.__path__, 'kvferry.cuda_ops.')}\n"
        "for name in modules - {'kvferry.cuda_ops.cuda.triton_copy'}: importlib.import_module(name)\n"
        "print([name for name in ('cuda', 'cuda.bindings', 'triton', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def test_machine_without_a_driver_is_refused_with_advice() -> None:
    if has_device():
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(CudaUnavailable, match="install"):
        load_driver()


def test_a_driver_too_old_is_refused() -> None:
    cuda = FakeCuda()
    with pytest.raises(CudaUnavailable, match="lacks cuStreamWaitEvent: it is older than CUDA 12"):
        CudaDriver(lambda name, version: 0 if name == "cuStreamWaitEvent" else cuda.resolve(name, version))


def test_memcpy_attributes_have_the_layout_of_nvidia() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    theirs = driver.CUmemcpyAttributes()
    theirs.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    theirs.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    ours = MemcpyAttributes.from_address(theirs.getPtr())
    assert (ours.src_access_order, ours.flags) == (1, 1)


# What the types of NVIDIA's declarations are to C; a type that is not listed here and has no star is a handle.
C_TYPES = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUresult": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
}


def test_driver_functions_have_the_arguments_of_nvidia() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    declared = Path(driver.__file__).with_name("cydriver.pxd").read_text()
    wanted: dict[str, list[object]] = {}
    for name in FUNCTIONS:
        found = re.search(rf"CUresult {name}\((.*?)\)", declared)
        assert found is not None, name
        kinds = [argument.strip().rsplit(" ", 1)[0] for argument in found[1].split(",")]
        # A pointer to what is handed over, and a pointer for what comes back, are both addresses.
        wanted[name] = [ctypes.c_void_p if "*" in kind else C_TYPES.get(kind, ctypes.c_void_p) for kind in kinds]
    pointers = {ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)}
    ours = {
        name: [ctypes.c_void_p if kind in pointers else kind for kind in kinds] for name, kinds in FUNCTIONS.items()
    }
    assert ours == wanted


@pytest.mark.gpu
def test_bytes_go_to_a_device_and_back() -> None:
    import torch

    if not has_device():
        pytest.skip("no CUDA device")
    driver = load_driver()
    registrar = CudaRegistrar(driver, 0)
    blocks = torch.randint(0, 256, (64, 5, 4096), dtype=torch.uint8, device="cuda")
    before = blocks.cpu()
    pool = HostPool(64, 5 * 4096, preparation=Preparation(registrar=registrar))
    assert pool.is_pinned
    copies = CudaCopyEngine(
        DeviceLayout.of_tensors([[blocks[:, :2], blocks[:, 2:]]]),
        pool,
        lambda: None,
        driver=driver,
        device=0,
        current_stream=lambda: torch.cuda.current_stream().cuda_stream,
    )
    order = np.random.default_rng(1).permutation(64).tolist()
    for number, direction in ((1, Direction.STORE), (2, Direction.LOAD)):
        copies.submit(job(number, direction, list(range(64)), order))
        assert copies.wait([number], PINNED_WAIT_S)
        assert [result.error for result in copies.poll()] == [None]
        if direction is Direction.STORE:
            # Nothing but its end says that a store has read its blocks.
            blocks.zero_()
    assert torch.equal(blocks.cpu(), before)
    copies.close()
    pool.close()
