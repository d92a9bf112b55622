"""Body of a completion call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvferry.app.policy_json import whole
from kvferry.core.policy import POLICY_FIELDS

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
    stream_options: StreamOptions | None = None
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
