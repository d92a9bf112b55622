"""Completion bodies: their model, and their conversion to engine requests, which runs off the event loop.

Work proportional to a body runs on dedicated threads: one for large bodies, because the C code that parses them holds
the interpreter lock, and others for all the rest, which do not wait behind a large one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from kvferry.app.api.errors import UNREADABLE_JSON, Problem, bad_request, busy
from kvferry.app.api.middleware import SMALL_BODY_BYTES
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import Request, Sampling
from kvferry.app.policy_json import whole
from kvferry.core.policy import POLICY_FIELDS, bounded_repr

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 4
"""Limits of OpenAI's API."""
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 4096
MAX_PARAMS_VALUES = 1000
MAX_PARAMS_CHARS = 16384
UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Fields accepted only with values that have no effect."""


def _whole_ids(value: object) -> object:
    """Return a list whose floats without a fraction are integers."""
    # The types are tested first: a list may hold a million ids.
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


def _only(name: str) -> WithJsonSchema:
    """Describe a field of which only values without effect are supported."""
    return WithJsonSchema({"enum": list(UNSUPPORTED_UNLESS[name])})


WholeNumber = Annotated[int, BeforeValidator(whole)]
"""An integer in the sense of JSON Schema, which includes 16.0."""

TokenIds = Annotated[
    list[int],
    Field(fail_fast=True, min_length=1),
    BeforeValidator(_whole_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
]
Text = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _policy_fields(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the policy fields of `kv_transfer_params`, within limits. Other keys are ignored and not copied."""
    if params is None:
        return None
    fields = {name: params[name] for name in POLICY_FIELDS if name in params}
    num_values, num_chars, rest = 0, 0, list(fields.values())
    while rest:
        value = rest.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            num_chars += sum(map(len, value))
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        if num_values + len(rest) > MAX_PARAMS_VALUES or num_chars > MAX_PARAMS_CHARS:
            limits = {"values": MAX_PARAMS_VALUES, "chars": MAX_PARAMS_CHARS}
            raise PydanticCustomError(
                "params_too_large", "policy fields may hold {values} values and {chars} characters", limits
            )
    return fields


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


_STREAM_OPTIONS = {"type": ["object", "null"], "properties": {"include_usage": {"type": "boolean", "default": False}}}
"""Inline, so that the schema of a body refers to no other."""


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(
        description=f"one prompt or up to {MAX_PROMPTS}, as text or token ids; each must leave room for an answer in "
        "the model's context"
    )
    model: str | None = None
    max_tokens: WholeNumber | None = Field(
        default=None,
        description=f"tokens of the answer, {DEFAULT_MAX_TOKENS} by default",
        json_schema_extra={"minimum": 1},
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; 1 by default")
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: WholeNumber | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description=f"up to {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARS} characters"
    )
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, WithJsonSchema(_STREAM_OPTIONS)] = None
    ignore_eos: bool = Field(default=False, description="continue past the end token, up to `max_tokens`")
    return_token_ids: bool = Field(default=False, description="return the `token_ids` of each choice")
    cache_salt: str | None = Field(
        default=None, max_length=MAX_SALT_CHARS, description="isolates this tenant's cached blocks from all others"
    )
    kv_transfer_params: Annotated[dict[str, Any] | None, AfterValidator(_policy_fields)] = Field(
        default=None,
        description="the request's own offload policy; keys other than its fields are ignored, and the fields hold up "
        f"to {MAX_PARAMS_VALUES} values and {MAX_PARAMS_CHARS} characters",
    )
    priority: WholeNumber = Field(
        default=0,
        ge=-(2**53),
        le=2**53,
        description="for policy rules; in this engine, calls take turns in the order of arrival",
    )
    n: Annotated[WholeNumber | None, _only("n")] = None
    best_of: Annotated[WholeNumber | None, _only("best_of")] = None
    echo: Annotated[bool | None, _only("echo")] = None
    logprobs: Annotated[WholeNumber | None, _only("logprobs")] = None
    suffix: Annotated[str | None, _only("suffix")] = None
    presence_penalty: Annotated[float | None, _only("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, _only("frequency_penalty")] = None
    logit_bias: Annotated[dict[str, Any] | None, _only("logit_bias")] = None


MAX_LARGE_BODIES = 8
"""Large bodies that are being parsed or wait for it; each has up to 16 MiB, and takes a multiple of that once parsed.
"""
MAX_STRUCTURES = 10_000
"""Arrays, objects and fields of a body: they dominate parsing time, 16 MiB of `[[],[],...` take seconds."""
MAX_VALUES = 1 << 20
"""Values of a body, such as token ids; the parser holds the interpreter lock until it has read them all."""


class Intake:
    """Threads that convert bodies to engine requests."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._small = ThreadPoolExecutor(2, "kvferry-small-bodies")
        self._large = ThreadPoolExecutor(1, "kvferry-large-bodies")
        self._num_large = 0

    async def prepare(self, body: bytes, request_id: str) -> tuple[CompletionRequest, list[Request]]:
        """Parse and validate a body, and tokenize its prompts; return one request for each. Raises `Problem`."""
        loop = asyncio.get_running_loop()
        if len(body) <= SMALL_BODY_BYTES:
            return await loop.run_in_executor(self._small, self._prepare, body, request_id)
        if self._num_large >= MAX_LARGE_BODIES:
            raise busy(f"{MAX_LARGE_BODIES} bodies of more than {SMALL_BODY_BYTES} bytes are being read already")
        self._num_large += 1
        try:
            return await loop.run_in_executor(self._large, self._prepare, body, request_id)
        finally:
            self._num_large -= 1

    def _prepare(self, body: bytes, request_id: str) -> tuple[CompletionRequest, list[Request]]:
        call = read_completion(body)
        check_model(self._engine, call.model)
        return call, prepare_requests(self._engine, call, request_id)


def check_model(engine: EmbeddedEngine, model: str | None) -> None:
    """Raise the 404 for a model that is not served here."""
    if model is not None and model != engine.settings.model:
        message = f"model {bounded_repr(model)} is not served here; this engine has {engine.settings.model!r}"
        raise Problem(404, message, extras={"param": "model", "code": "model_not_found"})


def read_completion(body: bytes) -> CompletionRequest:
    """Parse and validate the body of a completion call. Raises `Problem`."""
    try:
        text = body.decode("utf-8-sig")
        _check_size(text)
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(UNREADABLE_JSON) from error
    try:
        return CompletionRequest.model_validate(parsed)
    except ValidationError as error:
        raise _explain(error) from error


def prepare_requests(engine: EmbeddedEngine, call: CompletionRequest, request_id: str) -> list[Request]:
    """Create one engine request per prompt. Several are numbered after the client's id, which is their alias.

    Raises `Problem`.
    """
    sampling = _sampling(call)
    prompts = _token_prompts(engine, call.prompt)
    alone = len(prompts) == 1
    return [
        engine.prepare(
            prompt,
            sampling,
            request_id=request_id if alone else f"{request_id}-{index}",
            aliases=(f"cmpl-{request_id}",) if alone else (request_id, f"cmpl-{request_id}"),
            cache_salt=call.cache_salt,
            kv_transfer_params=call.kv_transfer_params,
            priority=call.priority,
        )
        for index, prompt in enumerate(prompts)
    ]


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


def _sampling(call: CompletionRequest) -> Sampling:
    for name, harmless in UNSUPPORTED_UNLESS.items():
        value = getattr(call, name)
        if value not in harmless:
            raise bad_request(f"{name}={bounded_repr(value)} is not supported: leave it out", name)
    if call.cache_salt is not None and not _is_text(call.cache_salt):
        raise bad_request("cache_salt is not valid Unicode", "cache_salt")
    return Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if call.max_tokens is None else call.max_tokens,
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        seed=call.seed,
        stop=() if call.stop is None else (call.stop,) if isinstance(call.stop, str) else tuple(call.stop),
        ignore_eos=call.ignore_eos,
    )


def _is_text(value: str) -> bool:
    """Return whether a string can be encoded: JSON can contain unpaired surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _token_prompts(engine: EmbeddedEngine, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
    """Return every prompt as token ids."""
    if isinstance(prompt, str):
        return [_encode(engine, prompt)]
    if isinstance(prompt[0], int):
        return [prompt]  # validated: all of them are token ids
    return [item if isinstance(item, list) else _encode(engine, str(item)) for item in prompt]


def _encode(engine: EmbeddedEngine, text: str) -> list[int]:
    tokenizer = engine.model.tokenizer
    max_chars = engine.served_tokens * tokenizer.max_token_chars
    if len(text) > max_chars:
        limit = f"{max_chars} that {engine.served_tokens} tokens can hold"
        raise bad_request(f"prompt has {len(text)} characters, more than the {limit}", "prompt")
    try:
        return tokenizer.encode(text)
    except (ValueError, TypeError) as error:
        raise bad_request(f"prompt: cannot be tokenized: {str(error)[:200]}", "prompt") from error


def _explain(error: ValidationError) -> Problem:
    """Convert the first validation error of a body to an error response that names its field."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if field == "prompt" and first["type"] != "missing":
        return bad_request(_explain_prompt({error["type"] for error in errors}), "prompt")
    if field == "stop":
        limits = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        return bad_request(f"stop takes {limits}", "stop")
    return bad_request(f"{field or 'body'}: {first['msg']}"[:500], field)


def _explain_prompt(types: Set[str]) -> str:
    if types & {"too_short", "string_too_short"}:
        return "prompt is empty: send at least one token"
    if "too_long" in types:
        return f"prompt has more than {MAX_PROMPTS} prompts: send them in several calls"
    return "prompt must be a string, a list of token ids, a list of strings or a list of lists of token ids"
