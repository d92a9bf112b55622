"""Answers of the OpenAI-compatible API: their forms, complete or as streams of chunks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import WithJsonSchema

# `typing.TypedDict` is not accepted by pydantic before Python 3.12.
from typing_extensions import TypedDict

from kvferry.app.api.errors import Problem
from kvferry.app.engines.embedded.bodies import CallBody
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, RequestStream

_Ended = Annotated[FinishReason, WithJsonSchema({"enum": [FinishReason.STOP, FinishReason.LENGTH]})]


class CachedTokens(TypedDict):
    """Prompt tokens that were not computed."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Choice(TypedDict):
    """Fields of every choice. `token_ids` is there with `return_token_ids`."""

    index: int
    logprobs: None
    finish_reason: _Ended | None
    token_ids: NotRequired[list[int]]


class TextChoice(Choice):
    """A completion, or the next piece of one."""

    text: str


class Message(TypedDict):
    """A complete message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    """A chat's next message."""

    message: Message


class MessageDelta(TypedDict):
    """The next piece of a message; the first one has the role."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatDelta(Choice):
    """The next piece of a chat's next message."""

    delta: MessageDelta


class Head(TypedDict):
    """Fields of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str


class Completion(Head):
    """Answer of `POST /v1/completions`."""

    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(Head):
    """Chunk of a streamed completion; it has a `usage` with `include_usage`."""

    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class ChatCompletion(Head):
    """Answer of `POST /v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Head):
    """Chunk of a streamed chat completion; it has a `usage` with `include_usage`."""

    choices: list[ChatDelta]
    usage: NotRequired[Usage | None]


@dataclass(frozen=True, slots=True)
class Form:
    """How one call of the API writes its answers.

    Attributes:
        id_prefix: of the answer's id, before the request's.
        whole, chunk: `object` of an answer and of a chunk, with their types.
        whole_text, chunk_text: return the fields of a choice that hold its text.
        opening: fields of the first chunk's choice, which precedes the text; None if there is none.
    """

    id_prefix: str
    whole: tuple[str, type]
    chunk: tuple[str, type]
    whole_text: Callable[[str], dict[str, Any]]
    chunk_text: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None = None


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


TEXT_FORM = Form(
    id_prefix="cmpl-",
    whole=("text_completion", Completion),
    chunk=("text_completion", CompletionChunk),
    whole_text=_text,
    chunk_text=_text,
)
CHAT_FORM = Form(
    id_prefix="chatcmpl-",
    whole=("chat.completion", ChatCompletion),
    chunk=("chat.completion.chunk", ChatCompletionChunk),
    whole_text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    chunk_text=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


class Answer:
    """The response to one call: a choice for each prompt, complete or as a stream of chunks."""

    def __init__(
        self, form: Form, model: str, request_id: str, streams: Sequence[RequestStream], options: CallBody
    ) -> None:
        self._form = form
        self._streams = streams
        self._with_token_ids = bool(options.return_token_ids)
        stream = options.stream_options
        self._with_usage = stream is not None and bool(stream.include_usage)
        self._with_every_usage = stream is not None and self._with_usage and bool(stream.continuous_usage_stats)
        self._last: list[OutputDelta | None] = [None] * len(streams)
        self._num_prompt = self._num_output = self._num_cached = 0
        """Tokens of the last outputs of all choices."""
        self.headers = {"X-Request-ID": request_id}
        self._head = {"id": form.id_prefix + request_id, "created": int(time.time()), "model": model}

    async def whole(self) -> bytes:
        """Return all choices as JSON, once all have ended."""
        texts: list[list[str]] = [[] for _ in self._streams]
        token_ids: list[list[int]] = [[] for _ in self._streams]
        async for index, delta in self._deltas():
            texts[index].append(delta.text)
            token_ids[index] += delta.token_ids
        choices = [
            self._choice(index, self._form.whole_text("".join(texts[index])), token_ids[index], last.finish_reason)
            for index, last in enumerate(self._last)
            if last is not None
        ]
        whole = {**self._head, "object": self._form.whole[0], "choices": choices, "usage": self._usage()}
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
                self._record(index, delta)
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

    def _record(self, index: int, delta: OutputDelta) -> None:
        last, self._last[index] = self._last[index], delta
        for one, sign in ((last, -1), (delta, 1)):
            if one is not None:
                self._num_prompt += sign * one.num_prompt_tokens
                self._num_output += sign * one.num_output_tokens
                self._num_cached += sign * one.num_cached_tokens

    def _chunk(self, choices: list[dict[str, Any]], is_last: bool = False) -> dict[str, str]:
        """Return the event of a chunk, in ASCII, so that no network chunk ends within a character."""
        chunk = {**self._head, "object": self._form.chunk[0], "choices": choices}
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

    def _usage(self) -> Usage:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
