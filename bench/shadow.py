"""Shadow caches beside full replays: hit percent at every size, and what both cost in processor time.

Run: python -m bench.shadow [--trace FILE|conversations|agents] [--pool 0.1] [--max-keys 100000 50000] [--draws 6]
    [--modes eager] [--policies lru] [--multiples 1 2]

The trace, the full replays and the figures are those of `bench.eviction`. With fewer keys than the trace has, a sample
of them is simulated; each draw is another sample. A cell is the mean difference of the draws to the full replay in
points, the largest one, and how many bars cover the truth. Processor time is of one full replay and of all shadow
caches together, without their compilation. `--modes`, `--policies` and `--multiples`, of the pool, leave out full
replays.

`--cost` measures the CPU time of the simulating thread instead: requests of so many tokens in slots of 16, half of
which go on with an earlier one, for pools of 10,000 to 1,000,000 slots, once these are full.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.eviction import POLICIES, Replay, Setup, Workload, read_workload, replayed, workload_parser
from bench.report import environment
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, request_blocks
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import RequestBlocks
from kvferry.core.shadow.caches import MAX_KEYS, MULTIPLES, Configuration, Estimate, ShadowCaches, ShadowSetup

SLOT_TOKENS = 16
CACHES_FULL = 2
"""Times that the keys of requests fill the pool before their cost is measured."""
MEASURED = 300


class Sample:
    """Shadow caches with room for so many keys, once for each draw."""

    def __init__(self, work: Workload, pool: float, max_keys: int, draws: int) -> None:
        """Replay the trace in all of them."""
        self.draws: list[dict[Configuration, Estimate]] = []
        self.errors: list[float] = []
        self.num_covered = 0
        self.cpu_s = 0.0
        for draw in range(draws):
            setup = ShadowSetup(work.blocks_of(pool), work.device_blocks, TRACE_BLOCK_TOKENS, work.watermark_blocks)
            caches = ShadowCaches(setup, max_keys)
            # Other ids have other hashes, which decide what is sampled.
            trace = [replace(one, hash_ids=tuple(each + (draw << 40) for each in one.hash_ids)) for one in work.trace]
            requests = list(request_blocks(trace))
            began_s = time.process_time()
            for request in requests:
                caches.record(request)
            self.cpu_s += (time.process_time() - began_s) / draws
            self.draws.append(dict(zip(caches.configurations, caches.estimates(), strict=True)))
        self.share, self.num_bytes = caches.share, caches.num_bytes

    def compare(self, configuration: Configuration, full: float) -> str:
        """Return a cell beside the percent of a full replay, and count its errors."""
        estimates = [draw[configuration] for draw in self.draws]
        differences = [100 * one.hit_rate - full for one in estimates]
        covered = sum(100 * one.low <= full <= 100 * one.high for one in estimates)
        self.errors += map(abs, differences)
        self.num_covered += covered
        return f"{np.mean(differences):+.2f}, {max(differences, key=abs):+.2f}, {covered}/{len(estimates)}"


def compare(work: Workload, samples: Sequence[Sample], chosen: Sequence[Configuration]) -> None:
    """Print the table of these configurations, and what each sample shows together."""
    print(f"| mode, policy, pool | full | {' | '.join(f'{one.share:.0%} of the keys' for one in samples)} |")
    print(f"| --- | ---: |{' --- |' * len(samples)}")
    full_s, num_full = 0.0, 0
    for one in chosen:
        setup = Setup(work.device_blocks, one.num_slots, one.eviction_policy, one.store_mode, work.watermark_blocks)
        began_s = time.process_time()
        full = Replay(setup).run(replayed(work.trace)).hit_percent
        full_s, num_full = full_s + time.process_time() - began_s, num_full + 1
        cells = " | ".join(sample.compare(one, full) for sample in samples)
        name = f"{one.store_mode}, {one.eviction_policy}, {one.num_slots / work.num_blocks:.1%}"
        print(f"| {name} | {full:.2f} | {cells} |", flush=True)
    print(f"\none full replay: {full_s / num_full:.2f} s of processor time in the mean")
    for sample in samples:
        each_s = sample.cpu_s / len(sample.draws[0])
        print(
            f"{sample.share:.0%} of the keys: mean error {np.mean(sample.errors):.2f} points, largest "
            f"{max(sample.errors):.2f}; bars cover {sample.num_covered} of {len(sample.errors)}; all shadows "
            f"{sample.cpu_s:.2f} s, each {each_s / (full_s / num_full):.1%} of a replay; "
            f"{sample.num_bytes / (1 << 20):.0f} MiB"
        )


def measure_cost(num_tokens: int, rng: random.Random) -> None:
    """Print CPU microseconds a request."""
    print(f"requests of {num_tokens:,} tokens in slots of {SLOT_TOKENS}, half of which go on with an earlier one\n")
    print("| pool, slots | share of the keys | us a request | us a key |")
    print("| ---: | ---: | ---: | ---: |")
    num_keys = num_tokens // SLOT_TOKENS
    for num_slots in (10_000, 100_000, 1_000_000):
        caches = ShadowCaches(ShadowSetup(num_slots, num_slots // 10, SLOT_TOKENS, 256))
        earlier: deque[list[bytes]] = deque(maxlen=200)
        num_warm = max(CACHES_FULL * num_slots // num_keys, 500)
        times = []
        for number in range(num_warm + MEASURED):
            keys = rng.choice(earlier)[: num_keys // 2] if number % 2 and earlier else []
            keys = keys + [rng.randbytes(32) + b"\0" for _ in range(num_keys - len(keys))]
            earlier.append(keys)
            request = RequestBlocks(0.1 * number, keys, num_tokens, 200, len(keys), 0)
            began_s = time.thread_time()
            caches.record(request)
            times.append(time.thread_time() - began_s)
        each_us = 1e6 * sum(times[num_warm:]) / MEASURED
        print(f"| {num_slots:,} | {caches.share:.2%} | {each_us:.0f} | {each_us / num_keys:.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = workload_parser(__doc__)
    parser.add_argument("--pool", type=float, default=0.1)
    parser.add_argument("--max-keys", type=int, nargs="+", default=[MAX_KEYS], help="keys that are simulated at most")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--modes", type=StoreMode, choices=list(StoreMode), nargs="+", default=list(StoreMode))
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=POLICIES)
    parser.add_argument("--multiples", type=float, choices=MULTIPLES, nargs="+", default=MULTIPLES)
    parser.add_argument("--cost", type=int, default=0, help="tokens of the requests whose cost is measured instead")
    options = parser.parse_args()
    if options.cost:
        print(environment("numpy", "numba"))
        measure_cost(options.cost, random.Random(options.seed))
        return
    work = read_workload(options)
    print(environment("numpy", "numba"))
    print(f"{work}, pool {work.blocks_of(options.pool):,}; points: mean, largest, bars that cover\n")
    samples = [Sample(work, options.pool, each, options.draws) for each in options.max_keys]
    sizes = {max(round(multiple * work.blocks_of(options.pool)), 1) for multiple in options.multiples}
    chosen = [
        one
        for one in samples[0].draws[0]
        if one.store_mode in options.modes and one.eviction_policy in options.policies and one.num_slots in sizes
    ]
    compare(work, samples, chosen)


if __name__ == "__main__":
    main()
