"""Every copy engine: bytes arrive where they belong, and each job ends exactly once, also after errors and a close."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.transfers import Direction, TransferJob
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.copy_jobs import assert_moved, job, store
from tests.harness.copy_rig import CopyRig, GatedPool, copy_engine
from tests.harness.drawn_devices import Device, contents, devices, jobs, pools
from tests.harness.effort import examples
from tests.harness.fake_cuda import FakeCuda
from tests.harness.waiting import DEADLINE_S, wait_until

KINDS = ["cpu", "batches", "one by one"]
Make = Callable[..., CopyRig]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, make_rig: Make) -> Make:
    return lambda **options: make_rig(request.param, **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(device=devices(), seed=st.integers(0, 1000), data=st.data())
def test_store_and_load_of_any_layout_move_exactly_their_bytes(
    kind: str, device: Device, seed: int, data: st.DataObject
) -> None:
    pool = data.draw(pools(device.layout))
    cuda = FakeCuda(seed, batches=kind == "batches")
    copies = copy_engine(kind, cuda, device.layout, pool, **({"num_threads": 1 + seed % 3} if kind == "cpu" else {}))
    try:
        for direction in (Direction.STORE, Direction.LOAD):
            one = data.draw(jobs(device.layout, pool, direction))
            fresh = np.random.default_rng(seed).integers(0, 256, device.memory.size, dtype=np.uint8)
            # What computes the device's bytes runs only when it must, and the job is submitted at once.
            cuda.launch(lambda fresh=fresh: np.copyto(device.memory, fresh))
            if kind == "cpu":
                cuda.synchronize()
            assert_moved(copies, one, device, pool, fresh)
    finally:
        copies.close()
        pool.close()


def test_job_without_blocks_ends(make: Make) -> None:
    results = make().results_of(job(1, Direction.STORE, [], []), TransferJob(2, Direction.LOAD, ()))
    assert [(result.error, result.num_bytes) for result in results.values()] == [(None, 0), (None, 0)]


def test_job_with_an_unknown_block_or_slot_fails_before_it_writes(make: Make) -> None:
    rig = make()
    unknown = [job(1, Direction.STORE, [0, 9], [0, 1]), job(2, Direction.LOAD, [0, -1], [1, 1])]
    results = rig.results_of(*unknown, job(3, Direction.STORE, [0, 1], [0]), store(4, 3))
    assert "blocks of group 0 0 to 9: must be in 0..7" in str(results[1].error)
    assert [results[number].error is None for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert [results[number].num_bytes for number in (1, 2, 3, 4)] == [0, 0, 0, 64]
    assert contents(rig.pool).sum(axis=(1, 2)).tolist() == [0, 0, 0, 256, 0, 0, 0, 0]
    assert rig.blocks[:, 0].tolist() == list(range(1, 9))
    assert rig.copies.is_alive()


def test_store_ahead_when_read_too_late_fails(make: Make) -> None:
    rig = make(pool=(pool := GatedPool()))
    rig.copies.submit_ahead(store(1, 0))
    rig.copies.submit_ahead(store(2, 1))
    rig.cuda.launch(lambda: rig.blocks.fill(77))
    rig.cuda.synchronize()
    assert rig.copies.wait([2], 0.0), "no step waits for a second one meanwhile"
    pool.go_on.set()
    assert all("overtaken" in str(result.error) for result in rig.ends([1, 2]).values())
    assert rig.kind == "cpu" or not contents(pool).any()
    rig.copies.submit_ahead(store(3, 0))
    assert rig.ends([3])[3].error is None


@pytest.mark.parametrize("name", ["kvferry-ahead", "kvferry-ahead-end"])
def test_store_ahead_when_a_thread_cannot_start_fails_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rig = make()
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        rig.copies.submit_ahead(store(1, 1))
        assert rig.ends([1])[1].error == ("RuntimeError: can't start new thread" if refused else None)
    rig.copies.submit_ahead(store(2, 2))
    assert rig.ends([2])[2].error is None
    assert rig.copies.is_alive()
    rig.copies.close()


def test_close_ends_stores_ahead_and_fails_later_ones(make: Make) -> None:
    rig = make()
    rig.copies.submit_ahead(store(1, 0))
    rig.copies.close()
    rig.copies.submit_ahead(store(2, 0))
    results = rig.ends([1, 2])
    assert (results[1].error, results[2].error) == (None, "the copy engine is closed")


def test_jobs_not_started_at_close_and_later_jobs_fail(make: Make) -> None:
    rig = make(pool=(pool := GatedPool()))
    rig.copies.submit(store(1, 0))
    assert pool.asked.wait(DEADLINE_S)
    rig.copies.submit(store(2, 1))
    closing = threading.Thread(target=rig.copies.close)
    closing.start()
    wait_until(lambda: not rig.copies.is_alive(), "the engine is closing", DEADLINE_S)
    rig.copies.submit(store(3, 2))
    pool.go_on.set()
    closing.join(DEADLINE_S)
    errors = {number: result.error for number, result in rig.ends([1, 2, 3]).items()}
    assert (errors[1], errors[3]) == (None, "the copy engine is closed")
    assert "closed before the job started" in str(errors[2])


def test_on_finished_that_raises_does_not_stop_copies(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise errors.pop()

    rig = make(on_finished=fail)
    errors = [OSError("nobody home"), OSError() if rig.kind == "cpu" else SystemExit()]
    assert [result.error for result in rig.results_of(store(1, 0), store(2, 1)).values()] == [None, None]
    assert rig.copies.is_alive()
    rig.copies.close()
    assert "nobody home" in caplog.text


def test_idle_copy_thread_releases_memory_of_removed_extents(make: Make) -> None:
    """The memory of a pool that shrinks is wanted elsewhere, also when there are no more stores and loads."""
    rig = make(pool=HostPool(8, 64, extent_bytes=2 * 64))
    rig.results_of(store(1, 7), job(2, Direction.LOAD, [6], [6]))
    left = weakref.ref(rig.pool.slot(7).base)
    rig.pool.remove_extents(1)
    wait_until(lambda: left() is None, "the memory to go", DEADLINE_S)
