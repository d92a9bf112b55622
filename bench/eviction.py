"""Hit tokens of each eviction policy and store mode on a trace, beside the clairvoyant optimum.

Run: python -m bench.eviction [--trace FILE|FOLDER|conversations|agents] [--device 0.05] [--pools 1 2 4 8]

Traces are those of `kvferry replay`; `conversations` and `agents` are generated. The replay is that of
`kvferry what-if` (`app/replay/core_replay.py`). The device is a share of the trace's different full blocks, pools are
multiples of the device. Cells are percent of prompt tokens that were not computed; the rows `auto` have the mode that
`KVFERRY_STORE_MODE=auto` chooses.
"""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product, takewhile
from pathlib import Path

from bench.agents import agent_trace
from bench.report import environment
from kvferry.app.replay.core_replay import Replay, Setup, count_blocks, full_ids, replayed
from kvferry.app.replay.trace import TraceRequest, read_trace, sample_trace
from kvferry.app.settings.store_mode import StoreModeSetting, choose_store_mode
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES

POLICIES = tuple(EVICTION_POLICIES)


def optimum(trace: Sequence[TraceRequest], num_blocks: int) -> float:
    """Return the hit percent of a cache of this many blocks that knows the future: an upper bound.

    Blocks whose next use is furthest away are dropped, and those that are never used again at once. A block is used at
    least as soon as those behind it in any prompt, so that this never cuts a prefix in front of a block that it keeps.
    """
    uses: dict[int, deque[int]] = defaultdict(deque)
    for number, request in enumerate(trace):
        for hash_id in full_ids(request):
            uses[hash_id].append(number)
    cached: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    num_hit = num_prompt = 0
    for request in trace:
        ids = full_ids(request)
        hits = takewhile(cached.__contains__, ids[: (request.input_length - 1) // request.block_size])
        num_hit += request.block_size * sum(1 for _ in hits)
        num_prompt += request.input_length
        for position, hash_id in enumerate(ids):
            uses[hash_id].popleft()
            if uses[hash_id]:
                cached[hash_id] = next_use = uses[hash_id][0]
                heappush(furthest, (-next_use, -position, hash_id))
            else:
                cached.pop(hash_id, None)
        while len(cached) > num_blocks:
            next_use, _, hash_id = heappop(furthest)
            if cached.get(hash_id) == -next_use:
                del cached[hash_id]
    return 100 * num_hit / num_prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace, and the sizes that options say for it, in blocks."""

    trace: Sequence[TraceRequest]
    num_blocks: int
    device_blocks: int
    watermark_blocks: int

    def blocks_of(self, share: float) -> int:
        """Return the blocks that are this share of the trace's."""
        return round(share * self.num_blocks)

    def setup(self, pool_slots: int, policy: str, mode: StoreMode = StoreMode.EAGER) -> Setup:
        """Return what to replay with a pool of this size."""
        size = self.trace[0].block_size
        return Setup(self.device_blocks, pool_slots, policy, mode, self.watermark_blocks, size)

    def __str__(self) -> str:
        return (
            f"{len(self.trace):,} requests, {self.num_blocks:,} different full blocks, device {self.device_blocks:,} "
            f"blocks, watermark {self.watermark_blocks}"
        )


GENERATED = {"conversations": sample_trace, "agents": agent_trace}
"""Functions that generate a trace of a seed."""


def workload_parser(description: str | None, pools: Sequence[float] | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks on a trace share, with `--pools` if it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="conversations", help=f"a file, sessions' folder, or {', '.join(GENERATED)}")
    parser.add_argument("--seed", type=int, default=1, help="of a generated trace")
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--watermark", type=int, default=256)
    if pools is not None:
        parser.add_argument("--pools", type=float, nargs="+", default=pools)
    return parser


def read_workload(options: argparse.Namespace) -> Workload:
    """Return what the options of `workload_parser` name."""
    generate = GENERATED.get(options.trace)
    path = Path(options.trace)
    trace = read_trace(path) if generate is None else generate(options.seed)
    num_blocks = count_blocks(trace)
    return Workload(trace, num_blocks, round(options.device * num_blocks), options.watermark)


def row(name: str, percents: Sequence[float]) -> str:
    """Return a row of the table."""
    return f"| {name} | {' | '.join(f'{percent:.2f}' for percent in percents)} |"


def main() -> None:
    """Print a table."""
    parser = workload_parser(__doc__, [1, 2, 4, 8])
    options = parser.parse_args()
    work = read_workload(options)
    pools = [round(multiple * work.device_blocks) for multiple in options.pools]
    print(environment("numpy", "numba"))
    print(f"{work}; percent of prompt tokens found, by the pool in multiples of the device\n")
    print(f"| mode, policy | {' | '.join(f'{multiple:g}' for multiple in options.pools)} |")
    print(f"| --- |{' ---: |' * len(pools)}")
    found: dict[tuple[StoreMode, str], list[float]] = {}
    for mode, policy in product(StoreMode, POLICIES):
        replays = (Replay(work.setup(slots, policy, mode)) for slots in pools)
        found[mode, policy] = [replay.run(replayed(work.trace)).hit_percent for replay in replays]
        print(row(f"{mode}, {policy}", found[mode, policy]), flush=True)
    modes = [choose_store_mode(StoreModeSetting.AUTO, slots, work.device_blocks).mode for slots in pools]
    for policy in POLICIES:
        print(row(f"auto, {policy}", [found[mode, policy][at] for at, mode in enumerate(modes)]))
    print(row("optimum", [optimum(work.trace, work.device_blocks + slots) for slots in pools]))
    print(row("every block kept", [optimum(work.trace, work.num_blocks)] * len(pools)))


if __name__ == "__main__":
    main()
