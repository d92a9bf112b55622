"""The body of a completion call, field by field."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
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
"""Fields that are accepted only with values that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream says besides its choices."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    max_tokens: int | None = Field(default=None, description=f"tokens of the answer, {DEFAULT_MAX_TOKENS} by default")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; 1 by default")
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(default=False, description="go on past the end token, up to `max_tokens`")
    return_token_ids: bool = Field(default=False, description="give each choice its `token_ids`")
    cache_salt: str | None = Field(default=None, description="keep this tenant's cached blocks apart from all others'")
    kv_transfer_params: dict[str, Any] | None = Field(default=None, description="the request's own offload policy")
    priority: int = Field(
        default=0, ge=-(2**53), le=2**53, description="for policy rules; this engine serves in the order of arrival"
    )
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
