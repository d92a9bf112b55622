"""Bodies of completion calls: fields, limits, and the values of unsupported fields that have no effect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvferry.app.policy_json import whole, whole_items
from kvferry.core.policy import POLICY_FIELDS

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 4
"""Limits of OpenAI's API."""
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 4096
MAX_NAME_CHARS = 64
MAX_PARAMS_VALUES = 1000
MAX_PARAMS_CHARS = 16384

NeutralValues = Mapping[str, tuple[Any, ...]]
"""Unsupported fields, each with the values besides null that have no effect and are accepted."""

_UNSUPPORTED: NeutralValues = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "repetition_detection": (),
    "top_k": (-1, 0),
    "min_p": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "echo": (False,),
}


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

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_FLAG = {"type": ["boolean", "null"], "default": False}
_STREAM_OPTIONS = {
    "type": ["object", "null"],
    "properties": {
        "include_usage": {**_FLAG, "description": "end with a chunk that has the usage and no choice"},
        "continuous_usage_stats": {**_FLAG, "description": "with `include_usage`: the usage so far in every chunk"},
    },
}
"""Inline, so that the schema of a body refers to no other."""


class CallBody(BaseModel):
    """Fields of every completion call. Null is as if absent."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt_field: ClassVar[str]
    unsupported: ClassVar[NeutralValues]

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
    stream_options: Annotated[StreamOptions | None, WithJsonSchema(_STREAM_OPTIONS)] = None
    ignore_eos: bool | None = Field(default=None, description="continue past the end token, up to `max_tokens`")
    return_token_ids: bool | None = Field(default=None, description="return the `token_ids` of each choice")
    cache_salt: str | None = Field(
        default=None, max_length=MAX_SALT_CHARS, description="isolates this tenant's cached blocks from all others"
    )
    kv_transfer_params: Annotated[dict[str, Any] | None, AfterValidator(_policy_fields)] = Field(
        default=None,
        description="the request's own offload policy; keys other than its fields are ignored, and the fields hold up "
        f"to {MAX_PARAMS_VALUES} values and {MAX_PARAMS_CHARS} characters",
    )
    priority: EnginePriority | None = Field(
        default=None,
        description="for policy rules, 0 by default; in this engine, calls take turns in the order of arrival",
    )

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts, each of which becomes a request."""
        return 1

    @abstractmethod
    def answer_tokens(self, unset_tokens: int) -> int:
        """Return the most tokens of the answer; `unset_tokens` are those of a chat that sets no limit."""


class CompletionRequest(CallBody):
    """The body of `POST /v1/completions`; without `max_tokens` an answer has up to 16 tokens."""

    prompt_field: ClassVar[str] = "prompt"
    unsupported: ClassVar[NeutralValues] = {
        **_UNSUPPORTED,
        "logprobs": (),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(
        description=f"one prompt or up to {MAX_PROMPTS}, as text or token ids; each must leave room for an answer in "
        "the model's context"
    )

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts, each of which becomes a request."""
        return len(self.prompt) if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) else 1

    def answer_tokens(self, unset_tokens: int) -> int:
        """Return the most tokens of the answer."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


def _joined_text(content: object) -> str:
    """Return the text of a message; its parts become lines, as in vLLM."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", 'only text parts are supported: {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in parts)


def _refuse_calls(value: object) -> None:
    if value not in (None, []):
        raise PydanticCustomError("calls", "calls of tools and functions are not supported: leave it out")


_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_NO_CALLS = WithJsonSchema({"enum": [None, []]})


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_joined_text), WithJsonSchema(_CONTENT)]
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    tool_calls: Annotated[object, AfterValidator(_refuse_calls), _NO_CALLS] = None
    function_call: Annotated[object, AfterValidator(_refuse_calls), _NO_CALLS] = None

    def for_template(self) -> dict[str, str]:
        """Return the fields that chat templates read."""
        return self.model_dump(include={"role", "content", "name"}, exclude_none=True)


class ChatRequest(CallBody):
    """The body of `POST /v1/chat/completions`; by default an answer may fill the context."""

    prompt_field: ClassVar[str] = "messages"
    unsupported: ClassVar[NeutralValues] = {
        **_UNSUPPORTED,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="made into a prompt by the model's chat template"
    )
    max_completion_tokens: PositiveCount | None = Field(
        default=None, description="tokens of the answer; comes before `max_tokens`"
    )

    def answer_tokens(self, unset_tokens: int) -> int:
        """Return the most tokens of the answer."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return unset_tokens if given is None else given


def inline_schema(kind: type) -> Any:
    """Return the JSON Schema of a type, without references."""
    schema = TypeAdapter(kind).json_schema()
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


def body_schema(kind: type[CallBody]) -> dict[str, Any]:
    """Return the JSON Schema of a body, with the accepted values of unsupported fields."""
    schema: dict[str, Any] = inline_schema(kind)
    schema["properties"] |= {name: {"enum": [None, *values]} for name, values in kind.unsupported.items()}
    return schema
