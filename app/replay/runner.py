"""Sending of a mapped trace: a limited number of concurrent requests, in order, each streamed and timed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from kvferry.app.client import KVFerryClient
from kvferry.app.replay.sender import COMPLETIONS, Answer, open_client, send
from kvferry.app.replay.trace import MappedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request of the trace."""

    request: MappedRequest
    answer: Answer


async def run_replay(
    requests: Sequence[MappedRequest],
    engine: KVFerryClient,
    model: str,
    concurrency: int,
    speed: float | None,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send all requests to the URL of `engine` and return their outcomes, in order. An error does not stop the replay.

    `speed` is a factor on the trace's own rate; None sends as fast as possible.
    """
    outcomes: list[Outcome | None] = [None] * len(requests)
    queue = iter(enumerate(requests))
    run_id = secrets.token_hex(4)
    started_s = time.perf_counter()

    async def work(client: httpx.AsyncClient, queue: Iterator[tuple[int, MappedRequest]]) -> None:
        for index, request in queue:
            if speed is not None:
                await asyncio.sleep(max(0.0, started_s + request.at_s / speed - time.perf_counter()))
            outcome = await _send(client, request, model, f"replay-{run_id}-{index}")
            outcomes[index] = outcome
            on_done(outcome)

    async with open_client(engine, concurrency) as client, asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work(client, queue))
    return [outcome for outcome in outcomes if outcome is not None]


async def _send(client: httpx.AsyncClient, request: MappedRequest, model: str, request_id: str) -> Outcome:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Outcome(request, await send(client, COMPLETIONS, body, request_id))
