"""Blocks written to a tier and tokens found in it, when it receives blocks as they are stored or before their eviction.

Run: python -m bench.cascading [--trace FILE|conversations|sessions] [--pools 0.05 0.1 0.2] [--tiers 0.2 1] [--cost 9]

The replay is that of `bench.eviction`, in eager mode, with one tier whose jobs end with the next step. `tier` is the
size of the tier, which evicts the least recently used block; sizes are shares of the trace's different full blocks.
A prompt is stored in one step, so that each step evicts as much as a prompt has: `lost` blocks were evicted before the
tier received them. Figures are counts, and the same in each run.

`--cost` measures the CPU time of the engine thread in so many rounds, in turns without a tier and with one of files in
`/dev/shm`, whose own threads do not count, and no waits for it. Nothing is computed: it is offloading alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from bench.eviction import read_workload, workload_parser
from bench.report import environment, spread
from kvferry.app.replay.core_replay import SLOT_BYTES, Replay, Setup, replayed
from kvferry.app.replay.trace import TraceRequest
from kvferry.app.tiers.block_store import TierContext
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.policy import TierWaitMode
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.tiers.base import CascadeWhen, Tier
from tests.harness.reference_tier import ReferenceTier

NAME = "tier"


class OneByte:
    """Slots without contents, as a `SlotBytes`."""

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """Return a byte, for any slot."""
        return [np.zeros(num_bytes, dtype=np.uint8)]


def measure_cost(trace: Sequence[TraceRequest], setup: Setup, rounds: int) -> None:
    """Print the CPU time of the engine thread for each stored block, without a tier and with one."""
    times: dict[str, list[float]] = {name: [] for name in ("no tier", *CascadeWhen)}
    for number, (name, own) in product(range(rounds + 1), times.items()):
        with ExitStack() as stack:
            tiers: dict[str, Tier] = {}
            if name in list(CascadeWhen):
                folder = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
                given = FileTier.Settings(type="fs", name=NAME, path=folder, max_bytes=1 << 30, timeout_s=3600)
                context = TierContext(NAME, {}, SLOT_BYTES)
                tiers[NAME] = ThreadedTier(FileTier.open(given, context), given, context, OneByte(), lambda: None)
                stack.callback(tiers[NAME].close, 60.0)
            replay = Replay(setup, tiers, TierWaitMode.BEST_EFFORT)
            if tiers:
                replay.offload.tiers.cascade_when(NAME, CascadeWhen(name))
            began_s = time.thread_time()
            replay.run(replayed(trace))
            taken_s = time.thread_time() - began_s
            if number:
                own.append(1e6 * taken_s / replay.offload.snapshot().store.stored)
    print("\n| tier | us a stored block | more than without |\n| --- | ---: | ---: |")
    for name, own in times.items():
        added = [mine - plain for mine, plain in zip(own, times["no tier"], strict=True)]
        print(f"| {name} | {spread(own, 1)} | {statistics.median(added):.1f} |")


def main() -> None:
    """Print a table."""
    parser = workload_parser(__doc__, [0.05, 0.1, 0.2])
    parser.add_argument("--tiers", type=float, nargs="+", default=[0.2, 1.0])
    parser.add_argument("--policy", choices=EVICTION_POLICIES, default="lru")
    parser.add_argument("--cost", type=int, default=0, help="rounds in which the engine thread's CPU time is measured")
    options = parser.parse_args()
    work = read_workload(options)
    print(environment("numpy", "numba"))
    print(f"{work}, eviction policy {options.policy}; written and lost in blocks, tokens in percent of the prompts'\n")
    print("| pool | tier | when | written | lost | tokens from the tier | found anywhere |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for pool, size, when in product(options.pools, options.tiers, CascadeWhen):
        tier = ReferenceTier(OneByte(), lambda: 0.0, max_blocks=work.blocks_of(size))
        replay = Replay(work.setup(work.blocks_of(pool), options.policy), {NAME: tier})
        replay.offload.tiers.cascade_when(NAME, when)
        tokens = replay.run(replayed(work.trace))
        lost = replay.offload.snapshot().tiers[NAME].use.cascades_dropped
        print(
            f"| {pool:.0%} | {size:.0%} | {when} | {tier.counts().stored:,} | {lost:,} "
            f"| {100 * tokens.tier / tokens.prompt:.2f} | {tokens.hit_percent:.2f} |",
            flush=True,
        )
    if options.cost:
        measure_cost(work.trace, work.setup(work.blocks_of(options.pools[-1]), options.policy), options.cost)


if __name__ == "__main__":
    main()
