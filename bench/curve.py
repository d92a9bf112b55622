"""The live curve beside full replays in eager mode, and its cost.

Run: python -m bench.curve [--trace FILE|FOLDER|conversations|agents] [--pools 0.05 0.1 0.2 0.4] [--seconds 60]

The curve counts what the scheduler emits in one of the replays (`app/replay/core_replay.py`); the others run with pools
that are shares of the trace's different full blocks, and with a device as large as the smallest. Differences are in
points. The cost is the processor time of the service's thread, with the curve and with partings (`core/partings.py`),
while requests, half of whose blocks most of them share, end at two rates.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from statistics import median
from typing import NamedTuple

from bench.eviction import Workload, read_workload, workload_parser
from bench.report import environment, thread_times_s
from kvferry.app.replay.core_replay import Replay, Setup, replayed
from kvferry.app.telemetry.curve import Present, WhatIf
from kvferry.app.telemetry.prompts import PromptFeed, PromptReader
from kvferry.core.curve import MAX_KEYS, ReuseCurve
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import RequestIdentity
from kvferry.core.partings import KeepTokenIds, Partings
from kvferry.core.pool.events import CacheEvent, RequestBlocks
from kvferry.core.pool.eviction.lru import LruPolicy

GOAL_POINTS = 1.0
BLOCK_TOKENS, ROUNDS = 16, 5
EXPLAIN_BYTES = 64 << 20
POOL_SLOTS = 50_000
BATCH_REQUESTS = 16


def counted(work: Workload, setup: Setup) -> tuple[ReuseCurve, float]:
    """Return the curve of a replay, and the hit percent of the replay."""
    replay = Replay(setup)
    group = replay.offload.layout.prefix_group
    curve, ended = ReuseCurve(group.slot_tokens), deque[RequestBlocks]()
    curve.near_units = 8 * (setup.pool_slots + setup.device_blocks)

    def receive(event: CacheEvent) -> None:
        if isinstance(event, RequestBlocks):
            ended.append(event)

    replay.offload.manager.sink = receive
    requests = replayed(work.trace)
    while some := list(islice(requests, BATCH_REQUESTS)):
        replay.run(some)
        curve.record(ended)
        ended.clear()
    return curve, replay.tokens.hit_percent


def print_accuracy(work: Workload, pools: Sequence[float]) -> None:
    """Print the curve beside replays."""
    print("| pool | replay | curve | difference |\n| --- | ---: | ---: | ---: |")
    curve, first = counted(work, work.setup(work.blocks_of(pools[0]), LruPolicy.name))
    worst = 0.0
    for share in pools:
        full = first
        if share != pools[0]:
            full = Replay(work.setup(work.blocks_of(share), LruPolicy.name)).run(replayed(work.trace)).hit_percent
        rate = 100 * curve.hit_rate(max(work.blocks_of(share), work.device_blocks))
        worst = max(worst, abs(rate - full))
        print(f"| {share:.0%} | {full:.2f} | {rate:.2f} | {rate - full:+.2f} |", flush=True)
    print(f"| everything kept | | {100 * curve.ceiling():.2f} | |")
    verdict = "met" if worst < GOAL_POINTS else "missed"
    print(f"\n{curve.sampled_share:.0%} of the keys; goal: {GOAL_POINTS} point: {verdict}")


class Load(NamedTuple):
    """Requests of `num_blocks` blocks that end `per_s` times a second."""

    num_blocks: int
    per_s: float


LOADS = (Load(250, 12), Load(500, 50))
"""3,000 blocks a second, and 50 requests a second of 8,000 tokens."""
GOALS = {("curve", LOADS[0]): 0.5, ("partings", LOADS[1]): 0.5, ("partings with token ids", LOADS[1]): 1.5}
"""Percent of a core."""


def make_curve() -> PromptReader:
    """Return the curve of hit rates."""
    layout = GroupLayout([GroupSpec(BLOCK_TOKENS, 1)])
    return WhatIf(lambda: Present(POOL_SLOTS, LruPolicy.name, StoreMode.EAGER), layout, 0, enabled=True)


def make_partings(explain_bytes: int = 0) -> PromptReader:
    """Return what finds where prompts part."""
    partings = Partings(BLOCK_TOKENS)
    partings.read([KeepTokenIds(explain_bytes)])
    return partings


READERS: Mapping[str, Callable[[], PromptReader]] = {
    "curve": make_curve,
    "partings": make_partings,
    "partings with token ids": lambda: make_partings(EXPLAIN_BYTES),
}


def draw_requests(num_blocks: int) -> Iterator[RequestBlocks]:
    """Yield requests, of which nine in ten begin with half of one of the latest 200.

    Of these every other one is equal again behind a block.
    """
    rng, latest = random.Random(1), deque[tuple[list[bytes], list[int]]](maxlen=200)
    for number in count(1):
        keys, ids = rng.choice(latest) if latest and rng.random() < 0.9 else ([], [])
        num_shared, rest = len(keys) // 2, []
        if keys and number % 2:
            rest = ids[(num_shared + 1) * BLOCK_TOKENS :]
        keys = [*keys[:num_shared], *(rng.randbytes(33) for _ in range(num_blocks - num_shared))]
        ids = ids[: num_shared * BLOCK_TOKENS]
        ids = [*ids, *rng.choices(range(50_000), k=num_blocks * BLOCK_TOKENS - len(ids) - len(rest)), *rest]
        latest.append((keys, ids))
        origin = RequestIdentity(f"request-{number}")
        length = num_blocks * BLOCK_TOKENS + 1
        yield RequestBlocks(time.time(), number, origin, keys, length, 1, num_blocks, 0, [*ids, 1, 2])


def memory_of(name: str, load: Load) -> int:
    """Return the most bytes that a reader takes for itself."""
    first, *requests = islice(draw_requests(load.num_blocks), 2 * MAX_KEYS // load.num_blocks)
    # Compiles.
    READERS[name]().read([first])
    tracemalloc.start()
    reader = READERS[name]()
    for request in requests:
        reader.read([request])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def costs_of(reader: PromptReader, load: Load, seconds: float) -> list[float]:
    """Return the shares of a core, in percent, that the service's thread takes in rounds with this reader alone.

    A first round, which is left out, fills what the reader remembers, and uses what it may do at once.
    """
    feed, requests, percents = PromptFeed([reader]), draw_requests(load.num_blocks), []
    feed.start()
    (thread,) = (one for one in threading.enumerate() if one.name == feed.thread.name)

    def spent_s() -> float:
        return thread_times_s(os.getpid())[str(thread.native_id)]

    for _ in range(ROUNDS + 1):
        began_s, cpu_s = time.monotonic(), spent_s()
        for number, request in enumerate(islice(requests, int(seconds * load.per_s)), start=1):
            feed.receive(request)
            time.sleep(max(began_s + number / load.per_s - time.monotonic(), 0))
        percents.append(100 * (spent_s() - cpu_s) / (time.monotonic() - began_s))
    feed.close()
    if feed.num_dropped:
        raise SystemExit(f"{feed.num_dropped} requests were dropped")
    return percents[1:]


def print_cost(seconds: float) -> None:
    """Print what the service's thread costs, by what it does."""
    print(
        "| thread, % of a core | blocks a second | requests a second | median (min-max) | memory at most, MiB | goal |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for load in LOADS:
        for name, make in READERS.items():
            reader = make()
            peak = memory_of(name, load)
            percents = costs_of(reader, load, seconds / ROUNDS)
            middle, goal = median(percents), GOALS.get((name, load), math.inf)
            met = "-" if goal == math.inf else f"{goal}: {'met' if middle < goal else 'missed'}"
            print(
                f"| {name} | {load.num_blocks * load.per_s:,} | {load.per_s} | {middle:.2f} ({min(percents):.2f}-"
                f"{max(percents):.2f}) | {peak / 2**20:.1f} | {met} |",
                flush=True,
            )


def main() -> None:
    """Print both tables."""
    parser = workload_parser(__doc__, [0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    options = parser.parse_args()
    work = read_workload(options)
    print(environment("numpy", "numba"))
    print(f"{work}\n")
    print_accuracy(work, options.pools)
    print()
    print_cost(options.seconds)


if __name__ == "__main__":
    main()
