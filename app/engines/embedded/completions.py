"""`/v1`: the embedded engine behind OpenAI's completions API.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. A field that OpenAI knows and this engine
cannot honor is refused where it asks for something; fields that nobody knows are ignored, as OpenAI's servers do.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

from app.api.problems import UNREADABLE_JSON
from app.api.streams import SEND_TIMEOUT_S, Stream
from app.engines.embedded.completion_models import (
    DEFAULT_MAX_TOKENS,
    MAX_STOP_STRINGS,
    UNSUPPORTED_UNLESS,
    CompletionRequest,
)
from app.engines.embedded.engine import EmbeddedEngine, InvalidRequestError
from app.engines.embedded.loop import EngineStoppedError
from app.engines.embedded.request import FinishReason, OutputDelta, Sampling
from app.engines.embedded.stream import RequestStream

SHUTDOWN_GRACE_S = 10.0
"""A stream under way ends with its request, which a service that stops aborts before this is over."""


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape; a body that does not validate is 400, not 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI makes."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as invalid:
                error = _explain(invalid)
            except InvalidRequestError as invalid:
                error = ApiError(400, str(invalid), invalid.param)
            except EngineStoppedError as stopped:
                error = ApiError(503, str(stopped))
            except HTTPException as unreadable:
                error = ApiError(unreadable.status_code, UNREADABLE_JSON)
            except ApiError as raised:
                error = raised
            return JSONResponse(error.body, error.status)

        return handle


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
_MEANINGS = {400: "A field that is not valid", 404: "Another model is served", 503: "The engine does not run"}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers in OpenAI's error shape, as the API's description has them."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def completions_router(engine: EmbeddedEngine) -> APIRouter:
    """`POST /v1/completions` and `GET /v1/models` over this engine."""
    router = APIRouter(prefix="/v1", tags=["engine"], route_class=OpenAIRoute)
    card = {
        "id": engine.info.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvferry",
        "max_model_len": engine.info.served_tokens,
    }

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """The one model that this engine serves."""
        return {"object": "list", "data": [card]}

    @router.get("/models/{model:path}", responses=_errors(404))
    async def get_model(model: str) -> dict[str, Any]:
        """The model of this name."""
        _check_model(engine, model)
        return card

    @router.post("/completions", response_model=None, responses=_errors(400, 404, 503))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        _check_model(engine, body.model)
        sampling = _sampling(body)
        prompts = await _token_prompts(engine, body.prompt)
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        streams = _submit(engine, body, prompts, sampling, request_id)
        answer = Answer(engine.info.model, request_id, streams, body.return_token_ids)
        headers = {"X-Request-ID": request_id}
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = answer.events(include_usage)
            # The task covers a client that hangs up before the first event, when the generator has not even started.
            return Stream(
                events,
                sep="\n",
                send_timeout=SEND_TIMEOUT_S,
                headers=headers,
                background=BackgroundTask(answer.cancel),
                shutdown_grace_period=SHUTDOWN_GRACE_S,
            )
        whole = await _unless_gone(request, answer.whole())
        return JSONResponse(whole, headers=headers) if whole is not None else Response(status_code=499)

    return router


class Answer:
    """The answer to one call: a choice for each prompt, whole or as a stream of chunks."""

    def __init__(self, model: str, request_id: str, streams: Sequence[RequestStream], with_token_ids: bool) -> None:
        self._streams = streams
        self._with_token_ids = with_token_ids
        self._last: list[OutputDelta | None] = [None] * len(streams)
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """All choices, once all have ended."""
        texts = [""] * len(self._streams)
        token_ids: list[list[int]] = [[] for _ in self._streams]
        async for index, delta in self._deltas():
            texts[index] += delta.text
            token_ids[index] += delta.token_ids
        choices = [
            self._choice(index, texts[index], token_ids[index], last.finish_reason)
            for index, last in enumerate(self._last)
            if last is not None
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[dict[str, str]]:
        """Server-sent events, a chunk for each step of each choice; an error ends the stream."""
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            async for index, delta in self._deltas():
                choice = self._choice(index, delta.text, delta.token_ids, delta.finish_reason)
                yield {"data": json.dumps({**self._head, "choices": [choice], **usage})}
            if include_usage:
                yield {"data": json.dumps({**self._head, "choices": [], "usage": self._usage()})}
        except ApiError as error:
            yield {"data": json.dumps(error.body)}
        yield {"data": "[DONE]"}

    def cancel(self) -> None:
        """Stop what still runs."""
        for stream in self._streams:
            stream.cancel()

    async def _deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """What any of the requests adds, as it comes. Whoever stops listening cancels them all."""
        queue: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
            async for delta in stream:
                queue.put_nowait((index, delta))

        pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(self._streams)]
        try:
            while any(last is None or last.finish_reason is None for last in self._last):
                index, delta = await queue.get()
                self._last[index] = delta
                if delta.finish_reason is FinishReason.ERROR:
                    raise ApiError(500, delta.error or "the engine failed on this request")
                if delta.finish_reason is FinishReason.ABORT:
                    raise ApiError(503, "the request was aborted: the engine is closing")
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


def _submit(
    engine: EmbeddedEngine,
    body: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    request_id: str,
) -> list[RequestStream]:
    """One engine request a prompt; several are numbered behind the client's id. That and the answer's are aliases."""
    for prompt in prompts:
        engine.check(prompt, sampling)
    streams: list[RequestStream] = []
    try:
        for index, prompt in enumerate(prompts):
            alone = len(prompts) == 1
            stream = engine.submit(
                prompt,
                sampling,
                request_id=request_id if alone else f"{request_id}-{index}",
                aliases=(f"cmpl-{request_id}",) if alone else (request_id, f"cmpl-{request_id}"),
                cache_salt=body.cache_salt,
                kv_transfer_params=body.kv_transfer_params,
                priority=body.priority,
            )
            streams.append(stream)
    except EngineStoppedError:
        for stream in streams:
            stream.cancel()
        raise
    return streams


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of `work`, or None when the client hung up first; then `work` is stopped."""
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


def _check_model(engine: EmbeddedEngine, model: str | None) -> None:
    if model is not None and model != engine.info.model:
        message = f"model {model!r} is not served here; this engine has {engine.info.model!r}"
        raise ApiError(404, message, "model", "model_not_found")


def _sampling(body: CompletionRequest) -> Sampling:
    for name, harmless in UNSUPPORTED_UNLESS.items():
        value = getattr(body, name)
        if value not in harmless:
            raise ApiError(400, f"{name}={value!r} is not supported: leave it out", name)
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stop) > MAX_STOP_STRINGS or "" in stop:
        raise ApiError(400, f"stop takes up to {MAX_STOP_STRINGS} strings, none of them empty", "stop")
    if body.cache_salt is not None and not _is_text(body.cache_salt):
        raise ApiError(400, "cache_salt is not valid Unicode", "cache_salt")
    return Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=stop,
        ignore_eos=body.ignore_eos,
    )


def _is_text(value: str) -> bool:
    """JSON can spell halves of characters, which no encoding takes."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


async def _token_prompts(
    engine: EmbeddedEngine, prompt: str | list[int] | list[str] | list[list[int]]
) -> list[list[int]]:
    """Every prompt as token ids; text is tokenized off the event loop."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: send at least one token", "prompt")
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, int):
            return [[token for token in prompt if isinstance(token, int)]]
        if isinstance(item, list):
            prompts.append(item)
            continue
        try:
            prompts.append(await asyncio.to_thread(engine.model.tokenizer.encode, item))
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"prompt cannot be tokenized: {error}", "prompt") from error
    return prompts


def _explain(invalid: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, said about its field."""
    first = invalid.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if where[:1] == ["prompt"] and first["type"] != "missing":
        kinds = "a string, a list of token ids, a list of strings or a list of lists of token ids"
        return ApiError(400, f"prompt must be {kinds}", "prompt")
    field = where[0] if where and first["type"] != "json_invalid" else None
    return ApiError(400, f"{field or 'body'}: {first['msg']}", field)
