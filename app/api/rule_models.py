"""Rules in calls and answers: one whose name stands in the path, and one as it holds."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kvferry.app.policies.rule_wire import NumberSpan, RuleBody, RuleName
from kvferry.app.policies.wire import PolicyBody


class PutRuleBody(RuleBody):
    """A rule, whose name stands in the path."""

    name: RuleName | None = Field(default=None, description="as in the path, or left out")


class RuleMatchView(BaseModel):
    """Which requests a rule is about; null is not asked."""

    request: str | None
    lora: str | None
    tenant: str | None = Field(description="glob of the tenant's digest")
    priority: NumberSpan | None
    prompt_tokens: NumberSpan | None


class RuleView(BaseModel):
    """A rule as it holds."""

    name: str
    order: int
    match: RuleMatchView
    policy: PolicyBody = Field(description="the fields that it settles")
