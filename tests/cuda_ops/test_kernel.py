"""Copies by the kernel: its bytes under Triton's interpreter, its table on a stream, and when it is chosen."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.copy.segments import Segments
from kvferry.cuda_ops.cuda.crossover import (
    ADVANTAGE,
    CALIBRATION,
    Crossover,
    CrossoverMover,
    cached_crossover,
    calibrate,
    choose_mover,
)
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.cuda.movers import DmaMover, KernelMover, Mover
from kvferry.cuda_ops.cuda.registrar import CudaRegistrar
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation
from tests.harness.copy_jobs import assert_moved, job
from tests.harness.copy_rig import CopyRig, copy_engine
from tests.harness.drawn_devices import Device, devices, jobs, pools
from tests.harness.effort import examples
from tests.harness.fake_cuda import OUT_OF_MEMORY, FakeCuda

KNOWN_AS = f"Fake, driver 13.2, calibration {CALIBRATION}"
FOUND = Crossover({Direction.STORE: ((64, 8192), (1024, 32768)), Direction.LOAD: ((64, 0), (1024, 8192))})


class Launches:
    """The kernel's place on a fake device: it reads its table when the stream comes to it, not when it is launched."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.words: Counter[int] = Counter()

    def __call__(
        self, targets: int, sources: int, sizes: int, count: int, word_bytes: int, direction: Direction, stream: int
    ) -> None:
        self.words[word_bytes] += 1

        def kernel() -> None:
            table = [
                np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at)) for at in (targets, sources, sizes)
            ]
            for target, source, size in zip(*(column.tolist() for column in table), strict=True):
                assert target % word_bytes == source % word_bytes == size % word_bytes == 0
                ctypes.memmove(target, source, size)

        self._cuda.queue(stream, kernel)


@settings(max_examples=examples(60))
@given(device=devices(), rows=st.integers(1, 5), seed=st.integers(0, 1000), data=st.data())
def test_any_layout_through_a_table_that_is_smaller_than_the_job(
    device: Device, rows: int, seed: int, data: st.DataObject
) -> None:
    pool = data.draw(pools(device.layout))
    cuda = FakeCuda(seed)
    mover = KernelMover(CudaDriver(cuda.resolve), Launches(cuda), table_rows=rows)
    copies = copy_engine("cuda", cuda, device.layout, pool, mover=mover)
    one = data.draw(jobs(device.layout, pool, Direction.STORE))
    assert_moved(copies, one, device, pool, device.memory.copy())
    copies.close()
    assert cuda.allocated == {}


def test_kernel_copies_exactly_the_given_segments() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    # The interpreter of 3.6 fails at ranges whose bounds are computed.
    pytest.importorskip("triton", minversion="3.7")
    code = """
import numpy as np
from kvferry.core.transfers import Direction
from kvferry.cuda_ops.cuda import triton_copy
rng = np.random.default_rng(7)
for word, direction in zip((16, 8, 4, 1), [*Direction, *Direction]):
    for count in (1, 5, 40, 70):
        source = rng.integers(0, 256, count * 9000, dtype=np.uint8)
        target, expected = np.zeros_like(source), np.zeros_like(source)
        sizes = rng.choice([word, 24, 1000, 4096, 4104, 8192, 9000], count).astype(np.int64) // word * word
        starts, ends = rng.permutation(count) * 9000, rng.permutation(count) * 9000
        for start, end, size in zip(starts, ends, sizes):
            expected[end : end + size] = source[start : start + size]
        targets, sources = target.ctypes.data + ends, source.ctypes.data + starts
        triton_copy.run(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count, word, direction)
        assert np.array_equal(target, expected), (word, count)
print("equal")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("equal", 0), done.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("word", "stored"), [(16, "st.global.v2.b64"), (8, "st.global.b64"), (4, "st.global.b32"), (1, "st.global.b8")]
)
def test_the_kernel_compiles_for_a_device(
    word: int, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the machine code of an H100, which takes no device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvferry.cuda_ops.cuda import triton_copy

    source = ASTSource(
        triton_copy.copy_segments,
        signature={
            **dict.fromkeys(("targets", "sources", "sizes"), "i64"),
            "count": "i32",
            **dict.fromkeys(("WORD_BYTES", "ROWS", "CHUNK"), "constexpr"),
        },
        constexprs={
            "WORD_BYTES": word,
            "ROWS": triton_copy.ROWS,
            "CHUNK": triton_copy.CHUNK_BYTES // min(word, 8),
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": triton_copy.WARPS})
    assert stored in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


# ---- which way -------------------------------------------------------------------------------------------------------


class Noted:
    """A mover that notes what it was given."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.closed = False

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        self.counts.append(len(segments.sizes))

    def close(self) -> None:
        self.closed = True


def segments_of(count: int, size: int) -> Segments:
    places = np.arange(count, dtype=np.int64) * size
    return Segments(places, places, np.full(count, size, dtype=np.int64))


@pytest.mark.parametrize(
    ("direction", "count", "size", "is_page_locked", "by_kernel"),
    [
        (Direction.STORE, 100, 8191, True, True),
        (Direction.STORE, 100, 8191, False, False),
        (Direction.STORE, 100, 8192, True, False),
        (Direction.STORE, 1024, 8192, True, True),
        (Direction.STORE, 1, 4096, True, True),
        (Direction.LOAD, 100, 1, True, False),
        (Direction.LOAD, 5000, 4096, True, True),
    ],
)
def test_mover_is_the_faster_for_direction_count_size_and_memory(
    direction: Direction, count: int, size: int, is_page_locked: bool, by_kernel: bool
) -> None:
    dma, kernel = Noted(), Noted()
    CrossoverMover(dma, kernel, FOUND, lambda: is_page_locked).move(direction, segments_of(count, size), 1)
    assert (dma.counts, kernel.counts) == (([], [count]) if by_kernel else ([count], []))


class TimedDevice:
    """Times of a device whose kernel is fast enough below a size that depends on direction and count."""

    def __init__(self, dma: Mover, step_s: float = 0.0) -> None:
        self._dma = dma
        self.now_s = 0.0
        self._step_s = step_s
        self.num_measured = 0

    def __call__(self, mover: Mover, direction: Direction, count: int, size: int) -> float:
        self.num_measured += 1
        self.now_s += self._step_s
        turn = {(Direction.STORE, 64): 10_000, (Direction.STORE, 1024): 70_000, (Direction.LOAD, 1024): 5_000}
        per_segment = turn.get((direction, count), 0) if mover is self._dma else size
        return count * float(per_segment) * (1 if mover is self._dma else 1 / ADVANTAGE)

    def clock(self) -> float:
        return self.now_s


def test_calibration_finds_where_the_ways_cross_and_stops_there() -> None:
    dma, kernel = Noted(), Noted()
    device = TimedDevice(dma)
    found = calibrate(dma, kernel, device, clock=device.clock)
    assert found.steps == {
        Direction.STORE: ((16, 0), (64, 16 << 10), (1024, 128 << 10)),
        Direction.LOAD: ((16, 0), (64, 0), (1024, 8 << 10)),
    }


def test_calibration_beyond_its_budget_uses_dma() -> None:
    dma, kernel = Noted(), Noted()
    device = TimedDevice(dma, step_s=0.2)
    found = calibrate(dma, kernel, device, budget_s=0.5, clock=device.clock)
    assert found.steps[Direction.STORE] == ((16, 0), (64, 8 << 10), (1024, 0))
    assert found.steps[Direction.LOAD] == ((16, 0), (64, 0), (1024, 0))
    assert device.num_measured <= 6


def test_crossover_when_kernel_or_calibration_changed_is_measured_again(tmp_path: Path) -> None:
    cuda, file = FakeCuda(), tmp_path / "crossover.json"
    cached_crossover(file, "Fake, driver 13.2", lambda: FOUND)
    cached_crossover(file, f"Fake, driver 13.2, calibration {CALIBRATION - 1}", lambda: FOUND)
    choose_mover(CudaDriver(cuda.resolve), 0, pinned_pool(cuda), file, None, Launches(cuda))
    assert KNOWN_AS in json.loads(file.read_text())


def test_a_crossover_is_measured_once_a_device_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "crossover.json"
    other = Crossover.fixed(1)
    assert cached_crossover(file, "A", lambda: FOUND) == FOUND
    assert cached_crossover(file, "B", lambda: other) == other
    assert cached_crossover(file, "A", lambda: pytest.fail("measured again")) == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"A": 3}',
        '{"A": {"store": [], "load": []}}',
        '{"A": {"store": [[1, 2]]}}',
        '{"A": {"store": [[0, Infinity]], "load": [[0, 1]]}}',
        "[" * 100_000,
    ],
)
def test_invalid_crossover_file_is_rewritten(text: str, tmp_path: Path) -> None:
    file = tmp_path / "crossover.json"
    file.write_text(text)
    assert cached_crossover(file, "A", lambda: FOUND) == FOUND
    assert Crossover.from_json(json.loads(file.read_text())["A"]) == FOUND


def test_a_file_that_cannot_be_written_costs_a_measurement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert cached_crossover(tmp_path / "file" / "crossover.json", "A", lambda: FOUND) == FOUND
    assert "measured again at the next start" in caplog.text


def pinned_pool(cuda: FakeCuda) -> HostPool:
    registrar = CudaRegistrar(CudaDriver(cuda.resolve), 0)
    return HostPool(8, 4096, preparation=Preparation(registrar=registrar))


@pytest.mark.parametrize("known", ["nothing", "the size is given", "it was measured before"])
def test_kernel_is_compiled_at_start_and_leaves_nothing_behind(known: str, tmp_path: Path) -> None:
    cuda, file = FakeCuda(), tmp_path / "crossover.json"
    if known == "it was measured before":
        cached_crossover(file, KNOWN_AS, lambda: FOUND)
    driver, pool, launches = CudaDriver(cuda.resolve), pinned_pool(cuda), Launches(cuda)
    before = cuda.retained
    mover = choose_mover(driver, 0, pool, file, 8192 if known == "the size is given" else None, launches)
    assert isinstance(mover, CrossoverMover)
    assert launches.words if known == "nothing" else list(launches.words) == [16]
    assert known == "the size is given" or list(json.loads(file.read_text())) == [KNOWN_AS]
    assert (cuda.allocated, cuda.copy_streams, cuda.num_events, cuda.retained) == ({}, [], 0, before)


@pytest.mark.parametrize("below_bytes", [1, 1 << 20])
def test_the_size_can_be_given_and_decides(below_bytes: int, tmp_path: Path) -> None:
    cuda = FakeCuda()
    driver, pool, launches = CudaDriver(cuda.resolve), pinned_pool(cuda), Launches(cuda)
    file = tmp_path / "crossover.json"
    mover = choose_mover(driver, 0, pool, file, below_bytes, launches)
    assert not file.exists()
    launches.words.clear()
    stream = cuda.compute
    blocks = np.arange(64, dtype=np.uint8)
    with driver.current(1):
        segments = Segments(
            np.array([blocks.ctypes.data]), np.array([pool.slot(2).ctypes.data]), np.array([64], dtype=np.int64)
        )
        mover.move(Direction.STORE, segments, stream)
        cuda.synchronize()
        mover.close()
    assert pool.slot(2)[:64].tolist() == blocks.tolist()
    assert bool(launches.words) == (below_bytes > 64)


@pytest.mark.parametrize("known", ["nothing", "the size is given", "it was measured before", "no memory to measure"])
def test_a_kernel_that_does_not_run_leaves_all_to_the_dma_engines(
    known: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where somebody knows from which size on: the compiler of an image may be gone in the next one."""
    cuda, file = FakeCuda(), tmp_path / "crossover.json"
    if known == "it was measured before":
        cached_crossover(file, KNOWN_AS, lambda: FOUND)
    if known == "no memory to measure":
        cuda.fail("cuMemAlloc", OUT_OF_MEMORY)
    below_bytes = 8192 if known == "the size is given" else None

    def broken(*_: object) -> None:
        raise NotImplementedError("no such architecture")

    mover = choose_mover(CudaDriver(cuda.resolve), 0, pinned_pool(cuda), file, below_bytes, broken)
    assert isinstance(mover, DmaMover)
    assert ("no such architecture" in caplog.text) == (known != "no memory to measure")
    assert (cuda.allocated, cuda.copy_streams, cuda.num_events) == ({}, [], 0)


def test_blocks_at_other_device_addresses_are_copied_one_by_one(
    make_rig: Callable[..., CopyRig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang#40232."""
    cuda = FakeCuda(reaches_pinned=False)
    pool, launches = pinned_pool(cuda), Launches(cuda)
    blocks = np.full((8, 4096), 5, dtype=np.uint8)
    mover = choose_mover(CudaDriver(cuda.resolve), 0, pool, tmp_path / "file", 8192, launches)
    rig = make_rig("batches", pool, blocks, cuda, mover=mover)
    assert rig.results_of(job(1, Direction.STORE, [0, 2], [1, 3]))[1].error is None
    assert pool.slot(3).tolist() == [5] * 4096
    assert (cuda.batches, sum(launches.words.values())) == ([], 0)
    assert "one by one" in caplog.text
