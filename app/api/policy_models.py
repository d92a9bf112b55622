"""Policies in calls and answers: an override going in, each value with its source coming out."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.policies.wire import PolicyBody, to_wire
from kvferry.core.policy import POLICY_FIELDS, EffectivePolicy, Level, Priority

T = TypeVar("T")

DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 366 * 24 * 3600.0

Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False, description="seconds until it ends by itself")]


class OverrideBody(PolicyBody):
    """What an operator sets for one request. Replaces what was set for it before."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"offload_prompt_only": False, "ttl_s": 600}]})
    ttl_s: Ttl = DEFAULT_TTL_S


class Sourced(BaseModel, Generic[T]):
    """A value and its source: a settings layer, `runtime`, `rule:<name>`, `request` or `override`."""

    value: T
    source: str = Field(
        description="of settings: `default`, `env`, `file` or `connector`", examples=["override", "rule:batch"]
    )


class PolicyView(BaseModel):
    """An effective policy, field by field."""

    offload_prompt_only: Sourced[bool]
    max_offload_tokens: Sourced[int | Literal["unlimited"]]
    level: Sourced[Level]
    store: Sourced[bool]
    load: Sourced[bool]
    max_load_tokens: Sourced[int | Literal["unlimited"]]
    tiers: Sourced[list[str] | None] = Field(description="null means all")
    priority: Sourced[Priority]


def view_fields(effective: EffectivePolicy) -> dict[str, dict[str, Any]]:
    """An effective policy as plain values beside their sources."""
    return {
        name: {"value": to_wire(name, getattr(effective.policy, name)), "source": effective.sources[name]}
        for name in POLICY_FIELDS
    }
