"""Stats: one consistent snapshot, once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated

import anyio
from fastapi import APIRouter, Query
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.api.context import AdminContext
from app.api.problems import Problem
from app.api.stats_models import (
    EngineStats,
    EvictionStats,
    JournalStats,
    LoadStats,
    PoolStats,
    PromptTokenStats,
    RequestStats,
    Stats,
    StoreStats,
)
from app.api.times import rfc3339

MAX_STREAMS = 32
CLOSING_POLL_S = 0.25
SEND_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1.0


def take_stats(context: AdminContext, now_s: float) -> Stats:
    """The stats of this moment. Microseconds: one copy of core's counters under its lock, and the journal's own."""
    snapshot = context.scheduler.snapshot()
    return Stats(
        time=rfc3339(now_s),
        uptime_s=max(0.0, round(now_s - context.started_s, 3)),
        epoch=snapshot.epoch,
        engine=EngineStats(**asdict(context.engine_info)),
        pool=PoolStats(kind=context.pool_kind, **asdict(snapshot.pool)),
        requests=RequestStats(**asdict(snapshot.requests)),
        prompt_tokens=PromptTokenStats(**asdict(snapshot.prompt_tokens)),
        store=StoreStats(**asdict(snapshot.store)),
        load=LoadStats(**asdict(snapshot.load)),
        evictions=EvictionStats(**asdict(snapshot.evictions)),
        journal=JournalStats(**asdict(context.store.journal_stats())),
    )


def stats_router(context: AdminContext) -> APIRouter:
    """Routes under `/admin/v1` for the cache's counters."""
    router = APIRouter(tags=["stats"])
    num_streams = 0

    @router.get("/stats", summary="All counters, at one moment", response_model=Stats)
    async def get_stats() -> Response:
        """Both identities of the contract hold in every answer. Cheap enough to poll every second."""
        return Response(take_stats(context, time.time()).model_dump_json(), media_type="application/json")

    async def follow(interval_s: float, shutdown: anyio.Event) -> AsyncIterator[ServerSentEvent]:
        nonlocal num_streams
        num_streams += 1
        loop = asyncio.get_running_loop()
        try:
            due_s = loop.time()
            while not (context.closing() or shutdown.is_set()):
                wait_s = due_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(min(wait_s, CLOSING_POLL_S))
                    continue
                yield ServerSentEvent(take_stats(context, time.time()).model_dump_json())
                # A slow reader gets fewer events, not late ones.
                due_s = max(due_s + interval_s, loop.time())
        finally:
            num_streams -= 1

    @router.get(
        "/stats/stream",
        summary="All counters, as server-sent events",
        response_class=EventSourceResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def stream_stats(
        interval_s: Annotated[
            float, Query(ge=0.1, le=60, allow_inf_nan=False, description="seconds between events")
        ] = 1.0,
    ) -> EventSourceResponse:
        """Each event's data is the JSON of `GET /admin/v1/stats`. Ends when the client goes or the server stops."""
        if num_streams >= MAX_STREAMS:
            raise Problem(503, f"{MAX_STREAMS} streams are open already: close one", headers={"Retry-After": "5"})
        shutdown = anyio.Event()
        return EventSourceResponse(
            follow(interval_s, shutdown),
            send_timeout=SEND_TIMEOUT_S,
            shutdown_event=shutdown,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    return router
