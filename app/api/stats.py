"""Stats: one consistent snapshot, once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvferry.app.api.context import AdminContext
from kvferry.app.api.stats_models import Stats
from kvferry.app.api.streams import CLOSING_POLL_S, STREAM_RESPONSES, MaxEvents, MustEnd, Streams
from kvferry.app.times import rfc3339

MAX_STREAMS = 32


def take_stats(context: AdminContext, now_s: float) -> Stats:
    """Copy all counters at one moment, under the manager lock, and build their model outside it."""
    snapshot = context.scheduler.snapshot()
    return Stats.model_validate(
        {
            "time": rfc3339(now_s),
            "uptime_s": max(0.0, now_s - context.started_s),
            "epoch": snapshot.epoch,
            "engine": context.engine_info,
            "pool": {"kind": context.pool_kind, **asdict(snapshot.pool)},
            "requests": snapshot.requests,
            "prompt_tokens": snapshot.prompt_tokens,
            "missed_tokens": snapshot.missed_tokens,
            "store": snapshot.store,
            "load": snapshot.load,
            "evictions": snapshot.evictions,
            "tiers": {name: asdict(tier.counts) | asdict(tier.use) for name, tier in snapshot.tiers.items()},
            "offloading": context.guard.status,
            "journal": context.store.journal_stats()._asdict(),
            "recovery": context.warm_start,
        },
        from_attributes=True,
    )


def stats_router(context: AdminContext) -> APIRouter:
    """Routes under `/admin/v1` for the cache's counters."""
    router = APIRouter(tags=["stats"])
    streams = Streams(context, MAX_STREAMS)

    @router.get("/stats", summary="All counters, at one moment")
    async def get_stats() -> Stats:
        """Both identities of the contract hold in every answer. Cheap enough to poll every second."""
        return take_stats(context, time.time())

    async def follow(interval_s: float, must_end: MustEnd) -> AsyncGenerator[ServerSentEvent, None]:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not must_end():
            wait_s = due_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, CLOSING_POLL_S))
                continue
            yield ServerSentEvent(take_stats(context, time.time()).model_dump_json())
            # A slow reader gets fewer events, not late ones.
            due_s = max(due_s + interval_s, loop.time())

    @router.get(
        "/stats/stream",
        summary="All counters, as server-sent events",
        response_class=EventSourceResponse,
        responses=STREAM_RESPONSES,
    )
    async def stream_stats(
        interval_s: Annotated[
            float, Query(ge=0.1, le=60, allow_inf_nan=False, description="seconds between events")
        ] = 1.0,
        max_events: MaxEvents = None,
    ) -> EventSourceResponse:
        """Each event's data is the JSON of `GET /admin/v1/stats`. Ends when the client goes or the server stops."""
        return streams.open(partial(follow, interval_s), max_events)

    return router
