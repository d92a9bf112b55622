"""Conversion of bodies to engine requests."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Set
from typing import TypeVar

from pydantic import ValidationError

from kvferry.app.api.errors import UNREADABLE_JSON, Problem, bad_request, too_long
from kvferry.app.engines.embedded.bodies import (
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    CallBody,
    ChatRequest,
    CompletionRequest,
)
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import ClientOptions, Request, Sampling
from kvferry.core.policy import bounded_repr

BodyKind = TypeVar("BodyKind", bound=CallBody)


def check_model(engine: EmbeddedEngine, model: str | None) -> None:
    """Raise the 404 for a model that is not served here."""
    if model is not None and model != engine.settings.model:
        message = f"model {bounded_repr(model)} is not served here; this engine has {engine.settings.model!r}"
        raise Problem(404, message, extras={"param": "model", "code": "model_not_found"})


def read_body(kind: type[BodyKind], body: bytes) -> BodyKind:
    """Parse and validate the body of a call. Raises `Problem`."""
    try:
        return kind.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise _explain(error) from error


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


def _sampling(call: CallBody, served_tokens: int, usual_tokens: int) -> Sampling:
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
    if first["type"] == "json_invalid":
        return bad_request(UNREADABLE_JSON)
    name, *rest = first["loc"] or (None,)
    if name == "prompt" and first["type"] != "missing":
        return bad_request(_explain_prompt({error["type"] for error in errors}), "prompt")
    if name == "stop":
        limits = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        return bad_request(f"stop takes {limits}", "stop")
    # Below a field of a message stand the kinds of values that pydantic has tried.
    rest = rest[:2]
    field = None if name is None else str(name) + "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in rest)
    # The message of Pydantic names a class.
    message = "must be a JSON object" if first["type"] == "model_type" else first["msg"]
    if rest[1:] == ["content"] and first["type"] != "missing":
        message = 'must be a string or a list of text parts: {"type": "text", "text": "..."}'
    return bad_request(f"{field or 'body'}: {message}"[:500], field)


def _explain_prompt(types: Set[str]) -> str:
    if types & {"too_short", "string_too_short"}:
        return "prompt is empty: send at least one token"
    if "too_long" in types:
        return f"prompt has more than {MAX_PROMPTS} prompts: send them in several calls"
    return "prompt must be a string, a list of token ids, a list of strings or a list of lists of token ids"
