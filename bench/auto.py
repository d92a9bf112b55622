"""`auto` as eviction policy and store mode beside each fixed choice, on a trace and on generated agents.

Run: python -m bench.auto --trace FILE [--device 0.05] [--pools 0.05 0.1 0.2] [--watermark 256] [--workloads then turns]
    [--modes eager lazy both]

The replay is that of `bench.eviction`. With `auto` the real shadow caches follow each request, and the real decision
switches the pool that is replayed, which begins with LRU in eager mode, or in the one mode that is allowed. Sizes are
shares of the different full blocks of the trace. `then`: the agents come after the trace; `turns`: thirds of both
alternate. Cells are percent of prompt tokens that were not computed, so figures are the same in each run, and one run
may measure one mode of one size; in `both`, `auto` may switch the mode, too.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.agents import agent_trace
from bench.eviction import POLICIES, Replay, Setup, count_blocks, replayed
from bench.report import environment
from kvferry.app.auto_switch import AutoState, AutoSwitch
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest, read_trace
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import CacheEvent, RequestBlocks
from kvferry.core.shadow.caches import ShadowCaches, ShadowSetup

TURNS = 3
BOTH = "both"
MODES = (*StoreMode, BOTH)


def replay_auto(setup: Setup, trace: Sequence[TraceRequest], mode: StoreMode | None) -> tuple[float, AutoState]:
    """Return the hit percent of a pool that leaves its policy to `auto`, and its mode, too, if that is None."""
    run = Replay(setup)
    ended = deque[RequestBlocks]()

    def receive(event: CacheEvent) -> None:
        if isinstance(event, RequestBlocks):
            ended.append(event)

    run.offload.manager.sink = receive
    run.offload.block_readers.add(receive)
    caches = ShadowCaches(
        ShadowSetup(setup.pool_slots, setup.device_blocks, TRACE_BLOCK_TOKENS, setup.watermark_blocks)
    )
    auto = AutoSwitch(run.offload, lambda where: nullcontext(), lambda what, now_s: None)
    auto.apply(None, mode)
    for one in replayed(trace):
        run.run([one])
        caches.record(ended.popleft())
        auto.follow(caches, 1)
    return run.tokens.hit_percent, auto.state()


def workload(name: str, trace: Sequence[TraceRequest], agents: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the trace and the agents, one after the other or in turns."""
    if name == "then":
        return list(_one_after_another([trace, agents]))
    parts = zip(_thirds(trace), _thirds(agents), strict=True)
    return list(_one_after_another([part for both in parts for part in both]))


def _thirds(trace: Sequence[TraceRequest]) -> list[Sequence[TraceRequest]]:
    size = -(-len(trace) // TURNS)
    return [trace[number * size : (number + 1) * size] for number in range(TURNS)]


def _one_after_another(parts: Sequence[Sequence[TraceRequest]]) -> Iterator[TraceRequest]:
    starts_ms = 0.0
    for part in parts:
        first_ms, last_ms = part[0].timestamp, part[-1].timestamp
        yield from (replace(one, timestamp=one.timestamp - first_ms + starts_ms) for one in part)
        starts_ms += last_ms - first_ms


def main() -> None:
    """Print a table for each workload and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the agents")
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--pools", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--watermark", type=int, default=256)
    parser.add_argument("--workloads", nargs="+", choices=("then", "turns"), default=["then", "turns"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    trace = read_trace(options.trace)
    first_id = max(hash_id for one in trace for hash_id in one.hash_ids) + 1
    agents = agent_trace(options.seed, len(trace), first_id)
    num_blocks = count_blocks(trace)
    print(environment("numpy", "numba"))
    for name, share in product(options.workloads, options.pools):
        requests = workload(name, trace, agents)
        setup = Setup(round(options.device * num_blocks), round(share * num_blocks), watermark_blocks=options.watermark)
        print(f"\n{name}, pool {share:.0%}, {len(requests):,} requests\n\n| mode | {' | '.join(POLICIES)} | auto |")
        print(f"| --- |{' ---: |' * len(POLICIES)} --- |")
        for given in options.modes:
            mode = None if given == BOTH else StoreMode(given)
            one = setup if mode is None else replace(setup, mode=mode)
            fixed = []
            if mode is not None:
                fixed = [Replay(replace(one, policy=each)).run(replayed(requests)).hit_percent for each in POLICIES]
            found, state = replay_auto(one, requests, mode)
            cells = [f"{percent:.2f}" for percent in fixed] or [""] * len(POLICIES)
            print(f"| {given} | {' | '.join(cells)} | {found:.2f}, {state.num_switches} switches |", flush=True)


if __name__ == "__main__":
    main()
