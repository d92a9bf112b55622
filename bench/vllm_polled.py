"""What watching costs inside vLLM: while it generates, windows of being polled, not, and another process take turns.

The wall time of a token is compared, and the CPU time of the engine's thread: the main one of its process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from bench.poller import ARMS, STATS, another_service, polling, show_polled
from bench.windows import Windows
from tests.vllm.server import VllmServer
from tests.vllm.workload import random_tokens

STREAMS = 4
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 1400
RATE = 50.0
WINDOW_S, SETTLE_S = 0.5, 0.1
SEED = 7


def measure_polled(server: VllmServer, num_rounds: int, rng: random.Random, goal: float) -> None:
    """Generate until so many rounds are complete, and show them. The first warms up."""
    pid = _engine_core(server)
    engine = Path(f"/proc/{pid}/task/{pid}/stat")
    with (
        tempfile.TemporaryDirectory() as folder,
        another_service(Path(folder)) as other,
        polling([str(url).rstrip("/") + STATS for url in (server.admin.base_url, other)], RATE) as poller,
    ):

        def read(num_tokens: int) -> tuple[float, ...]:
            return time.perf_counter(), _cpu_s(engine), num_tokens

        windows = Windows(ARMS, WINDOW_S, SETTLE_S, poller.ask, read, SEED)

        def is_wanted() -> bool:
            return len(windows.rounds) <= num_rounds

        while is_wanted():
            prompts = [random_tokens(rng, PROMPT_TOKENS) for _ in range(STREAMS)]
            asyncio.run(_generate(server, prompts, windows, is_wanted))
    rounds = windows.rounds[1:]
    print(
        f"\npolled: {STREAMS} streams, {RATE:.0f} polls of the statistics a second; {num_rounds} rounds of twice "
        f"{WINDOW_S} s for each"
    )
    show_polled(
        {
            "wall": [{arm: wall_s / tokens for arm, (wall_s, _, tokens) in one.items()} for one in rounds],
            "engine thread CPU": [{arm: cpu_s / tokens for arm, (_, cpu_s, tokens) in one.items()} for one in rounds],
        },
        goal,
    )


async def _generate(
    server: VllmServer, prompts: list[list[int]], windows: Windows, is_wanted: Callable[[], bool]
) -> None:
    """Answer all prompts at once, until they end or no more is wanted."""
    model = server.model
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

        async def read(index: int) -> None:
            body = {
                "model": model,
                "prompt": prompts[index],
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                # Several tokens may come at once.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not is_wanted():
                        return
                    if index == 0 and line.startswith("data: {"):
                        tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                        # At first the prompts of the others are computed.
                        if began[0] and tokens > STREAMS:
                            windows.step(tokens)
                        elif tokens > STREAMS:
                            began[0] = True
                            windows.restart()

        began = [False]
        await asyncio.gather(*map(read, range(len(prompts))))


def _engine_core(server: VllmServer) -> int:
    """The process that the admin API is in."""
    port = server.admin.base_url.port
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if any(one.laddr and one.laddr.port == port for one in process.net_connections("tcp")):
            return process.pid
    raise SystemExit("no process of the server listens where its admin API is")


def _cpu_s(thread: Path) -> float:
    """CPU seconds that a thread's `stat` tells, in hundredths."""
    fields = thread.read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
