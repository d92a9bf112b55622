"""Sessions that clients name: what served their requests, where their blocks are, and leases of these."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Body, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.api.calls import RequestId, admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem, Responses
from kvferry.app.api.leases import LeaseView, check_retain_s, lease_to_json
from kvferry.app.api.pagination import PageQuery, PositionCursor, page_response
from kvferry.app.api.routes.lookup import AppThreads, PrefetchAnswer, find_prefix, load_prefix
from kvferry.app.api.routes.reset import check_places
from kvferry.app.common.times import rfc3339_or_none
from kvferry.app.operations.policy_json import RetainS
from kvferry.app.store import Page
from kvferry.core.keys import TENANT_PATTERN, SessionKey
from kvferry.core.pool.leases import LeaseOutcome, LeaseReceipt
from kvferry.core.scheduler.sessions import SessionCounts
from kvferry.core.stats import PromptTokens

_FORGOTTEN = "which blocks it has is not known: no request of it was computed, or other sessions took the memory"
_MAX_NAMED = 5


class SessionModel(BaseModel):
    """A session: the requests of one tenant that named the same id. Counts are of requests that have ended."""

    id: str
    tenant: str | None = Field(description="digest of the tenant's name")
    requests: int
    last_seen: str | None = Field(description="when its latest request ended")
    prompt_tokens: PromptTokens = Field(description="as in stats, for its requests")
    retained_until: str | None = Field(description="when the last lease of its blocks ends; null without one")


class SessionDetails(SessionModel):
    """A session, and how many tokens of its latest request each place holds, as lookups say it.

    All are null where the blocks of the session are not known any more.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    num_tokens: int | None = Field(default=None, description="tokens of its latest computed request, in whole blocks")
    device: int | None = None
    pool: int | None = None
    tiers: dict[str, int | None] | None = Field(default=None, examples=[{"disk": 4096}])
    anywhere: int | None = None


class RetainBody(BaseModel):
    """Duration of a lease."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"retain_s": 600}]})
    retain_s: RetainS = Field(description="seconds from now, at most `max_retain_s`; 0 ends the leases of the session")


class SessionPrefetchBody(BaseModel):
    """The tiers that blocks may come from, all of them by default."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"tiers": None}]})
    tiers: list[str] | None = Field(default=None, min_length=1, max_length=64, examples=[["disk"]])


class SessionQuery(PageQuery):
    """Page of the list."""

    cursor: PositionCursor = None


Tenant = Annotated[
    str | None,
    Query(
        pattern=rf"^({TENANT_PATTERN[1:-1]})?$",
        description="digest of its tenant, empty for none; needed where several tenants have sessions of this id",
    ),
]
_REFUSALS: Responses = {409: {"description": "Several tenants have sessions of this id"}}
_PREFETCH_REFUSALS: Responses = {
    409: {"description": "Several tenants have sessions of this id, or its blocks are not known any more"},
    429: {"description": "More than an eighth of the pool would be prefetched, or too many calls wait"},
}

router = admin_router(prefix="/sessions", tags=["sessions"])


def _find(context: AdminContext, session: str, tenant: str | None) -> SessionCounts:
    """Return the session of an id; without counts if only a lease of it is known. Raises `Problem`."""
    scheduler = context.scheduler
    sessions = scheduler.sessions.named(session)
    if tenant is not None:
        sessions = [one for one in sessions if one.key.tenant == (tenant or None)]
    if len(sessions) > 1:
        names = ", ".join(one.key.tenant or "none" for one in sessions[:_MAX_NAMED])
        detail = f"{len(sessions)} tenants have a session {session!r}: choose one by ?tenant= (empty for none): {names}"
        raise Problem(409, detail, slug="ambiguous-session", title="Ambiguous session")
    if sessions:
        return sessions[0]
    key = SessionKey(tenant or None, session)
    if scheduler.manager.leases.until_s(key) is None:
        raise Problem(404, f"no session {session[:200]!r} is known")
    return SessionCounts(key)


def _to_json(context: AdminContext, counts: SessionCounts) -> dict[str, Any]:
    return {
        "id": counts.key.session,
        "tenant": counts.key.tenant,
        "requests": counts.num_requests,
        "last_seen": rfc3339_or_none(counts.last_seen_s),
        "prompt_tokens": counts.prompt_tokens,
        "retained_until": rfc3339_or_none(context.scheduler.manager.leases.until_s(counts.key)),
    }


@router.get("", summary="The latest sessions", response_model=Page[SessionModel])
def list_sessions(context: Context, query: Annotated[SessionQuery, Query()]) -> Response:
    """The last 1,000 that had a request, the latest first. A restart forgets them."""
    sessions = context.scheduler.sessions.page(None if query.cursor is None else int(query.cursor), query.limit)
    next_cursor = str(sessions[-1].sequence) if len(sessions) == query.limit else None
    return page_response([_to_json(context, one) for one in sessions], next_cursor)


def _describe(context: AdminContext, session: str, tenant: str | None) -> SessionDetails:
    counts = _find(context, session, tenant)
    hashes = context.scheduler.sessions.hashes(counts.key)
    places: dict[str, Any] = {}
    if hashes is not None:
        query, held = find_prefix(context, hashes)
        places = {"num_tokens": query.num_tokens, **asdict(held)}
    return SessionDetails(**_to_json(context, counts), **places)


@router.post(
    "/{id:path}/prefetch", summary="Load its blocks into the pool", status_code=202, responses=_PREFETCH_REFUSALS
)
async def prefetch_session(
    context: Context,
    threads: AppThreads,
    session: RequestId,
    tenant: Tenant = None,
    body: Annotated[SessionPrefetchBody | None, Body()] = None,
) -> PrefetchAnswer:
    """As `POST /admin/v1/prefetch`, for the prompt and answer of its latest request."""
    tiers = None if body is None else body.tiers
    check_places(tiers, context.scheduler.tiers.names)
    return await threads.run(partial(_prefetch, context, session, tenant, tiers))


def _prefetch(context: AdminContext, session: str, tenant: str | None, tiers: list[str] | None) -> PrefetchAnswer:
    hashes = context.scheduler.sessions.hashes(_find(context, session, tenant).key)
    if hashes is None:
        raise Problem(409, _FORGOTTEN)
    query, _ = find_prefix(context, hashes)
    return load_prefix(context, query, tiers)


# After the routes with longer paths, which this path matches too.
@router.get("/{id:path}", summary="One session", responses=_REFUSALS)
async def get_session(
    context: Context, threads: AppThreads, session: RequestId, tenant: Tenant = None
) -> SessionDetails:
    """By the id that its client sent. Its blocks are those of its latest computed request."""
    return await threads.run(partial(_describe, context, session, tenant))


@router.put("/{id:path}", summary="Keep its blocks from eviction", response_model=LeaseView, responses=_REFUSALS)
def retain_session(
    context: Context, session: RequestId, body: Annotated[RetainBody, Body()], tenant: Tenant = None
) -> dict[str, Any] | None:
    """Replaces its leases by one for the blocks of its latest request, which the session's next request ends."""
    check_retain_s(context, body.retain_s)
    scheduler, key = context.scheduler, _find(context, session, tenant).key
    hashes = scheduler.sessions.hashes(key)
    if hashes is None and body.retain_s:
        return lease_to_json(LeaseReceipt(LeaseOutcome.REJECTED, 0, 0, 0, None, _FORGOTTEN))
    with context.guard.guarding("lease of a session"):
        receipt = scheduler.retention.retain(key, hashes or (), body.retain_s, time.time())
    context.wake()
    return lease_to_json(receipt)


@router.delete("/{id:path}", summary="End its leases", status_code=204, responses=_REFUSALS)
def release_session(context: Context, session: RequestId, tenant: Tenant = None) -> None:
    """Its blocks that no other session of the list has are evicted next."""
    scheduler, key = context.scheduler, _find(context, session, tenant).key
    layout = scheduler.layout
    own = scheduler.sessions.own_hashes(key, layout.slot_alignment_tokens // layout.hash_block_size)
    with context.guard.guarding("release of a session"):
        scheduler.retention.release(key, own)
    context.wake()
