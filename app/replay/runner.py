"""Sending of a mapped trace: a limited number of concurrent requests, in order, each streamed and timed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from kvferry.app.client import KVFerryClient
from kvferry.app.replay.sender import Answer, open_client, send
from kvferry.app.replay.trace import MappedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request of the trace."""

    request: MappedRequest
    answer: Answer


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent, at most `concurrency` of them, or of sessions, at once."""

    concurrency: int
    speed: float = 1.0
    """Factor on the trace's times."""
    at_times: bool = False
    """Send at the trace's times, not as fast as possible."""
    sessions: bool = False
    """Send the requests of a session one after another, each after its think time."""


async def run_replay(
    requests: Sequence[MappedRequest], engine: KVFerryClient, model: str, pace: Pace, on_done: Callable[[Outcome], None]
) -> None:
    """Send all requests in the order of their times; `on_done` gets each outcome. An error does not stop the replay."""
    queue = iter(_chains(requests) if pace.sessions else [[one] for one in enumerate(requests)])
    run_id = secrets.token_hex(4)
    started_s = time.perf_counter()

    async def wait(request: MappedRequest, previous: MappedRequest, ended_s: float | None) -> None:
        """Wait until a request may be sent: the first of its chain, or the one after an answer at `ended_s`."""
        at_s = started_s + request.at_s / pace.speed if pace.at_times else 0.0
        if ended_s is not None:
            delay_s = request.at_s - previous.at_s if request.delay_s is None else request.delay_s
            at_s = ended_s + delay_s / pace.speed
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))

    async def work(client: httpx.AsyncClient, queue: Iterator[Sequence[tuple[int, MappedRequest]]]) -> None:
        for chain in queue:
            previous, ended_s = chain[0][1], None
            for index, request in chain:
                await wait(request, previous, ended_s)
                outcome = await _send(client, request, model, f"replay-{run_id}-{index}")
                ended_s, previous = time.perf_counter(), request
                on_done(outcome)

    async with open_client(engine, pace.concurrency) as client, asyncio.TaskGroup() as group:
        for _ in range(min(pace.concurrency, len(requests))):
            group.create_task(work(client, queue))


def _chains(requests: Sequence[MappedRequest]) -> list[list[tuple[int, MappedRequest]]]:
    """Return the requests of each session with their places, and those of none alone, in the order of their first."""
    chains: dict[object, list[tuple[int, MappedRequest]]] = {}
    for index, request in enumerate(requests):
        chains.setdefault(index if request.session is None else request.session, []).append((index, request))
    return list(chains.values())


async def _send(client: httpx.AsyncClient, request: MappedRequest, model: str, request_id: str) -> Outcome:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Outcome(request, await send(client, body, request_id))
