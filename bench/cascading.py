"""Blocks written to a tier and tokens found in it, when it receives blocks as they are stored or before their eviction.

Run: python -m bench.cascading [--trace FILE] [--device 0.05] [--pools 0.05 0.1 0.2] [--tiers 0.2 1]

The replay is that of `bench.eviction`, in eager mode, with one tier whose jobs end with the next step. `tier` is the
size of the tier, which evicts the least recently used block; sizes are shares of the trace's different full blocks.
A prompt is stored in one step, so that each step evicts as much as a prompt has: `lost` blocks were evicted before the
tier received them. Figures are counts, and the same in each run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.eviction import Replay, Setup, count_blocks, replayed
from bench.report import environment
from kvferry.app.replay.sample import sample_trace
from kvferry.app.replay.trace import read_trace
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.tiers.base import CascadeWhen
from tests.harness.reference_tier import ReferenceTier

NAME = "tier"


class OneByte:
    """Slots without contents, as a `SlotBytes`."""

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """Return a byte, for any slot."""
        return [np.zeros(num_bytes, dtype=np.uint8)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the generated trace")
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--pools", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--tiers", type=float, nargs="+", default=[0.2, 1.0])
    parser.add_argument("--policy", choices=EVICTION_POLICIES, default="lru")
    options = parser.parse_args()
    trace = sample_trace(options.seed) if options.trace is None else read_trace(options.trace)
    num_blocks = count_blocks(trace)
    device_blocks = round(options.device * num_blocks)
    print(environment("numpy", "numba"))
    print(
        f"{len(trace):,} requests, {num_blocks:,} different full blocks, device {device_blocks:,} blocks, eviction "
        f"policy {options.policy}; written and lost in blocks, tokens in percent of the prompts'\n"
    )
    print("| pool | tier | when | written | lost | tokens from the tier | found anywhere |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for pool, size, when in product(options.pools, options.tiers, CascadeWhen):
        tier = ReferenceTier(OneByte(), lambda: 0.0, max_blocks=round(size * num_blocks))
        replay = Replay(Setup(device_blocks, round(pool * num_blocks), options.policy), {NAME: tier})
        replay.offload.tiers.cascade_when(NAME, when)
        tokens = replay.run(replayed(trace))
        lost = replay.offload.snapshot().tiers[NAME].use.cascades_dropped
        print(
            f"| {pool:.0%} | {size:.0%} | {when} | {tier.counts().stored:,} | {lost:,} "
            f"| {100 * tokens.tier / tokens.prompt:.2f} | {tokens.hit_percent:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
