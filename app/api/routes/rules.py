"""Rules: named policies for matching requests, which survive a restart."""

from __future__ import annotations

import bisect
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response

from kvferry.app.api.audit import AuditInTransaction
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, RuleCursor
from kvferry.app.field_errors import FieldError
from kvferry.app.policy_json import NamedRuleBody, PutRuleBody, RuleBody, RuleName, RuleView, rule_to_json
from kvferry.app.store import Page
from kvferry.core.rules import MAX_RULES, Rule

_REFUSALS: dict[int | str, dict[str, Any]] = {
    409: {"description": f"The name exists or differs from the path's, a span is empty, or there are {MAX_RULES} rules"}
}

Name = Annotated[RuleName, Path()]


def rules_router(context: AdminContext) -> APIRouter:
    """Return the routes under `/rules`."""
    router = APIRouter(prefix="/rules", tags=["policies"])
    scheduler, policies = context.cache.scheduler, context.policies

    @router.get("", summary="The rules, in the order in which they are tried", response_model_exclude_unset=True)
    def list_rules(limit: Limit = DEFAULT_LIMIT, cursor: RuleCursor = None) -> Page[RuleView]:
        """Only the first rule that matches a request applies to it."""
        rules = scheduler.policies.rules()
        start = 0
        if cursor is not None:
            _, order, name = cursor.split("_", 2)
            start = bisect.bisect_right(rules, (int(order), name), key=lambda rule: rule.place)
        shown = rules[start : start + limit]
        more = start + limit < len(rules)
        next_cursor = f"rules_{shown[-1].order}_{shown[-1].name}" if more else None
        return Page([RuleView(**rule_to_json(rule)) for rule in shown], next_cursor)

    @router.post(
        "",
        summary="Add a rule",
        response_model=RuleView,
        response_model_exclude_unset=True,
        status_code=201,
        responses=_REFUSALS,
    )
    async def add_rule(
        audit: AuditInTransaction, body: Annotated[NamedRuleBody, Body()], response: Response
    ) -> dict[str, Any]:
        """Applies to the blocks not yet offered, at the engine's next step. 409 if the name exists."""
        rule = _to_core(body, body.name)
        await audit.apply(partial(policies.add_rule, rule, time.time()))
        context.cache.wake()
        response.headers["Location"] = f"/admin/v1/rules/{rule.name}"
        return rule_to_json(rule)

    @router.get("/{name}", summary="One rule", response_model=RuleView, response_model_exclude_unset=True)
    def get_rule(name: Name) -> dict[str, Any]:
        """404 without a rule of this name."""
        for rule in scheduler.policies.rules():
            if rule.name == name:
                return rule_to_json(rule)
        raise _unknown(name)

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
        audit: AuditInTransaction, name: Name, body: Annotated[PutRuleBody, Body()], response: Response
    ) -> dict[str, Any]:
        """Replaces the whole rule of this name, or adds it. Applies to the blocks not yet offered."""
        if body.name not in (None, name):
            detail = f"the rule is named {name!r} in the path and {body.name!r} in the body: omit one"
            raise Problem(409, detail, slug="name-differs", title="Names differ")
        rule = _to_core(body, name)
        existed = await audit.apply(partial(policies.put_rule, rule, time.time()))
        context.cache.wake()
        response.status_code = 200 if existed else 201
        return rule_to_json(rule)

    @router.delete("/{name}", summary="Delete a rule", status_code=204)
    async def delete_rule(audit: AuditInTransaction, name: Name) -> None:
        """Applies to the blocks not yet offered. 404 without a rule of this name."""
        if not await audit.apply(partial(policies.drop_rule, name, time.time())):
            raise _unknown(name)
        context.cache.wake()

    return router


def _to_core(body: RuleBody, name: str) -> Rule:
    """Return the rule; 409 for an empty span, which no JSON Schema can describe."""
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
