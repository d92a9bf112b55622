"""The engines that share the metadata store, as they describe themselves with their heartbeats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

from fastapi import Response
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import to_json
from sqlalchemy import Row

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context, Threads
from kvferry.app.api.errors import NO_DATABASE
from kvferry.app.api.pagination import DEFAULT_LIMIT, EngineCursor, Limit, page_response
from kvferry.app.store import MAX_TENANTS, MetadataStore, Page, TenantUse
from kvferry.app.store.schema import ALIVE_S
from kvferry.app.times import rfc3339, rfc3339_or_none


class EngineState(StrEnum):
    """Whether an engine runs."""

    ALIVE = "alive"
    ENDED = "ended"
    LOST = "lost"


class FleetPool(BaseModel):
    """The pool of an engine."""

    kind: str = Field(examples=["pinned"])
    bytes: int | None = Field(ge=0)
    slots: int | None = Field(ge=0)
    used_slots: int | None = Field(ge=0, description="slots that are not free")


class FleetRecent(BaseModel):
    """Prompt tokens of the last `window_s` seconds, by what served them."""

    window_s: float = Field(ge=0)
    device_hit: int = Field(ge=0)
    host_hit: int = Field(ge=0)
    tier_hit: int = Field(ge=0)
    recomputed: int = Field(ge=0)
    hit_rate: float | None = Field(
        default=None, description="share of prompt tokens that were not computed; null without prompts"
    )
    hit_rates: list[float | None] = Field(
        max_length=1000, description="the same for each of the last 30 minutes, the oldest first"
    )


class FleetTier(BaseModel):
    """A tier of an engine."""

    name: str
    type: str = Field(examples=["redis"])
    namespace: str | None = Field(
        description="equal for tiers through which engines exchange blocks; null for a tier that is not shared, or was "
        "not reached yet"
    )
    engines: int = Field(default=0, description="engines that are alive and share it, this one included")


class FleetEngine(BaseModel):
    """An engine. What an older version of kvferry does not report is null."""

    name: str
    answering: bool = Field(description="whether this engine gave the answer")
    state: EngineState = Field(
        description=f"`ended`: cleanly; `lost`: no heartbeat for {ALIVE_S:.0f} s. Both are listed for a day"
    )
    host: str | None
    url: str | None = Field(description="address of its admin API")
    kind: str | None = Field(examples=["vllm"])
    model: str | None
    version: str | None
    started_at: str
    seen_at: str = Field(description="its last heartbeat, which is written every five seconds")
    ended_at: str | None
    pool: FleetPool
    recent: FleetRecent | None
    tiers: list[FleetTier]


class UnreadableEngine(BaseModel):
    """A row of the database that was changed by hand to values that are none of its columns'."""

    name: str
    unreadable: list[str] = Field(description="the fields that cannot be read", examples=[["recent"]])


class FleetTenants(BaseModel):
    """The tenants with the most bytes in the pools of all engines that are alive, as of their last heartbeats."""

    items: list[TenantUse] = Field(description=f"each engine counts with its {MAX_TENANTS:,} largest tenants")


def _read_page(store: MetadataStore, cursor: str | None, limit: int) -> Response:
    now_s = time.time()
    after = None
    if cursor is not None:
        # Without NULs, which PostgreSQL refuses, and no name has.
        after = bytes.fromhex(cursor.removeprefix("engines_")).decode("utf-8", "replace").replace("\0", "")
    rows = store.reader.engines(now_s, after, limit + 1)
    sharing = Counter(_namespaces(store.reader.tiers_of_engines(now_s)))
    items = [_item(row, store.engine, now_s, sharing) for row in rows[:limit]]
    more = len(rows) > limit
    return page_response(items, f"engines_{rows[limit - 1].name.encode().hex()}" if more else None)


router = admin_router(prefix="/fleet", tags=["fleet"])


@router.get(
    "",
    summary="The engines that share the metadata store, by name",
    response_model=Page[FleetEngine | UnreadableEngine],
    responses=NO_DATABASE,
)
async def list_engines(
    context: Context, threads: Threads, limit: Limit = DEFAULT_LIMIT, cursor: EngineCursor = None
) -> Response:
    """Any of them answers, from the database. Tiers with the same `namespace` exchange blocks."""
    return await threads.run(partial(_read_page, context.store, cursor, limit))


def _read_tenants(store: MetadataStore, limit: int) -> Response:
    return Response(to_json({"items": store.reader.tenants(time.time(), limit)}), media_type="application/json")


@router.get(
    "/tenants",
    summary="The pools of all engines, by tenant",
    response_model=FleetTenants,
    responses=NO_DATABASE,
)
async def list_tenants(context: Context, threads: Threads, limit: Limit = DEFAULT_LIMIT) -> Response:
    """Those with the most bytes first, without limits and counts, which each engine has of its own."""
    return await threads.run(partial(_read_tenants, context.store, limit))


def _namespaces(columns: Iterable[Any]) -> Iterable[str]:
    """Yield each namespace of each engine once; what cannot be read is left out."""
    for tiers in columns:
        listed = [tier.get("namespace") for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
        yield from {name for name in listed if isinstance(name, str)}


def _item(row: Row[Any], own_name: str, now_s: float, sharing: Mapping[str, int]) -> dict[str, Any]:
    """Return an engine, or which of its fields cannot be read."""
    try:
        is_alive = row.ended_at is None and now_s - row.seen_at < ALIVE_S
        state = EngineState.ALIVE if is_alive else EngineState.LOST if row.ended_at is None else EngineState.ENDED
        times = {
            "started_at": rfc3339(row.started_at),
            "seen_at": rfc3339(row.seen_at),
            "ended_at": rfc3339_or_none(row.ended_at),
        }
    except (TypeError, ValueError, OverflowError):
        return {"name": row.name, "unreadable": ["started_at", "seen_at", "ended_at"]}
    content = {
        **{name: getattr(row, name) for name in ("name", "host", "url", "kind", "model", "version", "recent")},
        **times,
        "answering": row.name == own_name,
        "state": state,
        "pool": {"kind": row.pool_kind, "bytes": row.pool_bytes, "slots": row.slots, "used_slots": row.used_slots},
        "tiers": row.tiers or [],
    }
    try:
        engine = FleetEngine.model_validate(content)
    except ValidationError as error:
        return {"name": row.name, "unreadable": sorted({str(problem["loc"][0]) for problem in error.errors()})}
    if engine.recent is not None:
        recent = engine.recent
        hits = recent.device_hit + recent.host_hit + recent.tier_hit
        recent.hit_rate = hits / (hits + recent.recomputed) if hits + recent.recomputed else None
    for tier in engine.tiers:
        tier.engines = sharing.get(tier.namespace or "", 0)
    return engine.model_dump(mode="json")
