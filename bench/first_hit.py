"""Time until a restarted service serves from its pool, compared with a cold start on the same traffic.

The traffic is one sequence of prompts, some of which are asked often and others seldom, one after another. A warm start
finds the pool and the database of a process that had all of it and was killed with -9; a cold one finds nothing. A hit
is what a client sees as one: an answer with cached tokens, from the pool or from the device.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.keeping import save_llama
from bench.report import spread
from tests.harness.service_process import Served, serving

HIDDEN = 512
PROMPTS = 16
PROMPT_TOKENS = 1000
POOL_BYTES = "640MiB"
DEVICE_BLOCKS = 160
SEED = 3


@dataclass(frozen=True)
class Begun:
    """Seconds from the start of the process until ready, and from ready on."""

    ready_s: float
    first_hit_s: float
    first_hit_request: int
    all_s: float
    hit_share: float


def traffic(num_requests: int) -> list[list[int]]:
    """Return prompts; that of rank `r` occurs in proportion to `1 / r`."""
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return rng.choices(prompts, weights=[1 / rank for rank in range(1, PROMPTS + 1)], k=num_requests)


def begin(folder: Path, model: Path, asked: list[list[int]]) -> Begun:
    """Start a service in this folder, send it the traffic, and kill it."""
    started_s = time.perf_counter()
    settings = {"pool_kind": "file", "pool_path": folder, "pool_bytes": POOL_BYTES, "device_blocks": DEVICE_BLOCKS}
    with serving(folder, engine_name="bench", model=model, **settings) as served:
        ready_s = time.perf_counter()
        first: tuple[float, int] | None = None
        for number, prompt in enumerate(asked, 1):
            if num_cached(served, model, prompt) and first is None:
                first = time.perf_counter() - ready_s, number
        all_s = time.perf_counter() - ready_s
        tokens = served.settle()["prompt_tokens"]
        served.process.kill()
        served.process.wait()
    if first is None:
        raise SystemExit("nothing was ever served from the cache: send more requests")
    share = 1 - tokens["recomputed"] / tokens["total"]
    return Begun(ready_s - started_s, *first, all_s, share)


def num_cached(served: Served, model: Path, prompt: list[int]) -> int:
    usage = served.complete(prompt, model=str(model), max_tokens=1)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def measure_first_hit(rounds: int, num_requests: int) -> None:
    """Measure warm and cold starts alternately."""
    asked = traffic(num_requests)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        save_llama(model, HIDDEN)
        begin(folder / "warm", model, asked)
        begun: dict[str, list[Begun]] = {"warm": [], "cold": []}
        for number in range(rounds):
            for kind in ("warm", "cold") if number % 2 else ("cold", "warm"):
                if kind == "cold":
                    shutil.rmtree(folder / "cold", ignore_errors=True)
                begun[kind].append(begin(folder / kind, model, asked))
    print(
        f"\nLlama, 8 layers of {HIDDEN}; {num_requests} requests for {PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, "
        "one after another"
    )
    print(
        "| start | until ready, s | from there to the first hit, s | which was request | to the last answer, s | "
        "tokens from the cache |\n| --- | --- | --- | --- | --- | --- |"
    )
    for kind, each in begun.items():
        cells = (
            spread([one.ready_s for one in each], 2),
            spread([one.first_hit_s for one in each], 3),
            spread([one.first_hit_request for one in each], 0),
            spread([one.all_s for one in each], 2),
            f"{spread([100 * one.hit_share for one in each], 1)}%",
        )
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
