"""Stats: one consistent snapshot, once or as a stream of server-sent events, and samples over time.

The response is made of core's counters, which are declared with their descriptions at their fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from fastapi import Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvferry.app.api.auth import Caller
from kvferry.app.api.calls import admin_router, from_app
from kvferry.app.api.context import AdminContext, Context, EngineInfo, KVEventCounts
from kvferry.app.api.sse import CLOSING_POLL_S, STREAM_RESPONSES, MaxEvents, MustEnd, Streams
from kvferry.app.common.threads import ThreadCounts
from kvferry.app.common.times import Moment, rfc3339
from kvferry.app.guard import OffloadStatus
from kvferry.app.pool.recovery import WarmStart
from kvferry.app.settings.store_mode import StoreModeChoice
from kvferry.app.store import DatabaseUnavailable, JournalStats
from kvferry.app.telemetry.advice import Advice
from kvferry.app.telemetry.balance import Balance
from kvferry.app.telemetry.history import COUNTERS, GAUGES, MINUTE_S, NUM_MINUTES, NUM_SECONDS, SAMPLE_S, Row
from kvferry.app.telemetry.miss_texts import CAUSES, EVICTED, NOT_STORED, SHORT
from kvferry.core.stats import (
    EvictionCounts,
    LeaseCounts,
    LoadCounts,
    MissedTokens,
    PoolCounts,
    PromptTokens,
    RequestCounts,
    StoreCounts,
    TierWaitCounts,
)
from kvferry.core.tiers.base import TierCounts, TierUse
from kvferry.core.tiers.base import TierStats as CoreTierStats

DAY_S = NUM_MINUTES * MINUTE_S
MAX_MARKS = 200
MAX_MARK_CHARS = 100
CHANGES_TIMEOUT_S = 2.0
"""Charts are shown without operators' changes rather than late."""
MAX_STREAMS = 32
MIN_INTERVAL_S = 0.1

TierStats = make_dataclass(
    "TierStats",
    [(one.name, get_type_hints(part)[one.name], one) for part in (TierCounts, TierUse) for one in fields(part)],
    frozen=True,
)
"""A tier by its own counts and by its use, which responses show as one."""


_COLUMNS = "; ".join(
    [
        "`time`: RFC 3339, end of the interval",
        *(f"`{name}`: {text} during the interval" for name, (text, _) in COUNTERS.items()),
        *(f"`{name}`: {text} at its end" for name, (text, _) in GAUGES.items()),
        "`span_s`: seconds of the interval",
    ]
)


@dataclass(slots=True)
class PoolStats(PoolCounts):
    """Slots by state: `slots = free + ready + storing`; `loading`, `pinned` and `unverified` count among `ready`."""

    kind: str = ""


class Stats(BaseModel):
    """One consistent snapshot."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    time: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    uptime_s: float
    epoch: int = Field(
        description="raised by each reset of the whole pool, and when it is torn or truncated; "
        "a pool that outlives its process keeps counting"
    )
    engine: EngineInfo
    pool: PoolStats
    requests: RequestCounts
    prompt_tokens: PromptTokens
    missed_tokens: MissedTokens = Field(description="together `prompt_tokens.recomputed`")
    store: StoreCounts = Field(description="`offered = stored + sum(skipped) + failed + in_flight`")
    load: LoadCounts
    evictions: EvictionCounts
    leases: LeaseCounts
    tier_waits: TierWaitCounts
    tiers: dict[str, TierStats]  # type: ignore[valid-type]  # made of core's fields
    balance: Balance = Field(
        description="what offloading cost and saved in the last `window_s` seconds, and whether storing is paused"
    )
    advice: Advice | None = Field(
        description="the change that is worth most by what is measured; null if none is worth 0.5% of the time"
    )
    store_mode: StoreModeChoice
    offloading: OffloadStatus
    journal: JournalStats
    threads: ThreadCounts
    kv_events: KVEventCounts | None = Field(description="null if the engine publishes none")
    recovery: WarmStart | None = Field(description="null if the pool does not outlive its process")


class Mark(BaseModel):
    """What may explain a change of the counters."""

    time: str = Field(description="RFC 3339")
    kind: Literal["start", "change"] = Field(description="of the process, or by an operator")
    text: str = Field(examples=["PATCH config: pool_bytes=48GiB"])


class StatsRows(BaseModel):
    """Samples of the counters, oldest first."""

    interval_s: int = Field(description="seconds between rows; `time` and `span_s` are exact")
    columns: list[str] = Field(description=_COLUMNS)
    rows: list[list[str | int | float]] = Field(
        description="one value per column; none for the time in which no process ran"
    )
    marks: list[Mark] = Field(
        description="starts of the process and calls of the audit that were applied, oldest first, the latest "
        f"{MAX_MARKS}; while the database does not answer, starts only"
    )


class CauseTexts(BaseModel):
    """A sentence per cause of missed tokens, in the fields of `missed_tokens`."""

    causes: dict[str, str] = Field(examples=[{"tail": CAUSES["tail"]}])
    evicted: dict[str, str]
    not_stored: dict[str, str]
    short: dict[str, dict[str, str]] = Field(
        description="the same in at most three words", examples=[{"causes": {"tail": SHORT["causes"]["tail"]}}]
    )


def tier_stats(tier: CoreTierStats) -> Any:
    """Return the counters of a tier as one `TierStats`."""
    return TierStats(**asdict(tier.counts), **asdict(tier.use))


def take_stats(context: AdminContext, now_s: float) -> Stats:
    """Copy all counters at one moment, with the manager lock held, and build the response without it."""
    snapshot = context.scheduler.snapshot()
    values: dict[str, Any] = {
        "time": rfc3339(now_s),
        "uptime_s": time.monotonic() - context.started_s,
        "epoch": snapshot.epoch,
        "engine": context.engine,
        "pool": PoolStats(**asdict(snapshot.pool), kind=context.settings.current.pool_kind.value),
        "requests": snapshot.requests,
        "prompt_tokens": snapshot.prompt_tokens,
        "missed_tokens": snapshot.missed_tokens,
        "store": snapshot.store,
        "load": snapshot.load,
        "evictions": snapshot.evictions,
        "leases": snapshot.leases,
        "tier_waits": snapshot.tier_waits,
        "tiers": {name: tier_stats(tier) for name, tier in snapshot.tiers.items()},
        "balance": context.balance.balance(snapshot),
        "advice": context.adviser.latest,
        "store_mode": context.store_mode(),
        "offloading": context.guard.status,
        "journal": context.store.journal.stats(),
        "threads": context.threads(),
        "kv_events": context.kv_events(),
        "recovery": context.warm_start,
    }
    return Stats.model_validate(values, from_attributes=True)


router = admin_router(tags=["stats"])


@router.get("/stats", summary="All counters, at one moment")
async def get_stats(context: Context) -> Stats:
    """Both identities of the contract hold in every response. Cheap enough to poll every second."""
    return take_stats(context, time.time())


@router.get("/stats/causes", summary="Why prompt tokens are computed, in words")
def get_causes() -> CauseTexts:
    """For each cause in `missed_tokens` of stats and of requests, what it means and what an operator can do."""
    return CauseTexts(causes=CAUSES, evicted=EVICTED, not_stored=NOT_STORED, short=SHORT)


@router.get("/stats/history", summary="Counters over time", response_model=StatsRows)
async def get_history(
    context: Context,
    window_s: Annotated[
        int,
        Query(
            ge=SAMPLE_S,
            le=DAY_S,
            description=f"seconds to look back; beyond {NUM_SECONDS * SAMPLE_S} the rows are a minute apart",
        ),
    ] = NUM_SECONDS * SAMPLE_S,
    until: Annotated[
        Moment | None,
        Query(description="look back from then, in the database, which keeps rows a minute apart for 30 days"),
    ] = None,
) -> Response:
    """Samples a second apart of this process, or a minute apart of earlier ones too."""
    end_s, store = time.time() if until is None else until.timestamp(), context.store
    if until is None:
        interval_s, rows = context.samples.rows(window_s)
        starts = context.samples.starts()
    else:
        interval_s = MINUTE_S
        rows = await store.threads.run(partial(store.reader.stats_rows, end_s - window_s, end_s, NUM_MINUTES))
        starts = {row.started_s for row in rows}
    marks = [(start_s, "start", "process started") for start_s in starts if end_s - window_s < start_s <= end_s]
    with suppress(DatabaseUnavailable):
        read = partial(store.reader.changes, end_s - window_s, end_s, MAX_MARKS)
        changes = await store.threads.run(read, CHANGES_TIMEOUT_S)
        marks += [(change.time, "change", _text_of(change)) for change in changes]
    return await run_in_threadpool(_history_response, interval_s, rows, sorted(marks)[-MAX_MARKS:])


def _text_of(change: Any) -> str:
    """Return a recorded call in a few words."""
    what = change.what.items() if isinstance(change.what, dict) else ()
    spelled = [(name, value if isinstance(value, str) else to_json(value).decode()) for name, value in what]
    fields_ = ", ".join(name if value.startswith(("{", "[")) else f"{name}={value}" for name, value in spelled)
    path = str(change.path).removeprefix("/admin/v1/")
    return f"{change.method} {path}{': ' if fields_ else ''}{fields_}"[:MAX_MARK_CHARS]


def _history_response(interval_s: int, rows: Sequence[Row], marks: Sequence[tuple[float, str, str]]) -> Response:
    """Return `StatsRows`, in a thread: a day has a hundred thousand values."""
    content = {
        "interval_s": interval_s,
        "columns": ["time", *COUNTERS, *GAUGES, "span_s"],
        "rows": [(rfc3339(row.time_s), *row.increases, *row.values, row.span_s) for row in rows],
        "marks": [{"time": rfc3339(time_s), "kind": kind, "text": text} for time_s, kind, text in marks],
    }
    return Response(to_json(content), media_type="application/json")


async def _follow(context: AdminContext, interval_s: float, must_end: MustEnd) -> AsyncGenerator[ServerSentEvent, None]:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while not must_end():
        wait_s = due_s - loop.time()
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, CLOSING_POLL_S))
            continue
        yield ServerSentEvent(take_stats(context, time.time()).model_dump_json())
        # A slow client receives fewer events, not outdated ones.
        due_s = max(due_s + interval_s, loop.time())


@router.get(
    "/stats/stream",
    summary="All counters, as server-sent events",
    response_class=EventSourceResponse,
    responses=STREAM_RESPONSES,
)
async def stream_stats(
    context: Context,
    streams: Annotated[Streams, from_app("stats_streams")],
    token: Caller,
    interval_s: Annotated[
        float, Query(ge=MIN_INTERVAL_S, le=60, allow_inf_nan=False, description="seconds between events")
    ] = 1.0,
    max_events: MaxEvents = None,
) -> EventSourceResponse:
    """Each event's data is the JSON of `GET /admin/v1/stats`. Ends with the client or the server."""
    return streams.open(token, partial(_follow, context, interval_s), max_events)
