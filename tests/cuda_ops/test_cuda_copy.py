"""The CUDA copy engine over a driver whose work runs late and in any order: bytes, order, errors and the end.

Only the tests marked `gpu` need a device.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.transfers import Direction, TransferJob
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
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation
from tests.harness.commands import run_script
from tests.harness.copy_jobs import job, store
from tests.harness.copy_rig import CopyRig, copy_engine
from tests.harness.drawn_devices import contents
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
from tests.harness.waiting import DEADLINE_S, wait_until

Make = Callable[..., CopyRig]
COPY_CALLS = ["cuMemHostAlloc", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyBatchAsync", "cuEventSynchronize"]
"""Calls of the driver in any job."""


def load(number: int, block: int) -> TransferJob:
    return job(number, Direction.LOAD, [block], [block])


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_neighbors_go_as_one_copy_and_a_job_as_one_call(make_rig: Make) -> None:
    rig = make_rig()
    assert rig.results_of(job(1, Direction.STORE, [2, 3, 4, 6], [0, 1, 2, 7]))[1].num_bytes == 256
    assert [count for _, count in rig.cuda.batches] == [2]
    assert rig.cuda.calls["cuMemcpyAsync"] == 0


# ---- order -----------------------------------------------------------------------------------------------------------


def test_submitting_waits_for_no_compute_and_the_copies_wait_for_it(rig: CopyRig) -> None:
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


def test_compute_queued_before_a_load_reads_the_old_bytes(rig: CopyRig) -> None:
    seen: list[int] = []
    rig.pool.slot(3)[:] = 99
    with rig.cuda.held():
        rig.cuda.launch(lambda: seen.append(int(rig.blocks[3, 0])))
        rig.copies.submit(load(1, 3))
    rig.ends([1])
    rig.cuda.launch(lambda: seen.append(int(rig.blocks[3, 0])))
    rig.cuda.synchronize()
    assert seen == [4, 99]


def test_compute_stream_waits_for_loads_and_not_for_stores(rig: CopyRig) -> None:
    rig.results_of(store(1, 0))
    before = rig.cuda.calls["cuStreamWaitEvent"]
    rig.copies.poll()
    assert rig.cuda.calls["cuStreamWaitEvent"] == before
    rig.copies.submit(load(2, 0))
    assert rig.copies.wait([2], DEADLINE_S)
    assert rig.cuda.calls["cuStreamWaitEvent"] == before + 1
    assert [result.job_id for result in rig.copies.poll()] == [2]
    assert rig.cuda.calls["cuStreamWaitEvent"] == before + 2


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000), batches=st.booleans())
def test_a_store_ahead_reads_between_earlier_and_later_compute(seed: int, batches: bool) -> None:
    cuda, blocks, pool = FakeCuda(seed, batches=batches), np.ones((8, 64), dtype=np.uint8), HostPool(8, 64)
    copies = copy_engine("cuda", cuda, DeviceLayout.of_arrays([blocks]), pool)
    pool.slot(7)[:] = 99
    cuda.launch(lambda: blocks.fill(5))
    copies.submit_ahead(job(1, Direction.STORE, [0, 1], [0, 1]))
    copies.submit(job(2, Direction.LOAD, [1], [7]))
    cuda.launch(lambda: blocks[0].fill(77))
    cuda.synchronize()
    assert copies.wait([1, 2], DEADLINE_S)
    assert {result.job_id: result.error for result in copies.poll()} == {1: None, 2: None}
    assert (pool.slot(0) == 5).all()
    assert (pool.slot(1) == 5).all()
    assert (blocks[:2, 0] == [77, 99]).all()
    copies.close()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuEventCreate", "cuStreamCreateWithPriority"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_store_ahead_that_fails_holds_up_neither_caller_nor_compute(rig: CopyRig, call: str, after: int) -> None:
    rig.cuda.fail(call, INVALID_VALUE, after)
    rig.copies.submit_ahead(store(1, 0))
    rig.cuda.launch(lambda: rig.blocks.fill(77))
    rig.cuda.synchronize()
    first = rig.ends([1])[1]
    assert first.error is not None or rig.pool.slot(0).tolist() == [1] * 64
    assert rig.results_of(store(2, 0))[2].error is None or first.error is None


def test_store_ahead_of_unpinned_memory_waits_no_longer_than_its_limit(make_rig: Make) -> None:
    rig = make_rig(cuda=FakeCuda(batches=False, pageable_waits=True))
    with rig.cuda.held():
        rig.cuda.launch(lambda: None)
        rig.copies.submit_ahead(store(1, 0))
        rig.copies.submit_ahead(store(2, 1))
        rig.cuda.launch(lambda: rig.blocks.fill(77))
    rig.cuda.synchronize()
    assert all("overtaken" in str(result.error) for result in rig.ends([1, 2]).values())
    rig.copies.submit_ahead(store(3, 0))
    assert rig.ends([3])[3].error is None
    assert rig.pool.slot(0).tolist() == [77] * 64


def test_each_direction_has_a_stream_of_its_own_of_the_lowest_priority(make_rig: Make) -> None:
    rig = make_rig()
    rig.results_of(store(1, 0), load(2, 1))
    assert [(stream.flags, stream.priority) for stream in rig.cuda.copy_streams] == [(1, LEAST), (1, LEAST)]
    assert len({stream for stream, _ in rig.cuda.batches}) == 2


def test_sources_are_read_in_the_order_of_the_stream(make_rig: Make) -> None:
    """vllm#39306."""
    rig = make_rig()
    rig.results_of(store(1, 0), load(2, 1))
    assert {order for order, _ in rig.cuda.attributes} == {ORDER_STREAM}


def test_job_seconds_exclude_the_compute_before_its_copies(rig: CopyRig) -> None:
    began_ms = rig.cuda.time_ms
    with rig.cuda.held():
        for _ in range(300):
            rig.cuda.launch(lambda: None)
        rig.copies.submit(store(1, 0))
        rig.copies.submit(load(2, 1))
    results = rig.ends([1, 2])
    assert rig.cuda.time_ms - began_ms > 50
    assert all(0 < result.seconds < 0.02 for result in results.values())


def test_many_queued_jobs_take_bounded_pinned_memory(rig: CopyRig) -> None:
    with rig.cuda.held():
        rig.cuda.launch(lambda: None)
        for number in range(200):
            rig.copies.submit(store(number, number % 8))
        wait_until(lambda: rig.cuda.num_queued_copies() >= 8, "copies are queued ahead", DEADLINE_S)
        assert not rig.copies.wait([0], 0.1)
    assert all(result.error is None for result in rig.ends(list(range(200))).values())
    assert len(rig.cuda.allocated) <= 8


def test_events_are_used_again(rig: CopyRig) -> None:
    for number in range(20):
        rig.results_of(store(number, 0), load(number + 100, 1))
    # Two jobs at a time, each with one event before it and two around it.
    assert rig.cuda.num_events <= 6


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", *COPY_CALLS, "cuEventCreate", "cuEventElapsedTime"])
def test_driver_error_fails_its_job_and_the_next_is_copied(make_rig: Make, call: str) -> None:
    rig = make_rig()
    rig.cuda.fail(call, INVALID_VALUE)
    one = job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7])
    results = rig.results_of(one)
    assert "CUDA_ERROR_INVALID_VALUE (1)" in str(results[1].error)
    assert call in str(results[1].error)
    assert ("at copy 2 of 4" in str(results[1].error)) == (call == "cuMemcpyBatchAsync")
    assert results[1].num_bytes == 0
    assert rig.cuda.num_queued_copies() == 0
    assert rig.copies.is_alive()
    assert rig.results_of(store(2, 5))[2].error is None
    assert rig.pool.slot(5).tolist() == [6] * 64


def test_broken_device_fails_every_job(rig: CopyRig, caplog: pytest.LogCaptureFixture) -> None:
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


def test_device_that_broke_while_idle_fails_the_next_job(rig: CopyRig) -> None:
    rig.cuda.poison(ILLEGAL_ADDRESS)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(rig.results_of(store(1, 0))[1].error)
    assert not rig.copies.is_alive()


@pytest.fixture
def stream_rig(make_rig: Make) -> tuple[CopyRig, list[str]]:
    """A rig whose current stream raises what is in a list, once."""
    broken: list[str] = []

    def current_stream() -> int:
        if broken:
            raise LookupError(broken.pop())
        return rig.cuda.compute

    rig = make_rig(current_stream=current_stream)
    return rig, broken


def test_job_without_a_compute_stream_fails_and_the_next_is_copied(stream_rig: tuple[CopyRig, list[str]]) -> None:
    rig, broken = stream_rig
    broken.append("no stream")
    results = rig.results_of(store(1, 0), store(2, 1))
    assert "LookupError" in str(results[1].error)
    assert results[2].error is None
    assert rig.copies.is_alive()


def test_finished_load_is_reported_without_a_compute_stream(stream_rig: tuple[CopyRig, list[str]]) -> None:
    rig, broken = stream_rig
    seen: list[int] = []
    rig.pool.slot(1)[:] = 9
    rig.copies.submit(load(1, 1))
    assert rig.copies.wait([1], DEADLINE_S)
    broken.append("no stream")
    assert [(result.job_id, result.error) for result in rig.copies.poll()] == [(1, None)]
    before = rig.cuda.calls["cuStreamWaitEvent"]
    assert rig.copies.poll() == []
    assert rig.cuda.calls["cuStreamWaitEvent"] == before + 1
    rig.cuda.launch(lambda: seen.append(int(rig.blocks[1, 0])))
    rig.cuda.synchronize()
    assert seen == [9]


def test_finished_load_is_reported_when_the_stream_wait_fails(rig: CopyRig) -> None:
    rig.copies.submit(load(1, 0))
    assert rig.copies.wait([1], DEADLINE_S)
    rig.cuda.fail("cuStreamWaitEvent", INVALID_VALUE)
    assert [result.error for result in rig.copies.poll()] == [None]
    assert rig.copies.is_alive()
    assert rig.results_of(load(2, 1))[2].error is None


@pytest.mark.parametrize("num_unknown", [0, 3], ids=["the copies may run", "the stream state is unknown"])
def test_failed_job_is_open_while_its_copies_may_run(
    rig: CopyRig, num_unknown: int, caplog: pytest.LogCaptureFixture
) -> None:
    call = "cuMemcpyBatchAsync" if rig.cuda.has_batches else "cuMemcpyAsync"
    rig.cuda.fail(call, INVALID_VALUE, after=0 if rig.cuda.has_batches else 2)
    for _ in range(num_unknown):
        rig.cuda.fail("cuStreamSynchronize", OUT_OF_MEMORY)
    with rig.cuda.held():
        rig.cuda.launch(lambda: rig.blocks.fill(77))
        rig.copies.submit(job(1, Direction.STORE, [0, 2, 4, 6], [1, 3, 5, 7]))
        asked = rig.cuda.calls
        wait_until(lambda: asked["cuStreamSynchronize"] > num_unknown, "the stream is asked again", DEADLINE_S)
        assert not rig.copies.wait([1], 0.05)
        assert rig.cuda.num_queued_copies() == 2
    assert call in str(rig.ends([1])[1].error)
    assert rig.cuda.num_queued_copies() == 0
    assert rig.copies.is_alive()
    assert ("stream state unknown" in caplog.text) == (num_unknown > 0)
    assert rig.results_of(store(2, 5))[2].error is None


def test_copies_go_on_while_a_graph_is_captured(rig: CopyRig) -> None:
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
        CopyRig(cuda=cuda)
    assert cuda.copy_streams == []
    assert cuda.retained == 0


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    batches=st.booleans(),
    failures=st.lists(
        st.tuples(
            st.sampled_from(
                [*COPY_CALLS, "cuMemcpyAsync", "cuStreamSynchronize", "cuCtxPushCurrent", "cuCtxPopCurrent"]
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
    pool = HostPool(48, 32, extent_bytes=32 * 10)
    for slot in range(48):
        pool.slot(slot)[:] = rng.integers(0, 256, 32, dtype=np.uint8)
    copies = copy_engine("cuda", cuda, DeviceLayout.of_arrays([blocks]), pool)
    for call, after in failures:
        cuda.fail(call, INVALID_VALUE, after)
    ids, slots = (rng.permutation(48).reshape(12, 4) for _ in range(2))
    expected = {}
    for number in range(12):
        if number == poisoned_at:
            cuda.poison(ILLEGAL_ADDRESS)
        direction = Direction.STORE if rng.integers(2) else Direction.LOAD
        is_store = direction is Direction.STORE
        expected[number] = blocks[ids[number]] if is_store else contents(pool)[slots[number], 0]
        copies.submit(job(number, direction, ids[number].tolist(), slots[number].tolist()))
    assert copies.wait(range(12), DEADLINE_S)
    done = {result.job_id: result for result in copies.poll()}
    assert sorted(done) == list(range(12))
    good = [number for number, result in done.items() if result.error is None]
    assert len(good) == 12 or failures or poisoned_at is not None
    for number in good:
        assert (done[number].num_bytes, done[number].seconds > 0) == (128, True)
        assert np.array_equal(blocks[ids[number]], expected[number])
        assert np.array_equal(contents(pool)[slots[number], 0], expected[number])
    assert (poisoned_at is None) or not copies.is_alive()
    copies.close()
    assert cuda.num_queued_copies() == 0


def test_jobs_end_once_when_anything_on_the_copy_threads_raises(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, 5, probability=0.05, most=1000)
    on_copy_threads = ["_enqueue", "_take_buffer", "_finish", "_fail", "_synchronize", "_end_after_error"]
    faults.patch(CudaCopyEngine, [*on_copy_threads, "_record_compute"])
    faults.patch(DmaMover, ["move"])
    faults.patch(SegmentPlanner, ["plan", "num_bytes"])
    faults.patch(HostPool, ["hold"])
    faults.patch(CudaDriver, ["wait_event", "record_event", "synchronize_event", "synchronize_stream", "elapsed_s"])
    faults.patch(JobLedger, ["end"], after=False)
    with faults.on():
        rig = make_rig()
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


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_close_waits_for_the_device_and_frees_everything(make_rig: Make) -> None:
    rig = make_rig()
    with rig.cuda.held():
        rig.cuda.launch(lambda: rig.blocks.fill(55))
        rig.copies.submit(store(1, 0))
        wait_until(lambda: rig.cuda.num_queued_copies() > 0, "the copy is queued", DEADLINE_S)
        closing = threading.Thread(target=rig.copies.close)
        closing.start()
        wait_until(lambda: not rig.copies.is_alive(), "the engine is closing", DEADLINE_S)
        # The compute that the copy waits for has not run: the memory must not go yet.
        assert closing.is_alive()
        assert rig.copies.poll() == []
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert rig.ends([1])[1].error is None
    assert rig.pool.slot(0).tolist() == [55] * 64
    cuda = rig.cuda
    assert (cuda.num_queued_copies(), cuda.copy_streams, cuda.num_events, cuda.allocated) == (0, [], 0, {})
    assert cuda.retained == 0


def test_pool_closed_under_a_copy_stays_mapped(rig: CopyRig) -> None:
    with rig.cuda.held():
        rig.copies.submit(job(1, Direction.STORE, list(range(8)), list(range(8))))
        wait_until(lambda: rig.cuda.num_queued_copies() > 0, "the copy is queued", DEADLINE_S)
        rig.pool.close()
    assert rig.ends([1])[1].error is None


# ---- registration ----------------------------------------------------------------------------------------------------


def test_pool_with_an_unregistered_extent_is_copied_one_by_one(
    make_rig: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm#51080: a pool of 512 GiB could not be registered in one call."""
    cuda = FakeCuda()
    registrar = CudaRegistrar(CudaDriver(cuda.resolve), 0)
    cuda.fail("cuMemHostRegister", ALREADY_REGISTERED, after=2)
    pool = HostPool(16, 4096, extent_bytes=4 * 4096, preparation=Preparation(registrar=registrar))
    assert not pool.is_page_locked
    assert cuda.registered == {}
    assert caplog.text.count("the host pool is not page-locked") == 1
    assert re.search(r"extent \d of 4, 16,384 bytes, failed: .* RLIMIT_MEMLOCK is (\d|unlimited)", caplog.text)
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)" in caplog.text
    rig = make_rig("batches", pool, np.full((4, 4096), 3, dtype=np.uint8), cuda, mover=None)
    rig.results_of(store(1, 0))
    assert pool.slot(0).tolist() == [3] * 4096
    # What a batch does with memory that the device does not know is documented nowhere.
    assert cuda.batches == []


# ---- machines without a device ---------------------------------------------------------------------------------------


def test_modules_when_imported_do_not_import_cuda() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        "from kvferry import cuda_ops\n"
        "modules = {module.name for module in pkgutil.walk_packages(cuda_ops.__path__, 'kvferry.cuda_ops.')}\n"
        "for name in modules - {'kvferry.cuda_ops.cuda.triton_copy'}: importlib.import_module(name)\n"
        "print([name for name in ('cuda', 'cuda.bindings', 'triton', 'torch') if name in sys.modules])"
    )
    found = run_script(code)
    assert found.stdout.strip() == "[]", found.stderr


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


# ---- on a device -----------------------------------------------------------------------------------------------------

MOVERS = {"dma": 1, "kernel": 1 << 30, "calibrated": None}
"""Value of `kernel_below_bytes` for each mover."""


class DeviceRig:
    """Blocks of a real device, each of random bytes, a pinned pool with as many slots, and a copy engine."""

    def __init__(self, folder: Path, mover: str = "dma", num_blocks: int = 64, block_bytes: int = 5 * 4096) -> None:
        import torch

        from kvferry.app.engines.cuda import CudaDevice

        self.torch = torch
        self.blocks = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
        self.device = CudaDevice(torch.device("cuda", 0))
        self.pool = HostPool(num_blocks, block_bytes, preparation=self.device.preparation())
        assert self.pool.is_page_locked
        parts = [[self.blocks[:, :4096], self.blocks[:, 4096:]]]
        layout = DeviceLayout.of_tensors(parts)
        self.copies = self.device.copies(layout, self.pool, lambda: None, folder, MOVERS[mover])

    def end(self, *numbers: int) -> None:
        """Wait for jobs, which must succeed."""
        assert self.copies.wait(numbers, DEADLINE_S)
        results = self.copies.poll()
        assert {(result.job_id, result.error) for result in results} == {(number, None) for number in numbers}

    def close(self) -> None:
        self.copies.close()
        self.pool.close()
        self.device.close()


@pytest.fixture
def device_rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DeviceRig]:
    if not has_device():
        pytest.skip("no CUDA device")
    rig = DeviceRig(tmp_path, getattr(request, "param", "dma"))
    yield rig
    rig.close()


@pytest.mark.gpu
@pytest.mark.parametrize("device_rig", list(MOVERS), indirect=True)
def test_bytes_go_to_a_device_and_back(device_rig: DeviceRig) -> None:
    rig, before = device_rig, device_rig.blocks.cpu()
    order = np.random.default_rng(1).permutation(64).tolist()
    rig.copies.submit(job(1, Direction.STORE, list(range(64)), order))
    rig.end(1)
    # Nothing but its end says that a store has read its blocks.
    rig.blocks.zero_()
    rig.copies.submit(job(2, Direction.LOAD, list(range(64)), order))
    rig.end(2)
    assert rig.torch.equal(rig.blocks.cpu(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("device_rig", list(MOVERS), indirect=True)
def test_copies_of_a_device_follow_its_compute_and_submitting_does_not_wait(device_rig: DeviceRig) -> None:
    rig, torch = device_rig, device_rig.torch
    before = rig.blocks[0].cpu()
    rig.pool.slot(9)[:] = 99
    # The first use of each operation may load its kernel, which waits for the device.
    rig.blocks[2].clone()
    rig.blocks[2].fill_(0)
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    rig.blocks[0].fill_(77)
    rig.copies.submit(store(1, 0))
    seen = rig.blocks[1].clone()
    rig.copies.submit(job(2, Direction.LOAD, [1], [9]))
    assert not busy.query(), "submitting has waited for a second of compute"
    rig.end(1, 2)
    later = rig.blocks[1].clone()
    assert (rig.pool.slot(0) == 77).all()
    assert not (before == 77).all()
    assert not (seen == 99).all()
    assert (later == 99).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device_rig", list(MOVERS), indirect=True)
def test_a_store_ahead_on_a_device_reads_before_later_compute(device_rig: DeviceRig) -> None:
    rig, torch = device_rig, device_rig.torch
    torch.cuda._sleep(100_000_000)
    rig.blocks.fill_(5)
    rig.copies.submit_ahead(job(1, Direction.STORE, list(range(64)), list(range(64))))
    rig.blocks.fill_(77)
    rig.end(1)
    assert all((rig.pool.slot(slot) == 5).all() for slot in range(64))


@pytest.mark.gpu
@pytest.mark.parametrize("device_rig", list(MOVERS), indirect=True)
def test_copies_go_on_while_a_device_captures_a_graph(device_rig: DeviceRig) -> None:
    """pytorch#104555."""
    rig, torch = device_rig, device_rig.torch
    rig.copies.submit(store(1, 0))
    rig.end(1)
    side = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # The capture's stream is the current one in it: copies are submitted from the stream of the engine.
    outside = torch.cuda.current_stream()
    with torch.cuda.graph(graph):
        side += 1
        with torch.cuda.stream(outside):
            rig.copies.submit(store(2, 3))
            rig.copies.submit(load(3, 4))
            assert rig.copies.wait([2, 3], DEADLINE_S)
        side += 1
    assert [result.error for result in rig.copies.poll()] == [None, None]
    graph.replay()
    assert side.tolist() == [2.0] * 1024


@pytest.mark.gpu
def test_a_device_that_breaks_fails_the_jobs_and_the_engine_closes(tmp_path: Path) -> None:
    if not has_device():
        pytest.skip("no CUDA device")
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from kvferry.core.transfers import Direction\n"
        "from tests.cuda_ops.test_cuda_copy import DeviceRig\n"
        "from tests.harness.copy_jobs import job, store\n"
        "rig = DeviceRig(Path(sys.argv[1]))\n"
        "rig.copies.submit(store(1, 0))\n"
        "rig.end(1)\n"
        "torch.zeros(4, device='cuda')[torch.tensor([10], device='cuda')]\n"
        "rig.copies.submit(store(2, 1))\n"
        "rig.copies.submit(job(3, Direction.LOAD, [2], [2]))\n"
        "assert rig.copies.wait([2, 3], 60)\n"
        "errors = [result.error for result in rig.copies.poll()]\n"
        "rig.copies.submit(store(4, 1))\n"
        "errors += [result.error for result in rig.copies.poll()]\n"
        "print(rig.copies.is_alive(), errors, flush=True)\n"
        "rig.copies.close()\n"
        "rig.pool.close()\n"
        "print('closed')\n"
    )
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    alive, closed = done.stdout.splitlines()
    assert alive.startswith("False [")
    assert alive.count("CUDA_ERROR_ASSERT (710)") == 3
    assert closed == "closed"
