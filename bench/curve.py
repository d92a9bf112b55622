"""The live curve beside full replays in eager mode, and its cost.

Run: python -m bench.curve [--trace FILE|FOLDER|conversations|agents] [--pools 0.05 0.1 0.2 0.4] [--seconds 30]

The curve counts what the scheduler emits in one of the replays (`app/replay/core_replay.py`); the others run with pools
that are shares of the trace's different full blocks, and with a device as large as the smallest. Differences are in
points. The cost is the processor time of the service's thread while requests of 250 blocks, half of which are known,
end at 3,000 blocks a second, after as many keys as it remembers have passed; and what the end of a request takes more
on the engine's thread.
"""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from itertools import islice

from bench.eviction import Workload, read_workload, workload_parser
from bench.observing import thread_times_s
from bench.report import environment
from kvferry.app.replay.core_replay import Replay, Setup, replayed
from kvferry.app.telemetry.curve import Present, WhatIf
from kvferry.core.curve import MAX_KEYS, ReuseCurve
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.pool.events import CacheEvent, RequestBlocks
from kvferry.core.pool.eviction.lru import LruPolicy

GOAL_POINTS, GOAL_PERCENT = 1.0, 0.5
BLOCKS_PER_S, REQUEST_BLOCKS, BLOCK_TOKENS = 3000, 250, 16
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
    replay.offload.block_readers.add(receive)
    requests = replayed(work.trace)
    while some := list(islice(requests, BATCH_REQUESTS)):
        replay.run(some)
        curve.record(ended)
        ended.clear()
    return curve, replay.tokens.hit_percent


def print_accuracy(work: Workload, pools: Sequence[float]) -> None:
    """Print the curve beside replays."""
    print("| pool | replay | curve | difference |\n| --- | ---: | ---: | ---: |")
    curve, first = counted(work, work.setup(pools[0], LruPolicy.name))
    worst = 0.0
    for share in pools:
        full = first
        if share != pools[0]:
            full = Replay(work.setup(share, LruPolicy.name)).run(replayed(work.trace)).hit_percent
        rate = 100 * curve.hit_rate(max(work.blocks_of(share), work.device_blocks))
        worst = max(worst, abs(rate - full))
        print(f"| {share:.0%} | {full:.2f} | {rate:.2f} | {rate - full:+.2f} |", flush=True)
    print(f"| everything kept | | {100 * curve.ceiling():.2f} | |")
    verdict = "met" if worst < GOAL_POINTS else "missed"
    print(f"\n{curve.sampled_share:.0%} of the keys; goal: {GOAL_POINTS} point: {verdict}")


def print_cost(seconds: float) -> None:
    """Print the cost of the service's thread."""
    rng, known = random.Random(1), deque[list[bytes]](maxlen=200)

    def request() -> RequestBlocks:
        keys = rng.choice(known)[: REQUEST_BLOCKS // 2] if known and rng.random() < 0.9 else []
        keys = [*keys, *(rng.randbytes(33) for _ in range(REQUEST_BLOCKS - len(keys)))]
        known.append(keys)
        return RequestBlocks(time.time(), keys, REQUEST_BLOCKS * BLOCK_TOKENS + 1, 1, REQUEST_BLOCKS, 0)

    tracemalloc.start()
    what_if = WhatIf(
        lambda: Present(POOL_SLOTS, LruPolicy.name, StoreMode.EAGER), GroupLayout([GroupSpec(BLOCK_TOKENS, 1)]), 0, True
    )
    before = tracemalloc.get_traced_memory()[0]
    what_if.start()
    for _ in range(2 * MAX_KEYS // REQUEST_BLOCKS):
        while what_if.num_queued_keys > MAX_KEYS // 4:
            time.sleep(0.01)
        what_if.receive(request())
    while what_if.num_queued_keys:
        time.sleep(0.01)
    held = sum(len(keys) * 66 + 8 * len(keys) for keys in known)
    peak = tracemalloc.get_traced_memory()[1] - before - held
    tracemalloc.stop()
    (thread,) = (one for one in threading.enumerate() if one.name == "kvferry-what-if")

    def spent_s() -> float:
        return thread_times_s(os.getpid())[str(thread.native_id)]

    began_s, cpu_s, num = time.monotonic(), spent_s(), 0
    while num * REQUEST_BLOCKS < seconds * BLOCKS_PER_S:
        what_if.receive(request())
        num += 1
        time.sleep(max(began_s + num * REQUEST_BLOCKS / BLOCKS_PER_S - time.monotonic(), 0))
    percent = 100 * (spent_s() - cpu_s) / (time.monotonic() - began_s)
    what_if.close()
    print("| thread, % of a core at 3,000 blocks a second | memory at most, MiB |\n| ---: | ---: |")
    print(f"| {percent:.2f} | {peak / 2**20:.1f} |")
    print(f"\nGoal: {GOAL_PERCENT}%: {'met' if percent < GOAL_PERCENT else 'missed'}")


def main() -> None:
    """Print both tables."""
    parser = workload_parser(__doc__, [0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    work = read_workload(options)
    print(environment("numpy", "numba"))
    print(f"{work}\n")
    print_accuracy(work, options.pools)
    print()
    print_cost(options.seconds)


if __name__ == "__main__":
    main()
