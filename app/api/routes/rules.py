"""Rules: named policies for matching requests, which survive a restart."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Body, Path, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvferry.app.api.audit import Audited
from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem, Responses
from kvferry.app.api.leases import check_retain_s
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, RuleCursor, page_response
from kvferry.app.common.call_errors import FieldError
from kvferry.app.operations.policy_json import (
    NamedRuleBody,
    NewRuleName,
    PutRuleBody,
    RuleBody,
    RuleName,
    RuleView,
    field_to_json,
    rule_to_json,
)
from kvferry.app.store import Page
from kvferry.core.policy import POLICY_FIELDS, RequestPolicy
from kvferry.core.rules import MAX_RULES, Rule, RuleSet
from kvferry.core.scheduler.requests import RequestView

_REFUSALS: Responses = {
    409: {
        "description": f"The name exists or differs from the path's, a span is empty, or there are {MAX_RULES:,} rules"
    }
}

_STRONGER_SOURCES = ("request", "override", "engine", "error")
_MAX_EXAMPLES = 20
MAX_TESTED = 2000
"""Live and finished requests that a change of the rules is tested with."""

Name = Annotated[RuleName, Path()]
NewName = Annotated[NewRuleName, Path()]


class RuleTestBody(BaseModel):
    """A change of rules: `rule` is added or replaces the one of its name, and the rule `without` is deleted."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"rule": {"name": "batch", "match": {"request": "batch-*"}, "policy": {"store": False}}}],
            "anyOf": [
                {"required": ["rule"], "properties": {"rule": {"type": "object"}}},
                {"required": ["without"], "properties": {"without": {"type": "string"}}},
            ],
        },
    )
    rule: NamedRuleBody | None = None
    without: RuleName | None = None

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.rule is None and self.without is None:
            raise ValueError("give rule, without, or both")
        return self


class FieldChange(BaseModel):
    """A policy field that would change, and the number of requests in which it would."""

    field: str = Field(examples=["store"])
    now: Any = Field(examples=[True])
    then: Any = Field(examples=[False])
    requests: int


class RuleMove(BaseModel):
    """Requests to which another rule would apply. Null is no rule."""

    now: str | None = Field(examples=["sql-low"])
    then: str | None = Field(examples=["batch"])
    requests: int


class RuleTest(BaseModel):
    """Effect that a change of the rules would have had on the live and recent requests."""

    requests: int = Field(
        description=f"requests that were tested: up to {MAX_TESTED} of the live ones and the last 1,000 that finished"
    )
    matching: int = Field(description="those to which the rules in question would apply, or apply now")
    changed: int = Field(description="those with a policy field that would change")
    rules: list[RuleMove]
    fields: list[FieldChange]
    examples: list[str] = Field(
        description=f"ids of up to {_MAX_EXAMPLES} matching requests, latest first", examples=[["chat-1"]]
    )


router = admin_router(prefix="/rules", tags=["policies"])


@router.get("", summary="The rules, in the order in which they are tried", response_model=Page[RuleView])
def list_rules(context: Context, limit: Limit = DEFAULT_LIMIT, cursor: RuleCursor = None) -> Response:
    """Only the first rule that matches a request applies to it."""
    rules = context.scheduler.policies.rules()
    start = 0
    if cursor is not None:
        _, order, name = cursor.split("_", 2)
        start = bisect.bisect_right(rules, (int(order), name), key=lambda rule: rule.place)
    shown = rules[start : start + limit]
    more = start + limit < len(rules)
    next_cursor = f"rules_{shown[-1].order}_{shown[-1].name}" if more else None
    return page_response(list(map(rule_to_json, shown)), next_cursor)


@router.post(
    "",
    summary="Add a rule",
    response_model=RuleView,
    response_model_exclude_unset=True,
    status_code=201,
    responses=_REFUSALS,
)
async def add_rule(
    context: Context, audit: Audited, body: Annotated[NamedRuleBody, Body()], response: Response
) -> dict[str, Any]:
    """Applies to the blocks not yet offered, at the engine's next step. 409 if the name exists."""
    rule = _to_core(context, body, body.name)
    await audit.apply(partial(context.policies.add_rule, rule, time.time()))
    context.wake()
    response.headers["Location"] = f"/admin/v1/rules/{rule.name}"
    return rule_to_json(rule)


@router.post(
    "/test", summary="Test a change of the rules", responses={409: {"description": "A span of a rule is empty"}}
)
def test_rules(context: Context, body: Annotated[RuleTestBody, Body()]) -> RuleTest:
    """Changes nothing: compares the policies of live and recent requests, under the present defaults.

    Fields that the request itself or an override sets do not change.
    """
    scheduler = context.scheduler
    added = [] if body.rule is None else [_to_core(context, body.rule, body.rule.name)]
    tested = {rule.name for rule in added} | ({body.without} if body.without else set())
    others, replaced = RuleSet(), []
    for rule in scheduler.policies.rules():
        if rule.name in tested:
            replaced.append(rule)
        else:
            others.put(rule)
    views = scheduler.requests.page(None, MAX_TESTED, time.time())
    return _compare(views, others, replaced, added, scheduler.policies.defaults().policy)


@router.get("/{name}", summary="One rule", response_model=RuleView, response_model_exclude_unset=True)
def get_rule(context: Context, name: Name) -> dict[str, Any]:
    """404 without a rule of this name."""
    rule = context.scheduler.policies.rule(name)
    if rule is None:
        raise _unknown(name)
    return rule_to_json(rule)


@router.put(
    "/{name}",
    summary="Set a rule",
    response_model=RuleView,
    response_model_exclude_unset=True,
    responses={
        201: {"model": RuleView, "description": "There was no rule of this name"},
        **_REFUSALS,
    },
)
async def put_rule(
    context: Context, audit: Audited, name: NewName, body: Annotated[PutRuleBody, Body()], response: Response
) -> dict[str, Any]:
    """Replaces the whole rule of this name, or adds it. Applies to the blocks not yet offered."""
    if body.name not in (None, name):
        detail = f"the rule is named {name!r} in the path and {body.name!r} in the body: omit one"
        raise Problem(409, detail, slug="name-differs", title="Names differ")
    rule = _to_core(context, body, name)
    existed = await audit.apply(partial(context.policies.put_rule, rule, time.time()))
    context.wake()
    response.status_code = 200 if existed else 201
    return rule_to_json(rule)


@router.delete("/{name}", summary="Delete a rule", status_code=204)
async def delete_rule(context: Context, audit: Audited, name: Name) -> None:
    """Applies to the blocks not yet offered. 404 without a rule of this name."""
    if not await audit.apply(partial(context.policies.drop_rule, name, time.time())):
        raise _unknown(name)
    context.wake()


def _compare(
    views: Sequence[RequestView],
    others: RuleSet,
    replaced: Sequence[Rule],
    added: Sequence[Rule],
    defaults: RequestPolicy,
) -> RuleTest:
    """Return the effect of adding rules in place of those that are `replaced`, beside `others`, which stay."""
    moves: Counter[tuple[str | None, str | None]] = Counter()
    changes: Counter[tuple[str, Any, Any]] = Counter()
    matching: list[str] = []
    num_changed = 0
    for view in views:
        subject = view.subject()
        own = [[rule for rule in rules if rule.match.applies_to(subject)] for rules in (replaced, added)]
        if not any(own):
            # Spares most requests the search among the other rules.
            continue
        other = others.first(subject)
        rules = [_first([*one, *([] if other is None else [other])]) for one in own]
        if all(rule is other for rule in rules):
            continue
        before, after = (None if rule is None else rule.name for rule in rules)
        matching.append(view.request_id)
        if before != after:
            moves[before, after] += 1
        fields = set(_changes_of(view, rules, defaults))
        changes.update(fields)
        num_changed += bool(fields)
    return RuleTest(
        requests=len(views),
        matching=len(matching),
        changed=num_changed,
        rules=[RuleMove(now=old, then=new, requests=number) for (old, new), number in moves.most_common()],
        fields=[
            FieldChange(field=name, now=field_to_json(name, old), then=field_to_json(name, new), requests=number)
            for (name, old, new), number in changes.most_common()
        ],
        examples=matching[:_MAX_EXAMPLES],
    )


def _changes_of(
    view: RequestView, rules: Sequence[Rule | None], defaults: RequestPolicy
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each field that differs between two rules for a request, and both values."""
    for name in POLICY_FIELDS:
        if view.policy.sources[name].partition(":")[0] in _STRONGER_SOURCES:
            continue
        default = getattr(defaults, name)
        old, new = (default if rule is None else rule.policy.get(name, default) for rule in rules)
        if old != new:
            yield name, old, new


def _first(rules: Iterable[Rule]) -> Rule | None:
    return min(rules, key=lambda rule: rule.place, default=None)


def _to_core(context: AdminContext, body: RuleBody, name: str) -> Rule:
    """Return the rule; 422 for a lease that is too long, 409 for an empty span, which no JSON Schema can describe."""
    check_retain_s(context, body.policy.retain_s, "policy.retain_s")
    spans = {"match.priority": body.match.priority, "match.prompt_tokens": body.match.prompt_tokens}
    errors = [
        FieldError(field=field, message=f"min={span.min}: must not be greater than max={span.max}")
        for field, span in spans.items()
        if span is not None and span.is_empty
    ]
    if errors:
        raise Problem(409, f"{errors[0].field} is an empty span", slug="empty-span", title="Empty span", errors=errors)
    return body.to_core(name)


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no rule named {name!r}")
