"""Cost of the shadow caches on the serving path: the same engine with requests recorded, and not.

Run: OMP_NUM_THREADS=1 python -m bench.simulating [--hidden 0 512] [--rounds 24] [--round-s 2]

One embedded engine answers prompts of which half begin as an earlier one, in rounds that alternate in random order:
`off`, `on`, and `off again`, a control that shows what two equal rounds differ by. The caches are those of a pool of
10,000 slots, where a key costs most, and are full before the first round. `--hidden 0` is the built-in model, whose
steps are all interpreter, and so the hardest; other numbers are the hidden size of a random Llama of 8 layers.

Throughput is the wall time of equally many tokens. Scheduling on a shared machine changes it by more than the caches
cost, so that the processor time of the simulating thread, as a share of the process's, stands beside it: where all
cores are busy, it is the throughput that the engine can lose, and with a core to spare the engine loses less.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.keeping import BARE, BLOCK_TOKENS, DEVICE_BLOCKS, PROMPT_TOKENS, STREAMS, Arm, Taken, make_model
from bench.observing import thread_times_s
from bench.report import environment, median_interval, spread, verdict
from kvferry.app.what_if import Present, WhatIf
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import RequestBlocks
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.waiting import wait_until

GOAL = 0.99
MOST_SHARE = 1 - GOAL
SHADOW_SLOTS = 10_000
FILLING_KEYS, FILLING_BATCH_KEYS = 90_000, 20_000
"""Keys that fill the largest cache before the first round, in batches that the queue has space for."""
OFF, ON, AGAIN = "off", "on", "off again"
SEED = 17


@dataclass(frozen=True, slots=True)
class Round:
    """Times of one round; those of the process and the simulating thread last until the queue is empty."""

    taken: Taken
    process_cpu_s: float
    shadow_cpu_s: float


class Bench:
    """An engine, and shadow caches of its requests."""

    def __init__(self, model: str, memory: Path, folder: Path, closers: ExitStack) -> None:
        present = Present(SHADOW_SLOTS, 1, "lru", StoreMode.EAGER)
        self._what_if = what_if = WhatIf(lambda: present, DEVICE_BLOCKS, BLOCK_TOKENS, 0, True)
        self._arm = Arm(model, BARE, memory, folder, closers, sink=what_if.receive)
        what_if.start()
        closers.callback(what_if.close)
        (self._thread,) = (one for one in threading.enumerate() if one.name == "kvferry-what-if")
        self._rng = random.Random(SEED)
        self._earlier: deque[list[int]] = deque(maxlen=DEVICE_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS)

    def fill(self) -> float:
        """Fill all caches and the pool, and return the seconds that a prompt takes."""
        for start in range(0, FILLING_KEYS, FILLING_BATCH_KEYS):
            for _ in range(start, start + FILLING_BATCH_KEYS, 100):
                keys = [self._rng.randbytes(32) + b"\0" for _ in range(100)]
                self._what_if.receive(RequestBlocks(time.time(), keys, 100 * BLOCK_TOKENS + 1, 1, 100, 0))
            self._wait()
        prompts = self.prompts(8 * STREAMS)
        return [self.run(self.prompts(len(prompts)), is_on=True) for _ in range(3)][-1].taken.wall_s / len(prompts)

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts; each second one begins as an earlier one."""
        made = []
        for number in range(count):
            first = self._rng.choice(self._earlier)[: PROMPT_TOKENS // 2] if number % 2 and self._earlier else []
            made.append(first + [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS - len(first))])
            self._earlier.append(made[-1])
        return made

    def run(self, prompts: Sequence[Sequence[int]], *, is_on: bool) -> Round:
        """Answer the prompts."""
        readers = self._arm.scheduler.block_readers
        if is_on:
            readers.add(self)
        process_s, shadow_s = time.process_time(), self._shadow_cpu_s()
        taken = self._arm.timed(prompts)
        self._wait()
        found = Round(taken, time.process_time() - process_s, self._shadow_cpu_s() - shadow_s)
        readers.discard(self)
        return found

    def num_recorded_tokens(self) -> int:
        """Return the prompt tokens that were simulated."""
        return self._what_if.answer().prompt_tokens

    def _wait(self) -> None:
        wait_until(lambda: not self._what_if.num_queued_keys, "all requests simulated")

    def _shadow_cpu_s(self) -> float:
        return thread_times_s(os.getpid())[str(self._thread.native_id)]


def measure(hidden: int, rounds: int, round_s: float) -> None:
    """Print a table for a model."""
    with ExitStack() as closers:
        memory = Path(closers.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        folder = Path(closers.enter_context(tempfile.TemporaryDirectory()))
        model, title = make_model(hidden, folder)
        bench = Bench(model, memory, folder, closers)
        num_prompts = max(STREAMS, round(round_s / bench.fill() / STREAMS) * STREAMS)
        num_before = bench.num_recorded_tokens()
        found: dict[str, list[Round]] = {OFF: [], ON: [], AGAIN: []}
        order, rng = list(found), random.Random(SEED)
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                found[name].append(bench.run(bench.prompts(num_prompts), is_on=name == ON))
        num_recorded = bench.num_recorded_tokens() - num_before
    if num_recorded != rounds * num_prompts * PROMPT_TOKENS:
        raise SystemExit(f"{num_recorded} prompt tokens were simulated")
    print(
        f"\n{title}: {rounds} rounds of {num_prompts} prompts of "
        f"{PROMPT_TOKENS} tokens, {STREAMS} at a time; medians (minimum to maximum)\n"
    )
    _show(found)


def _show(found: dict[str, list[Round]]) -> None:
    print(f"| measure | off | on | on to off | 95% interval | off again to off | 95% interval | goal {GOAL} |")
    print("| --- | --- | --- | ---: | --- | ---: | --- | --- |")
    columns: tuple[tuple[str, Callable[[Round], float]], ...] = (
        ("throughput, 1/s of wall time", lambda one: 1 / one.taken.wall_s),
        ("of the process's CPU time", lambda one: 1 / one.process_cpu_s),
        ("of the engine thread's CPU time", lambda one: 1 / one.taken.engine_cpu_s),
    )
    for name, of in columns:
        cells = [name, *(spread(list(map(of, found[arm]))) for arm in (OFF, ON))]
        for arm in (ON, AGAIN):
            ratios = [of(one) / of(off) for one, off in zip(found[arm], found[OFF], strict=True)]
            low, high = median_interval(ratios)
            cells += [spread(ratios), f"{low:.3f} to {high:.3f}"]
            if arm == ON:
                judged = verdict(ratios, GOAL, at_most=False)
        print(f"| {' | '.join(cells)} | {judged} |")
    shares = [one.shadow_cpu_s / one.process_cpu_s for one in found[ON]]
    low, high = median_interval(shares)
    print(
        f"\nsimulating thread: {spread([100 * one for one in shares], 2)}% of the process's CPU time, 95% interval "
        f"{100 * low:.2f} to {100 * high:.2f}; at most {MOST_SHARE:.0%}: {verdict(shares, MOST_SHARE)}",
        flush=True,
    )


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[0, 512])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--round-s", type=float, default=2.0)
    options = parser.parse_args()
    print(environment("torch", "numpy", "numba"))
    for hidden in options.hidden:
        measure(hidden, options.rounds, options.round_s)


if __name__ == "__main__":
    main()
