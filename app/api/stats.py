"""Stats: one consistent snapshot, once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query
from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.api.context import AdminContext
from app.api.polled import PolledAnswer, PolledRoute
from app.api.stats_models import Stats
from app.api.streams import CLOSING_POLL_S, MustEnd, Streams
from app.api.times import rfc3339

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_STREAMS = 32


def stats_json(context: AdminContext, now_s: float) -> bytes:
    """The stats of this moment, as `Stats` describes them: one copy of core's counters, and the journal's own.

    Written without a model in between: this is polled, and what it costs is the interpreter's time that an engine in
    this process wants too.
    """
    snapshot = context.scheduler.snapshot()
    return to_json(
        {
            "time": rfc3339(now_s),
            "uptime_s": max(0.0, round(now_s - context.started_s, 3)),
            "epoch": snapshot.epoch,
            "engine": _fields(context.engine_info),
            "pool": {"kind": context.pool_kind, **_fields(snapshot.pool)},
            "requests": _fields(snapshot.requests),
            "prompt_tokens": _fields(snapshot.prompt_tokens),
            "missed_tokens": _fields(snapshot.missed_tokens),
            "store": _fields(snapshot.store),
            "load": _fields(snapshot.load),
            "evictions": _fields(snapshot.evictions),
            "tiers": {name: _fields(tier.counts) | _fields(tier.use) for name, tier in snapshot.tiers.items()},
            "journal": _fields(context.store.journal_stats()),
            "recovery": None if context.warm_start is None else _fields(context.warm_start),
        }
    )


def _fields(counts: DataclassInstance) -> dict[str, object]:
    """A flat dataclass as a dictionary, which is written quicker than it; `dataclasses.asdict` would copy in depth."""
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


def stats_router(context: AdminContext) -> APIRouter:
    """Routes under `/admin/v1` for the cache's counters."""
    router = APIRouter(tags=["stats"])
    streams = Streams(context, MAX_STREAMS)

    def get_stats() -> PolledAnswer:
        """Both identities of the contract hold in every answer. Cheap enough to poll every second."""
        return PolledAnswer(lambda: stats_json(context, time.time()), "application/json")

    router.add_api_route(
        "/stats",
        get_stats,
        summary="All counters, at one moment",
        response_model=Stats,
        route_class_override=PolledRoute,
    )

    async def follow(interval_s: float, must_end: MustEnd) -> AsyncGenerator[ServerSentEvent, None]:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not must_end():
            wait_s = due_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, CLOSING_POLL_S))
                continue
            yield ServerSentEvent(stats_json(context, time.time()).decode())
            # A slow reader gets fewer events, not late ones.
            due_s = max(due_s + interval_s, loop.time())

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
        return streams.open(partial(follow, interval_s))

    return router
