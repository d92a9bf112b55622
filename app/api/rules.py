"""Rules: named policies for the requests that they match, kept across restarts."""

from __future__ import annotations

import bisect
import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response

from kvferry.app.api.audit_trail import WRITE_AHEAD
from kvferry.app.api.context import AdminContext
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.paging import DEFAULT_LIMIT, Limit, Page, RuleCursor
from kvferry.app.api.problems import Problem, too_many
from kvferry.app.api.rule_models import PutRuleBody, RuleView
from kvferry.app.field_errors import FieldError
from kvferry.app.policies.kept import RuleExistsError, TooManyError
from kvferry.app.policies.rule_wire import NamedRuleBody, RuleBody, RuleName, rule_to_wire
from kvferry.app.store.cursors import decode_cursor, encode_cursor
from kvferry.core.rules import MAX_RULES, Rule

_CURSOR = "rules"
_REFUSALS: dict[int | str, dict[str, Any]] = {
    409: {
        "description": f"The name is taken or not the path's, a span is empty, or there are {MAX_RULES} rules already"
    }
}

Name = Annotated[RuleName, Path()]


def rules_router(context: AdminContext, threads: StoreThreads) -> APIRouter:
    """`/admin/v1/rules`."""
    router = APIRouter(prefix="/rules", tags=["policies"])
    scheduler, policies = context.scheduler, context.policies

    @router.get("", summary="The rules, in the order in which they are tried", response_model_exclude_unset=True)
    def list_rules(limit: Limit = DEFAULT_LIMIT, cursor: RuleCursor = None) -> Page[RuleView]:
        """The first rule that matches a request is the only one that counts for it."""
        rules = scheduler.policies.rules()
        start = 0
        if cursor is not None:
            order, name = decode_cursor(_CURSOR, [int, str], cursor)
            start = bisect.bisect_right(rules, (order, name), key=lambda rule: rule.place)
        shown = rules[start : start + limit]
        more = start + limit < len(rules)
        next_cursor = encode_cursor(_CURSOR, shown[-1].place) if more else None
        return Page(items=[RuleView(**rule_to_wire(rule)) for rule in shown], next_cursor=next_cursor)

    @router.post(
        "",
        summary="Add a rule",
        response_model=RuleView,
        response_model_exclude_unset=True,
        status_code=201,
        responses=_REFUSALS,
        dependencies=[WRITE_AHEAD],
    )
    async def add_rule(body: Annotated[NamedRuleBody, Body()], response: Response) -> dict[str, Any]:
        """Applies to the blocks not yet offered, at the engine's next step. 409 if the name is taken."""
        rule = _to_core(body, body.name)
        try:
            await threads.run(policies.add_rule, rule, time.time())
        except RuleExistsError as error:
            detail = f"{error}: PUT replaces it"
            raise Problem(409, detail, slug="rule-exists", title="Rule exists") from None
        except TooManyError as error:
            raise too_many(error) from None
        context.wake()
        response.headers["Location"] = f"/admin/v1/rules/{rule.name}"
        return rule_to_wire(rule)

    @router.get("/{name}", summary="One rule", response_model=RuleView, response_model_exclude_unset=True)
    def get_rule(name: Name) -> dict[str, Any]:
        """404 if there is none of this name."""
        for rule in scheduler.policies.rules():
            if rule.name == name:
                return rule_to_wire(rule)
        raise _unknown(name)

    @router.put(
        "/{name}",
        summary="Set a rule",
        response_model=RuleView,
        response_model_exclude_unset=True,
        responses={
            201: {"model": RuleView, "description": "There was no rule of this name before"},
            **_REFUSALS,
        },
        dependencies=[WRITE_AHEAD],
    )
    async def put_rule(name: Name, body: Annotated[PutRuleBody, Body()], response: Response) -> dict[str, Any]:
        """Replaces the rule of this name whole, or adds it. Applies to the blocks not yet offered."""
        if body.name not in (None, name):
            detail = f"the rule is named {name!r} in the path and {body.name!r} in the body: leave one out"
            raise Problem(409, detail, slug="name-differs", title="Names differ")
        rule = _to_core(body, name)
        try:
            existed = await threads.run(policies.put_rule, rule, time.time())
        except TooManyError as error:
            raise too_many(error) from None
        context.wake()
        response.status_code = 200 if existed else 201
        return rule_to_wire(rule)

    @router.delete("/{name}", summary="Take a rule away", status_code=204, dependencies=[WRITE_AHEAD])
    async def delete_rule(name: Name) -> None:
        """Blocks not yet offered follow what matches then. 404 if there is none of this name."""
        if not await threads.run(policies.drop_rule, name, time.time()):
            raise _unknown(name)
        context.wake()

    return router


def _to_core(body: RuleBody, name: str) -> Rule:
    """Return the rule; 409 for conditions that contradict each other, which no schema of the body can describe."""
    spans = {"match.priority": body.match.priority, "match.prompt_tokens": body.match.prompt_tokens}
    errors = [
        FieldError(field=field, message=f"min is {span.min}, which is more than max, {span.max}")
        for field, span in spans.items()
        if span is not None and span.is_empty
    ]
    if errors:
        raise Problem(409, f"nothing lies in {errors[0].field}", slug="empty-span", title="Empty span", errors=errors)
    return body.to_core(name)


def _unknown(name: str) -> Problem:
    return Problem(404, f"there is no rule named {name!r}")
