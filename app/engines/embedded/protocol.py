"""Bodies of the OpenAI-compatible API: fields, their limits, and errors that name a field.

Unknown fields of a body are ignored, as by vLLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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

# `typing.TypedDict` is not accepted by pydantic before Python 3.12.
from typing_extensions import TypedDict

from kvferry.app.api.errors import UNREADABLE_JSON, Problem, bad_request
from kvferry.app.operations.policy_json import whole, whole_items
from kvferry.core.policy import POLICY_FIELDS

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 4
"""Limits of OpenAI's API."""
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 4096
MAX_NAME_CHARS = 64

# Integers in the sense of JSON Schema, which include 16.0. Pydantic describes bounds in JSON Schema only if they stand
# at the integer itself, before the validator.
Count = Annotated[int, Field(ge=0), BeforeValidator(whole)]
PositiveCount = Annotated[int, Field(ge=1), BeforeValidator(whole)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(whole)]
EnginePriority = Annotated[int, Field(ge=-(2**53), le=2**53), BeforeValidator(whole)]

TokenIds = Annotated[
    list[int],
    Field(fail_fast=True, min_length=1),
    BeforeValidator(whole_items),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
]
Text = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _refuse_items(items: list[Any]) -> list[Any]:
    if items:
        raise PydanticCustomError("not_supported", "is not supported: leave it out")
    return items


def _typed(kind: type) -> BeforeValidator:
    """Return a check that no value of another type equals a literal, as 0 equals False."""
    return BeforeValidator(lambda value: value if type(value) is kind else ...)


Off = Annotated[Literal[False], _typed(bool)]
Zero = Annotated[Literal[0], _typed(int), BeforeValidator(whole)]
One = Annotated[int, Field(ge=1, le=1), BeforeValidator(whole)]
Empty = Annotated[list[Any], AfterValidator(_refuse_items), WithJsonSchema({"type": "array", "maxItems": 0})]


def _policy_fields(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the policy fields of `kv_transfer_params`; other keys are ignored."""
    return None if params is None else {name: params[name] for name in POLICY_FIELDS if name in params}


# ---- bodies ----------------------------------------------------------------------------------------------------------


class _Body(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool | None = Field(default=None, description="end with a chunk that has the usage and no choice")
    continuous_usage_stats: bool | None = Field(
        default=None, description="with `include_usage`: the usage so far in every chunk"
    )


class CallBody(_Body):
    """Fields of every completion call. Null is as if absent.

    Of fields that this engine does not support, those are refused whose loss would change the form of the answer.
    """

    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: PositiveCount | None = Field(default=None, description="tokens of the answer")
    min_tokens: Count | None = Field(
        default=None, description="tokens before which neither the end token nor a stop string ends the answer"
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; 1 by default")
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description=f"up to {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARS} characters"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(default=None, description="continue past the end token, up to `max_tokens`")
    return_token_ids: bool | None = Field(default=None, description="return the `token_ids` of each choice")
    cache_salt: str | None = Field(
        default=None, max_length=MAX_SALT_CHARS, description="isolates this tenant's cached blocks from all others"
    )
    kv_transfer_params: Annotated[dict[str, Any] | None, AfterValidator(_policy_fields)] = Field(
        default=None,
        description="the request's own offload policy; keys other than its fields are ignored",
    )
    priority: EnginePriority | None = Field(
        default=None,
        description="for policy rules, 0 by default; in this engine, requests start in the order of their arrival",
    )
    session_id: str | None = Field(
        default=None, description="names the conversation that this call continues; by default the header X-Session-ID"
    )
    n: One | None = None
    best_of: One | None = None


class CompletionRequest(CallBody):
    """The body of `POST /v1/completions`; without `max_tokens` an answer has up to 16 tokens."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(
        description=f"one prompt or up to {MAX_PROMPTS}, as text or token ids; each must leave room for an answer in "
        "the model's context"
    )
    echo: Off | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    def max_answer_tokens(self, default_tokens: int) -> int:
        """Return the most tokens of the answer."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class TextPart(_Body):
    """A part of a message. Others, such as images, are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """A message of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[TextPart]
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    tool_calls: Empty | None = None
    function_call: None = None

    def for_template(self) -> dict[str, str]:
        """Return the fields that chat templates read; parts of the content become lines, as in vLLM."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class TextFormat(_Body):
    """The only form of an answer."""

    type: Literal["text"]


class ChatRequest(CallBody):
    """The body of `POST /v1/chat/completions`; by default an answer may fill the context."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="made into a prompt by the model's chat template"
    )
    max_completion_tokens: PositiveCount | None = Field(
        default=None, description="tokens of the answer; comes before `max_tokens`"
    )
    logprobs: Off | None = None
    top_logprobs: Zero | None = None
    tools: Empty | None = None
    functions: Empty | None = None
    response_format: TextFormat | None = None

    def max_answer_tokens(self, default_tokens: int) -> int:
        """Return the most tokens of the answer; `default_tokens` if the chat sets no limit."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return default_tokens if given is None else given


# ---- reading a body --------------------------------------------------------------------------------------------------

Call = TypeVar("Call", bound=CallBody)


def read_body(kind: type[Call], body: bytes) -> Call:
    """Parse and validate the body of a call. Raises `Problem`."""
    try:
        return kind.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise _explain(error) from error


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


# ---- the list of models ----------------------------------------------------------------------------------------------


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
