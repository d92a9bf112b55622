"""Shadow caches beside full replays: hit percent at every size, and what both cost in processor time.

Run: python -m bench.shadow [--trace FILE] [--device 0.05] [--pool 0.1] [--watermark 256]

The trace, the full replays and the figures are those of `bench.eviction`. A cell is the full replay's percent and the
shadow's difference to it, marked with ! where its 95% bar does not cover the truth. Processor time is of one full
replay and of all shadow caches together, without their compilation.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.eviction import Replay, Setup, count_blocks, replayed
from bench.report import environment
from kvferry.app.replay.blocks import request_blocks
from kvferry.app.replay.sample import sample_trace
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, read_trace
from kvferry.core.shadow.caches import MAX_KEYS, ShadowCaches, ShadowSetup


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the generated trace")
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--pool", type=float, default=0.1)
    parser.add_argument("--watermark", type=int, default=256)
    parser.add_argument("--max-keys", type=int, default=MAX_KEYS, help="keys that are simulated at most")
    options = parser.parse_args()
    trace = sample_trace(options.seed) if options.trace is None else read_trace(options.trace)
    num_blocks = count_blocks(trace)
    pool, device = round(options.pool * num_blocks), round(options.device * num_blocks)
    requests = list(request_blocks(trace))
    caches = ShadowCaches(ShadowSetup(pool, device, TRACE_BLOCK_TOKENS, options.watermark), options.max_keys)
    began_s = time.process_time()
    for request in requests:
        caches.record(request)
    shadow_s = time.process_time() - began_s
    num_caches = len(caches.configurations)
    print(environment("numpy", "numba"))
    print(
        f"{len(trace):,} requests, {num_blocks:,} different full blocks, pool {pool:,}, device {device:,}; "
        f"sampled share {caches.share:.2f}, {caches.num_bytes / (1 << 20):.0f} MiB\n"
    )
    errors, full_s, num_covered = [], 0.0, 0
    for one, estimate in zip(caches.configurations, caches.estimates(), strict=True):
        setup = Setup(device, one.num_slots, one.eviction_policy, one.store_mode, options.watermark)
        began_s = time.process_time()
        full = Replay(setup).run(replayed(trace)).hit_percent
        full_s += time.process_time() - began_s
        is_covered = 100 * estimate.low <= full <= 100 * estimate.high
        num_covered += is_covered
        errors.append(abs(100 * estimate.hit_rate - full))
        print(
            f"{one.store_mode}, {one.eviction_policy}, {one.num_slots / num_blocks:.1%}: {full:.2f} "
            f"{100 * estimate.hit_rate - full:+.2f}{'' if is_covered else ' !'}",
            flush=True,
        )
    print(
        f"\nmean error {sum(errors) / num_caches:.2f} points, largest {max(errors):.2f}; bars cover {num_covered} of "
        f"{num_caches}; processor time {shadow_s:.2f} s for all shadows, {full_s / num_caches:.2f} s for one full "
        f"replay: {shadow_s / full_s:.1%} each"
    )


if __name__ == "__main__":
    main()
