"""Cost of the shadow caches on the serving path: the time that an engine loses to them.

Run: OMP_NUM_THREADS=1 python -m bench.simulating [--hidden 0 512] [--seconds 240]

One embedded engine answers prompts of which half begin as an earlier one, 8 at a time without a pause, while shadow
caches of a pool of 10,000 slots, where a key costs most, simulate them. The caches are full before. `--hidden 0` is the
built-in model, whose steps are all interpreter, and so the hardest; other numbers are the hidden size of a random Llama
of 8 layers. `taskset -c 0` before it shows an engine without a processor to spare.

Equal rounds with and without the caches differ by more than these cost, since the machine's speed changes. But the
caches cost in two places only. Twice a second their thread replays what has ended: the progress of the engine's steps
from then on is compared with that a quarter of a second before, in which the thread sleeps. Progress is time beyond the
mean of steps with as many requests, running and new. And the engine's thread lists the blocks of a request that ends:
those of a random half are compared with the others. Both together, as shares of the time, are what throughput loses.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.keeping import (
    BARE,
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    STREAMS,
    Arm,
    make_model,
)
from bench.observing import thread_times_s
from bench.report import environment
from kvferry.app.engines.embedded import Sampling
from kvferry.app.what_if import Present, WhatIf
from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.pool.events import RequestBlocks
from kvferry.core.transfers import StepPlan
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.waiting import wait_until

GOAL = 0.99
SHADOW_SLOTS = 10_000
FILLING_KEYS, FILLING_BATCH_KEYS = 90_000, 20_000
"""Keys that fill the largest cache before, in batches that the queue has space for."""
STRETCH_S = 0.025
"""Time from the start of a replay in which it may cost something: several times what it takes."""
BEFORE_S, BEFORE_AGAIN_S = 0.25, 0.35
"""How long before a replay the stretches begin that it is compared with: the thread polls twice a second."""
TRIMMED = 0.1
WARM_S = 3.0
SEED = 17


class Mean(NamedTuple):
    """A mean without a tenth at each end, which other processes of the machine make, and half of its 95% interval."""

    value: float
    error: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Mean:
        low, high = np.quantile(values, (TRIMMED, 1 - TRIMMED))
        middle, error = values[(low <= values) & (values <= high)], float(values.clip(low, high).std(ddof=1))
        return cls(float(middle.mean()), 1.96 * error / (1 - 2 * TRIMMED) / len(values) ** 0.5)

    def text(self, scale: float, digits: int) -> str:
        return f"{scale * self.value:.{digits}f} ± {scale * self.error:.{digits}f}"


class Bench:
    """An engine that is never idle, and shadow caches of its requests."""

    def __init__(self, model: str, memory: Path, folder: Path, closers: ExitStack) -> None:
        self.steps: list[tuple[float, int]] = []
        """Start of each step, and a number for how many requests it computes, and how many of them it begins with."""
        self.replays: list[float] = []
        """Start of each batch that the thread replays."""
        self.ends: tuple[list[float], list[float]] = [], []
        """Times that ends of requests take, of those that are not simulated, and those that are."""
        self._records_half = False
        self._running: set[str] = set()
        self._what_if = what_if = WhatIf(self._begin_replay, DEVICE_BLOCKS, BLOCK_TOKENS, 0, True)
        self._arm = Arm(model, BARE, memory, folder, closers, sink=what_if.receive)
        self._scheduler = scheduler = self._arm.scheduler
        self._plan_step, self._on_finished = scheduler.plan_step, scheduler.on_request_finished
        scheduler.plan_step = self._timed_step  # type: ignore[method-assign]
        scheduler.on_request_finished = self._timed_end  # type: ignore[method-assign]
        what_if.start()
        closers.callback(what_if.close)
        (self._thread,) = (one for one in threading.enumerate() if one.name == "kvferry-what-if")
        self._rng = random.Random(SEED)
        self._coin = random.Random(SEED)
        self._earlier: deque[list[int]] = deque(maxlen=DEVICE_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS)
        self._num_prompts = 0

    def fill(self) -> None:
        """Fill all caches and the pool."""
        for start in range(0, FILLING_KEYS, FILLING_BATCH_KEYS):
            for _ in range(start, start + FILLING_BATCH_KEYS, 100):
                keys = [self._rng.randbytes(32) + b"\0" for _ in range(100)]
                self._what_if.receive(RequestBlocks(time.time(), keys, 100 * BLOCK_TOKENS + 1, 1, 100, 0))
            wait_until(lambda: not self._what_if.num_queued_keys, "all requests simulated")
        self.serve(WARM_S)

    def serve(self, seconds: float, *, records_half: bool = False) -> None:
        """Answer prompts for a time, and record it; all requests are simulated, or a random half."""
        for times in (self.steps, self.replays, *self.ends):
            times.clear()
        self._records_half, ends_s = records_half, time.monotonic() + seconds
        sampling = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

        async def stream() -> None:
            while time.monotonic() < ends_s:
                async for _ in self._arm.engine.submit(self._prompt(), sampling):
                    pass

        async def streams() -> None:
            await asyncio.gather(*(stream() for _ in range(STREAMS)))

        asyncio.run(streams())

    def shadow_cpu_s(self) -> float:
        """Return the processor time of the simulating thread."""
        return thread_times_s(os.getpid())[str(self._thread.native_id)]

    def _prompt(self) -> list[int]:
        """Return a prompt; each second one begins as an earlier one."""
        self._num_prompts += 1
        first = self._rng.choice(self._earlier)[: PROMPT_TOKENS // 2] if self._num_prompts % 2 and self._earlier else []
        prompt = first + [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS - len(first))]
        self._earlier.append(prompt)
        return prompt

    def _begin_replay(self) -> Present:
        self.replays.append(time.perf_counter())
        return Present(SHADOW_SLOTS, 1, "lru", StoreMode.EAGER)

    def _timed_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        before, self._running = self._running, {one.request_id for one in progress}
        kind = len(progress) * (STREAMS + 1) + len(self._running - before)
        self.steps.append((time.perf_counter(), kind))
        return self._plan_step(progress, now_s)

    def _timed_end(self, request_id: str, now_s: float) -> None:
        readers, is_recorded = self._scheduler.block_readers, not self._records_half or self._coin.random() < 0.5
        readers.add(self) if is_recorded else readers.discard(self)
        began_s = time.perf_counter()
        self._on_finished(request_id, now_s)
        self.ends[is_recorded].append(time.perf_counter() - began_s)


def lost_s(steps: Sequence[tuple[float, int]], replays: Sequence[float]) -> tuple[Mean, Mean, float]:
    """Return what the engine loses to a replay, the same between two stretches without one, and the interval."""
    starts_s, kinds = np.array([one[0] for one in steps]), np.array([one[1] for one in steps[:-1]])
    taken_s = np.diff(starts_s)
    means_s = np.bincount(kinds, taken_s) / np.maximum(np.bincount(kinds), 1)
    behind_s = np.concatenate(([0.0], np.cumsum(taken_s - means_s[kinds])))
    begun_s = np.array(replays)
    # Only the first batch of a replay, and none that the first or the last steps contain.
    begun_s = begun_s[np.diff(begun_s, prepend=-np.inf) > BEFORE_AGAIN_S]
    begun_s = begun_s[(begun_s > starts_s[0] + BEFORE_AGAIN_S) & (begun_s < starts_s[-1] - STRETCH_S)]

    def behind(from_s: NDArray[np.float64]) -> NDArray[np.float64]:
        ends: NDArray[np.float64] = np.interp(from_s + STRETCH_S, starts_s, behind_s)
        return ends - np.interp(from_s, starts_s, behind_s)

    before, again = behind(begun_s - BEFORE_S), behind(begun_s - BEFORE_AGAIN_S)
    return Mean.of(behind(begun_s) - before), Mean.of(again - before), float(np.diff(begun_s).mean())


def measure(hidden: int, seconds: float) -> None:
    """Print the figures of a model."""
    with ExitStack() as closers:
        memory = Path(closers.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY)))
        folder = Path(closers.enter_context(tempfile.TemporaryDirectory()))
        model, title = make_model(hidden, folder)
        bench = Bench(model, memory, folder, closers)
        bench.fill()
        process_s, shadow_s, began_s = time.process_time(), bench.shadow_cpu_s(), time.perf_counter()
        bench.serve(seconds)
        process_s, shadow_s = time.process_time() - process_s, bench.shadow_cpu_s() - shadow_s
        rate = len(bench.ends[True]) / (time.perf_counter() - began_s)
        replay, control, interval_s = lost_s(bench.steps, bench.replays)
        bench.serve(seconds / 4, records_half=True)
        others, recorded = (Mean.of(np.array(times)) for times in bench.ends)
    end = Mean(recorded.value - others.value, (recorded.error**2 + others.error**2) ** 0.5)
    ratio = 1 - replay.value / interval_s - end.value * rate
    error = ((replay.error / interval_s) ** 2 + (end.error * rate) ** 2) ** 0.5
    judged = "not resolved" if abs(ratio - GOAL) <= error else "met" if ratio > GOAL else "missed"
    shown = f"{ratio:.4f} ({ratio - error:.4f} to {ratio + error:.4f})"
    print(
        f"| {title} | {rate:.1f} | {100 * shadow_s / process_s:.2f} | {replay.text(1e3, 2)} | {control.text(1e3, 2)} "
        f"| {interval_s:.3f} | {end.text(1e6, 0)} | {shown} | {judged} |",
        flush=True,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[0, 512])
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    print(environment("torch", "numpy", "numba"))
    print(f"prompts of {PROMPT_TOKENS} tokens, {STREAMS} at a time; means of the middle 80% with 95% intervals\n")
    print(
        "| model | requests/s | thread, % of the CPU time | lost to a replay, ms | between two stretches without, ms "
        f"| s between replays | end of a request, us more | throughput on to off | goal {GOAL} |"
    )
    print(f"| --- |{' ---: |' * 6} --- | --- |")
    for hidden in options.hidden:
        measure(hidden, options.seconds)


if __name__ == "__main__":
    main()
