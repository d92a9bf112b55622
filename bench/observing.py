"""Cost of being observed: a scrape of `/metrics` every 5 s, and the dashboard's first page, beside the same traffic.

Run: python -m bench.observing [--rounds 12] [--requests 24] [--speed 10]

`kvferry serve` with the built-in model answers the same number of requests in each round, one after another, while
nothing, a scraper, an open page or both observe it, in an order that changes. The observers are a process of their own
that reads answers without parsing them. They work `--speed` times as often as in reality, so that their cost stands out
from the noise, and the table divides by it. The page is the stream of stats at 1 Hz, the samples since the last every
2 s, and `/readyz` every 3 s, as `live.js` and `overview.js` ask for them.

Observers are answered by other threads than the engine's, which share one interpreter with it. What these threads add
is what the engine can lose, and hardly depends on the machine: it counts for the goal of less than 0.5% of one core,
page and scrapes together. The engine thread's own CPU time and the wall time confirm it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from bench.report import environment, median_interval, spread, thread_times_s, verdict
from tests.harness.service_process import Served, serving

GOAL_PERCENT = 0.5
SCRAPE_S = 5.0
STREAM_S = 1.0
HISTORY_S = 2.0
HEALTH_S = 3.0
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 16
SEED = 7
NOTHING, SCRAPE, PAGE, BOTH = "nothing", "scrape every 5 s", "page at 1 Hz", "both"
ARMS = (NOTHING, SCRAPE, PAGE, BOTH)


@dataclass(frozen=True)
class Round:
    """What one round took: wall time, CPU time of the busiest thread, which is the engine's, and of all others."""

    wall_s: float
    engine_s: float
    others_s: float


async def _repeat(period_s: float, ask: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        await ask()  # type: ignore[misc]  # a coroutine
        due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


async def _observe(url: str, arm: str, speed: float, is_stopped: Event) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:

        def get(path: str) -> Callable[[], object]:
            return lambda: http.get(path)

        async def follow() -> None:
            async with http.stream("GET", f"/admin/v1/stats/stream?interval_s={STREAM_S / speed}") as answer:
                async for _ in answer.aiter_raw():
                    pass

        work = []
        if arm in (SCRAPE, BOTH):
            work.append(_repeat(SCRAPE_S / speed, get("/metrics")))
        if arm in (PAGE, BOTH):
            # The rows that the page lacks after 2 s, and two more.
            history = f"/admin/v1/stats/history?window_s={HISTORY_S + 2:.0f}"
            work += [follow(), _repeat(HISTORY_S / speed, get(history)), _repeat(HEALTH_S / speed, get("/readyz"))]
        tasks = [asyncio.create_task(one) for one in work]
        while not is_stopped.is_set():
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def observing(url: str, arm: str, speed: float) -> Iterator[None]:
    """Observe a service from another process while the body runs."""
    if arm == NOTHING:
        yield
        return
    context = multiprocessing.get_context("fork")
    is_stopped = context.Event()
    process = context.Process(target=lambda: asyncio.run(_observe(url, arm, speed, is_stopped)), daemon=True)
    process.start()
    try:
        yield
    finally:
        is_stopped.set()
        process.join()
    if process.exitcode:
        raise RuntimeError(f"the observer of {arm} ended with {process.exitcode}")


def answer(served: Served, pid: int, num_requests: int, rng: random.Random) -> Round:
    """Send prompts that have nothing in common, one after another."""
    started_s, before_s = time.perf_counter(), thread_times_s(pid)
    for _ in range(num_requests):
        prompt = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
        served.complete(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    wall_s = time.perf_counter() - started_s
    spent_s = sorted(spent - before_s.get(thread, 0.0) for thread, spent in thread_times_s(pid).items())
    return Round(wall_s, spent_s[-1], sum(spent_s[:-1]))


def measure(rounds: int, num_requests: int, speed: float) -> dict[str, list[Round]]:
    """Return the rounds of each arm."""
    taken: dict[str, list[Round]] = {arm: [] for arm in ARMS}
    rng = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "state", pool_bytes="64MiB", max_waiting=64) as served,
    ):
        pid = served.process.pid
        answer(served, pid, num_requests, rng)
        for number in range(rounds):
            for arm in rng.sample(ARMS, len(ARMS)):
                with observing(served.url, arm, speed):
                    taken[arm].append(answer(served, pid, num_requests, rng))
            print(f"round {number + 1} of {rounds}", flush=True)
    return taken


def per_speed(with_s: float, without_s: float, speed: float) -> float:
    """Return the ratio that observers at their real rates would have."""
    return 1 + (with_s / without_s - 1) / speed


def table(taken: dict[str, list[Round]], speed: float) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [
        "| observed by | CPU of other threads, % of a core | 95% interval | goal 0.5% "
        "| engine thread's CPU, ratio | time per request, ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    bare = taken[NOTHING]
    for arm in ARMS[1:]:
        pairs = list(zip(taken[arm], bare, strict=True))
        added = [(one.others_s - base.others_s) / one.wall_s / speed * 100 for one, base in pairs]
        engine = [per_speed(one.engine_s, base.engine_s, speed) for one, base in pairs]
        wall = [per_speed(one.wall_s, base.wall_s, speed) for one, base in pairs]
        low, high = median_interval(added)
        met = verdict(added, GOAL_PERCENT) if arm == BOTH else ""
        lines.append(
            f"| {arm} | {spread(added)} | {low:.3f}-{high:.3f} | {met} | {spread(engine, 4)} | {spread(wall, 4)} |"
        )
    return lines


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=24, help="per round and observer")
    parser.add_argument("--speed", type=float, default=10.0, help="how many times as often as in reality; at most 10")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    taken = measure(asked.rounds, asked.requests, asked.speed)
    per_round_s = statistics.median(one.wall_s for one in taken[NOTHING])
    print(f"\n{environment('torch', 'uvicorn', 'prometheus-client')}")
    print(
        f"{asked.rounds} rounds of {asked.requests} requests of {PROMPT_TOKENS} tokens, {per_round_s:.1f} s each, "
        f"observed at {asked.speed:g} times the rate and divided by it\n"
    )
    print("\n".join(table(taken, asked.speed)))


if __name__ == "__main__":
    main()
