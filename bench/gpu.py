"""Copy throughput between a GPU and host memory, by size and number of segments, relative to the bus.

    python -m bench.gpu --json gpu.json           on a GPU, within --budget-s
    python -m bench.gpu --reduced                 no GPU: the script alone, over a driver made of host memory

For each cell: the DMA engines by batch and copy by copy, the kernel, and whichever the calibration takes (`auto`), each
from jobs of the copy engine, on segments in random order; GB/s by device time, and for both directions at once by wall
time over jobs enough that planning hides behind copies. Before a cell is measured, all its blocks go to the device and
back, and every page has to arrive where it belongs. The ceiling is one large pinned copy each way, and both at once, in
the same run; both directions are held against the ceiling's both.

What is found is printed and written as soon as it is found: a part that fails is named in `failed`, one that there was
no time for in `left_out`, and neither takes the others with it. Where there is a `compute-sanitizer`, it watches the
engines first. What `--reduced` prints are no speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.parts import DeviceLost, Parts
from bench.report import environment, spread, verdict
from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions, Region
from kvferry.cuda_ops.copy.segments import SegmentBuffer, SegmentPlanner
from kvferry.cuda_ops.cuda.crossover import choose_mover
from kvferry.cuda_ops.cuda.cuda_copy import ComputeDevice, CudaCopyEngine
from kvferry.cuda_ops.cuda.driver import CudaDriver, CudaError, load_driver
from kvferry.cuda_ops.cuda.movers import DmaMover, KernelMover, LaunchCopy, Mover, triton_launch
from kvferry.cuda_ops.cuda.registrar import CudaRegistrar
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES = 4096
COPIES_WAIT_S = 60.0
SANITIZER_S = 60.0
GOALS = ((64 * KIB, 0.95), (16 * KIB, 0.70))
DUPLEX_GOAL = 0.90
JUDGED_BYTES = 64 * MIB
SLOWED_GOAL = 1.03
MOST_TIMES = 16
"""A matrix loop that takes more times the expected copy time is not comparable."""
ONE_BY_ONE_COUNT = 4096
"""Above this number, segments are not queued one by one, because it takes too long."""


@dataclass
class Scale:
    """Sizes to measure, most important first, because time may run out."""

    sizes: list[int]
    counts: list[int]
    most_bytes: int
    ceiling_bytes: int
    duplex_bytes: int
    rounds: int
    matrix: int
    multiplications: int
    beside: tuple[tuple[str, int], ...]
    is_judged: bool

    def goal(self, size: int, count: int, way: str) -> float | None:
        """Return the required share of the ceiling, if there is one: a short job mostly waits for its start."""
        if not self.is_judged or count * size < JUDGED_BYTES:
            return None
        if way == "both":
            return DUPLEX_GOAL if size == 2 * MIB else None
        return next((part for least, part in GOALS if size >= least), None)


FULL = Scale(
    sizes=[32 * KIB, 64 * KIB, 16 * KIB, 2 * MIB, 4 * KIB, 256 * KIB, 8 * MIB],
    counts=[256, 4096, 100_000, 16],
    most_bytes=2 << 30,
    ceiling_bytes=1 << 30,
    duplex_bytes=2 << 30,
    rounds=7,
    matrix=8192,
    multiplications=60,
    beside=(("dma", 2 * MIB), ("auto", 64 * KIB), ("auto", 32 * KIB), ("kernel", 16 * KIB)),
    is_judged=True,
)
REDUCED = Scale(
    sizes=[4 * KIB, 16 * KIB],
    counts=[16, 40],
    most_bytes=4 * MIB,
    ceiling_bytes=MIB,
    duplex_bytes=MIB,
    rounds=3,
    matrix=64,
    multiplications=4,
    beside=(("dma", 16 * KIB), ("kernel", 4 * KIB)),
    is_judged=False,
)


@dataclass
class Machine:
    """Differences between a GPU and the reduced mode. `finish_compute` waits for the compute stream alone: waiting for
    the device would include the measured copies.
    """

    name: str
    driver: CudaDriver
    launch: LaunchCopy
    current_stream: Callable[[], int]
    torch_device: torch.device
    finish_compute: Callable[[], None]


@dataclass
class Cell:
    size: int
    count: int
    direction: str
    engine: str
    gbps: list[float]
    of_ceiling: float
    verdict: str


@dataclass
class Slowed:
    """Slowdown of a matrix loop by concurrent copies, a ratio per round, with the bytes copied."""

    engine: str
    size: int
    ratios: list[float]
    gbps: list[float]
    verdict: str


@dataclass
class Found:
    """All results so far."""

    where: str
    seed: int
    ceiling_gbps: dict[str, list[float]] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    descriptors_us: list[tuple[int, int, float]] = field(default_factory=list)
    slowed: list[Slowed] = field(default_factory=list)
    sanitizer: dict[str, str] = field(default_factory=dict)


def gpu() -> Machine:
    driver = load_driver()
    torch.cuda.init()
    device = torch.device("cuda", 0)
    return Machine(
        driver.describe(driver.device(0)),
        driver,
        triton_launch(0),
        lambda: int(torch.cuda.current_stream(device).cuda_stream),
        device,
        lambda: torch.cuda.current_stream(device).synchronize(),
    )


def no_gpu() -> Machine:
    from tests.cuda_ops.test_kernel import Launches
    from tests.harness.fake_cuda import FakeCuda

    cuda = FakeCuda()
    return Machine(
        "REDUCED: host memory, these are no speeds",
        CudaDriver(cuda.resolve),
        Launches(cuda),
        lambda: cuda.compute,
        torch.device("cpu"),
        cuda.synchronize,
    )


class Bench:
    def __init__(self, machine: Machine, scale: Scale, found: Found, parts: Parts, folder: Path) -> None:
        self.machine, self.scale, self.found, self.parts, self.folder = machine, scale, found, parts, folder
        self.driver = machine.driver
        self.device = self.driver.device(0)
        self.context = self.driver.retain_context(self.device)
        self.registrar = CudaRegistrar(self.driver, 0)
        self.rng = np.random.default_rng(self.found.seed)
        self.job_id = 0

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the context current. Raises `DeviceLost` for an error that ends it."""
        try:
            with self.driver.current(self.context):
                yield
        except CudaError as error:
            if error.is_fatal:
                raise DeviceLost(str(error)) from error
            raise

    def ceiling(self, way: str) -> float | None:
        rates = self.found.ceiling_gbps.get(way)
        return statistics.median(rates) if rates else None

    def measure_ceiling(self) -> None:
        """Measure GB/s of one large copy between pinned and device memory."""
        num_bytes, driver = self.scale.ceiling_bytes, self.driver
        found: dict[str, list[float]] = {"store": [], "load": [], "both": []}
        with self.on_device():
            device = [driver.allocate(num_bytes) for _ in range(2)]
            host = [driver.allocate_host(num_bytes) for _ in range(2)]
            streams = [driver.create_stream() for _ in range(2)]
            events = [driver.create_event(timing=True) for _ in range(2)]
            ways = {"store": (host[0], device[0]), "load": (device[1], host[1])}
            for round_ in range(self.scale.rounds + 1):
                for name, (target, source) in ways.items():
                    driver.record_event(events[0], streams[0])
                    driver.copy(target, source, num_bytes, streams[0])
                    driver.record_event(events[1], streams[0])
                    driver.synchronize_event(events[1])
                    if round_:
                        found[name].append(num_bytes / driver.elapsed_s(events[0], events[1]) / 1e9)
                started_s = time.perf_counter()
                for stream, (target, source) in zip(streams, ways.values(), strict=True):
                    driver.copy(target, source, num_bytes, stream)
                for stream in streams:
                    driver.synchronize_stream(stream)
                if round_:
                    found["both"].append(2 * num_bytes / (time.perf_counter() - started_s) / 1e9)
            for give_back, handles in (
                (driver.free, device),
                (driver.free_host, host),
                (driver.destroy_stream, streams),
                (driver.destroy_event, events),
            ):
                for handle in handles:
                    give_back(handle)
        self.found.ceiling_gbps = found
        print(f"ceiling, GB/s: {', '.join(f'{way} {spread(rates, 1)}' for way, rates in found.items())}\n", flush=True)

    def calibrate(self) -> None:
        """Measure duration and result of the calibration. The first one also compiles the kernel."""
        times = []
        with self.memory(PAGE_BYTES, 1) as (_, pool):
            for name in ("compiling.json", "crossover.json"):
                started_s = time.perf_counter()
                self.movers(pool, self.folder / name)["auto"].close()
                times.append(time.perf_counter() - started_s)
        file = self.folder / "crossover.json"
        steps = json.loads(file.read_text()) if file.exists() else {}
        self.found.calibration = {"first_s": times[0], "again_s": times[1], "below_bytes": steps}
        print(f"calibration: {times[0]:.2f} s with compiling, {times[1]:.2f} s without; {steps}\n", flush=True)

    def movers(self, pool: HostPool, file: Path | None = None) -> dict[str, Mover]:
        driver, launch = self.driver, self.machine.launch
        file = self.folder / "crossover.json" if file is None else file
        with self.on_device():
            auto = choose_mover(driver, 0, pool, file, launch=launch)
        return {
            "auto": auto,
            "dma": DmaMover(driver),
            "kernel": KernelMover(driver, launch),
            "one by one": DmaMover(driver, lambda: False),
        }

    @contextmanager
    def memory(self, size: int, count: int) -> Iterator[tuple[DeviceLayout, HostPool]]:
        """Yield `2 * count` blocks of one segment, with slots in page-locked memory."""
        pool = HostPool(2 * count, size, preparation=Preparation(registrar=self.registrar))
        try:
            if not pool.is_page_locked:
                raise RuntimeError("the pool could not be pinned: measurements would be meaningless")
            with self.on_device():
                address = self.driver.allocate(2 * count * size)
            try:
                yield DeviceLayout((GroupRegions((Region(address, 2 * count, size, size),)),)), pool
            finally:
                with self.on_device():
                    self.driver.free(address)
        finally:
            pool.close()

    @contextmanager
    def engine(self, layout: DeviceLayout, pool: HostPool, mover: Mover) -> Iterator[CudaCopyEngine]:
        copies = CudaCopyEngine(
            layout,
            pool,
            lambda: None,
            ComputeDevice(self.driver, 0, self.machine.current_stream),
            mover=mover,
        )
        try:
            yield copies
        finally:
            copies.close()

    def cell(self, size: int, count: int) -> None:
        """Measure one cell: blocks 0 to `count` are stored, the others loaded."""
        with self.memory(size, count) as (layout, pool):
            for name, mover in self.movers(pool).items():
                if name != "one by one" or count <= ONE_BY_ONE_COUNT:
                    place = f"{count} segments of {size >> 10} KiB, {name}"
                    self.parts.run(place, lambda: self.measure(layout, pool, name, mover))  # noqa: B023

    def measure(self, layout: DeviceLayout, pool: HostPool, name: str, mover: Mover) -> None:
        size, count = pool.slot_bytes, pool.num_slots // 2
        halves = {Direction.STORE: np.arange(count), Direction.LOAD: np.arange(count, 2 * count)}
        repeats = max(1, min(32, self.scale.duplex_bytes // (2 * count * size)))
        found: dict[str, list[float]] = {"store": [], "load": [], "both": []}
        with self.engine(layout, pool, mover) as copies:
            self.check(copies, pool, name)
            for _ in range(self.scale.rounds):
                for direction, blocks in halves.items():
                    seconds = self.run(copies, [self.job(direction, blocks)])[1]
                    found[direction.value].append(count * size / seconds / 1e9)
                jobs = [self.job(direction, blocks) for _ in range(repeats) for direction, blocks in halves.items()]
                wall_s, _ = self.run(copies, jobs)
                found["both"].append(len(jobs) * count * size / wall_s / 1e9)
        for way, rates in found.items():
            ceiling, goal = self.ceiling(way), self.scale.goal(size, count, way)
            ratios = [] if ceiling is None else [rate / ceiling for rate in rates]
            judged = "-" if goal is None or not ratios else verdict(ratios, goal, at_most=False)
            cell = Cell(size, count, way, name, rates, statistics.median(ratios) if ratios else float("nan"), judged)
            self.found.cells.append(cell)
            print(
                f"| {size >> 10} | {count} | {way} | {name} | {spread(rates, 1)} | {cell.of_ceiling:.2f} | {judged} |",
                flush=True,
            )

    def job(
        self, direction: Direction, blocks: NDArray[np.int64], slots: NDArray[np.int64] | None = None
    ) -> TransferJob:
        self.job_id += 1
        slots = self.rng.permutation(blocks) if slots is None else slots
        return TransferJob(self.job_id, direction, (BlockRun(0, blocks, slots, np.zeros_like(slots)),))

    def run(self, copies: CudaCopyEngine, jobs: list[TransferJob]) -> tuple[float, float]:
        """Return wall seconds from submission to the last end, and the sum of device seconds."""
        started_s = time.perf_counter()
        for job in jobs:
            copies.submit(job)
        if not copies.wait([job.job_id for job in jobs], COPIES_WAIT_S):
            raise RuntimeError(f"the copy engine did not end its jobs within {COPIES_WAIT_S:.0f} s")
        wall_s = time.perf_counter() - started_s
        return wall_s, self.poll(copies)

    def poll(self, copies: CudaCopyEngine) -> float:
        results = copies.poll()
        errors = [result.error for result in results if result.error is not None]
        if errors:
            raise (RuntimeError if copies.is_alive() else DeviceLost)(f"the copy engine failed: {errors[0]}")
        return sum(result.seconds for result in results)

    def check(self, copies: CudaCopyEngine, pool: HostPool, name: str) -> None:
        """Load all blocks from the first half of the slots and store them into the other half, in random orders, and
        compare all bytes.
        """
        count, pages = pool.num_slots // 2, pool.slot_bytes // PAGE_BYTES
        noise = self.rng.integers(0, 256, pool.slot_bytes, dtype=np.uint8)
        stamps = self.rng.permutation(2 * count * pages).reshape(2 * count, pages).astype(np.int64)
        for rows, numbers in self.rows(pool, stamps):
            rows[:] = noise
            rows.view(np.int64)[:, :: PAGE_BYTES // 8] = numbers
        # The second order differs from the first, so that errors by position do not cancel out.
        slots, back, order = (self.rng.permutation(count) for _ in range(3))
        self.run(copies, [self.job(Direction.LOAD, np.arange(count), slots)])
        self.run(copies, [self.job(Direction.STORE, order, back + count)])
        stamps[back + count] = stamps[slots[order]]
        for rows, numbers in self.rows(pool, stamps):
            expected = np.broadcast_to(noise, rows.shape)
            if not np.array_equal(rows.view(np.int64)[:, :: PAGE_BYTES // 8], numbers):
                raise RuntimeError(f"{name} copied pages to wrong places at segments of {pool.slot_bytes} bytes")
            some = self.rng.choice(len(rows), min(len(rows), max(16 * MIB // pool.slot_bytes, 2), 64), replace=False)
            inside = np.arange(pool.slot_bytes) % PAGE_BYTES >= 8
            if not np.array_equal(rows[some][:, inside], expected[some][:, inside]):
                raise RuntimeError(f"{name} copied wrong bytes at segments of {pool.slot_bytes} bytes")

    @staticmethod
    def rows(pool: HostPool, by_slot: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """Yield the slots of each extent as rows, with the corresponding data."""
        start = 0
        for count in pool.extent_slots:
            memory = pool.slot(start).base
            if memory is None:
                raise RuntimeError("a slot is a view of its extent")
            address = pool.slot(start).ctypes.data - memory.ctypes.data
            rows = memory.reshape(-1)[address : address + count * pool.slot_bytes].reshape(count, pool.slot_bytes)
            yield rows, by_slot[start : start + count]
            start += count

    def descriptors(self) -> None:
        """Measure the median CPU microseconds of computing a job's descriptors."""
        print("\n| blocks | regions | descriptors, us |\n| --- | --- | --- |")
        for regions in (1, 64):
            for count in sorted(self.scale.counts):
                num_blocks = max(count // regions, 1)
                layout = DeviceLayout(
                    (GroupRegions(tuple(Region(1 << 40, num_blocks, 64, 64) for _ in range(regions))),)
                )
                pool = HostPool(num_blocks, 64 * regions)
                planner, buffer = SegmentPlanner(layout, pool.slot_bytes), SegmentBuffer()
                job = self.job(Direction.STORE, self.rng.permutation(num_blocks))
                times = []
                for _ in range(self.scale.rounds):
                    started_s = time.perf_counter()
                    planner.plan(job, pool.hold(), buffer, coalesce=True)
                    times.append((time.perf_counter() - started_s) * 1e6)
                self.found.descriptors_us.append((num_blocks, regions, statistics.median(times)))
                print(f"| {num_blocks} | {regions} | {statistics.median(times):.0f} |", flush=True)
                pool.close()

    def interference(self, name: str, size: int) -> None:
        """Measure the slowdown of matrix multiplications by copies in both directions at full rate."""
        count = max(64 * MIB // size, 1) if self.scale.is_judged else 16
        device = self.machine.torch_device
        left, right = (
            torch.randn(self.scale.matrix, self.scale.matrix, dtype=torch.bfloat16, device=device) for _ in range(2)
        )

        def multiply() -> float:
            self.machine.finish_compute()
            started_s = time.perf_counter()
            for _ in range(self.scale.multiplications):
                torch.matmul(left, right)
            self.machine.finish_compute()
            return time.perf_counter() - started_s

        halves = {Direction.STORE: np.arange(count), Direction.LOAD: np.arange(count, 2 * count)}
        with self.memory(size, count) as (layout, pool), self.engine(layout, pool, self.movers(pool)[name]) as copies:
            multiply()
            for _ in range(2):
                # The first jobs allocate what later ones reuse, so their times are not representative.
                probe = [self.job(direction, blocks) for _ in range(4) for direction, blocks in halves.items()]
                pair_s = self.run(copies, probe)[0] / 4
            times, ratios, rates = 2, [], []
            while len(ratios) < 2 * self.scale.rounds - 1:
                alone_s = multiply()
                # Enough copies to outlast the loop.
                pairs = min(int(times * alone_s / pair_s) + 2, 1000)
                jobs = [self.job(direction, blocks) for _ in range(pairs) for direction, blocks in halves.items()]
                started_s = time.perf_counter()
                for job in jobs:
                    copies.submit(job)
                beside_s = multiply()
                outlasted = copies.wait([job.job_id for job in jobs], 0.0)
                if not copies.wait([job.job_id for job in jobs], COPIES_WAIT_S):
                    raise RuntimeError(f"the copy engine did not end its jobs within {COPIES_WAIT_S:.0f} s")
                wall_s = time.perf_counter() - started_s
                self.poll(copies)
                if outlasted and self.scale.is_judged:
                    if times >= MOST_TIMES:
                        raise RuntimeError("the copies ended before the matrix loop: not comparable")
                    times *= 2
                    continue
                rates.append(len(jobs) * count * size / wall_s / 1e9)
                ratios.append(beside_s / alone_s)
        judged = verdict(ratios, SLOWED_GOAL) if self.scale.is_judged else "-"
        self.found.slowed.append(Slowed(name, size, ratios, rates, judged))
        print(
            f"matrix loop beside {name} copies of {size >> 10} KiB at {spread(rates, 1)} GB/s, over alone: "
            f"{spread(ratios)}, goal {SLOWED_GOAL}: {judged}",
            flush=True,
        )

    def sanitize(self) -> None:
        """Run reduced engines under compute-sanitizer, in processes of their own."""
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if program is None or self.machine.torch_device.type != "cuda":
            self.found.sanitizer = {"none": "there is no compute-sanitizer here, or no device"}
            print("compute-sanitizer: not run, since there is none here", flush=True)
            return
        for tool in ("memcheck", "racecheck"):
            limit_s = min(SANITIZER_S, max(self.parts.left_s, 10.0))
            command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "bench.gpu", "--check"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=limit_s, env=dict(os.environ)
                )
                said = "clean" if done.returncode == 0 else f"exit {done.returncode}: {done.stdout[-1500:]}"
            except subprocess.TimeoutExpired:
                said = f"not done within {limit_s:.0f} s"
            self.found.sanitizer[tool] = said
            print(f"compute-sanitizer {tool}: {said}", flush=True)

    def check_all(self) -> None:
        """Check the bytes of all engines, for small and large segments."""
        for size, count in ((PAGE_BYTES, 40), (3 * PAGE_BYTES, 7), (MIB, 4)):
            with self.memory(size, count) as (layout, pool):
                for name, mover in self.movers(pool).items():
                    with self.engine(layout, pool, mover) as copies:
                        self.check(copies, pool, name)
        print("every engine's bytes are right", flush=True)

    def compare_calibration(self) -> None:
        """Compare the calibrated choice with the best one, cell by cell."""
        by_place: dict[tuple[int, int, str], dict[str, float]] = {}
        for cell in self.found.cells:
            by_place.setdefault((cell.size, cell.count, cell.direction), {})[cell.engine] = statistics.median(cell.gbps)
        ratios = {place: rates["auto"] / max(rates.values()) for place, rates in by_place.items() if "auto" in rates}
        if ratios:
            worst = sorted(ratios.items(), key=lambda item: item[1])[:5]
            self.found.calibration["of_best"] = [[*place, ratio] for place, ratio in ratios.items()]
            shown = ", ".join(
                f"{ratio:.2f} at {count} of {size >> 10} KiB {way}" for (size, count, way), ratio in worst
            )
            print(f"\ncalibration's choice over the best, worst first: {shown}")
        one_way = min((self.ceiling("store") or 0.0, self.ceiling("load") or 0.0))
        both = self.ceiling("both")
        if both is not None and one_way:
            print(f"the ceiling both ways is {both / (2 * one_way):.2f} of twice the slower way")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="without a GPU, and with tiny sizes")
    parser.add_argument("--check", action="store_true", help="only whether the bytes are right, in small")
    parser.add_argument("--json", type=Path, help="where to write all figures, as they come")
    parser.add_argument("--budget-s", type=float, default=240.0, help="no part begins after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    machine, scale = (no_gpu(), REDUCED) if options.reduced else (gpu(), FULL)
    found = Found(f"{environment('numpy', 'torch', 'triton', 'cuda-bindings')}, {machine.name}", options.seed)
    parts = Parts(lambda: asdict(found), options.json, options.budget_s)
    print(f"{found.where}, seed {options.seed}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(machine, scale, found, parts, Path(folder))
        if options.check:
            bench.check_all()
            return
        parts.run("ceiling", bench.measure_ceiling)
        parts.run("calibration", bench.calibrate)
        for name, size in scale.beside:
            parts.run(f"interference of {name}", lambda name=name, size=size: bench.interference(name, size))  # type: ignore[misc]
        parts.run("sanitizer", bench.sanitize)
        parts.run("descriptors", bench.descriptors)
        print("\n| segment KiB | segments | direction | engine | GB/s | of ceiling | goal |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for size in scale.sizes:
            for count in scale.counts:
                if count * size <= scale.most_bytes:
                    place = f"{count} segments of {size >> 10} KiB"
                    parts.run(place, lambda size=size, count=count: bench.cell(size, count))  # type: ignore[misc]
        bench.compare_calibration()
    sys.exit(parts.conclude())


if __name__ == "__main__":
    main()
