"""Rules as JSON values: what they match, and what they settle."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)

from kvferry.app.policies.wire import MAX_TOKENS, PolicyBody, patch_to_wire, whole
from kvferry.app.tenants import TenantMatch
from kvferry.core.rules import EVERYTHING, MAX_GLOB_CHARS, Rule, RuleMatch, Span

MAX_ORDER = 2**31 - 1
RULE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

RuleName = Annotated[
    str,
    StringConstraints(pattern=RULE_NAME_PATTERN),
    Field(description="1 to 64 letters, digits, '.', '_' or '-'", examples=["batch-jobs"]),
]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GLOB_CHARS)]

Length = Annotated[int, Field(ge=0, le=MAX_TOKENS), BeforeValidator(whole)]
Number = Annotated[int, Field(ge=-MAX_TOKENS, le=MAX_TOKENS), BeforeValidator(whole)]
Order = Annotated[int, Field(ge=-MAX_ORDER, le=MAX_ORDER), BeforeValidator(whole)]


class NumberSpan(BaseModel):
    """Whole numbers from `min` to `max`, both included; null is without end."""

    model_config = ConfigDict(extra="forbid", strict=True)
    min: Number | None = None
    max: Number | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no number lies in it."""
        return self.min is not None and self.max is not None and self.min > self.max

    def to_core(self) -> Span:
        """The same, as core says it."""
        return Span(self.min, self.max)


class LengthSpan(NumberSpan):
    """Lengths from `min` to `max`, both included; null is without end."""

    min: Length | None = None
    max: Length | None = None


def _one_number(given: object) -> object:
    value = whole(given)
    return {"min": value, "max": value} if type(value) is int else value


NumberOrSpan = Annotated[NumberSpan, BeforeValidator(_one_number, json_schema_input_type=NumberSpan | Number)]
LengthOrSpan = Annotated[
    LengthSpan,
    BeforeValidator(_one_number, json_schema_input_type=LengthSpan | Length),
]


class RuleMatchBody(TenantMatch):
    """Which requests a rule is about: all conditions given hold together, none is every request. Globs know case."""

    request: Glob | None = Field(default=None, description="glob of the request's id, or of any id it goes by")
    lora: Glob | None = Field(default=None, description="glob of the LoRA's name; `?*` is any, `*` also none")
    priority: NumberOrSpan | None = Field(
        default=None, description="the request's priority, where its engine knows one: a number, or a span"
    )
    prompt_tokens: LengthOrSpan | None = Field(
        default=None, description="length of the prompt in tokens: a number, or a span"
    )

    def to_core(self) -> RuleMatch:
        """The same, as core says it; of a cache salt only its digest."""
        return RuleMatch(
            request=self.request,
            tenant=self.tenant_glob(),
            lora=self.lora,
            priority=EVERYTHING if self.priority is None else self.priority.to_core(),
            prompt_tokens=EVERYTHING if self.prompt_tokens is None else self.prompt_tokens.to_core(),
        )


class RuleBody(BaseModel):
    """A rule without its name. Rules are tried by `order`, then by name; the first that matches is the only one."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "order": 10,
                    "match": {"request": "batch-*", "prompt_tokens": {"min": 8192}},
                    "policy": {"store": False},
                }
            ]
        },
    )
    order: Order = Field(default=0, description="the lowest is tried first")
    match: RuleMatchBody = Field(default_factory=RuleMatchBody)
    policy: PolicyBody = Field(
        default_factory=PolicyBody,
        description="what it settles; nothing at all shields requests from later rules",
    )

    def to_core(self, name: str) -> Rule:
        """The rule of this name."""
        return Rule(name, self.order, self.match.to_core(), self.policy.patch())


class NamedRuleBody(RuleBody):
    """A rule."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "sql-low", "order": 20, "match": {"lora": "sql-*"}, "policy": {"priority": "low"}}]
        }
    )
    name: RuleName


def match_to_wire(match: RuleMatch) -> dict[str, Any]:
    """A rule's conditions as JSON values, the way rules are kept and shown: what `RuleMatchBody` reads back."""
    return {
        "request": match.request,
        "lora": match.lora,
        "tenant": match.tenant,
        "priority": _span_to_wire(match.priority),
        "prompt_tokens": _span_to_wire(match.prompt_tokens),
    }


def rule_to_wire(rule: Rule) -> dict[str, Any]:
    """A rule as JSON values."""
    return {
        "name": rule.name,
        "order": rule.order,
        "match": match_to_wire(rule.match),
        "policy": patch_to_wire(rule.patch),
    }


def _span_to_wire(span: Span) -> dict[str, int | None] | None:
    return None if span == EVERYTHING else {"min": span.least, "max": span.most}
