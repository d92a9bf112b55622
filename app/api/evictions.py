"""Eviction history: what left the pool, when and why, and what it was like in sum."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from kvferry.app.api.context import AdminContext
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.paging import EvictionCursor, Page, PageQuery
from kvferry.app.store import EvictionFilter, EvictionRecord
from kvferry.app.times import rfc3339, rfc3339_or_none
from kvferry.core.stats import EvictionReason

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


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
    position: int
    size: int
    request: str = Field(description="the request that stored it")
    tenant: str | None
    needed_by: str | None = Field(description="the request whose blocks needed the room")
    regretted_at: str | None = Field(description="when it was asked for again; null if it was not")


class AgeBucketModel(BaseModel):
    """Evictions of blocks at most `upto_s` old, and older than the bucket before; null is without end."""

    upto_s: float | None
    count: int


class Ages(BaseModel):
    """Ages at eviction; null when nothing was evicted."""

    min_s: float | None
    mean_s: float | None
    max_s: float | None
    buckets: list[AgeBucketModel]


class EvictionSummaryModel(BaseModel):
    """Evictions in sum. Whole resets have no rows of their own, and are counted apart."""

    total: int
    by_reason: dict[str, int]
    regretted: int
    regret_rate: float = Field(description="share of the evicted blocks that were asked for again")
    regretted_by_reason: dict[str, int]
    never_hit: int
    age: Ages
    resets: int = Field(description="whole resets")
    reset_blocks: int = Field(description="blocks that those dropped")


def _rfc3339(value: object) -> object:
    if not isinstance(value, str) or not _RFC3339.fullmatch(value):
        raise ValueError("must be RFC 3339 with Z or an offset, such as 2026-01-31T12:00:00Z; in a URL a + is %2B")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_rfc3339)]


class Window(BaseModel):
    """A span of time. Unknown parameters are refused, as by `PageQuery`."""

    model_config = ConfigDict(extra="forbid")
    since: Moment | None = Field(default=None, description="RFC 3339, with an offset or Z; inclusive")
    until: Moment | None = Field(default=None, description="RFC 3339, with an offset or Z; exclusive")


class EvictionQuery(Window, PageQuery):
    """What to list; all conditions given hold together."""

    cursor: EvictionCursor = None
    reason: EvictionReason | None = None
    request: str | None = Field(
        default=None, min_length=1, max_length=512, description="the request that stored the block"
    )
    tenant: str | None = Field(default=None, min_length=1, max_length=512, description="digest of the tenant's name")


def _item(record: EvictionRecord) -> Eviction:
    return Eviction(
        id=record.id,
        time=rfc3339(record.time_s),
        hash=record.key,
        key=record.key,
        group=record.group,
        reason=EvictionReason(record.reason),
        policy=record.policy,
        age_s=record.age_s,
        idle_s=record.idle_s,
        hits=record.hits,
        position=record.position,
        size=record.size_bytes,
        request=record.request,
        tenant=record.tenant,
        needed_by=record.needed_by,
        regretted_at=rfc3339_or_none(record.regretted_at_s),
    )


def _unix_s(window: Window) -> tuple[float | None, float | None]:
    since, until = window.since, window.until
    return None if since is None else since.timestamp(), None if until is None else until.timestamp()


_NO_DATABASE: dict[int | str, dict[str, Any]] = {503: {"description": "The metadata store is gone"}}


def evictions_router(context: AdminContext, threads: StoreThreads) -> APIRouter:
    """`/admin/v1/evictions`."""
    router = APIRouter(prefix="/evictions", tags=["evictions"])
    reader = context.store.reader

    @router.get("", summary="Evicted blocks, the latest first", responses=_NO_DATABASE)
    async def list_evictions(query: Annotated[EvictionQuery, Query()]) -> Page[Eviction]:
        """History is written behind the engine; how far behind is `journal` in stats."""
        since_s, until_s = _unix_s(query)
        wanted = EvictionFilter(since_s, until_s, query.reason, query.request, query.tenant)
        page = await threads.run(reader.evictions, wanted, query.cursor, query.limit)
        return Page(items=[_item(record) for record in page.items], next_cursor=page.next_cursor)

    @router.get("/summary", summary="Evictions in sum", responses=_NO_DATABASE)
    async def summarize_evictions(window: Annotated[Window, Query()]) -> EvictionSummaryModel:
        """Counts by reason, ages at eviction, and how often an eviction was regretted."""
        summary = await threads.run(reader.eviction_summary, *_unix_s(window))
        return EvictionSummaryModel(
            total=summary.count,
            by_reason=dict(summary.by_reason),
            regretted=summary.regretted,
            regret_rate=summary.regret_rate,
            regretted_by_reason=dict(summary.regretted_by_reason),
            never_hit=summary.never_hit,
            age=Ages(
                min_s=summary.age_min_s,
                mean_s=summary.age_mean_s,
                max_s=summary.age_max_s,
                buckets=[AgeBucketModel(upto_s=bucket.upto_s, count=bucket.count) for bucket in summary.ages],
            ),
            resets=summary.resets,
            reset_blocks=summary.reset_blocks,
        )

    return router
