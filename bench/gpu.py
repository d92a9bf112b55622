"""Copies between a GPU and host memory, by size and number of segments, beside what the bus can do.

    python -m bench.gpu --json gpu.json          on a GPU, within --budget-s
    python -m bench.gpu --reduced                 no GPU: the script alone, over a driver made of host memory

For each cell: the DMA engines, the kernel, and whichever the calibration takes (`auto`), from one job of the copy
engine, on segments in random order; GB/s by device time, and for both directions at once by wall time. Every cell's
bytes are checked first. The ceiling is one large pinned copy each way, and both at once, in the same run.

What `--reduced` prints are no speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import environment, spread, verdict
from core.transfers import BlockRun, Direction, TransferJob
from cuda_ops.cuda_copy import CudaCopyEngine
from cuda_ops.dma import DmaMover, Mover
from cuda_ops.driver import CudaDriver, load_driver
from cuda_ops.host_pool import HostPool
from cuda_ops.kernel import KernelMover, LaunchCopy, triton_launch
from cuda_ops.layout import DeviceLayout, GroupRegions, Region
from cuda_ops.movers import choose_mover
from cuda_ops.prepare import Preparation
from cuda_ops.registrar import CudaRegistrar
from cuda_ops.segments import SegmentBuffer, SegmentPlanner

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 120.0
GOALS = ((64 * KIB, 0.95), (16 * KIB, 0.70))
DUPLEX_GOAL = 0.90
SLOWED_GOAL = 1.03


@dataclass
class Scale:
    sizes: list[int]
    counts: list[int]
    most_bytes: int
    ceiling_bytes: int
    rounds: int
    matrix: int
    multiplications: int
    is_judged: bool

    def goal(self, size: int, way: str) -> float | None:
        """The part of the ceiling that is wanted, where one is."""
        if not self.is_judged:
            return None
        if way == "both":
            return DUPLEX_GOAL if size == 2 * MIB else None
        return next((part for least, part in GOALS if size >= least), None)


FULL = Scale(
    [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB, 8 * MIB],
    [16, 256, 4096, 100_000],
    2 << 30,
    1 << 30,
    5,
    8192,
    30,
    True,
)
REDUCED = Scale([4 * KIB, 16 * KIB], [16, 40], 4 * MIB, MIB, 3, 64, 4, False)


@dataclass
class Machine:
    """What differs between a GPU and the reduced mode."""

    name: str
    driver: CudaDriver
    launch: LaunchCopy
    current_stream: Callable[[], int]
    torch_device: torch.device
    synchronize: Callable[[], None]


@dataclass
class Cell:
    size: int
    count: int
    direction: str
    engine: str
    gbps: list[float]
    of_ceiling: float
    verdict: str


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
        lambda: torch.cuda.synchronize(device),
    )


def no_gpu() -> Machine:
    from tests.cuda_ops.fake_cuda import FakeCuda
    from tests.cuda_ops.test_kernel import Launches

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
    def __init__(self, machine: Machine, scale: Scale, seed: int, folder: Path) -> None:
        self.machine, self.scale, self.folder = machine, scale, folder
        self.driver = machine.driver
        self.device = self.driver.device(0)
        self.context = self.driver.retain_context(self.device)
        self.registrar = CudaRegistrar(self.driver, 0)
        self.rng = np.random.default_rng(seed)
        self.job_id = 0
        self.cells: list[Cell] = []
        self.ceiling = self.measure_ceiling()

    def measure_ceiling(self) -> dict[str, float]:
        """GB/s of one large copy between pinned and device memory."""
        num_bytes = self.scale.ceiling_bytes
        found: dict[str, list[float]] = {"store": [], "load": [], "both": []}
        with self.driver.current(self.context):
            device = [self.driver.allocate(num_bytes) for _ in range(2)]
            host = [self.driver.allocate_host(num_bytes) for _ in range(2)]
            streams = [self.driver.create_stream() for _ in range(2)]
            events = [self.driver.create_event(timing=True) for _ in range(2)]
            ways = {"store": (host[0], device[0]), "load": (device[1], host[1])}
            for round_ in range(self.scale.rounds + 1):
                for name, (target, source) in ways.items():
                    self.driver.record_event(events[0], streams[0])
                    self.driver.copy(target, source, num_bytes, streams[0])
                    self.driver.record_event(events[1], streams[0])
                    self.driver.synchronize_event(events[1])
                    if round_:
                        found[name].append(num_bytes / self.driver.elapsed_s(*events) / 1e9)
                started_s = time.perf_counter()
                for stream, (target, source) in zip(streams, ways.values(), strict=True):
                    self.driver.copy(target, source, num_bytes, stream)
                for stream in streams:
                    self.driver.synchronize_stream(stream)
                if round_:
                    found["both"].append(2 * num_bytes / (time.perf_counter() - started_s) / 1e9)
            for address in device:
                self.driver.free(address)
            for address in host:
                self.driver.free_host(address)
            for stream in streams:
                self.driver.destroy_stream(stream)
            for event in events:
                self.driver.destroy_event(event)
        return {name: statistics.median(values) for name, values in found.items()}

    def movers(self, pool: HostPool) -> dict[str, Mover]:
        driver, launch = self.driver, self.machine.launch
        return {
            "dma": DmaMover(driver),
            "kernel": KernelMover(driver, launch),
            "auto": choose_mover(driver, 0, pool, self.folder / "crossover.json", launch=launch),
        }

    def cell(self, size: int, count: int) -> None:
        """Blocks 0 to count are stored, the others loaded."""
        pool = HostPool(2 * count, size, preparation=Preparation(registrar=self.registrar))
        with self.driver.current(self.context):
            address = self.driver.allocate(2 * count * size)
        layout = DeviceLayout((GroupRegions((Region(address, 2 * count, size, size),)),))
        for name, mover in self.movers(pool).items():
            copies = self.engine(layout, pool, mover)
            self.check(copies, pool, count, name)
            halves = {Direction.STORE: np.arange(count), Direction.LOAD: np.arange(count, 2 * count)}
            found: dict[str, list[float]] = {"store": [], "load": [], "both": []}
            for _ in range(self.scale.rounds):
                for direction, blocks in halves.items():
                    seconds = self.run(copies, [self.job(direction, blocks)])[1]
                    found[direction.value].append(count * size / seconds / 1e9)
                wall_s, _ = self.run(copies, [self.job(direction, blocks) for direction, blocks in halves.items()])
                found["both"].append(2 * count * size / wall_s / 1e9)
            copies.close()
            for way, rates in found.items():
                ceiling = 2 * min(self.ceiling["store"], self.ceiling["load"]) if way == "both" else self.ceiling[way]
                ratios = [rate / ceiling for rate in rates]
                goal = self.scale.goal(size, way)
                judged = "-" if goal is None else verdict(ratios, goal, at_most=False)
                self.cells.append(Cell(size, count, way, name, rates, statistics.median(ratios), judged))
        with self.driver.current(self.context):
            self.driver.free(address)
        pool.close()

    def engine(self, layout: DeviceLayout, pool: HostPool, mover: Mover) -> CudaCopyEngine:
        return CudaCopyEngine(
            layout,
            pool,
            lambda: None,
            driver=self.driver,
            device=0,
            current_stream=self.machine.current_stream,
            mover=mover,
        )

    def job(
        self, direction: Direction, blocks: NDArray[np.int64], slots: NDArray[np.int64] | None = None
    ) -> TransferJob:
        self.job_id += 1
        slots = self.rng.permutation(blocks) if slots is None else slots
        return TransferJob(self.job_id, direction, (BlockRun(0, blocks, slots, np.zeros_like(slots)),))

    def run(self, copies: CudaCopyEngine, jobs: list[TransferJob]) -> tuple[float, float]:
        """Wall seconds from submission to the last end, and the sum of the device's."""
        started_s = time.perf_counter()
        for job in jobs:
            copies.submit(job)
        if not copies.wait([job.job_id for job in jobs], PATIENCE_S):
            raise RuntimeError(f"the copy engine did not end its jobs within {PATIENCE_S:.0f} s")
        wall_s = time.perf_counter() - started_s
        results = copies.poll()
        errors = [result.error for result in results if result.error is not None]
        if errors:
            raise RuntimeError(f"the copy engine failed: {errors[0]}")
        return wall_s, sum(result.seconds for result in results)

    def check(self, copies: CudaCopyEngine, pool: HostPool, count: int, name: str) -> None:
        """What is loaded from some slots and stored into others has the same bytes."""
        some = self.rng.choice(count, min(count, 64), replace=False).astype(np.int64)
        before = [self.rng.integers(0, 256, pool.slot_bytes, dtype=np.uint8) for _ in some]
        for slot, noise in zip(some.tolist(), before, strict=True):
            pool.slot(slot)[:] = noise
            pool.slot(slot + count)[:] = 0
        self.run(copies, [self.job(Direction.LOAD, some, some)])
        self.run(copies, [self.job(Direction.STORE, some, some + count)])
        for slot, noise in zip(some.tolist(), before, strict=True):
            if not np.array_equal(pool.slot(slot + count), noise):
                raise RuntimeError(f"{name} copied wrong bytes at segments of {pool.slot_bytes} bytes")

    def descriptors(self) -> list[tuple[int, int, float]]:
        """Microseconds on the CPU to compute a job's descriptors: blocks, regions, median."""
        found = []
        for regions in (1, 64):
            for count in self.scale.counts:
                num_blocks = max(count // regions, 1)
                layout = DeviceLayout(
                    (GroupRegions(tuple(Region(1 << 40, num_blocks, 64, 64) for _ in range(regions))),)
                )
                pool = HostPool(num_blocks, 64 * regions)
                planner, buffer = SegmentPlanner(layout, pool), SegmentBuffer()
                job = self.job(Direction.STORE, self.rng.permutation(num_blocks))
                times = []
                for _ in range(self.scale.rounds):
                    started_s = time.perf_counter()
                    planner.plan(job, buffer, coalesce=True)
                    times.append((time.perf_counter() - started_s) * 1e6)
                found.append((num_blocks, regions, statistics.median(times)))
                pool.close()
        return found

    def interference(self) -> list[float]:
        """A loop of matrix multiplications beside copies both ways, over the same loop alone, a ratio a round."""
        size, count = self.scale.sizes[-1], self.scale.counts[0]
        pool = HostPool(2 * count, size, preparation=Preparation(registrar=self.registrar))
        with self.driver.current(self.context):
            address = self.driver.allocate(2 * count * size)
        layout = DeviceLayout((GroupRegions((Region(address, 2 * count, size, size),)),))
        copies = self.engine(layout, pool, DmaMover(self.driver))
        left, right = (
            torch.randn(self.scale.matrix, self.scale.matrix, dtype=torch.bfloat16, device=self.machine.torch_device)
            for _ in range(2)
        )

        def multiply() -> float:
            self.machine.synchronize()
            started_s = time.perf_counter()
            for _ in range(self.scale.multiplications):
                torch.matmul(left, right)
            if self.machine.torch_device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return time.perf_counter() - started_s

        multiply()
        ratios = []
        for _ in range(self.scale.rounds):
            alone_s = multiply()
            wanted_s, queued_bytes = 3 * alone_s, 0.0
            jobs: list[int] = []
            while queued_bytes < wanted_s * self.ceiling["both"] * 1e9 and len(jobs) < 400:
                for direction, blocks in (
                    (Direction.STORE, np.arange(count)),
                    (Direction.LOAD, np.arange(count, 2 * count)),
                ):
                    job = self.job(direction, blocks)
                    copies.submit(job)
                    jobs.append(job.job_id)
                    queued_bytes += count * size
            ratios.append(multiply() / alone_s)
            copies.wait(jobs, PATIENCE_S)
            copies.poll()
        copies.close()
        with self.driver.current(self.context):
            self.driver.free(address)
        pool.close()
        return ratios


def report(bench: Bench, left_out: list[str]) -> dict[str, object]:
    ceiling = ", ".join(f"{name} {rate:.1f}" for name, rate in bench.ceiling.items())
    print(f"ceiling, GB/s: {ceiling}\n")
    print("| segment KiB | segments | direction | engine | GB/s | of ceiling | goal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for cell in bench.cells:
        print(
            f"| {cell.size >> 10} | {cell.count} | {cell.direction} | {cell.engine} | {spread(cell.gbps, 1)} | "
            f"{cell.of_ceiling:.2f} | {cell.verdict} |"
        )
    by_place: dict[tuple[int, int, str], dict[str, float]] = {}
    for cell in bench.cells:
        by_place.setdefault((cell.size, cell.count, cell.direction), {})[cell.engine] = statistics.median(cell.gbps)
    worst = min(by_place.items(), key=lambda item: item[1]["auto"] / max(item[1].values()))
    print(f"\ncalibration: at worst {worst[1]['auto'] / max(worst[1].values()):.2f} of the best, at {worst[0]}")
    descriptors = bench.descriptors()
    print("\n| blocks | regions | descriptors, us |\n| --- | --- | --- |")
    for num_blocks, regions, median_us in descriptors:
        print(f"| {num_blocks} | {regions} | {median_us:.0f} |")
    ratios = bench.interference()
    print(
        f"\nmatrix loop beside copies over alone: {spread(ratios)}, goal {SLOWED_GOAL}: {verdict(ratios, SLOWED_GOAL)}"
    )
    if left_out:
        print(f"\nno time for: {', '.join(left_out)}")
    return {
        "ceiling_gbps": bench.ceiling,
        "cells": [asdict(cell) for cell in bench.cells],
        "descriptors_us": descriptors,
        "slowed": ratios,
        "left_out": left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="without a GPU, and with tiny sizes")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end_s = time.monotonic() + options.budget_s
    machine, scale = (no_gpu(), REDUCED) if options.reduced else (gpu(), FULL)
    where = f"{environment('numpy', 'torch')}, {machine.name}"
    print(f"{where}, seed {options.seed}\n", flush=True)
    left_out = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(machine, scale, options.seed, Path(folder))
        for size in scale.sizes:
            for count in scale.counts:
                if count * size > scale.most_bytes:
                    continue
                if time.monotonic() > end_s:
                    left_out.append(f"{count} segments of {size}")
                else:
                    bench.cell(size, count)
        found = {"where": where, "seed": options.seed, **report(bench, left_out)}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
