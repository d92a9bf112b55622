"""Stats: one consistent snapshot, once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.api.context import AdminContext
from app.api.polled import PolledAnswer, PolledRoute
from app.api.stats_models import Stats
from app.api.streams import CLOSING_POLL_S, MustEnd, Streams
from app.api.times import rfc3339
from core.tier_stats import TierStats

MAX_STREAMS = 32


class StatsWriter:
    """Writes the stats of a moment, as `Stats` describes them.

    This is polled, and what it costs is the interpreter's time that an engine in this process wants too. Hardly any of
    that is spent on the numbers: it is memory that others have pushed out of the caches, code above all. So all is read
    in one go, without copies, dictionaries or models in between.
    """

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._engine = _constant(context.engine_info)
        self._kind = _constant(context.pool_kind)
        self._recovery = _constant(context.warm_start)

    def write(self, now_s: float) -> bytes:
        """The stats of this moment, as JSON."""
        context = self._context
        journal = context.store.journal_stats()
        with context.manager.lock:
            live = context.scheduler.live()
            pool, requests, prompt, missed = live.pool, live.requests, live.prompt_tokens, live.missed_tokens
            store, load, evictions = live.store, live.load, live.evictions
            text = (
                f'{{"time":"{rfc3339(now_s)}","uptime_s":{max(0.0, now_s - context.started_s):.3f},'
                f'"epoch":{live.epoch},"engine":{self._engine},"pool":{{"kind":{self._kind},"slots":{pool.slots},'
                f'"wanted_slots":{pool.wanted_slots},"slot_bytes":{pool.slot_bytes},"free":{pool.free},'
                f'"ready":{pool.ready},"storing":{pool.storing},"loading":{pool.loading},"pinned":{pool.pinned},'
                f'"unverified":{pool.unverified},"bytes":{pool.bytes},"eviction_policy":"{pool.eviction_policy}"}},'
                f'"requests":{{"seen":{requests.seen},"running":{requests.running},'
                f'"waiting_for_load":{requests.waiting_for_load},"finished":{requests.finished},'
                f'"preempted":{requests.preempted}}},"prompt_tokens":{{"total":{prompt.total},'
                f'"device_hit":{prompt.device_hit},"host_hit":{prompt.host_hit},"tier_hit":{prompt.tier_hit},'
                f'"recomputed":{prompt.recomputed}}},"missed_tokens":{{"causes":{missed.causes},'
                f'"evicted":{missed.evicted},"not_stored":{missed.not_stored}}},"store":{{"offered":{store.offered},'
                f'"stored":{store.stored},"bytes":{store.bytes},"failed":{store.failed},'
                f'"in_flight":{store.in_flight},"seconds":{store.seconds},"skipped":{store.skipped}}},'
                f'"load":{{"blocks":{load.blocks},"bytes":{load.bytes},"failed":{load.failed},'
                f'"corrupt":{load.corrupt},"declined":{load.declined},"in_flight":{load.in_flight},'
                f'"seconds":{load.seconds}}},"evictions":{{"total":{evictions.total},'
                f'"by_reason":{evictions.by_reason},"regretted":{evictions.regretted}}},'
                f'"tiers":{_tiers(live.tiers) if live.tiers else "{}"},"journal":{{"queued":{journal.queued},'
                f'"written":{journal.written},"dropped":{journal.dropped},"lag_s":{journal.lag_s}}},'
                f'"recovery":{self._recovery}}}'
            )
        # Of names and numbers only, Python writes a dictionary as JSON does, but for the quotes.
        return text.replace("'", '"').encode()


def _constant(value: object) -> str:
    """JSON of what stays as it is, without single quotes."""
    return to_json(value).decode().replace("'", "\\u0027")


def _tiers(tiers: Mapping[str, TierStats]) -> str:
    return to_json({name: asdict(tier.counts) | asdict(tier.use) for name, tier in tiers.items()}).decode()


def stats_router(context: AdminContext) -> APIRouter:
    """Routes under `/admin/v1` for the cache's counters."""
    router = APIRouter(tags=["stats"])
    streams = Streams(context, MAX_STREAMS)
    writer = StatsWriter(context)

    def get_stats() -> PolledAnswer:
        """Both identities of the contract hold in every answer. Cheap enough to poll every second."""
        return PolledAnswer(lambda: writer.write(time.time()), "application/json")

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
            yield ServerSentEvent(writer.write(time.time()).decode())
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
