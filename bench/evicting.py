"""Cost of evictions from a kept pool on the engine thread: offers that evict 64 slots each.

Run: python -m bench.evicting FOLDER [--slots 500000] [--offers 4000]

Two full pools, one of which records evictions in a file in FOLDER; first alone, then while another process overwrites
the file's payload as fast as it can, so that pages are written back all the time. FOLDER should be on the disk of
the pools, with 4 KiB per slot available. Evicted slots are spread over the pool.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from bench.manager import BATCH, KEY_BYTES, QueueingSink, batches
from bench.report import environment
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.pool_file import KeptFile

SLOT_BYTES = 4096
SETTLE_S = 3.0
_DIRTY = """
import os, random, sys
file = os.open(sys.argv[1], os.O_WRONLY)
start, end = int(sys.argv[2]), int(sys.argv[3])
data = random.randbytes(1 << 20)
while True:
    for at in range(start, end - len(data), len(data)):
        os.pwrite(file, data, at)
        if at // len(data) % 128 == 0:
            os.fdatasync(file)
"""


@contextmanager
def dirtying(path: Path, shape: PoolShape) -> Iterator[None]:
    """Run another process that overwrites the payload continuously."""
    end = shape.payload_offset + shape.payload_bytes
    process = subprocess.Popen([sys.executable, "-c", _DIRTY, str(path), str(shape.payload_offset), str(end)])
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()


def full_manager(num_slots: int, writer: HeaderWriter | None, rng: random.Random) -> OffloadManager:
    """Return a full pool whose eviction order is unrelated to slot numbers."""
    manager = OffloadManager(num_slots, SLOT_BYTES, sink=QueueingSink(), header_queue=writer)
    keys = [rng.randbytes(KEY_BYTES) for _ in range(num_slots)]
    origin, positions = RequestIdentity("bench"), np.arange(BATCH)
    for batch in batches(keys):
        answer = manager.prepare_store(batch, origin, positions[: len(batch)], 1, 0.0)
        manager.complete_store(answer.slots, 0.0)
    rng.shuffle(keys)
    for batch in batches(keys):
        manager.prepare_store(batch, origin, positions[: len(batch)], 1, 1.0)
    return manager


def times_of_offers(manager: OffloadManager, num_offers: int, rng: random.Random) -> list[float]:
    """Return the microseconds of each offer; publishing is not timed."""
    origin, positions = RequestIdentity("bench"), np.arange(BATCH)
    times: list[float] = []
    for now_s in map(float, count(2)):
        keys = [rng.randbytes(KEY_BYTES) for _ in range(BATCH)]
        started_s = time.perf_counter()
        answer = manager.prepare_store(keys, origin, positions, 1, now_s)
        times.append((time.perf_counter() - started_s) * 1e6)
        manager.complete_store(answer.slots, now_s)
        # Copies take longer than this, so that other threads have time to run.
        time.sleep(0.001)
        if len(times) == num_offers:
            return times
    raise AssertionError("unreachable")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slots", type=int, default=500_000)
    parser.add_argument("--offers", type=int, default=4000)
    options = parser.parse_args()
    print(environment("numpy", "numba"))
    print(f"offers that evict {BATCH} of {options.slots:,} slots\n")
    print("| pool | median us | p99 us | p99.9 us | longest us |")
    print("| --- | ---: | ---: | ---: | ---: |")
    rng = random.Random(7)
    num_slots = options.slots // BATCH * BATCH
    shape = PoolShape(num_slots, SLOT_BYTES, 1, num_slots)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "bench.pool"
        file = KeptFile(path, shape, {"model": "bench"})
        file.reserve(shape.payload_bytes)
        writer = HeaderWriter(file)
        writer.start()
        managers = {name: full_manager(num_slots, of, rng) for name, of in (("in memory", None), ("file", writer))}
        for name, manager in managers.items():
            _show(name, times_of_offers(manager, options.offers, rng))
        with dirtying(path, shape):
            for name, manager in managers.items():
                _show(f"{name}, payload overwritten", times_of_offers(manager, options.offers, rng))
        writer.close()
        file.close()


def _show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    cells = [statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[len(ordered) * 999 // 1000]]
    print(f"| {name} | {' | '.join(f'{cell:,.0f}' for cell in [*cells, ordered[-1]])} |", flush=True)


if __name__ == "__main__":
    main()
