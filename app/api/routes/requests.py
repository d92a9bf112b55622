"""Live and recent requests: effective policies with their sources, and counts of tokens and blocks."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem
from kvferry.app.api.middleware import RequestId
from kvferry.app.api.pagination import PageQuery, PositionCursor
from kvferry.app.policy_json import PolicyView, policy_to_json
from kvferry.app.store import Page
from kvferry.app.times import rfc3339
from kvferry.core.policy import Override
from kvferry.core.scheduler.requests import RequestPhase, RequestView
from kvferry.core.stats import MissedTokens, PromptTokens, StoreCounts

EXPECTED = "expected"


class OverrideState(BaseModel):
    """An override and its expiry."""

    fields: list[str] = Field(examples=[["offload_prompt_only"]])
    expires_at: str


class RequestModel(BaseModel):
    """A request: live, recent, or `expected` if only an override of it is known."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    id: str
    aliases: list[str] = Field(description="other ids that match it")
    state: str = Field(examples=["running"], description="`expected`, `waiting`, `loading`, `running` or `finished`")
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    tenant: str | None = Field(description="digest of the tenant's name")
    lora: str | None
    policy: PolicyView
    override: OverrideState | None
    prompt_tokens: PromptTokens = Field(description="as in stats, for this request; zero until its prefill is done")
    missed_tokens: MissedTokens = Field(description="as in stats, for this request")
    evicted_between: tuple[str, str] | None = Field(
        description="when the first and the last of its missed blocks were evicted; null if none was"
    )
    store: StoreCounts = Field(description="as in stats, for this request")


def unknown_request(request_id: str) -> Problem:
    """Return the 404 for an id without a request and an override."""
    return Problem(404, f"no request {request_id[:200]!r} is known, and there is no override for it")


def override_to_json(override: Override | None) -> dict[str, Any] | None:
    """Return an override in the form of `OverrideState`."""
    if override is None:
        return None
    return {"fields": list(override.patch), "expires_at": rfc3339(override.expires_s)}


def ids_of(request_id: str, view: RequestView | None) -> tuple[str, ...]:
    """Return a request's ids, the exact one first; `request_id` if the request is not known."""
    return (request_id,) if view is None else (view.request_id, *view.aliases)


def find_override(context: AdminContext, request_id: str, view: RequestView | None, now_s: float) -> Override | None:
    """Return the override that applies to a request: that of its exact id, else that of its first alias with one."""
    return context.scheduler.policies.override(ids_of(request_id, view), now_s)


def _to_json(view: RequestView, override: Override | None) -> dict[str, Any]:
    return {
        "id": view.request_id,
        "aliases": list(view.aliases),
        "state": view.phase.value,
        "num_prompt_tokens": view.num_prompt_tokens,
        "num_output_tokens": view.num_output_tokens,
        "tenant": view.tenant,
        "lora": view.lora,
        "policy": policy_to_json(view.policy),
        "override": override_to_json(override),
        "prompt_tokens": asdict(view.prompt_tokens),
        "missed_tokens": asdict(view.missed_tokens),
        "evicted_between": view.evicted_between_s and tuple(map(rfc3339, view.evicted_between_s)),
        "store": asdict(view.store),
    }


def _expected_to_json(context: AdminContext, override: Override, now_s: float) -> dict[str, Any]:
    """Return a request that has not arrived; the policy is that of its id alone, without rules."""
    return {
        "id": override.request_id,
        "aliases": [],
        "state": EXPECTED,
        "num_prompt_tokens": None,
        "num_output_tokens": None,
        "tenant": None,
        "lora": None,
        "policy": policy_to_json(context.scheduler.policies.expected((override.request_id,), now_s)),
        "override": override_to_json(override),
        "prompt_tokens": asdict(PromptTokens()),
        "missed_tokens": asdict(MissedTokens()),
        "evicted_between": None,
        "store": asdict(StoreCounts()),
    }


class RequestQuery(PageQuery):
    """Filter of requests."""

    cursor: PositionCursor = None
    state: RequestPhase | None = Field(default=None, description="only those in this state")


def requests_router(context: AdminContext) -> APIRouter:
    """Return the routes under `/requests`."""
    router = APIRouter(prefix="/requests", tags=["requests"])
    scheduler = context.scheduler

    @router.get("", summary="Live and recent requests, newest first", response_model=Page[RequestModel])
    def list_requests(
        query: Annotated[RequestQuery, Query()],
    ) -> dict[str, Any]:
        """Every live request, and the last 1,000 that finished."""
        now_s = time.time()
        after = None if query.cursor is None else int(query.cursor)
        items: list[dict[str, Any]] = []
        more = True
        while more and len(items) < query.limit:
            views = scheduler.requests.page(after, query.limit - len(items), now_s)
            wanted = [view for view in views if query.state is None or view.phase == query.state]
            items += [_to_json(view, find_override(context, view.request_id, view, now_s)) for view in wanted]
            more = bool(views)
            after = views[-1].sequence if views else after
        return {"items": items, "next_cursor": str(after) if more else None}

    @router.get("/{id:path}", summary="One request", response_model=RequestModel)
    def get_request(request_id: RequestId) -> dict[str, Any]:
        """By the id that the client sent, or the engine's. 404 if neither a request nor an override is known."""
        now_s = time.time()
        view = scheduler.requests.find(request_id, now_s)
        override = find_override(context, request_id, view, now_s)
        if view is not None:
            return _to_json(view, override)
        if override is None:
            raise unknown_request(request_id)
        return _expected_to_json(context, override, now_s)

    return router
