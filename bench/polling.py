"""What watching costs: generation with the admin API polled 50 times a second, against the same without.

Run: OMP_NUM_THREADS=1 python -m bench.polling [--pairs 24] [--rate 50] [--hidden 512 --tokens 80]

One service in this process, its admin API on a thread as in production; the poller is a process of its own. Each round
generates the same tokens three times, in changing order: not polled; polled; and, as a control, while the same poller
asks the same of another process. What the control costs is two processes more on the machine's cores, not the polling
of the engine's own. Besides the wall time of a run the CPU time of the engine's thread is compared, which the
scheduling of other processes disturbs less.

The model `tiny` is the hardest case: its steps are all interpreter, which the admin API shares. With `--hidden` a
random Llama of that width takes its place, whose matrix products run beside the interpreter, as real models' do.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.engines.embedded import EmbeddedEngine, Sampling
from app.engines.embedded.model import TINY
from app.logs import start_logging
from app.service import listen, make_server
from app.settings import Settings
from app.wiring import Process
from bench.report import environment, median_interval, spread, verdict

GOAL = 1.02
STREAMS = 4
PROMPT_TOKENS = 64
LAYERS = 8
NOBODY, OWN, OTHER = ARMS = (-1, 0, 1)
"""Who is polled: nobody, the service with the engine, or another process."""


def poll(urls: Sequence[str], rate: float, target: Synchronized[int], stop: Event, count: Synchronized[int]) -> None:
    """Ask for the stats at a steady rate, also when answers are slow to come; `target` is whom, negative for nobody."""

    async def ask(http: httpx.AsyncClient) -> None:
        (await http.get("/admin/v1/stats")).raise_for_status()
        with count.get_lock():
            count.value += 1

    async def run() -> None:
        clients = [httpx.AsyncClient(base_url=url, timeout=10) for url in urls]
        asked: set[asyncio.Task[None]] = set()
        due_s = time.monotonic()
        while not stop.is_set():
            due_s += 1 / rate
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            if target.value >= 0:
                task = asyncio.create_task(ask(clients[target.value]))
                asked.add(task)
                task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)

    asyncio.run(run())


@contextmanager
def another_service(folder: Path) -> Iterator[str]:
    """The URL of a service without an engine, in a process of its own."""
    env = os.environ | {"KVFERRY_ENGINE": "none", "KVFERRY_PORT": "0", "KVFERRY_STATE_DIR": str(folder)}
    command = [sys.executable, "-m", "app.cli", "serve"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as other:
        try:
            for line in other.stderr or ():
                if (match := re.search(r"serving on (http://\S+):", line)) is not None:
                    yield match[1]
                    return
            raise SystemExit("the other service did not start")
        finally:
            other.terminate()


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


def save_llama(folder: Path, hidden: int) -> None:
    """A random Llama with a `hidden` size of multiples of 64, without a tokenizer: prompts are token ids."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=0, help="width of a random Llama; 0 takes the model tiny")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    target, stop, polls = context.Value("i", NOBODY), context.Event(), context.Value("i", 0)
    walls: dict[int, list[float]] = {arm: [] for arm in ARMS}
    cpus: dict[int, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder, another_service(Path(folder) / "other") as other_url:
        model = TINY
        if options.hidden:
            model = str(Path(folder) / "model")
            save_llama(Path(model), options.hidden)
        settings = Settings(_env_file=None, model=model, state_dir=str(Path(folder) / "own"), port=0, log_level="error")
        with start_logging(settings) as logs, listen(settings.host, settings.port) as listener:
            process = Process(settings, logs)
            process.start()
            server = make_server(process)
            thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
            thread.start()
            urls = [f"http://127.0.0.1:{listener.getsockname()[1]}", other_url]
            poller = context.Process(target=poll, args=(urls, options.rate, target, stop, polls))
            poller.start()
            try:
                engine = process.engine
                if engine is None:
                    raise SystemExit("set ENGINE=embedded: there is nothing to measure without an engine")
                target.value = OWN
                while polls.value < options.rate and poller.is_alive():
                    timed(engine, options.tokens, 0)
                polls.value = 0
                for number in range(options.pairs):
                    for arm in (*ARMS[number % 3 :], *ARMS[: number % 3]):
                        target.value = arm
                        wall_s, cpu_s = timed(engine, options.tokens, number + 1)
                        walls[arm].append(wall_s)
                        cpus[arm].append(cpu_s)
            finally:
                stop.set()
                poller.join()
                server.should_exit = True
                thread.join()
                process.close()
    polled_s = sum(walls[OWN]) + sum(walls[OTHER])
    print(environment("torch", "transformers", "fastapi", "uvicorn"), f"OMP_NUM_THREADS={torch.get_num_threads()}")
    shape = f"Llama, {LAYERS} layers of {options.hidden}" if options.hidden else TINY
    print(
        f"{shape}: {options.pairs} rounds of {STREAMS} streams x {options.tokens} tokens; "
        f"{polls.value / polled_s:.0f} polls a second while polled; median (min-max)"
    )
    print(f"{'':<18}{'not polled, s':<22}{'polled, s':<22}{'other polled, s':<22}")
    for name, times in (("wall", walls), ("engine thread CPU", cpus)):
        print(f"{name:<18}" + "".join(f"{spread(times[arm]):<22}" for arm in (NOBODY, OWN, OTHER)))
    print(f"\n{'':<18}{'':<28}{'ratio':<9}{'95% interval':<18}goal {GOAL}")
    for name, times in (("wall", walls), ("engine thread CPU", cpus)):
        for what, base in (("polled / not polled", NOBODY), ("polled / other polled", OTHER)):
            ratios = [own / without for own, without in zip(times[OWN], times[base], strict=True)]
            low, high = median_interval(ratios)
            interval = f"{low:.3f} to {high:.3f}"
            print(f"{name:<18}{what:<28}{statistics.median(ratios):<9.3f}{interval:<18}{verdict(ratios, GOAL)}")


if __name__ == "__main__":
    main()
