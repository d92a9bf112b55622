"""Policies as JSON values: how they are read from whoever sets them or from where they are kept, and written again.

Validation is strict: `true` and `"5"` are no whole numbers. `5.0` is one, as in JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema

from kvferry.core.policy import CAP_FIELDS, POLICY_FIELDS, UNLIMITED, Level, PolicyPatch, Priority

MAX_TOKENS = 2**53 - 1
"""The largest whole number that every JSON reader holds exactly."""
MAX_TIERS = 64


def whole(value: object) -> object:
    """Return a float without a fraction as the integer that it is in JSON Schema; all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _cap(given: object) -> int | str | None:
    value = whole(given)
    if value is None or value == UNLIMITED or (type(value) is int and 0 <= value <= MAX_TOKENS):
        return value
    raise ValueError(f'must be a whole number from 0 to {MAX_TOKENS}, "{UNLIMITED}", or null')


Cap = Annotated[
    int | str | None,
    PlainValidator(_cap),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
                {"const": UNLIMITED, "type": "string"},
                {"type": "null"},
            ]
        }
    ),
]
TierName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]+$")]


class PolicyBody(BaseModel):
    """Any subset of the policy fields; null takes a field away, so that the next lower source settles it."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"offload_prompt_only": False, "max_offload_tokens": 4096}]},
    )
    offload_prompt_only: bool | None = Field(default=None, description="store only blocks wholly inside the prompt")
    max_offload_tokens: Cap = Field(
        default=None, description="store only blocks wholly inside the first N tokens; 0 stores none"
    )
    level: Literal["block", "request"] | None = Field(
        default=None, description="`request`: tiers get every block of the request"
    )
    store: bool | None = Field(default=None, description="may write to the pool")
    load: bool | None = Field(default=None, description="may read from the pool")
    max_load_tokens: Cap = Field(default=None, description="load at most the first N tokens; 0 loads none")
    tiers: Annotated[list[TierName], Field(max_length=MAX_TIERS)] | None = Field(
        default=None, description="tiers that may be used"
    )
    priority: Literal["low", "normal", "high"] | None = Field(
        default=None, description="eviction class of the blocks stored"
    )

    def patch(self) -> dict[str, Any]:
        """The fields given a value, in core's types."""
        return {name: _to_core(name, getattr(self, name)) for name in self._given() if getattr(self, name) is not None}

    def removed(self) -> list[str]:
        """The fields given as null."""
        return [name for name in self._given() if getattr(self, name) is None]

    def _given(self) -> list[str]:
        return [name for name in POLICY_FIELDS if name in self.model_fields_set]


def _to_core(name: str, value: Any) -> Any:
    if name in CAP_FIELDS:
        return None if value == UNLIMITED else value
    if name == "level":
        return Level(value)
    if name == "priority":
        return Priority(value)
    return tuple(value) if name == "tiers" else value


def to_wire(name: str, value: Any) -> Any:
    """A policy field's value in JSON: a lifted cap is `unlimited`, null tiers are all of them."""
    if name in CAP_FIELDS and value is None:
        return UNLIMITED
    return list(value) if isinstance(value, tuple) else value


def patch_to_wire(patch: PolicyPatch) -> dict[str, Any]:
    """Some policy fields as JSON values, the way overrides are kept: what `PolicyBody` reads back."""
    return {name: to_wire(name, value) for name, value in patch.items()}
