"""JSON forms of request policies, overrides and rules: validated when received or loaded, and written again.

Validation is strict: `true` and `"5"` are not whole numbers. `5.0` is one, as in JSON Schema. A tenant is a secret:
operators name it by a glob of its digest or by its cache salt, which is not kept.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from kvferry.core.keys import TENANT_HEX_DIGITS, tenant_digest
from kvferry.core.policy import (
    CAP_FIELDS,
    MAX_TIER_WAIT_CHARS,
    POLICY_FIELDS,
    TIER_WAIT_PATTERN,
    UNLIMITED,
    EffectivePolicy,
    Level,
    PolicyPatch,
    Priority,
    TierWait,
)
from kvferry.core.rules import MAX_GLOB_CHARS, Rule, RuleMatch, Span

T = TypeVar("T")

MAX_TOKENS = 2**53 - 1
"""The largest whole number that every JSON reader represents exactly."""
MAX_TIERS = 64
MAX_ORDER = 2**31 - 1
MAX_SALT_CHARS = 1024
RULE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
RESERVED_RULE_NAME = "test"
"""Segment of the path `/admin/v1/rules/test`, where changes of rules are tested."""
DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 366 * 24 * 3600.0

_DIGEST_GLOB = re.compile(r"[0-9a-f*?\[\]!-]+", re.ASCII)


def whole(value: object) -> object:
    """Return a float without a fraction as the integer that it is in JSON Schema; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_items(value: object) -> object:
    """Return a list with `whole` applied to its items; other values unchanged."""
    # The types are tested first: a list may hold a million token ids.
    return list(map(whole, value)) if isinstance(value, list) and float in set(map(type, value)) else value


def _validate_cap(given: object) -> int | str | None:
    value = whole(given)
    if value is None or value == UNLIMITED or (type(value) is int and 0 <= value <= MAX_TOKENS):
        return value
    raise ValueError(f'must be a whole number from 0 to {MAX_TOKENS}, "{UNLIMITED}", or null')


def is_digest_glob(text: str) -> bool:
    """Return whether a text has only hex digits and wildcards; another text may be a misplaced salt."""
    return _DIGEST_GLOB.fullmatch(text) is not None


def _validate_digest_glob(text: str) -> str:
    if not is_digest_glob(text):
        raise ValueError("must be a glob of a digest: hex digits in lower case and wildcards; a salt is a cache_salt")
    return text


def _validate_new_name(name: str) -> str:
    if name == RESERVED_RULE_NAME:
        raise ValueError(f"{name!r} is reserved: /admin/v1/rules/{name} tests changes of rules; choose another name")
    return name


def _validate_salt(salt: SecretStr) -> SecretStr:
    if any("\ud800" <= char <= "\udfff" for char in salt.get_secret_value()):
        raise ValueError("is not valid Unicode")
    return salt


Cap = Annotated[
    int | str | None,
    PlainValidator(_validate_cap),
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
TierWaitText = Annotated[
    str,
    Field(max_length=MAX_TIER_WAIT_CHARS, json_schema_extra={"pattern": TIER_WAIT_PATTERN}),
    AfterValidator(lambda text: str(TierWait.parse(text))),
]
RetainS = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TierName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]+$")]
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False, description="seconds until it expires")]
RuleName = Annotated[
    str,
    StringConstraints(pattern=RULE_NAME_PATTERN),
    Field(description="1 to 64 letters, digits, '.', '_' or '-'", examples=["batch-jobs"]),
]
NewRuleName = Annotated[
    RuleName,
    Field(json_schema_extra={"not": {"const": RESERVED_RULE_NAME}}),
    AfterValidator(_validate_new_name),
]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GLOB_CHARS)]
DigestGlob = Annotated[
    str,
    Field(min_length=1, max_length=MAX_GLOB_CHARS, json_schema_extra={"pattern": f"^{_DIGEST_GLOB.pattern}$"}),
    AfterValidator(_validate_digest_glob),
]
CacheSalt = Annotated[SecretStr, Field(min_length=1, max_length=MAX_SALT_CHARS), AfterValidator(_validate_salt)]
Length = Annotated[int, Field(ge=0, le=MAX_TOKENS), BeforeValidator(whole)]
Number = Annotated[int, Field(ge=-MAX_TOKENS, le=MAX_TOKENS), BeforeValidator(whole)]
Order = Annotated[int, Field(ge=-MAX_ORDER, le=MAX_ORDER), BeforeValidator(whole)]


class PolicyBody(BaseModel):
    """Any subset of the policy fields. Null removes a field, so that the next weaker source sets it."""

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
    tier_wait: TierWaitText | None = Field(
        default=None,
        description="how long the request waits for tiers: `best_effort` not at all, `timeout` as long as computing "
        "would take, `timeout:SECONDS`, or `wait_complete`",
        examples=["timeout:2.5"],
    )
    priority: Literal["low", "normal", "high"] | None = Field(
        default=None, description="eviction class of the blocks stored"
    )
    retain_s: RetainS | None = Field(
        default=None,
        description="seconds for which its blocks are not evicted after it has ended, unless its session's next "
        "request comes first; at most `max_retain_s`",
        examples=[60],
    )

    def patch(self) -> dict[str, Any]:
        """Return the fields that have a value, in core's types."""
        return {name: _to_core(name, value) for name, value in self._given().items() if value is not None}

    def removed(self) -> list[str]:
        """Return the names of the fields given as null."""
        return [name for name, value in self._given().items() if value is None]

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in POLICY_FIELDS if name in self.model_fields_set}


class OverrideBody(PolicyBody):
    """Policy of one request. Replaces the request's earlier override."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"offload_prompt_only": False, "ttl_s": 600}]})
    ttl_s: Ttl = DEFAULT_TTL_S


def _to_core(name: str, value: Any) -> Any:
    if name in CAP_FIELDS:
        return None if value == UNLIMITED else value
    if name == "level":
        return Level(value)
    if name == "priority":
        return Priority(value)
    if name == "tier_wait":
        return TierWait.parse(value)
    return tuple(value) if name == "tiers" else value


def field_to_json(name: str, value: Any) -> Any:
    """Return a policy field's value in JSON: a lifted cap is `unlimited`, null tiers are all of them."""
    if name in CAP_FIELDS and value is None:
        return UNLIMITED
    if isinstance(value, TierWait):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def patch_to_json(patch: PolicyPatch) -> dict[str, Any]:
    """Return policy fields as JSON values, which `PolicyBody` reads back."""
    return {name: field_to_json(name, value) for name, value in patch.items()}


class Sourced(BaseModel, Generic[T]):
    """A value and its source: a settings layer, `runtime`, `rule:<name>`, `request`, `override` or `engine:<cause>`.

    `error` if the policy of a request could not be resolved.
    """

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
    tier_wait: Sourced[str] = Field(description="`best_effort`, `wait_complete`, `timeout` or `timeout:SECONDS`")
    priority: Sourced[Priority]
    retain_s: Sourced[float]


def policy_to_json(effective: EffectivePolicy) -> dict[str, dict[str, Any]]:
    """Return an effective policy's fields as JSON values beside their sources."""
    return {
        name: {"value": field_to_json(name, getattr(effective.policy, name)), "source": effective.sources[name]}
        for name in POLICY_FIELDS
    }


class TenantMatch(BaseModel):
    """Conditions of which at most one names a tenant."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "not": {
                "required": ["tenant", "cache_salt"],
                "properties": {"tenant": {"type": "string"}, "cache_salt": {"type": "string"}},
            }
        },
    )
    tenant: DigestGlob | None = Field(
        default=None, description=f"glob of the tenant's digest ({TENANT_HEX_DIGITS} hex digits); `?*` is any tenant"
    )
    cache_salt: CacheSalt | None = Field(
        default=None, description="the tenant's cache salt instead of `tenant`: only its digest is kept"
    )

    @model_validator(mode="after")
    def _check_single_tenant(self) -> Self:
        if self.tenant is not None and self.cache_salt is not None:
            raise ValueError("give tenant or cache_salt, not both")
        return self

    def tenant_glob(self) -> str | None:
        """Return the glob of the digest, or the salt's digest; None without a condition on the tenant."""
        return self.tenant if self.cache_salt is None else tenant_digest(self.cache_salt.get_secret_value())


class NumberSpan(BaseModel):
    """Whole numbers from `min` to `max`, both included; null is unbounded."""

    model_config = ConfigDict(extra="forbid", strict=True)
    min: Number | None = None
    max: Number | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it contains no number."""
        return self.min is not None and self.max is not None and self.min > self.max


class LengthSpan(NumberSpan):
    """Lengths from `min` to `max`, both included; null is unbounded."""

    min: Length | None = None
    max: Length | None = None


def _number_to_span(given: object) -> object:
    value = whole(given)
    return {"min": value, "max": value} if type(value) is int else value


NumberOrSpan = Annotated[NumberSpan, BeforeValidator(_number_to_span, json_schema_input_type=NumberSpan | Number)]
LengthOrSpan = Annotated[LengthSpan, BeforeValidator(_number_to_span, json_schema_input_type=LengthSpan | Length)]


class RuleMatchBody(TenantMatch):
    """Conditions on requests, all of which must hold; none is every request. Globs are case-sensitive."""

    request: Glob | None = Field(default=None, description="glob of the request's id, or of any of its aliases")
    lora: Glob | None = Field(default=None, description="glob of the LoRA's name; `?*` is any, `*` also none")
    session: Glob | None = Field(default=None, description="glob of the session's id; `*` is any")
    priority: NumberOrSpan | None = Field(
        default=None, description="the request's priority, if its engine has one: a number, or a span"
    )
    prompt_tokens: LengthOrSpan | None = Field(
        default=None, description="length of the prompt in tokens: a number, or a span"
    )


class RuleBody(BaseModel):
    """A rule without its name. Rules are tried by `order`, then by name; only the first match applies."""

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
        description="the fields that it sets; without any, the rule keeps later rules from matching",
    )

    def to_core(self, name: str) -> Rule:
        """Return the rule of this name."""
        match = RuleMatch(
            request=self.match.request,
            tenant=self.match.tenant_glob(),
            lora=self.match.lora,
            session=self.match.session,
            priority=_to_span(self.match.priority),
            prompt_tokens=_to_span(self.match.prompt_tokens),
        )
        return Rule(name, self.order, match, self.policy.patch())


class NamedRuleBody(RuleBody):
    """A rule."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "sql-low", "order": 20, "match": {"lora": "sql-*"}, "policy": {"priority": "low"}}]
        }
    )
    name: NewRuleName


class PutRuleBody(RuleBody):
    """A rule whose name is in the path."""

    name: NewRuleName | None = Field(default=None, description="as in the path, or omitted")


class RuleView(BaseModel):
    """A rule as it applies."""

    name: str
    order: int
    match: RuleMatch
    policy: PolicyBody = Field(description="the fields that it sets")


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as JSON values, which `NamedRuleBody` reads back."""
    return {"name": rule.name, "order": rule.order, "match": asdict(rule.match), "policy": patch_to_json(rule.policy)}


def _to_span(span: NumberSpan | None) -> Span | None:
    if span is None or (span.min is None and span.max is None):
        return None
    return Span(span.min, span.max)
