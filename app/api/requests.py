"""Live and recent requests: what settled their policies, what served their tokens, what became of their blocks."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvferry.app.api.context import AdminContext
from kvferry.app.api.paging import Page, PageQuery, PositionCursor
from kvferry.app.api.policy_models import PolicyView, view_fields
from kvferry.app.api.problems import Problem
from kvferry.app.api.raw_ids import RequestId
from kvferry.app.api.stats_models import MissedTokenStats, PromptTokenStats, StoreStats
from kvferry.app.times import rfc3339
from kvferry.core.policy import Override
from kvferry.core.scheduler.requests import RequestPhase, RequestView
from kvferry.core.stats import MissedTokens, PromptTokens, StoreCounts

EXPECTED = "expected"


class OverrideState(BaseModel):
    """An operator's override, and when it ends."""

    fields: list[str] = Field(examples=[["offload_prompt_only"]])
    expires_at: str


class RequestModel(BaseModel):
    """A request: live, recent, or `expected` where only an override is known of it."""

    id: str
    aliases: list[str] = Field(description="other ids that a client may know it by")
    state: str = Field(examples=["running"], description="`expected`, `waiting`, `loading`, `running` or `finished`")
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    tenant: str | None = Field(description="digest of the tenant's name")
    lora: str | None
    policy: PolicyView
    override: OverrideState | None
    prompt_tokens: PromptTokenStats = Field(description="as in stats, for this request; zero until its prefill is done")
    missed_tokens: MissedTokenStats = Field(description="as in stats, for this request")
    evicted_between: tuple[str, str] | None = Field(
        description="when the first and the last of what it missed by eviction had left the pool; null if nothing had"
    )
    store: StoreStats = Field(description="as in stats, for this request")


def unknown_request(request_id: str) -> Problem:
    """The 404 for an id that names neither a request nor an override."""
    return Problem(404, f"no request {request_id[:200]!r} is known, and none is expected under an override")


def show_override(override: Override | None) -> dict[str, Any] | None:
    """An override as answers show it."""
    if override is None:
        return None
    return {"fields": list(override.patch), "expires_at": rfc3339(override.expires_s)}


def ids_of(request_id: str, view: RequestView | None) -> tuple[str, ...]:
    """The ids that a request goes by, the exact one first; what it was asked for by where it is not known."""
    return (request_id,) if view is None else (view.request_id, *view.aliases)


def find_override(context: AdminContext, request_id: str, view: RequestView | None, now_s: float) -> Override | None:
    """The override that covers a request: by its exact id, else by the next that it goes by, as core settles it."""
    return context.scheduler.policies.override(ids_of(request_id, view), now_s)


def _show(view: RequestView, override: Override | None) -> dict[str, Any]:
    return {
        "id": view.request_id,
        "aliases": list(view.aliases),
        "state": view.phase.value,
        "num_prompt_tokens": view.num_prompt_tokens,
        "num_output_tokens": view.num_output_tokens,
        "tenant": view.tenant,
        "lora": view.lora,
        "policy": view_fields(view.policy),
        "override": show_override(override),
        "prompt_tokens": asdict(view.prompt_tokens),
        "missed_tokens": asdict(view.missed_tokens),
        "evicted_between": view.evicted_between_s and tuple(map(rfc3339, view.evicted_between_s)),
        "store": asdict(view.store),
    }


def _show_expected(context: AdminContext, override: Override, now_s: float) -> dict[str, Any]:
    """Rules are settled when it arrives; what its id alone settles is shown."""
    return {
        "id": override.request_id,
        "aliases": [],
        "state": EXPECTED,
        "num_prompt_tokens": None,
        "num_output_tokens": None,
        "tenant": None,
        "lora": None,
        "policy": view_fields(context.scheduler.policies.expected((override.request_id,), now_s)),
        "override": show_override(override),
        "prompt_tokens": asdict(PromptTokens()),
        "missed_tokens": asdict(MissedTokens()),
        "evicted_between": None,
        "store": asdict(StoreCounts()),
    }


class RequestQuery(PageQuery):
    """Which requests to list."""

    cursor: PositionCursor = None
    state: RequestPhase | None = Field(default=None, description="only those in this state")


def requests_router(context: AdminContext) -> APIRouter:
    """`/admin/v1/requests`."""
    router = APIRouter(prefix="/requests", tags=["requests"])
    scheduler = context.scheduler

    @router.get("", summary="Live and recent requests, the latest first", response_model=Page[RequestModel])
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
            items += [_show(view, find_override(context, view.request_id, view, now_s)) for view in wanted]
            more = bool(views)
            after = views[-1].sequence if views else after
        return {"items": items, "next_cursor": str(after) if more else None}

    @router.get("/{id:path}", summary="One request", response_model=RequestModel)
    def get_request(request_id: RequestId) -> dict[str, Any]:
        """By the id that the client sent, or the one the engine made of it. 404 if nothing is known of it."""
        now_s = time.time()
        view = scheduler.requests.find(request_id, now_s)
        override = find_override(context, request_id, view, now_s)
        if view is not None:
            return _show(view, override)
        if override is None:
            raise unknown_request(request_id)
        return _show_expected(context, override, now_s)

    return router
