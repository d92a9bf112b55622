"""What watching costs: generation with the admin API polled 50 times a second, against the same without.

Run: OMP_NUM_THREADS=1 python -m bench.polling [--pairs 150] [--rate 50] [--hidden 512] [--path /metrics]

One service in this process, its admin API on a thread as in production; the poller is a process of its own. While
several streams decode, short windows take turns: nobody is polled; we are; and, as a control, another process is, by
the same poller at the same rate. What the control costs is two processes more on the machine's cores, not the polling
of the engine's own. Each round, of two windows of every arm in an order drawn and backwards, gives one pair of times a
step. Besides the wall time the CPU time of the engine's thread is compared, which the scheduling of other processes
disturbs less.

The model `tiny` is the hardest case: its steps are all interpreter, which the admin API shares. With `--hidden` a
random Llama of that width takes its place, whose matrix products run beside the interpreter, as real models' do.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.engines.embedded import EmbeddedEngine, Sampling
from app.engines.embedded.model import TINY
from app.logs import start_logging
from app.serving import listen, make_server, url_of
from app.settings import Settings
from app.wiring import Process
from bench.poller import ARMS, NOBODY, OWN, STATS, another_service, polling, show_polled
from bench.report import environment, median_interval
from bench.windows import Windows

GOAL = 1.02
STREAMS = 4
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 1500
LAYERS = 8
SETTLE_S = 0.04
SEED = 7


class Readings(NamedTuple):
    """Counters of this process; of a window, what they grew by."""

    wall_s: float
    steps: float
    engine_cpu_s: float
    engine_waits: float
    server_cpu_s: float
    server_waits: float
    polls: float

    @property
    def wall_of_step_s(self) -> float:
        return self.wall_s / self.steps

    @property
    def cpu_of_step_s(self) -> float:
        return self.engine_cpu_s / self.steps


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


async def generate(engine: EmbeddedEngine, seed: int, on_step: Callable[[], bool]) -> None:
    """Decode on several streams at once, until they end or `on_step`, which every step calls, wants no more."""
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    def prompt(index: int) -> list[int]:
        return [(seed * 31 + index * 17 + i * 7) % 240 + 3 for i in range(PROMPT_TOKENS)]

    streams = [engine.submit(prompt(index), sampling) for index in range(STREAMS)]

    async def read(index: int) -> None:
        async for _ in streams[index]:
            if index == 0 and not on_step():
                for stream in streams:
                    stream.cancel()

    await asyncio.gather(*map(read, range(STREAMS)))


def run(engine: EmbeddedEngine, windows: Windows, num_rounds: int) -> None:
    """Generate until so many rounds are complete."""
    steps = 0

    def on_step() -> bool:
        nonlocal steps
        steps += 1
        # The first steps compute the prompts.
        if steps == STREAMS:
            windows.restart()
        elif steps > STREAMS:
            windows.step(steps)
        return len(windows.rounds) < num_rounds

    generations = 0
    while len(windows.rounds) < num_rounds:
        steps = 0
        generations += 1
        asyncio.run(generate(engine, generations, on_step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--window", type=float, default=0.25, metavar="SECONDS", help="how long an arm has its turn")
    parser.add_argument("--hidden", type=int, default=0, help="width of a random Llama; 0 takes the model tiny")
    parser.add_argument("--path", default=STATS, help="what is polled")
    options = parser.parse_args()
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
            try:
                with polling([url + options.path for url in (url_of(listener), other_url)], options.rate) as poller:
                    if process.engine is None:
                        raise SystemExit("set ENGINE=embedded: there is nothing to measure without an engine")
                    read = _reader(process.engine, thread, lambda: poller.polls)
                    windows = Windows(ARMS, options.window, SETTLE_S, poller.ask, read, SEED)
                    # The first round warms up.
                    run(process.engine, windows, options.pairs + 1)
            finally:
                server.should_exit = True
                thread.join()
                process.close()
    shape = f"Llama, {LAYERS} layers of {options.hidden}" if options.hidden else TINY
    print(environment("torch", "transformers", "fastapi", "uvicorn"), f"OMP_NUM_THREADS={torch.get_num_threads()}")
    print(
        f"{shape}, {STREAMS} streams: {options.pairs} rounds of twice {options.window} s for each of nobody polled, "
        f"{options.path} polled, and another process polled"
    )
    report([{arm: Readings(*taken) for arm, taken in one.items()} for one in windows.rounds[1:]])


def _reader(engine: EmbeddedEngine, server: threading.Thread, polls: Callable[[], int]) -> Callable[[int], Readings]:
    """What reads the counters at the end of a step."""
    found = next(thread for thread in threading.enumerate() if thread.name == "kvferry-engine")
    server_clock = time.pthread_getcpuclockid(server.ident or 0)

    def read(steps: int) -> Readings:
        return Readings(
            wall_s=time.perf_counter(),
            steps=steps,
            engine_cpu_s=engine.thread_cpu_s,
            engine_waits=_waits_of(found),
            server_cpu_s=time.clock_gettime(server_clock),
            server_waits=_waits_of(server),
            polls=polls(),
        )

    return read


def _waits_of(thread: threading.Thread) -> int:
    """How often a thread of this process has gone to sleep."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def report(rounds: Sequence[dict[int, Readings]]) -> None:
    """A table of ratios, and what one poll takes from whom."""
    show_polled(
        {
            "wall": [{arm: one.wall_of_step_s for arm, one in taken.items()} for taken in rounds],
            "engine thread CPU": [{arm: one.cpu_of_step_s for arm, one in taken.items()} for taken in rounds],
        },
        GOAL,
    )
    server_ms, server_waits, wall_ms, cpu_ms, waits = [], [], [], [], []
    for one in rounds:
        own, none = one[OWN], one[NOBODY]
        if not own.polls:
            # Others had the machine all the while.
            continue
        per_poll = own.steps / own.polls
        server_ms.append(1e3 * (own.server_cpu_s - none.server_cpu_s / none.wall_s * own.wall_s) / own.polls)
        server_waits.append((own.server_waits - none.server_waits / none.wall_s * own.wall_s) / own.polls)
        wall_ms.append(1e3 * (own.wall_of_step_s - none.wall_of_step_s) * per_poll)
        cpu_ms.append(1e3 * (own.cpu_of_step_s - none.cpu_of_step_s) * per_poll)
        waits.append((own.engine_waits / own.steps - none.engine_waits / none.steps) * per_poll)
    rate = sum(one[OWN].polls for one in rounds) / sum(one[OWN].wall_s for one in rounds)
    print(f"\nA poll, at {rate:.0f} a second, median and 95% interval:")
    for values, what in (
        (server_ms, "ms of CPU time of the server's thread"),
        (server_waits, "times that the server's thread sleeps"),
        (wall_ms, "ms later that the engine is done"),
        (cpu_ms, "ms of CPU time of the engine's thread"),
        (waits, "times more that the engine's thread sleeps"),
    ):
        low, high = median_interval(values)
        print(f"{statistics.median(values):8.3f} ({low:.3f} to {high:.3f}) {what}")


if __name__ == "__main__":
    main()
