"""The CPU copy engine: shares of a job, stores ahead of a step, and copy threads that die."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.transfers import Direction, TransferJob
from kvferry.cuda_ops.copy.cpu_copy import default_threads
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable
from tests.harness.copy_jobs import job, store
from tests.harness.copy_rig import CopyRig
from tests.harness.waiting import DEADLINE_S, wait_until

Make = Callable[..., CopyRig]


def test_job_when_shared_among_threads_arrives_whole(make_rig: Make) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (100, 256 << 10), dtype=np.uint8)
    before = blocks.copy()
    rig = make_rig("cpu", HostPool(100, 256 << 10, extent_bytes=7 << 20), blocks, num_threads=3)
    order = np.random.default_rng(2).permutation(100).tolist()
    assert rig.results_of(job(1, Direction.STORE, list(range(100)), order))[1].num_bytes == blocks.nbytes
    blocks[:] = 0
    assert rig.results_of(job(2, Direction.LOAD, list(range(100)), order))[2].error is None
    assert np.array_equal(blocks, before)


def test_a_job_ends_when_the_last_of_its_shares_has(make_rig: Make) -> None:
    """Looked at by the thread that ends it, at once: a share that still runs would be seen, if not each time."""
    blocks, pool, seen = np.zeros((24, 1 << 20), dtype=np.uint8), HostPool(24, 1 << 20), list[set[int]]()
    every = list(range(24))
    rig = make_rig(
        "cpu", pool, blocks, num_threads=3, on_finished=lambda: seen.append({int(pool.slot(i)[-1]) for i in every})
    )
    for number in range(1, 41):
        blocks[:, -1] = number
        rig.results_of(job(number, Direction.STORE, every, every))
        # `on_finished` is called after the results can be polled, and it reads the slots that the next job changes.
        wait_until(lambda number=number: len(seen) == number, "the end was seen", DEADLINE_S)
    assert seen == [{number} for number in range(1, 41)]


def test_store_ahead_is_copied_when_the_call_returns(make_rig: Make) -> None:
    """Also while the other threads are busy with a job that does not end."""
    busy, go_on = threading.Event(), threading.Event()

    def before(one: TransferJob) -> None:
        if one.job_id == 1:
            busy.set()
            assert go_on.wait(DEADLINE_S)

    rig = make_rig("cpu", before=before)
    rig.copies.submit(store(1, 1))
    assert busy.wait(DEADLINE_S)
    rig.copies.submit_ahead(store(2, 0))
    rig.blocks[0] = 77
    assert [(result.job_id, result.error) for result in rig.copies.poll()] == [(2, None)]
    assert rig.pool.slot(0).tolist() == [1] * 64
    go_on.set()


@pytest.fixture
def copy_threads() -> Callable[[], list[threading.Thread]]:
    """Copy threads that were started since; services of other suites may have some of their own."""
    before = set(threading.enumerate())
    return lambda: [each for each in threading.enumerate() if each.name == "kvferry-copy" and each not in before]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_copy_thread_is_restarted_and_copies_waiting_jobs(make_rig: Make, copy_threads) -> None:
    """LMCache#4817: a background thread died, and nobody noticed."""

    def die_once() -> None:
        if threading.current_thread() is thread:
            raise SystemExit

    rig = make_rig("cpu", on_finished=die_once)
    (thread,) = copy_threads()
    rig.copies.submit(store(1, 0))
    thread.join(DEADLINE_S)
    assert not rig.copies.is_alive()
    rig.copies.submit(store(2, 1))
    results = rig.ends([1, 2])
    assert rig.copies.is_alive()
    assert (results[1].error, results[2].error) == (None, None)
    rig.copies.close()
    assert not copy_threads()


class DyingPool(HostPool):
    """A pool that kills the thread which asks it where its slots are."""

    def hold(self) -> PoolTable:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ending", ["poll", "wait", "close"])
def test_job_of_a_dead_copy_thread_fails(make_rig: Make, copy_threads, ending: str) -> None:
    rig = make_rig("cpu", DyingPool(8, 64))
    (thread,) = copy_threads()
    rig.copies.submit(store(1, 0))
    thread.join(DEADLINE_S)
    if ending == "wait":
        assert rig.copies.wait([1], DEADLINE_S)
    if ending == "close":
        rig.copies.close()
    assert [(result.job_id, result.error) for result in rig.copies.poll()] == [(1, "the copy thread died")]
    rig.copies.close()
    assert rig.copies.poll() == []


def test_wait_is_bounded_and_ignores_ended_or_unknown_jobs(make_rig: Make) -> None:
    go_on = threading.Event()
    rig = make_rig("cpu", on_finished=lambda: go_on.wait(DEADLINE_S))
    rig.copies.submit(store(1, 0))
    assert rig.copies.wait([1, 77], DEADLINE_S)
    rig.copies.submit(store(2, 1))
    assert not rig.copies.wait([1, 2], 0.01)
    go_on.set()
    assert list(rig.ends([1, 2])) == [1, 2]


def test_pool_closed_under_a_copy_stays_mapped(make_rig: Make) -> None:
    rig = make_rig("cpu", HostPool(64, 1 << 20), np.ones((64, 1 << 20), dtype=np.uint8))
    rig.copies.submit(job(1, Direction.STORE, list(range(64)), list(range(64))))
    rig.pool.close()
    rig.copies.close()
    assert [result.job_id for result in rig.copies.poll()] == [1]


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (8, 2), (64, 4)])
def test_default_threads_leave_most_processors_to_the_engine(cpus: int, threads: int) -> None:
    assert default_threads(cpus) == threads
