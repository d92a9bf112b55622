"""OpenAI-compatible API (`/v1`) of the embedded engine: completions, chats and models.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.background import BackgroundTask
from typing_extensions import TypedDict

from kvferry.app.api.sse import SEND_TIMEOUT_S, Stream
from kvferry.app.engines.embedded.answers import CHAT_FORM, TEXT_FORM, Answer, Form
from kvferry.app.engines.embedded.bodies import CallBody, ChatRequest, CompletionRequest, inline_schema
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.intake import check_model, prepare_requests, read_body
from kvferry.app.engines.embedded.model import TINY
from kvferry.app.engines.embedded.request import Request as EngineRequest
from kvferry.app.engines.embedded.tokenizer import TINY_FOLDER

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import Traces

SHUTDOWN_GRACE_S = 10.0
"""A stream ends with its request; a stopping service aborts requests before this time is over."""
T = TypeVar("T")


class ModelCard(TypedDict):
    """A served model.

    `root` is the folder or hub id of its tokenizer, and `max_model_len` the most tokens of a prompt with its answer.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """The served models."""

    object: str
    data: list[ModelCard]


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
    408: "Body that did not arrive in time",
    413: "Body larger than 16 MiB",
    415: "Body not sent as application/json",
    429: "Too many waiting requests; `Retry-After` has the seconds to wait",
    500: "Engine error",
    503: "Engine not running",
}


def _answers(form: Form) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of an answer, and of a chunk within its event."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": inline_schema(form.chunk[1])}
    data = {"anyOf": [chunk, {"const": "[DONE]"}]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {
        200: {
            "description": "The choices; with `stream`, chunks as server-sent events, and `[DONE]` after the last. A "
            "chunk with `error` instead of choices ends a stream that fails.",
            "content": {
                "application/json": {"schema": inline_schema(form.whole[1])},
                "text/event-stream": {"schema": event},
            },
        }
    }


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return responses in OpenAI's error shape for the OpenAPI description."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def _body(engine: EmbeddedEngine, kind: type[CallBody]) -> dict[str, Any]:
    """Return the OpenAPI description of a body, with the bounds of this model's token ids."""
    schema, last = inline_schema(kind), engine.model.vocab_size - 1
    if "prompt" in schema["properties"]:
        schema["properties"]["prompt"]["items"] = {"maximum": last, "items": {"maximum": last}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def completions_router(engine: EmbeddedEngine, traces: Traces | None = None) -> APIRouter:
    """Return the router of `/v1` for this engine."""
    # Parsing and tokenizing take time in proportion to the body, for which the event loop would stand still.
    threads = ThreadPoolExecutor(2, "kvferry-bodies")
    router = APIRouter(prefix="/v1", tags=["engine"])
    card: ModelCard = {
        "id": engine.settings.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvferry",
        "root": str(TINY_FOLDER) if engine.settings.model == TINY else engine.settings.model,
        "max_model_len": engine.served_tokens,
    }

    @router.get("/models", responses=_errors(400, 401, 403))
    async def list_models() -> ModelList:
        """The model served by this engine, with the folder of its tokenizer and its context."""
        return {"object": "list", "data": [card]}

    @router.get("/models/{model:path}", responses=_errors(400, 401, 403, 404))
    async def get_model(model: str) -> ModelCard:
        """The model with this name."""
        check_model(engine, model)
        return card

    def prepare(kind: type[CallBody], body: bytes, request_id: str, alias: str) -> tuple[CallBody, list[EngineRequest]]:
        options = read_body(kind, body)
        check_model(engine, options.model)
        return options, prepare_requests(engine, options, request_id, alias)

    async def serve(request: Request, kind: type[CallBody], form: Form) -> Response:
        trace = None if traces is None else traces.begin(request.headers, time.time())
        # Not `request.body()`, which keeps the bytes while the response is produced.
        body = b"".join([chunk async for chunk in request.stream()])
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        words = (kind, body, request_id, form.id_prefix + request_id)
        options, requests = await asyncio.get_running_loop().run_in_executor(threads, prepare, *words)
        del body, words
        request.state.take_places(len(requests) - 1)
        streams = engine.submit_all(requests, trace)
        answer = Answer(form, engine.settings.model, request_id, streams, options)
        return await _respond(request, answer, bool(options.stream))

    @router.post(
        "/completions",
        response_model=None,
        responses={**_answers(TEXT_FORM), **_errors(*_MEANINGS)},
        openapi_extra=_body(engine, CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        return await serve(request, CompletionRequest, TEXT_FORM)

    @router.post(
        "/chat/completions",
        response_model=None,
        responses={**_answers(CHAT_FORM), **_errors(*_MEANINGS)},
        openapi_extra=_body(engine, ChatRequest),
    )
    async def chat(request: Request) -> Response:
        """Answer a chat, whose messages the model's chat template makes into a prompt."""
        return await serve(request, ChatRequest, CHAT_FORM)

    return router


async def _respond(request: Request, answer: Answer, is_stream: bool) -> Response:
    """Return a stream that has its first event, or the complete answer."""
    if not is_stream:
        whole = await _unless_gone(request, answer.whole())
        return _gone() if whole is None else Response(whole, headers=answer.headers, media_type="application/json")
    events = answer.events()
    first = await _unless_gone(request, anext(events))
    if first is None:
        return _gone()
    # The task also handles a client that disconnects before the first event is sent, when the generator does not run.
    return Stream(
        _resumed(first, events),
        sep="\n",
        send_timeout=SEND_TIMEOUT_S,
        headers=answer.headers,
        background=BackgroundTask(answer.cancel),
        shutdown_grace_period=SHUTDOWN_GRACE_S,
    )


async def _resumed(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield an item that was taken from an iterator, and the items that follow."""
    yield first
    async for item in rest:
        yield item


def _gone() -> Response:
    """Return the response for the log: its client has disconnected."""
    return Response(status_code=499)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects first."""
    working = asyncio.ensure_future(work)
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
