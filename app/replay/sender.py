"""Streamed requests to an OpenAI-compatible engine, timed by the client."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import httpx
from httpx_sse import SSEError, aconnect_sse
from pydantic import BaseModel, Field, ValidationError

from kvferry.app.client import CONNECT_TIMEOUT_S, DONE, ClientError, KVFerryClient, http_options, refusal
from kvferry.app.common.call_errors import error_text

READ_TIMEOUT_S = 600.0
COMPLETIONS = "/v1/completions"
_Count = Annotated[int, Field(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class Model:
    """The served model. `context_tokens` limits prompt and output together; None if the engine does not report it."""

    name: str
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one request. `error` is None when the stream was complete; times count from sending.

    Tokens of the prompt, and those of them from a cache, are None if the engine does not report them.
    """

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    error: str | None = None


class _Choice(BaseModel):
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(BaseModel):
    cached_tokens: _Count | None = None


class _Usage(BaseModel):
    prompt_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(BaseModel):
    """Fields of a stream's chunk that are used here; engines send others too."""

    choices: list[_Choice]
    usage: _Usage | None = None


def served_model(engine: KVFerryClient) -> Model:
    """Return the first model that the engine lists."""
    models = engine.get("/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    context = first.get("max_model_len")
    return Model(str(first.get("id", "")), context if type(context) is int and context > 1 else None)


def open_client(engine: KVFerryClient, concurrency: int) -> httpx.AsyncClient:
    """Return a client for `send`, with URL and token of `engine`."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(**http_options(engine.url, engine.token), limits=limits, timeout=timeout)


async def send(client: httpx.AsyncClient, body: Mapping[str, Any], request_id: str) -> Answer:
    """Send one request, streamed, and return its answer, complete or not."""
    sent_s = time.perf_counter()
    answer, finished = Answer(), False
    texts: list[str] = []
    error: str | None = None
    try:
        async with aconnect_sse(
            client, "POST", COMPLETIONS, json={**body, "stream": True}, headers={"X-Request-ID": request_id}
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise refusal(source.response.status_code, source.response.text)
            async for event in source.aiter_sse():
                if event.data == DONE:
                    finished = True
                    break
                chunk = _read_chunk(event.data)
                count = sum(map(_num_tokens, chunk.choices))
                if count and answer.first_token_s is None:
                    answer = replace(answer, first_token_s=time.perf_counter() - sent_s)
                texts += [choice.text or "" for choice in chunk.choices]
                answer = _with_usage(replace(answer, output_tokens=answer.output_tokens + count), chunk.usage)
    except (httpx.HTTPError, httpx.StreamError, SSEError) as failed:
        error = f"{type(failed).__name__}: {failed}".rstrip(": ")
    except ClientError as failed:
        error = str(failed)
    if error is None and not finished:
        error = "stream ended early"
    if error is None and answer.output_tokens == 0:
        error = "answer without tokens"
    return replace(answer, text="".join(texts), total_s=time.perf_counter() - sent_s, error=error)


def _read_chunk(data: str) -> _Chunk:
    """Return a chunk of the stream; raises for an error or an invalid chunk."""
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ClientError("stream chunk is not JSON") from error
    if not isinstance(chunk, dict) or "error" in chunk or "choices" not in chunk:
        raise refusal(200, data)
    try:
        return _Chunk.model_validate(chunk)
    except ValidationError as error:
        raise ClientError(f"stream chunk is not of OpenAI's API: {error_text(error, 'chunk', 1)}") from error


def _num_tokens(choice: _Choice) -> int:
    """Return the number of tokens in a choice; without token ids, text counts as one."""
    return bool(choice.text) if choice.token_ids is None else len(choice.token_ids)


def _with_usage(answer: Answer, usage: _Usage | None) -> Answer:
    """Return the answer with the token counts of a chunk that has them, usually the last one."""
    if usage is None or usage.prompt_tokens is None:
        return answer
    details = usage.prompt_tokens_details
    cached_tokens = None if details is None else details.cached_tokens
    return replace(answer, prompt_tokens=usage.prompt_tokens, cached_tokens=cached_tokens)
