"""OpenAI-compatible completions API (`/v1`) of the embedded engine.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. An OpenAI field that this engine does not
support is refused unless its value has no effect; unknown fields are ignored, as by OpenAI's servers.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.background import BackgroundTask

from kvferry.app.api.errors import BUSY, Problem, busy
from kvferry.app.api.sse import SEND_TIMEOUT_S, STREAM_RESPONSES, Stream
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.intake import CompletionRequest, Intake, check_model
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, RequestStream

SMALL_ANSWER_TOKENS = 4096
"""Responses of more tokens are encoded off the event loop."""
SHUTDOWN_GRACE_S = 10.0
"""A stream ends with its request; a stopping service aborts requests before this time is over."""


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MEANINGS = {
    400: "Invalid field, or beyond a limit",
    401: "Missing or unknown token",
    403: "Client not allowed",
    404: "Model not served here",
    413: "Body larger than 16 MiB",
    415: "Body not sent as application/json",
    429: "Too many waiting requests, or too many large bodies being read; `Retry-After` has the seconds to wait",
    503: "Engine not running",
}


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The choices; with `stream`, as server-sent events",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["id", "object", "created", "model", "choices", "usage"],
                    "properties": {"choices": {"type": "array", "items": {"type": "object"}}},
                }
            },
            **STREAM_RESPONSES[200]["content"],
        },
    }
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return responses in OpenAI's error shape for the OpenAPI description."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def _body_schema(engine: EmbeddedEngine) -> dict[str, Any]:
    """Return the JSON Schema of a completion's body, with the bounds of this model's token ids."""
    schema, last = CompletionRequest.model_json_schema(), engine.model.vocab_size - 1
    schema["properties"]["prompt"]["items"] = {"maximum": last, "items": {"maximum": last}}
    return schema


def completions_router(engine: EmbeddedEngine) -> APIRouter:
    """Return the router of `POST /v1/completions` and `GET /v1/models` for this engine."""
    intake = Intake(engine)
    router = APIRouter(prefix="/v1", tags=["engine"])
    card = {
        "id": engine.settings.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvferry",
        "max_model_len": engine.served_tokens,
    }

    @router.get("/models", responses=_errors(400, 401, 403))
    async def list_models() -> dict[str, Any]:
        """The model served by this engine."""
        return {"object": "list", "data": [card]}

    @router.get("/models/{model:path}", responses=_errors(400, 401, 403, 404))
    async def get_model(model: str) -> dict[str, Any]:
        """The model with this name."""
        check_model(engine, model)
        return card

    @router.post(
        "/completions",
        response_model=None,
        responses={**_ANSWERS, **_errors(*_MEANINGS)},
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": _body_schema(engine)}}}
        },
    )
    async def complete(request: Request) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        client = "" if request.client is None else request.client.host
        retry_after_s = engine.retry_after_s(client)
        if retry_after_s is not None:
            raise busy(BUSY, retry_after_s)
        call = engine.admission.begin(client)
        try:
            # Not `request.body()`, which keeps the bytes while the response is produced.
            body = b"".join([chunk async for chunk in request.stream()])
            request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
            options, requests = await intake.prepare(body, request_id)
            del body
            streams = engine.submit_all(requests, call)
            answer = Answer(engine.settings.model, request_id, streams, options.return_token_ids)
            return await _respond(request, answer, options)
        finally:
            if not call.num_open:
                engine.admission.end(call)

    return router


async def _respond(request: Request, answer: Answer, options: CompletionRequest) -> Response:
    """Return a started stream, or the complete answer."""
    if options.stream:
        include_usage = options.stream_options is not None and options.stream_options.include_usage
        # The task also handles a client that disconnects before the first event, when the generator has not started.
        return Stream(
            answer.events(include_usage),
            sep="\n",
            send_timeout=SEND_TIMEOUT_S,
            headers=answer.headers,
            background=BackgroundTask(answer.cancel),
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )
    whole = await _unless_gone(request, answer.whole())
    if whole is None:
        return Response(status_code=499)
    return Response(whole, headers=answer.headers, media_type="application/json")


class Answer:
    """The response to one call: a choice for each prompt, complete or as a stream of chunks."""

    def __init__(self, model: str, request_id: str, streams: Sequence[RequestStream], with_token_ids: bool) -> None:
        self._streams = streams
        self._with_token_ids = with_token_ids
        self._last: list[OutputDelta | None] = [None] * len(streams)
        self.headers = {"X-Request-ID": request_id}
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> bytes:
        """Return all choices as JSON, once all have ended."""
        texts: list[list[str]] = [[] for _ in self._streams]
        token_ids: list[list[int]] = [[] for _ in self._streams]
        async for index, delta in self._deltas():
            texts[index].append(delta.text)
            token_ids[index] += delta.token_ids
        encode = partial(self._encode, texts, token_ids)
        return encode() if sum(map(len, token_ids)) <= SMALL_ANSWER_TOKENS else await asyncio.to_thread(encode)

    def _encode(self, texts: Sequence[Sequence[str]], token_ids: Sequence[Sequence[int]]) -> bytes:
        """Encode choice by choice: the encoder holds the interpreter lock until it returns."""
        choices = [
            json.dumps(self._choice(index, "".join(texts[index]), token_ids[index], last.finish_reason))
            for index, last in enumerate(self._last)
            if last is not None
        ]
        head, usage = json.dumps(self._head)[:-1], json.dumps(self._usage())
        return f'{head}, "choices": [{", ".join(choices)}], "usage": {usage}}}'.encode("ascii")

    async def events(self, include_usage: bool) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events, a chunk for each step of each choice; an error ends the stream."""
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            async for index, delta in self._deltas():
                choice = self._choice(index, delta.text, delta.token_ids, delta.finish_reason)
                yield {"data": json.dumps({**self._head, "choices": [choice], **usage})}
            if include_usage:
                yield {"data": json.dumps({**self._head, "choices": [], "usage": self._usage()})}
        except Problem as problem:
            yield {"data": json.dumps(problem.openai_body())}
        yield {"data": "[DONE]"}

    def cancel(self) -> None:
        """Stop the requests that still run."""
        for stream in self._streams:
            stream.cancel()

    async def _deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Yield the deltas of all requests as they arrive; cancel all requests when the consumer stops."""
        queue: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
            async for delta in stream:
                queue.put_nowait((index, delta))

        pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(self._streams)]
        num_open = len(self._streams)
        try:
            while num_open:
                index, delta = await queue.get()
                self._last[index] = delta
                num_open -= delta.finish_reason is not None
                if delta.finish_reason is FinishReason.ERROR:
                    raise Problem(500, delta.error or "engine error while processing this request")
                if delta.finish_reason is FinishReason.ABORT:
                    raise Problem(503, "the request was aborted: the engine is closing")
                yield index, delta
        finally:
            for task in pumps:
                task.cancel()
            self.cancel()

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._with_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _usage(self) -> dict[str, Any]:
        ended = [delta for delta in self._last if delta is not None]
        num_prompt = sum(delta.num_prompt_tokens for delta in ended)
        num_output = sum(delta.num_output_tokens for delta in ended)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(delta.num_cached_tokens for delta in ended)},
        }


async def _unless_gone(request: Request, work: Coroutine[Any, Any, bytes]) -> bytes | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects first."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
