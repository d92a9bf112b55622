"""Sending of a mapped trace: a limited number of concurrent requests, in order, each streamed and timed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
from httpx_sse import SSEError, aconnect_sse

from kvferry.app.client import CONNECT_TIMEOUT_S, DONE, ClientError, Json, KVFerryClient, http_options, refusal
from kvferry.app.replay.mapping import MappedRequest

READ_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request. `error` is None when every token arrived; times count from sending."""

    prompt_tokens: int
    output_tokens: int
    truncated: bool
    first_token_s: float | None
    total_s: float
    error: str | None


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
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)

    async def work(client: httpx.AsyncClient, queue: Iterator[tuple[int, MappedRequest]]) -> None:
        for index, request in queue:
            if speed is not None:
                await asyncio.sleep(max(0.0, started_s + request.at_s / speed - time.perf_counter()))
            outcome = await _send(client, request, model, f"replay-{run_id}-{index}")
            outcomes[index] = outcome
            on_done(outcome)

    async with (
        httpx.AsyncClient(**http_options(engine.url, engine.token), limits=limits, timeout=timeout) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work(client, queue))
    return [outcome for outcome in outcomes if outcome is not None]


async def _send(client: httpx.AsyncClient, request: MappedRequest, model: str, request_id: str) -> Outcome:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    sent_s = time.perf_counter()
    first_s: float | None = None
    received, finished = 0, False
    error: str | None = None
    try:
        async with aconnect_sse(
            client, "POST", "/v1/completions", json=body, headers={"X-Request-ID": request_id}
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise refusal(source.response.status_code, source.response.text)
            async for event in source.aiter_sse():
                if event.data == DONE:
                    finished = True
                    break
                count = _tokens_in(event.data)
                if count and first_s is None:
                    first_s = time.perf_counter() - sent_s
                received += count
    except (httpx.HTTPError, httpx.StreamError, SSEError) as failed:
        error = f"{type(failed).__name__}: {failed}".rstrip(": ")
    except ClientError as failed:
        error = str(failed)
    if error is None and not finished:
        error = "stream ended early"
    if error is None and received == 0:
        error = "answer without tokens"
    total_s = time.perf_counter() - sent_s
    return Outcome(len(request.prompt), received, request.truncated, first_s, total_s, error)


def _tokens_in(data: str) -> int:
    """Return the number of tokens in a chunk; raises for an error or an invalid chunk."""
    try:
        chunk: Json = json.loads(data)
    except ValueError as error:
        raise ClientError("stream chunk is not JSON") from error
    if not isinstance(chunk, dict) or "error" in chunk or "choices" not in chunk:
        raise refusal(200, data)
    count = 0
    for choice in chunk["choices"]:
        token_ids = choice.get("token_ids")
        count += len(token_ids) if token_ids is not None else bool(choice.get("text"))
    return count
