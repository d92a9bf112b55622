"""Latency of stores while the pool grows and shrinks; bookkeeping only, without memory.

    python -m bench.resize [--slots N] [--rounds N]

A full pool grows to three times its slots, with its keys moving to an index for as many, and then shrinks to half of
what it began with, evicting. Beside it a thread stores batches of 64 new keys, one every half millisecond, and each is
timed. Between two steps the resize rests as long as it does in a service.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from bench.manager import KEY_BYTES, QueueingSink
from bench.report import environment
from kvferry.app.pool.resizer import BETWEEN_STEPS_S
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.resize import PoolResize, Todo

BATCH = 64
EXTENT_SLOTS = 1000
PAUSE_S = 0.0005
REST_S = 3.0


class Traffic:
    """Stores new keys, and records how long each batch took."""

    def __init__(self, manager: OffloadManager, rng: random.Random) -> None:
        self._manager = manager
        self._rng = rng
        self._origin, self._positions = RequestIdentity("bench"), np.arange(BATCH)

    def store(self) -> float:
        keys = [self._rng.randbytes(KEY_BYTES - 1) + b"\0" for _ in range(BATCH)]
        started_s = time.perf_counter()
        answer = self._manager.prepare_store(keys, self._origin, self._positions, 1, 1.0)
        self._manager.complete_store(answer.slots, 2.0)
        return time.perf_counter() - started_s

    def run(self, stop: threading.Event, seconds: list[float]) -> None:
        while not stop.wait(PAUSE_S):
            seconds.append(self.store())


def drive(manager: OffloadManager, target: int) -> list[float]:
    """Resize the pool; return how long each step took."""
    resize, steps = PoolResize(manager, EXTENT_SLOTS), list[float]()
    resize.request(target)
    while True:
        started_s = time.perf_counter()
        todo = resize.step(time.time())
        steps.append(time.perf_counter() - started_s)
        if todo is Todo.MEMORY:
            resize.acknowledge(resize.memory_slots)
        elif todo is Todo.NOTHING:
            return steps
        else:
            time.sleep(BETWEEN_STEPS_S)


def told(seconds: Sequence[float]) -> str:
    """Format median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(seconds)
    chosen = (statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1])
    return " | ".join(f"{one * 1e3:.2f}" for one in chosen)


def bench(num_slots: int, rng: random.Random) -> None:
    manager = OffloadManager(num_slots, 4096, sink=QueueingSink(), max_slots=3 * num_slots)
    traffic = Traffic(manager, rng)
    for _ in range(num_slots // BATCH):
        traffic.store()
    for name, target in (("at rest", None), ("growing", 3 * num_slots), ("shrinking", num_slots // 2)):
        stop, seconds = threading.Event(), list[float]()
        thread = threading.Thread(target=traffic.run, args=(stop, seconds))
        started_s = time.perf_counter()
        thread.start()
        if target is None:
            time.sleep(REST_S)
        else:
            drive(manager, target)
        took_s = time.perf_counter() - started_s
        stop.set()
        thread.join()
        print(f"| {num_slots:,} | {name} | {took_s:.1f} | {told(seconds)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(environment("numpy"))
    print("| slots | pool | seconds | store of 64: median ms | 99% | longest |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for number in range(options.rounds):
        bench(options.slots, random.Random(options.seed + number))


if __name__ == "__main__":
    main()
