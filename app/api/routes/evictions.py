"""Eviction history: blocks that left the pool, and summaries."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query, Response
from pydantic import BaseModel, Field

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.api.errors import NO_DATABASE
from kvferry.app.api.pagination import EvictionCursor, PageQuery, json_page_response
from kvferry.app.common.times import Moment
from kvferry.app.store import EvictionFilter, EvictionSummary, MetadataStore, Page
from kvferry.core.stats import EvictionReason

SUMMARY_TIMEOUT_S = 60.0
"""SQLite counts a million rows in one or two seconds."""


class Eviction(BaseModel):
    """A block that left the pool. `age_s` counts from when it was stored, `idle_s` from when it was last used."""

    id: int
    time: str
    hash: str
    key: str
    group: int
    reason: EvictionReason
    policy: str = Field(description="the eviction policy at that time", examples=["lru"])
    age_s: float
    idle_s: float
    hits: int
    position: int = Field(description="place in its request, in slots")
    size: int = Field(description="in bytes")
    request: str = Field(description="the request that stored it")
    tenant: str | None
    session: str | None = Field(description="that request's session")
    needed_by: str | None = Field(description="the request whose blocks needed the slot")
    regretted_at: str | None = Field(description="when it was requested again; null if it was not")


class Window(BaseModel):
    """A span of time."""

    since: Moment | None = Field(default=None, description="RFC 3339, with an offset or Z; inclusive")
    until: Moment | None = Field(default=None, description="RFC 3339, with an offset or Z; exclusive")


class EvictionQuery(Window, PageQuery):
    """Filter of evictions; all conditions must hold."""

    cursor: EvictionCursor = None
    reason: EvictionReason | None = None
    request: str | None = Field(
        default=None, min_length=1, max_length=512, description="the request that stored the block"
    )
    tenant: str | None = Field(default=None, min_length=1, max_length=512, description="digest of the tenant's name")


def _unix_s(window: Window) -> tuple[float | None, float | None]:
    since, until = window.since, window.until
    return None if since is None else since.timestamp(), None if until is None else until.timestamp()


def _read_page(store: MetadataStore, wanted: EvictionFilter, cursor: str | None, limit: int) -> Response:
    return json_page_response(store.reader.evictions(wanted, cursor, limit))


router = admin_router(prefix="/evictions", tags=["evictions"])


@router.get("", summary="Evicted blocks, newest first", response_model=Page[Eviction], responses=NO_DATABASE)
async def list_evictions(context: Context, query: Annotated[EvictionQuery, Query()]) -> Response:
    """History is written behind the engine; `journal` in stats shows how far."""
    since_s, until_s = _unix_s(query)
    wanted = EvictionFilter(since_s, until_s, query.reason, query.request, query.tenant)
    return await context.store.threads.run(partial(_read_page, context.store, wanted, query.cursor, query.limit))


@router.get("/summary", summary="Summary of evictions", responses=NO_DATABASE)
async def summarize_evictions(context: Context, window: Annotated[Window, Query()]) -> EvictionSummary:
    """Counts by reason, ages at eviction, and the rate of regretted evictions."""
    store = context.store
    return await store.threads.run(partial(store.reader.eviction_summary, *_unix_s(window)), SUMMARY_TIMEOUT_S)
