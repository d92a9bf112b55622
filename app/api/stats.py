"""Stats: one consistent snapshot, once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
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
from app.times import rfc3339
from core.tier_stats import TierStats

MAX_STREAMS = 32

_FORM = (
    '{"time":"%s","uptime_s":%.3f,"epoch":%d,"engine":%s,'
    '"pool":{"kind":%s,"slots":%d,"wanted_slots":%d,"slot_bytes":%d,"free":%d,"ready":%d,"storing":%d,'
    '"loading":%d,"pinned":%d,"unverified":%d,"bytes":%d,"eviction_policy":"%s"},'
    '"requests":{"seen":%d,"running":%d,"waiting_for_load":%d,"finished":%d,"preempted":%d},'
    '"prompt_tokens":{"total":%d,"device_hit":%d,"host_hit":%d,"tier_hit":{NAMES},"recomputed":%d},'
    '"missed_tokens":{"causes":{NAMES},"evicted":{NAMES},"not_stored":{NAMES}},'
    '"store":{"offered":%d,"stored":%d,"bytes":%d,"failed":%d,"in_flight":%d,"seconds":%s,"skipped":{NAMES}},'
    '"load":{"blocks":%d,"bytes":%d,"failed":%d,"corrupt":%d,"declined":%d,"in_flight":%d,"seconds":%s},'
    '"evictions":{"total":%d,"by_reason":{NAMES},"regretted":%d},'
    '"tiers":%s,"journal":{"queued":%d,"written":%d,"dropped":%d,"lag_s":%s},"recovery":%s}'
)
"""JSON of all stats, to be filled with their values in this order. For NAMES come those of counters kept by name."""


class StatsWriter:
    """Writes the stats of a moment, as `Stats` describes them.

    This is polled, and what it costs is the interpreter's time that an engine in this process wants too. Hardly any of
    that is spent on the numbers: it is memory that others have pushed out of the caches, code above all. So all is read
    in one go, without copies, dictionaries or models in between, and written by one call of one function.
    """

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._engine = to_json(context.engine_info).decode()
        self._kind = to_json(context.pool_kind).decode()
        self._recovery = to_json(context.warm_start).decode()
        self._num_names = -1
        self._form = _FORM

    def write(self, now_s: float) -> bytes:
        """The stats of this moment, as JSON."""
        context = self._context
        journal = context.store.journal_stats()
        context.scheduler.tiers.fetch_counts()
        with context.manager.lock:
            live = context.scheduler.live()
            pool, requests, prompt, missed = live.pool, live.requests, live.prompt_tokens, live.missed_tokens
            store, load, evictions = live.store, live.load, live.evictions
            by_name = (
                prompt.tier_hit,
                missed.causes,
                missed.evicted,
                missed.not_stored,
                store.skipped,
                evictions.by_reason,
            )
            tier_hit, causes, evicted, not_stored, skipped, by_reason = by_name
            num_names = sum(map(len, by_name))
            if num_names != self._num_names:
                # A counter's name may come, and none ever goes.
                self._num_names, self._form = num_names, _with_names(by_name)
            form = self._form
            values = (
                rfc3339(now_s), max(0.0, now_s - context.started_s), live.epoch, self._engine,
                self._kind, pool.slots, pool.wanted_slots, pool.slot_bytes, pool.free, pool.ready, pool.storing,
                pool.loading, pool.pinned, pool.unverified, pool.bytes, pool.eviction_policy,
                requests.seen, requests.running, requests.waiting_for_load, requests.finished, requests.preempted,
                prompt.total, prompt.device_hit, prompt.host_hit, *tier_hit.values(), prompt.recomputed,
                *causes.values(), *evicted.values(), *not_stored.values(),
                store.offered, store.stored, store.bytes, store.failed, store.in_flight, store.seconds,
                *skipped.values(),
                load.blocks, load.bytes, load.failed, load.corrupt, load.declined, load.in_flight, load.seconds,
                evictions.total, *by_reason.values(), evictions.regretted,
                _tiers(live.tiers) if live.tiers else "{}",
                journal.queued, journal.written, journal.dropped, journal.lag_s, self._recovery,
            )  # fmt: skip
        return (form % values).encode()


def _with_names(by_name: Iterable[Mapping[str, int]]) -> str:
    """The form with these counters' names, in the order in which they stand there."""
    form, *rest = _FORM.split("NAMES")
    for counters, part in zip(by_name, rest, strict=True):
        form += ",".join(f"{to_json(name).decode().replace('%', '%%')}:%d" for name in counters) + part
    return form


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
