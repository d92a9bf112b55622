"""Conversion of bodies to engine requests, which runs off the event loop.

Work proportional to a body runs on dedicated threads: one for large bodies, because the C code that parses them holds
the interpreter lock, and others for all the rest, which do not wait behind a large one.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError

from kvferry.app.api.calls import SMALL_BODY_BYTES
from kvferry.app.api.errors import UNREADABLE_JSON, Problem, bad_request, busy, too_long
from kvferry.app.engines.embedded.bodies import (
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    CallBody,
    ChatRequest,
    CompletionRequest,
)
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import Call, ClientOptions, Request, Sampling
from kvferry.core.policy import bounded_repr

MAX_LARGE_BODIES = 8
"""Large bodies that are being parsed or wait for it; each has up to 16 MiB, and takes a multiple of that once parsed.
"""
MANY_PROMPTS = 16
"""A call of more prompts is prepared like a large body: each prompt takes about a tenth of a millisecond."""
MAX_STRUCTURES = 10_000
"""Arrays, objects and fields of a body: they dominate parsing time, 16 MiB of `[[],[],...` take seconds."""
MAX_VALUES = 1 << 20
"""Values of a body, such as token ids; the parser holds the interpreter lock until it has read them all."""

BodyKind = TypeVar("BodyKind", bound=CallBody)


class Intake:
    """Threads that convert bodies to engine requests."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._small = ThreadPoolExecutor(2, "kvferry-small-bodies")
        self._large = ThreadPoolExecutor(1, "kvferry-large-bodies")
        self._num_large = 0

    async def prepare(
        self, kind: type[BodyKind], body: bytes, request_id: str, alias: str, admitted: Call
    ) -> tuple[BodyKind, list[Request]]:
        """Parse and validate a body, and tokenize its prompts; return one request for each. Raises `Problem`."""
        run, words = asyncio.get_running_loop().run_in_executor, (kind, body, request_id, alias, admitted)
        if len(body) > SMALL_BODY_BYTES:
            with self._large_threads() as threads:
                call, requests = await run(threads, self._prepare, *words, MAX_PROMPTS)
        else:
            call, requests = await run(self._small, self._prepare, *words, MANY_PROMPTS)
        if requests is None:
            with self._large_threads() as threads:
                requests = await run(threads, prepare_requests, self._engine, call, request_id, alias)
        return call, requests

    def _prepare(
        self, kind: type[BodyKind], body: bytes, request_id: str, alias: str, admitted: Call, max_prompts: int
    ) -> tuple[BodyKind, list[Request] | None]:
        """Return a call, and its requests if it has at most `max_prompts` prompts."""
        call = read_body(kind, body)
        check_model(self._engine, call.model)
        self._engine.check_room(call.num_prompts, admitted)
        return call, prepare_requests(
            self._engine, call, request_id, alias
        ) if call.num_prompts <= max_prompts else None

    @contextmanager
    def _large_threads(self) -> Iterator[ThreadPoolExecutor]:
        """Count a call that is read or prepared on the thread of large ones. Raises `Problem` if these are too many."""
        if self._num_large >= MAX_LARGE_BODIES:
            limits = f"more than {SMALL_BODY_BYTES} bytes or {MANY_PROMPTS} prompts"
            raise busy(f"{MAX_LARGE_BODIES} bodies of {limits} are being read already")
        self._num_large += 1
        try:
            yield self._large
        finally:
            self._num_large -= 1


def check_model(engine: EmbeddedEngine, model: str | None) -> None:
    """Raise the 404 for a model that is not served here."""
    if model is not None and model != engine.settings.model:
        message = f"model {bounded_repr(model)} is not served here; this engine has {engine.settings.model!r}"
        raise Problem(404, message, extras={"param": "model", "code": "model_not_found"})


def read_body(kind: type[BodyKind], body: bytes) -> BodyKind:
    """Parse and validate the body of a call. Raises `Problem`."""
    try:
        text = body.removeprefix(codecs.BOM_UTF8).decode()
        _check_size(text)
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(UNREADABLE_JSON) from error
    try:
        call = kind.model_validate(parsed)
    except ValidationError as error:
        raise _explain(error) from error
    for name, neutral in kind.unsupported.items():
        if not _is_neutral(parsed.get(name), neutral):
            raise _not_supported(name, parsed[name], neutral)
    return call


def prepare_requests(engine: EmbeddedEngine, call: CallBody, request_id: str, alias: str) -> list[Request]:
    """Create one engine request per prompt. Several are numbered after the client's id, which is their alias too.

    Raises `Problem`.
    """
    sampling = _sampling(call, engine.served_tokens, engine.answer_tokens)
    prompts = _token_prompts(engine, call)
    options = ClientOptions(call.cache_salt, call.kv_transfer_params, call.priority or 0)
    alone = len(prompts) == 1
    try:
        return [
            engine.prepare(
                prompt,
                sampling,
                request_id=request_id if alone else f"{request_id}-{index}",
                aliases=(alias,) if alone else (request_id, alias),
                options=options,
            )
            for index, prompt in enumerate(prompts)
        ]
    except Problem as problem:
        if problem.extras.get("param") == "prompt":
            problem.extras["param"] = call.prompt_field
        raise


def _check_size(text: str) -> None:
    """Refuse JSON that takes long to parse, in a few passes of C code over the text."""
    fault = _find_excess(text)
    if fault is None:
        return
    # Characters inside strings do not count: without escapes, every other piece between quotes is outside of strings.
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') <= 8 * MAX_STRUCTURES:
        fault = _find_excess("".join(bare.split('"')[::2]))
    if fault is not None:
        raise bad_request(f"body: has more than {fault}")


def _find_excess(text: str) -> str | None:
    """Return the limit exceeded by JSON whose characters are all outside of strings; None if none is."""
    if text.count("[") + text.count("{") + text.count(":") > MAX_STRUCTURES:
        return f"{MAX_STRUCTURES} arrays, objects and fields"
    return f"{MAX_VALUES} values" if text.count(",") >= MAX_VALUES else None


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether an unsupported field has no effect. True is not 1 here."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _not_supported(name: str, value: object, neutral: tuple[object, ...]) -> Problem:
    accepted = " or ".join(json.dumps(one) for one in neutral)
    instead = f", or send {accepted}" if neutral else ""
    return bad_request(f"{name}={bounded_repr(value)} is not supported: leave it out{instead}", name)


def _sampling(call: CallBody, served_tokens: int, usual_tokens: int) -> Sampling:
    if call.cache_salt is not None and not _is_text(call.cache_salt):
        raise bad_request("cache_salt is not valid Unicode", "cache_salt")
    min_tokens = call.min_tokens or 0
    max_tokens = call.answer_tokens(min(max(usual_tokens, min_tokens), served_tokens))
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens={bounded_repr(min_tokens)}: must be at most max_tokens, which is {max_tokens}", "min_tokens"
        )
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        seed=call.seed,
        stop=() if call.stop is None else (call.stop,) if isinstance(call.stop, str) else tuple(call.stop),
        ignore_eos=bool(call.ignore_eos),
    )


def _is_text(value: str) -> bool:
    """Return whether a string can be encoded: JSON can contain unpaired surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_prompts(engine: EmbeddedEngine, call: CallBody) -> list[list[int]]:
    """Return every prompt as token ids."""
    if isinstance(call, ChatRequest):
        return [_chat_prompt(engine, call)]
    if not isinstance(call, CompletionRequest):
        raise TypeError(f"{type(call).__name__} has no prompt")
    prompt = call.prompt
    if isinstance(prompt, str):
        return [_text_prompt(engine, prompt)]
    if isinstance(prompt[0], int):
        return [prompt]  # validated: all of them are token ids
    return [item if isinstance(item, list) else _text_prompt(engine, str(item)) for item in prompt]


def _text_prompt(engine: EmbeddedEngine, text: str) -> list[int]:
    return _tokenize(engine, "prompt", len(text), lambda: engine.model.tokenizer.encode(text))


def _chat_prompt(engine: EmbeddedEngine, call: ChatRequest) -> list[int]:
    messages = [message.for_template() for message in call.messages]
    num_chars = sum(len(message["content"]) for message in messages)
    return _tokenize(engine, "messages", num_chars, lambda: engine.model.tokenizer.encode_chat(messages))


def _tokenize(engine: EmbeddedEngine, field: str, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    """Return the ids of a text, which is not tokenized if its characters are too many for the model."""
    max_chars = engine.served_tokens * engine.model.tokenizer.max_token_chars
    if num_chars > max_chars:
        limit = f"{max_chars} that {engine.served_tokens} tokens can hold"
        raise too_long(f"{field} has {num_chars} characters, more than the {limit}", field)
    try:
        return encode()
    except (ValueError, TypeError) as error:
        raise bad_request(f"{field}: cannot be tokenized: {str(error)[:200]}", field) from error


def _explain(error: ValidationError) -> Problem:
    """Convert the first validation error of a body to an error response that names its field."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    name, *rest = first["loc"] or (None,)
    if name == "prompt" and first["type"] != "missing":
        return bad_request(_explain_prompt({error["type"] for error in errors}), "prompt")
    if name == "stop":
        limits = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        return bad_request(f"stop takes {limits}", "stop")
    field = None if name is None else str(name) + "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in rest)
    # The message of Pydantic names a class.
    message = "must be a JSON object" if first["type"] == "model_type" else first["msg"]
    return bad_request(f"{field or 'body'}: {message}"[:500], field)


def _explain_prompt(types: Set[str]) -> str:
    if types & {"too_short", "string_too_short"}:
        return "prompt is empty: send at least one token"
    if "too_long" in types:
        return f"prompt has more than {MAX_PROMPTS} prompts: send them in several calls"
    return "prompt must be a string, a list of token ids, a list of strings or a list of lists of token ids"
