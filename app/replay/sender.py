"""Streamed requests to an OpenAI-compatible engine, timed by the client."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse

from kvferry.app.client import CONNECT_TIMEOUT_S, DONE, ClientError, Json, KVFerryClient, Refused, http_options, refusal

READ_TIMEOUT_S = 600.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Model:
    """The served model. `context_tokens` limits prompt and output together; None if the engine does not report it."""

    name: str
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one request. `error` is None when the stream was complete; times count from sending.

    `status` is that of an error response. Tokens of the prompt, and those of them from a cache, are None if the engine
    does not report them.
    """

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    error: str | None = None
    status: int | None = None


def served_model(engine: KVFerryClient) -> Model:
    """Return the first model that the engine lists."""
    models = engine.get("/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else {}
    context = first.get("max_model_len")
    return Model(str(first.get("id", "")), context if type(context) is int and context > 1 else None)


def open_client(engine: KVFerryClient, concurrency: int) -> httpx.AsyncClient:
    """Return a client for `send`, with URL and token of `engine`."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(**http_options(engine.url, engine.token), limits=limits, timeout=timeout)


async def send(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], request_id: str) -> Answer:
    """Send one request, streamed, to `COMPLETIONS` or `CHAT`, and return its answer, complete or not."""
    sent_s = time.perf_counter()
    answer, finished = Answer(), False
    texts: list[str] = []
    error: str | None = None
    status: int | None = None
    try:
        async with aconnect_sse(
            client, "POST", path, json={**body, "stream": True}, headers={"X-Request-ID": request_id}
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise refusal(source.response.status_code, source.response.text)
            async for event in source.aiter_sse():
                if event.data == DONE:
                    finished = True
                    break
                chunk = _read_chunk(event.data)
                count = sum(map(_num_tokens, chunk["choices"]))
                if count and answer.first_token_s is None:
                    answer = replace(answer, first_token_s=time.perf_counter() - sent_s)
                texts += map(_text, chunk["choices"])
                answer = _with_usage(replace(answer, output_tokens=answer.output_tokens + count), chunk)
    except (httpx.HTTPError, httpx.StreamError, SSEError) as failed:
        error = f"{type(failed).__name__}: {failed}".rstrip(": ")
    except ClientError as failed:
        error, status = str(failed), failed.status if isinstance(failed, Refused) else None
    if error is None and not finished:
        error = "stream ended early"
    if error is None and answer.output_tokens == 0:
        error = "answer without tokens"
    total_s = time.perf_counter() - sent_s
    return replace(answer, text="".join(texts), total_s=total_s, error=error, status=status)


def _read_chunk(data: str) -> Json:
    """Return a chunk of the stream; raises for an error or an invalid chunk."""
    try:
        chunk: Json = json.loads(data)
    except ValueError as error:
        raise ClientError("stream chunk is not JSON") from error
    if not isinstance(chunk, dict) or "error" in chunk or "choices" not in chunk:
        raise refusal(200, data)
    return chunk


def _num_tokens(choice: Json) -> int:
    """Return the number of tokens in a choice; without token ids, text counts as one."""
    token_ids = choice.get("token_ids")
    if token_ids is not None:
        return len(token_ids)
    delta = choice.get("delta") or {}
    return bool(_text(choice) or delta.get("reasoning_content") or delta.get("reasoning"))


def _text(choice: Json) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _with_usage(answer: Answer, chunk: Json) -> Answer:
    """Return the answer with the token counts of a chunk that has them, usually the last one."""
    usage = chunk.get("usage")
    if not usage:
        return answer
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return replace(answer, prompt_tokens=usage.get("prompt_tokens"), cached_tokens=cached)
