"""Copy throughput on CPU: the copy engine compared with one memcpy, NumPy indexing and torch indexing.

Run: OMP_NUM_THREADS=1 python -m bench.copy_cpu [--threads 1 2] [--rounds 9] [--only-engine]

Blocks and slots are random rows of two large tables, so that caches do not help. All contenders copy equal amounts,
alternately and at new places each time; the memcpy copies one stretch per thread. Times are from submitting a job until
its result can be polled. Jobs are submitted one at a time, which measures latency, and in a row, which measures
throughput. The ratio compares speeds of the same round. The last figure is the time of a job of one small block: the
overhead of the copy thread, which the memcpy on one thread does not have.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from bench.report import environment, median_interval, spread, verdict
from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation

TABLE_BYTES = 512 << 20
MIB = 1 << 20
ROW_BYTES = 256 * MIB
MAX_ROW = 8
GOAL = 0.9
"""Share of the speed of one memcpy, from blocks of 16 KiB up."""


@dataclass(frozen=True)
class Batch:
    """The copies of one contender in one round; `at` is where the memcpy's stretches start."""

    direction: Direction
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    at: int
    num_bytes: int


class Bench:
    """Tables of blocks of one size, and the contenders over them."""

    def __init__(self, block_bytes: int, num_threads: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.block_bytes = block_bytes
        self.num_blocks = TABLE_BYTES // block_bytes
        self.device = torch.ones((self.num_blocks, block_bytes), dtype=torch.uint8).numpy()
        self.pool = HostPool(self.num_blocks, block_bytes, preparation=Preparation(touch=True))
        self.host = self.pool.slot(0).base[: self.num_blocks * block_bytes].reshape(self.num_blocks, block_bytes)
        self.num_threads = num_threads
        self.helpers = ThreadPoolExecutor(num_threads)
        self.engine = CpuCopyEngine(
            DeviceLayout.of_arrays([self.device]), self.pool, lambda: None, num_threads=num_threads
        )
        self.job_id = 0

    def close(self) -> None:
        self.engine.close()
        self.helpers.shutdown()

    def batch(self, direction: Direction, num_bytes: int) -> Batch:
        count = num_bytes // self.block_bytes
        blocks, slots = (self.rng.permutation(self.num_blocks)[:count].astype(np.int64) for _ in range(2))
        at = int(self.rng.integers(0, (TABLE_BYTES - num_bytes) // 4096 + 1)) * 4096
        return Batch(direction, blocks, slots, at, num_bytes)

    def run_engine(self, row: Sequence[Batch]) -> None:
        jobs = []
        for batch in row:
            self.job_id += 1
            run = BlockRun(0, batch.blocks, batch.slots, np.zeros_like(batch.slots))
            jobs.append(TransferJob(self.job_id, batch.direction, (run,)))
        for job in jobs:
            self.engine.submit(job)
        self.engine.wait([job.job_id for job in jobs], 60.0)
        results = self.engine.poll()
        if len(results) != len(row) or any(
            result.error is not None or result.num_bytes != batch.num_bytes
            for result, batch in zip(results, row, strict=True)
        ):
            raise RuntimeError(f"the copy engine failed: {results}")

    def run_memcpy(self, row: Sequence[Batch]) -> None:
        for batch in row:
            source, target = self._sides(batch)
            part = batch.num_bytes // self.num_threads
            starts = range(batch.at, batch.at + part * self.num_threads, part)
            from_, to = source.ctypes.data, target.ctypes.data
            if self.num_threads == 1:
                ctypes.memmove(to + batch.at, from_ + batch.at, part)
            else:
                list(self.helpers.map(partial(_move, to, from_, part), starts))

    def run_numpy(self, row: Sequence[Batch]) -> None:
        for batch in row:
            source, target = self._sides(batch)
            from_, to = self._rows(batch)
            target[to] = source[from_]

    def run_torch(self, row: Sequence[Batch]) -> None:
        for batch in row:
            source, target = map(torch.from_numpy, self._sides(batch))
            from_, to = map(torch.from_numpy, self._rows(batch))
            target.index_copy_(0, to, source.index_select(0, from_))

    def _sides(self, batch: Batch) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return (self.device, self.host) if batch.direction is Direction.STORE else (self.host, self.device)

    def _rows(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return (batch.blocks, batch.slots) if batch.direction is Direction.STORE else (batch.slots, batch.blocks)


def _move(to: int, from_: int, num_bytes: int, start: int) -> None:
    ctypes.memmove(to + start, from_ + start, num_bytes)


def measure(row: Sequence[Batch], run: Callable[[Sequence[Batch]], None]) -> float:
    """Return GB/s."""
    started_s = time.perf_counter()
    run(row)
    return sum(batch.num_bytes for batch in row) / (time.perf_counter() - started_s) / 1e9


def job_us(bench: Bench) -> float:
    """Return the median microseconds of a job of one block."""
    times: list[float] = []
    for _ in range(300):
        batch = bench.batch(Direction.STORE, bench.block_bytes)
        started_s = time.perf_counter()
        bench.run_engine([batch])
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6


def compare(bench: Bench, direction: Direction, num_bytes: int, in_row: int, rounds: int, only_engine: bool) -> None:
    contenders = {"memcpy": bench.run_memcpy, "engine": bench.run_engine}
    if not only_engine:
        contenders |= {"numpy": bench.run_numpy, "torch": bench.run_torch}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    repeats = max(1, min(16, 64 * MIB // (num_bytes * in_row)))
    for round_ in range(rounds + 1):
        order = list(contenders)
        bench.rng.shuffle(order)
        for name in order:
            found = [
                measure([bench.batch(direction, num_bytes) for _ in range(in_row)], contenders[name])
                for _ in range(1 if name in ("numpy", "torch") else repeats)
            ]
            if round_:
                rates[name].append(statistics.median(found))
    ratios = [mine / plain for mine, plain in zip(rates["engine"], rates["memcpy"], strict=True)]
    low, high = median_interval(ratios)
    judged = verdict(ratios, GOAL, at_most=False) if bench.block_bytes >= 16 << 10 else "-"
    print(
        f"| {bench.block_bytes >> 10} | {num_bytes // MIB} | {in_row} | {direction} | {bench.num_threads} | "
        + " | ".join(spread(rates[name], 1) for name in contenders)
        + f" | {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) | {judged} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks-kib", type=int, nargs="+", default=[4, 16, 64, 256, 2048])
    parser.add_argument("--jobs-mib", type=int, nargs="+", default=[2, 16, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only-engine", action="store_true", help="leave NumPy and torch out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = ["memcpy", "engine"] if options.only_engine else ["memcpy", "engine", "numpy", "torch"]
    print(environment("numpy", "numba", "torch"))
    print(f"GB/s, median (minimum-maximum) of {options.rounds} rounds; the ratio's median with its 95% interval\n")
    print(f"| block KiB | job MiB | in a row | direction | threads | {' | '.join(names)} | engine / memcpy | {GOAL} |")
    print("|" + " --- |" * (7 + len(names)))
    one_block_us: dict[tuple[int, int], float] = {}
    for num_threads in options.threads:
        torch.set_num_threads(num_threads)
        for block_kib in options.blocks_kib:
            bench = Bench(block_kib << 10, num_threads, np.random.default_rng(options.seed))
            for job_mib in options.jobs_mib:
                rows = sorted({1, min(MAX_ROW, max(ROW_BYTES // (job_mib * MIB), 1))})
                for direction, in_row in product(Direction, rows):
                    compare(bench, direction, job_mib * MIB, in_row, options.rounds, options.only_engine)
            one_block_us[num_threads, block_kib] = job_us(bench)
            bench.close()
    for (num_threads, block_kib), micros in one_block_us.items():
        print(f"a job of one block of {block_kib} KiB, {num_threads} threads: {micros:.0f} microseconds")


if __name__ == "__main__":
    main()
