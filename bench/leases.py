"""Sessions with pauses beside a flood of prompts that come once: what leases keep, and what they cost others.

Run: python -m bench.leases [--trace FOLDER|sessions] [--retain 300] [--pool 0.5] [--fraction 0.5] [--rounds 2]

The replay is that of `bench.eviction`. Of each session's requests those count whose previous request has an accepted
lease that has not ended: percent of their prompt tokens that were not computed. The flood fills the pool `--rounds`
times while the mean lease lasts. At last, sessions that have ended: what conversations after them find, with leases
that are over and without any.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from bench.report import environment
from kvferry.app.replay.core_replay import Replay, ReplayedRequest, Setup, Tokens, count_blocks, replayed
from kvferry.app.replay.trace import TraceRequest, read_trace, sample_trace
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.leases import LeaseOutcome
from kvferry.core.rules import Rule, RuleMatch

FLOOD_BLOCKS = 40
SESSIONS, TURNS, BEGIN_BLOCKS, TURN_BLOCKS = 24, 8, (20, 60), (2, 8)
PAUSE_MS, START_MS = (10_000, 120_000), 400_000
BLOCK_TOKENS = 64
_COLUMNS = (
    *("after an accepted lease", "alone", "flood", "flood, leases"),
    *("all: alone", "all: flood", "all: flood, leases", "later others: no leases", "later others: leases over"),
)


@dataclass(slots=True)
class Found:
    """What a replay has found for the sessions."""

    all: Tokens
    """For all requests of sessions but the first of each."""
    by_request: dict[int, Tokens]
    """For each of these, by its number."""
    accepted: set[int]
    """Those of them whose previous request has an accepted lease that has not ended."""

    def hit_percent(self, numbers: set[int]) -> float:
        """Return the percent that these requests found."""
        total = Tokens()
        for number in numbers:
            add(total, self.by_request[number])
        return total.hit_percent if total.prompt else 0.0


def add(total: Tokens, more: Tokens) -> None:
    """Add up tokens."""
    total.prompt += more.prompt
    total.device += more.device
    total.pool += more.pool


def session_trace(seed: int, num_sessions: int = SESSIONS) -> list[TraceRequest]:
    """Return the requests of generated sessions, whose prompts go on after pauses."""
    rng, new_ids = random.Random(seed), count()
    requests = []
    for number in range(num_sessions):
        hash_ids = list(islice(new_ids, rng.randint(*BEGIN_BLOCKS)))
        time_ms = rng.uniform(0, START_MS)
        for _ in range(TURNS):
            length = len(hash_ids) * BLOCK_TOKENS
            requests.append(TraceRequest(time_ms, length, 100, tuple(hash_ids), BLOCK_TOKENS, f"s{number}"))
            hash_ids += islice(new_ids, rng.randint(*TURN_BLOCKS))
            time_ms += rng.uniform(*PAUSE_MS)
    return sorted(requests, key=lambda one: one.timestamp)


def flood(until_s: float, interval_s: float, block_tokens: int) -> Iterator[tuple[float, ReplayedRequest]]:
    """Return prompts that share nothing, at equal intervals."""
    for number in range(int(until_s / interval_s)):
        hashes = [b"flood" + (number * FLOOD_BLOCKS + i).to_bytes(8, "little") for i in range(FLOOD_BLOCKS)]
        tokens = FLOOD_BLOCKS * block_tokens
        yield number * interval_s, ReplayedRequest(f"flood{number}", tokens, tokens + 1, hashes)


def make_replay(setup: Setup, retain_s: float, fraction: float) -> Replay:
    """Return a replay whose sessions have leases."""
    found = Replay(setup)
    found.offload.manager.operator_pins.max_fraction = fraction
    found.offload.policies.put_rule(Rule("sessions", 0, RuleMatch(request="r*"), {"retain_s": retain_s}))
    return found


def run_sessions(
    trace: Sequence[TraceRequest], setup: Setup, retain_s: float, fraction: float, flood_interval_s: float | None
) -> Found:
    """Replay sessions, and a flood beside them if it has an interval."""
    one = make_replay(setup, retain_s, fraction)
    timed = list(replayed(trace))
    if flood_interval_s is not None:
        timed += flood(timed[-1][0], flood_interval_s, setup.block_tokens)
    found = Found(Tokens(), {}, set())
    ends_s: dict[str, float] = {}
    for now_s, request in sorted(timed, key=lambda each: each[0]):
        before = replace(one.tokens)
        one.run([(now_s, request)])
        if request.session is None:
            continue
        after, number = one.tokens, int(request.request_id[1:])
        own = Tokens(after.prompt - before.prompt, after.device - before.device, after.pool - before.pool)
        if request.session in ends_s:
            found.by_request[number] = own
            add(found.all, own)
            if now_s < ends_s[request.session]:
                found.accepted.add(number)
        view = one.offload.requests.find(request.request_id, now_s)
        lease = None if view is None else view.lease
        is_accepted = lease is not None and lease.outcome is LeaseOutcome.ACCEPTED
        ends_s[request.session] = lease.until_s or 0.0 if lease is not None and is_accepted else 0.0
    return found


def run_after(trace: Sequence[TraceRequest], setup: Setup, retain_s: float, fraction: float) -> float:
    """Replay sessions that do not return, and return what conversations find that begin after their leases."""
    one = make_replay(setup, retain_s, fraction)
    one.run(replayed(trace))
    start_s = trace[-1].timestamp / 1000 + max(retain_s, 1.0) + 1.0
    others = [replace(each, block_size=setup.block_tokens, input_length=len(each.hash_ids) * setup.block_tokens)
              for each in sample_trace(1)]  # fmt: skip
    one.tokens = Tokens()
    for now_s, request in replayed(others):
        hashes = [b"other" + each for each in request.block_hashes]
        one.run([(start_s + now_s, replace(request, request_id=f"other {request.request_id}", block_hashes=hashes))])
    return one.tokens.hit_percent


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="sessions", help="a folder of sessions, or sessions, which are generated")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--retain", type=float, default=300.0)
    parser.add_argument("--pool", type=float, default=0.5, help="share of the trace's different full blocks")
    parser.add_argument("--device", type=float, default=0.05)
    parser.add_argument("--fraction", type=float, default=0.5, help="MAX_PINNED_FRACTION")
    parser.add_argument("--rounds", type=float, default=2.0, help="how often the flood fills the pool in a lease")
    options = parser.parse_args()
    path = None if options.trace == "sessions" else Path(options.trace)
    trace = session_trace(options.seed) if path is None else read_trace(path, options.requests)
    num_blocks = count_blocks(trace)
    longest = max(len(one.hash_ids) + one.output_length // one.block_size + 2 for one in trace)
    device, pool = max(round(options.device * num_blocks), longest, 64), round(options.pool * num_blocks)
    interval_s = options.retain * FLOOD_BLOCKS / (options.rounds * pool)
    print(environment("numpy", "numba"))
    sizes = f"{num_blocks:,} blocks, device {device:,}, pool {pool:,}"
    print(f"{len(trace):,} requests, {sizes}, flood every {interval_s:.2f} s\n")
    print(f"| mode | {' | '.join(_COLUMNS)} |")
    print("| --- |" + " ---: |" * len(_COLUMNS))
    for mode in StoreMode:
        setup = Setup(device, pool, "lru", mode, min(256, device // 4), trace[0].block_size)
        quiet, flooded, leased = (
            run_sessions(trace, setup, retain_s, options.fraction, every)
            for retain_s, every in ((0.0, None), (0.0, interval_s), (options.retain, interval_s))
        )
        chosen = leased.accepted
        cells = [f"{len(chosen):,} of {len(leased.by_request):,}"]
        cells += [f"{one.hit_percent(chosen):.2f}" for one in (quiet, flooded, leased)]
        cells += [f"{one.all.hit_percent:.2f}" for one in (quiet, flooded, leased)]
        cells += [f"{run_after(trace, setup, retain_s, options.fraction):.2f}" for retain_s in (0.0, options.retain)]
        print(f"| {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
