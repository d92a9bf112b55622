"""OpenAI-compatible API (`/v1`) of the embedded engine: completions, chats and models.

The way of a call: its body is read and its prompts are tokenized on a thread (`_prepare`), the engine gets one request
for each prompt, and their outputs become an `Answer`, whole or as a stream. A client that disconnects cancels them.
Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.background import BackgroundTask

from kvferry.app.api.errors import Problem, bad_request, too_long
from kvferry.app.api.sse import SEND_TIMEOUT_S, Stream
from kvferry.app.engines.embedded.engine import EmbeddedEngine, OutputStream
from kvferry.app.engines.embedded.model import TINY
from kvferry.app.engines.embedded.protocol import (
    CallBody,
    ChatRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    read_body,
)
from kvferry.app.engines.embedded.request import ClientOptions, FinishReason, OutputDelta, SamplingParams
from kvferry.app.engines.embedded.request import Request as EngineRequest
from kvferry.app.engines.embedded.tokenizer import TINY_FOLDER
from kvferry.core.policy import bounded_repr

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import Traces

SHUTDOWN_GRACE_S = 10.0
"""A stream ends with its request; a stopping service aborts requests before this time is over."""
GONE_STATUS = 499
"""Status for the log of a call whose client has disconnected."""
T = TypeVar("T")


def completions_router(engine: EmbeddedEngine, traces: Traces | None = None) -> APIRouter:
    """Return the router of `/v1` for this engine."""
    # Parsing and tokenizing take time in proportion to the body, for which the event loop would stand still.
    threads = ThreadPoolExecutor(2, "kvferry-bodies")
    router = APIRouter(prefix="/v1", tags=["engine"], responses={"default": _ERROR})
    card: ModelCard = {
        "id": engine.settings.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvferry",
        "root": str(TINY_FOLDER) if engine.settings.model == TINY else engine.settings.model,
        "max_model_len": engine.max_model_len,
    }

    @router.get("/models")
    async def list_models() -> ModelList:
        """The model served by this engine, with the folder of its tokenizer and its context."""
        return {"object": "list", "data": [card]}

    @router.get("/models/{model:path}")
    async def get_model(model: str) -> ModelCard:
        """The model with this name."""
        _check_model(engine, model)
        return card

    async def serve(request: Request, form: Form) -> Response:
        trace = None if traces is None else traces.begin(request.headers, time.time())
        # Not `request.body()`, which keeps the bytes while the response is produced.
        body = b"".join([chunk async for chunk in request.stream()])
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        event_loop = asyncio.get_running_loop()
        session = request.headers.get("x-session-id")
        call, requests = await event_loop.run_in_executor(threads, _prepare, engine, form, body, request_id, session)
        del body
        request.state.take_places(len(requests) - 1)
        answer = Answer(form, engine.settings.model, request_id, engine.submit_all(requests, trace), call)
        return await _respond(request, answer, bool(call.stream))

    @router.post("/completions", **_described(engine, TEXT_FORM))
    async def complete(request: Request) -> Response:
        """Continue one or more prompts, given as text or token ids."""
        return await serve(request, TEXT_FORM)

    @router.post("/chat/completions", **_described(engine, CHAT_FORM))
    async def chat(request: Request) -> Response:
        """Answer a chat, whose messages the model's chat template makes into a prompt."""
        return await serve(request, CHAT_FORM)

    return router


# ---- from a body to requests of the engine ---------------------------------------------------------------------------


def _prepare(
    engine: EmbeddedEngine, form: Form, body: bytes, request_id: str, session: str | None
) -> tuple[CallBody, list[EngineRequest]]:
    """Return a call's fields, and one engine request for each prompt. Raises `Problem`.

    The body's session comes before that of the headers, as in vLLM. Requests of several prompts are numbered after the
    client's id, which is their alias too.
    """
    call = read_body(form.body, body)
    _check_model(engine, call.model)
    sampling = _sampling(call, engine.max_model_len, engine.chat_tokens)
    prompts = _token_prompts(engine, call)
    options = ClientOptions(call.cache_salt, call.kv_transfer_params, call.priority or 0, call.session_id or session)
    alias = form.id_prefix + request_id
    is_single = len(prompts) == 1
    try:
        return call, [
            engine.prepare(
                prompt,
                sampling,
                request_id=request_id if is_single else f"{request_id}-{index}",
                aliases=(alias,) if is_single else (request_id, alias),
                options=options,
            )
            for index, prompt in enumerate(prompts)
        ]
    except Problem as problem:
        if problem.extras.get("param") == "prompt":
            problem.extras["param"] = call.prompt_field
        raise


def _check_model(engine: EmbeddedEngine, model: str | None) -> None:
    """Raise the 404 for a model that is not served here."""
    if model is not None and model != engine.settings.model:
        message = f"model {bounded_repr(model)} is not served here; this engine has {engine.settings.model!r}"
        raise Problem(404, message, extras={"param": "model", "code": "model_not_found"})


def _sampling(call: CompletionRequest | ChatRequest, max_model_len: int, chat_tokens: int) -> SamplingParams:
    min_tokens = call.min_tokens or 0
    max_tokens = call.max_answer_tokens(min(max(chat_tokens, min_tokens), max_model_len))
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens={bounded_repr(min_tokens)}: must be at most max_tokens, which is {max_tokens}", "min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        seed=call.seed,
        stop=() if call.stop is None else (call.stop,) if isinstance(call.stop, str) else tuple(call.stop),
        ignore_eos=bool(call.ignore_eos),
    )


def _token_prompts(engine: EmbeddedEngine, call: CompletionRequest | ChatRequest) -> list[list[int]]:
    """Return every prompt as token ids."""
    tokenizer = engine.model.tokenizer
    if isinstance(call, ChatRequest):
        messages = [message.for_template() for message in call.messages]
        num_chars = sum(len(message["content"]) for message in messages)
        return [_tokenize(engine, "messages", num_chars, lambda: tokenizer.encode_chat(messages))]
    prompt = call.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    elif isinstance(prompt[0], int):
        return [prompt]  # validated: all of them are token ids
    return [
        _tokenize(engine, "prompt", len(item), partial(tokenizer.encode, item)) if isinstance(item, str) else item
        for item in prompt
    ]


def _tokenize(engine: EmbeddedEngine, field: str, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    """Return the ids of a text, which is not tokenized if its characters are too many for the model."""
    max_chars = engine.max_model_len * engine.model.tokenizer.max_token_chars
    if num_chars > max_chars:
        limit = f"{max_chars} that {engine.max_model_len} tokens can hold"
        raise too_long(f"{field} has {num_chars} characters, more than the {limit}", field)
    try:
        return encode()
    except (ValueError, TypeError) as error:
        raise bad_request(f"{field}: cannot be tokenized: {str(error)[:200]}", field) from error


# ---- from outputs to an answer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """How one call of the API reads its body and writes its answers."""

    body: type[CompletionRequest] | type[ChatRequest]
    id_prefix: str
    """Start of the answer's id, before the request's."""
    whole: str
    """`object` of an answer."""
    chunk: str
    """`object` of a chunk."""
    whole_text: Callable[[str], dict[str, Any]]
    """Returns the fields of a choice that hold its text."""
    chunk_text: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None = None
    """Fields of the first chunk's choice, which precedes the text; None if there is none."""


TEXT_FORM = Form(
    body=CompletionRequest,
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    whole_text=lambda text: {"text": text},
    chunk_text=lambda text: {"text": text},
)
CHAT_FORM = Form(
    body=ChatRequest,
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    whole_text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    chunk_text=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


class Answer:
    """The answer to one call: a choice for each prompt, complete or as a stream of chunks."""

    def __init__(self, form: Form, model: str, request_id: str, outputs: OutputStream, call: CallBody) -> None:
        self.headers = {"X-Request-ID": request_id}
        self._form = form
        self._head = {"id": form.id_prefix + request_id, "created": int(time.time()), "model": model}
        self._outputs = outputs
        self._with_token_ids = bool(call.return_token_ids)
        stream = call.stream_options
        self._with_usage = stream is not None and bool(stream.include_usage)
        self._with_every_usage = stream is not None and self._with_usage and bool(stream.continuous_usage_stats)
        self._begun: set[int] = set()
        """Choices that have had output; the counts below are theirs."""
        self._num_prompt = self._num_output = self._num_cached = 0

    async def whole(self) -> bytes:
        """Return all choices as JSON, once all have ended."""
        deltas: list[list[OutputDelta]] = [[] for _ in range(self._outputs.num_requests)]
        async for index, delta in self._deltas():
            deltas[index].append(delta)
        choices = []
        for index, parts in enumerate(deltas):
            text = self._form.whole_text("".join(delta.text for delta in parts))
            token_ids = [token_id for delta in parts for token_id in delta.token_ids]
            choices.append(self._choice(index, text, token_ids, parts[-1].finish_reason))
        whole = {**self._head, "object": self._form.whole, "choices": choices, "usage": self._usage()}
        return json.dumps(whole).encode("ascii")

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events, a chunk for each step of each choice; an error after the first ends the stream.

        Raises:
            Problem: there is no answer, and nothing was yielded.
        """
        has_begun = False
        try:
            async for index, delta in self._deltas():
                if self._form.opening is not None and not has_begun:
                    yield self._chunk([self._choice(index, self._form.opening, (), None)])
                has_begun = True
                text = self._form.chunk_text(delta.text)
                yield self._chunk([self._choice(index, text, delta.token_ids, delta.finish_reason)])
            if self._with_usage:
                yield self._chunk([], is_last=True)
        except Problem as problem:
            if not has_begun:
                raise
            yield {"data": json.dumps(problem.openai_body())}
        yield {"data": "[DONE]"}

    def cancel(self) -> None:
        """Stop the requests that still run."""
        self._outputs.cancel()

    async def _deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Yield outputs as they arrive; cancel all requests when the consumer stops. Raises `Problem` if one fails."""
        try:
            async for index, delta in self._outputs:
                if delta.finish_reason is FinishReason.ERROR:
                    raise Problem(500, str(delta.error))
                if delta.finish_reason is FinishReason.ABORT:
                    raise Problem(503, "the request was aborted: the engine is closing")
                self._count(index, delta)
                yield index, delta
        finally:
            self.cancel()

    def _count(self, index: int, delta: OutputDelta) -> None:
        if index not in self._begun:
            self._begun.add(index)
            self._num_prompt += delta.num_prompt_tokens
            self._num_cached += delta.num_cached_tokens
        self._num_output += len(delta.token_ids)

    def _chunk(self, choices: list[dict[str, Any]], is_last: bool = False) -> dict[str, str]:
        """Return the event of a chunk, in ASCII, so that no network chunk ends within a character."""
        chunk = {**self._head, "object": self._form.chunk, "choices": choices}
        if self._with_usage:
            chunk["usage"] = self._usage() if is_last or self._with_every_usage else None
        return {"data": json.dumps(chunk)}

    def _choice(
        self, index: int, text: dict[str, Any], token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        choice = {"index": index, **text, "logprobs": None, "finish_reason": finish_reason}
        if self._with_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


async def _respond(request: Request, answer: Answer, is_stream: bool) -> Response:
    """Return a stream that has its first event, or the complete answer."""
    if not is_stream:
        whole = await _unless_gone(request, answer.whole())
        if whole is None:
            return Response(status_code=GONE_STATUS)
        return Response(whole, headers=answer.headers, media_type="application/json")
    events = answer.events()
    first = await _unless_gone(request, anext(events))
    if first is None:
        return Response(status_code=GONE_STATUS)
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


# ---- the description in OpenAPI --------------------------------------------------------------------------------------

_ERROR = {
    "description": "An error in OpenAI's form: `error` with `message`, `type`, `param` and `code`",
    "content": {"application/json": {}},
}


def _described(engine: EmbeddedEngine, form: Form) -> dict[str, Any]:
    """Return the description of a call for its route; its body has the bounds of this model's token ids."""
    body, last = _inline_schema(form.body), engine.model.vocab_size - 1
    if "prompt" in body["properties"]:
        body["properties"]["prompt"]["items"] = {"maximum": last, "items": {"maximum": last}}
    answers = {
        "description": "The choices, as OpenAI's API has them; with `stream`, chunks as server-sent events, and "
        "`[DONE]` after the last. A chunk with `error` instead of choices ends a stream that fails.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
    return {
        "response_model": None,
        "responses": {200: answers},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
    }


def _inline_schema(body: type[BaseModel]) -> Any:
    """Return the JSON Schema of a body, without references."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inline(definitions[part["$ref"].rsplit("/", 1)[1]])
        return {name: inline(value) for name, value in part.items()}

    return inline(schema)
