"""Bytes arrive where they belong, every job ends, and a pool that cannot fit is refused with both numbers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.transfers import BlockRun, Direction, TransferJob, TransferResult
from cuda_ops.cpu_copy import CpuCopyEngine
from cuda_ops.host_pool import HostPool
from cuda_ops.limits import MemoryLimit, NotEnoughMemory, check_fits, memory_limits


class Finished:
    """Counts ended jobs, and lets a test wait for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def __call__(self) -> None:
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._count >= count, 30), f"{self._count} of {count} jobs ended"


def job(number: int, direction: Direction, blocks: list[int], slots: list[int]) -> TransferJob:
    block_ids, rows = np.array(blocks, dtype=np.int64), np.array(slots, dtype=np.int64)
    return TransferJob(number, direction, (BlockRun(0, block_ids, rows, np.zeros_like(rows)),))


def run(copies: CpuCopyEngine, finished: Finished, jobs: list[TransferJob]) -> dict[int, TransferResult]:
    for one in jobs:
        copies.submit(one)
    finished.wait(len(jobs))
    return {result.job_id: result for result in copies.poll()}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    block_bytes=st.sampled_from([1, 7, 64, 4096, 300_000]),
    padding=st.sampled_from([0, 0, 5, 64]),
    per_extent=st.integers(1, 9),
    data=st.data(),
)
def test_what_was_stored_is_loaded_back_and_nothing_else_is_touched(block_bytes, padding, per_extent, data) -> None:
    num_blocks, num_slots = 12, 20
    slot_bytes = block_bytes + padding
    count = data.draw(st.integers(0, num_blocks))
    blocks = data.draw(st.permutations(range(num_blocks)))[:count]
    slots = data.draw(st.permutations(range(num_slots)))[:count]
    targets = data.draw(st.permutations(range(num_blocks)))[:count]
    rng = np.random.default_rng(1)
    device = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    before = device.copy()
    pool = HostPool(num_slots, slot_bytes, extent_bytes=per_extent * slot_bytes)
    host_before = rng.integers(0, 256, (num_slots, slot_bytes), dtype=np.uint8)
    for slot in range(num_slots):
        pool.slot(slot)[:] = host_before[slot]
    finished = Finished()
    copies = CpuCopyEngine([device], pool, finished)
    try:
        results = run(copies, finished, [job(1, Direction.STORE, blocks, slots)])
        assert results[1].error is None
        assert results[1].num_bytes == count * block_bytes
        expected_host = host_before.copy()
        expected_host[slots, :block_bytes] = before[blocks]
        for slot in range(num_slots):
            assert np.array_equal(pool.slot(slot), expected_host[slot])
        device[:] = 0
        copies.submit(job(2, Direction.LOAD, targets, slots))
        finished.wait(2)
        assert copies.poll()[0].error is None
        expected = np.zeros_like(before)
        expected[targets] = before[blocks]
        assert np.array_equal(device, expected)
    finally:
        copies.close()
        pool.close()


def test_a_job_that_cannot_be_copied_fails_and_the_next_one_is_carried_out() -> None:
    device, finished = np.zeros((4, 64), dtype=np.uint8), Finished()
    pool = HostPool(4, 64)
    copies = CpuCopyEngine([device], pool, finished)
    results = run(
        copies,
        finished,
        [
            job(1, Direction.STORE, [0, 9], [0, 1]),
            job(2, Direction.LOAD, [-1], [1]),
            job(3, Direction.STORE, [0, 1], [0]),
            job(4, Direction.STORE, [0], [0]),
        ],
    )
    assert [results[n].error is None for n in (1, 2, 3, 4)] == [False, False, False, True]
    assert results[1].num_bytes == 0
    copies.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_job_ends_when_the_engine_is_closed_or_its_thread_dies() -> None:
    device, finished = np.zeros((4, 64), dtype=np.uint8), Finished()
    pool = HostPool(4, 64)
    died = threading.Event()

    def die_once() -> None:
        finished()
        if not died.is_set() and threading.current_thread().name == "kvferry-copy":
            died.set()
            raise SystemExit

    copies = CpuCopyEngine([device], pool, die_once)
    first = copies._thread
    copies.submit(job(1, Direction.STORE, [0], [0]))
    first.join(30)
    assert not copies.is_alive()
    copies.submit(job(2, Direction.STORE, [1], [1]))
    ended = {result.job_id: result.error for result in copies.poll()}
    assert ended[1] is None
    assert "died" in str(ended[2])
    assert copies.is_alive()
    copies.submit(job(3, Direction.STORE, [2], [2]))
    finished.wait(3)
    copies.close()
    copies.submit(job(4, Direction.STORE, [2], [2]))
    ended = {result.job_id: result.error for result in copies.poll()}
    assert ended[3] is None
    assert ended[4] is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_job_in_hand_of_a_thread_that_died_ends_when_the_engine_is_closed() -> None:
    class Deadly(HostPool):
        def extents_of(self, slots: np.ndarray) -> object:
            raise SystemExit

    copies = CpuCopyEngine([np.zeros((4, 64), dtype=np.uint8)], Deadly(4, 64), Finished())
    copies.submit(job(1, Direction.STORE, [0], [0]))
    copies._thread.join(30)
    copies.close()
    assert [result.job_id for result in copies.poll() if result.error] == [1]


def test_a_block_that_does_not_fit_a_slot_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"65 bytes.*slot of 64"):
        CpuCopyEngine([np.zeros((2, 65), dtype=np.uint8)], HostPool(2, 64), Finished())


def test_a_pool_larger_than_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match=r"POOL_BYTES asks for 1,125,899,906,842,624 bytes .* bytes"):
        HostPool(1 << 30, 1 << 20)


def test_the_tightest_limit_is_the_one_that_is_named() -> None:
    limits = [MemoryLimit("memory", 1000), MemoryLimit("the cgroup", 500)]
    check_fits("POOL_BYTES", 500, limits)
    with pytest.raises(NotEnoughMemory, match=r"asks for 501 bytes .* the cgroup is 500 bytes"):
        check_fits("POOL_BYTES", 501, limits)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_the_cgroup_and_of_its_parents_count(tmp_path: Path, version: int) -> None:
    mount = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    unlimited = str(2**63 - 4096) if version == 1 else "max"
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "5:cpu,memory:/box/inner" if version == 1 else "0::/box/inner"
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/elsewhere\n{line}\n")
    for folder, limit, used in (("", unlimited, 9), ("box", "5000", 1000), ("box/inner", "9000", 500)):
        (mount / folder).mkdir(parents=True, exist_ok=True)
        (mount / folder / names[0]).write_text(f"{limit}\n")
        (mount / folder / names[1]).write_text(f"{used}\n")
    left = [limit.available_bytes for limit in memory_limits(tmp_path) if "cgroup" in limit.name]
    assert sorted(left) == [4000, 8500]
