"""What watching costs: generation with the admin API polled 50 times a second, against the same without.

Run: python -m bench.polling [--pairs 24] [--rate 50]

One service in this process, its admin API on a thread as in production; the poller is a process of its own. Each pair
generates the same tokens twice, in alternating order, once polled and once not. Besides the wall time of a run the CPU
time of the engine's thread is compared, which the scheduling of other processes disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from app.engines.embedded import EmbeddedEngine, Sampling
from app.logs import start_logging
from app.service import listen, make_server
from app.settings import Settings
from app.wiring import Process
from bench.report import environment, median_interval, spread, verdict

GOAL = 1.02
STREAMS = 4
PROMPT_TOKENS = 64


def poll(url: str, rate: float, polling: Event, stop: Event, count: Synchronized[int]) -> None:
    """Ask for the stats at a steady rate while `polling` is set, also when answers are slow to come."""

    async def ask(http: httpx.AsyncClient) -> None:
        (await http.get("/admin/v1/stats")).raise_for_status()
        with count.get_lock():
            count.value += 1

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            asked: set[asyncio.Task[None]] = set()
            while not stop.is_set():
                await asyncio.sleep(1 / rate)
                if polling.is_set():
                    task = asyncio.create_task(ask(http))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
            await asyncio.gather(*asked)

    asyncio.run(run())


async def generate(engine: EmbeddedEngine, num_tokens: int, seed: int) -> None:
    """Decode on several streams at once."""

    async def one(index: int) -> None:
        prompt = [(seed * 31 + index * 17 + i * 7) % 240 + 3 for i in range(PROMPT_TOKENS)]
        stream = engine.submit(prompt, Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
        async for _ in stream:
            pass

    await asyncio.gather(*(one(index) for index in range(STREAMS)))


def timed(engine: EmbeddedEngine, num_tokens: int, seed: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds of the engine's thread."""
    cpu_s, started_s = engine.thread_cpu_s, time.perf_counter()
    asyncio.run(generate(engine, num_tokens, seed))
    return time.perf_counter() - started_s, engine.thread_cpu_s - cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    polling, stop, polls = context.Event(), context.Event(), context.Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(_env_file=None, state_dir=str(Path(folder)), port=0, log_level="error")
        with start_logging(settings) as logs, listen(settings) as listener:
            process = Process(settings, logs)
            process.start()
            server = make_server(process)
            thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            poller = context.Process(target=poll, args=(url, options.rate, polling, stop, polls))
            poller.start()
            walls: dict[bool, list[float]] = {True: [], False: []}
            cpus: dict[bool, list[float]] = {True: [], False: []}
            polled_s = 0.0
            try:
                engine = process.engine
                if engine is None:
                    raise SystemExit("set ENGINE=embedded: there is nothing to measure without an engine")
                timed(engine, options.tokens, 0)
                for pair in range(options.pairs):
                    for polled in (True, False) if pair % 2 else (False, True):
                        (polling.set if polled else polling.clear)()
                        wall_s, cpu_s = timed(engine, options.tokens, pair + 1)
                        walls[polled].append(wall_s)
                        cpus[polled].append(cpu_s)
                        polled_s += wall_s if polled else 0.0
            finally:
                stop.set()
                polling.set()
                poller.join()
                server.should_exit = True
                thread.join()
                process.close()
    print(environment("torch", "transformers", "fastapi", "uvicorn"))
    print(
        f"{options.pairs} pairs of {STREAMS} streams x {options.tokens} tokens; "
        f"{polls.value / polled_s:.0f} polls a second while polled; median (min-max)"
    )
    print(f"{'':<18}{'not polled, s':<24}{'polled, s':<24}{'ratio':<9}{'95% interval':<18}goal {GOAL}")
    for name, times in (("wall", walls), ("engine thread CPU", cpus)):
        ratios = [polled / alone for polled, alone in zip(times[True], times[False], strict=True)]
        low, high = median_interval(ratios)
        print(
            f"{name:<18}{spread(times[False]):<24}{spread(times[True]):<24}{statistics.median(ratios):<9.3f}"
            f"{f'{low:.3f} to {high:.3f}':<18}{verdict(ratios, GOAL)}"
        )


if __name__ == "__main__":
    main()
