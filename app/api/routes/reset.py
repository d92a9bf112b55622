"""Reset: drop the whole pool, or the blocks that some requests stored, while transfers are in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Annotated

import anyio
from fastapi import Body, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvferry.app.api.audit import Audited
from kvferry.app.api.calls import admin_router, from_app
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import invalid_fields
from kvferry.app.common.call_errors import FieldError
from kvferry.app.operations.policy_json import TenantMatch, TierName
from kvferry.app.store import DatabaseUnavailable
from kvferry.core.keys import RequestFilter
from kvferry.core.partings import KeepTokenIds
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.resets import ResetTicket
from kvferry.core.tiers.base import HOST

MAX_DRAIN_S = 3600.0
MAX_SEARCHES = 4
FIRST_POLL_S = 0.002
LAST_POLL_S = 0.1

Glob = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class ResetMatch(TenantMatch):
    """Shell globs on the request that stored a block, all of which must match."""

    lora: Glob | None = None
    request: Glob | None = None
    session: Glob | None = Field(default=None, description="`*` is any; requests without a session do not match")


class ResetBody(BaseModel):
    """Blocks to drop, and how long to wait for the transfers under way."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"tiers": ["host"], "match": {"lora": "sql-*"}, "drain_timeout_s": 30}]},
    )
    tiers: Annotated[list[TierName], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="`host` for the pool, and names of tiers; null is all"
    )
    match: ResetMatch | None = Field(default=None, description="null, or without any glob, matches everything")
    drain_timeout_s: float = Field(default=30.0, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False)
    reason: Annotated[str, StringConstraints(max_length=1000)] | None = Field(
        default=None, description="for the audit table"
    )


class Dropped(StrEnum):
    """Which blocks a reset drops from a tier."""

    ALL = "all"
    MATCHING = "matching"


class TierReset(BaseModel):
    """Blocks dropped by a tier."""

    dropped: Dropped = Field(description="`all` also for a reset by match of a tier that engines share")
    dropped_blocks: int
    dropped_bytes: int


class ResetAnswer(BaseModel):
    """Blocks dropped by a reset, and the jobs that it disowned."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    epoch: int = Field(
        description="the pool's new epoch, as in stats: raised by each reset of the whole pool, not "
        "by one by `match` or of tiers only"
    )
    dropped_blocks: int = Field(default=0, description="from the pool")
    dropped_bytes: int = 0
    tiers: dict[str, TierReset] = Field(default={}, description="by tier, for those that have completed the reset")
    detached_tiers: list[str] = Field(
        default=[],
        description="tiers that were detached: they are reset once they are attached again under this name, also by a "
        "later process",
    )
    drained_jobs: int = Field(default=0, description="disowned jobs that have ended")
    pending_jobs: int = Field(
        description="disowned jobs (or a search, or writing headers of a pool that outlives the process) still under "
        "way; the reset is effective. After a restart it is so for tiers, which continue it, and for a pool that "
        "outlives the process only once nothing is pending"
    )


class Wait:
    """A wait of a call's response, until `deadline_s` on the event loop's clock, a disconnect, or the server's end."""

    def __init__(self, request: Request, closing: Callable[[], bool], timeout_s: float) -> None:
        self._request = request
        self._closing = closing
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    async def until(self, is_over: Callable[[], bool], at_least_s: float = 0.0) -> bool:
        """Poll until `is_over` returns true; return False if the wait ends before. Waits `at_least_s` from now."""
        loop = asyncio.get_running_loop()
        deadline_s = max(self._deadline_s, loop.time() + at_least_s)
        poll_s = FIRST_POLL_S
        while not is_over():
            wait_s = min(poll_s, deadline_s - loop.time())
            if wait_s <= 0 or self._closing() or await self._request.is_disconnected():
                return False
            await asyncio.sleep(wait_s)
            poll_s = min(poll_s * 2, LAST_POLL_S)
        return True


async def wait_until_written(wait: Wait, manager: OffloadManager, at_least_s: float = 0.0) -> bool:
    """Wait until no restart can bring back blocks that have left the pool.

    Returns whether every invalidation queued so far is written to the pool's headers; always true for a pool that does
    not outlive its process.
    """
    count = manager.num_invalidations()
    return await wait.until(lambda: manager.are_flushed(count), at_least_s)


async def record_open_resets(context: AdminContext) -> None:
    """Have the next process repeat the resets that tiers have not completed; without the database `/readyz` says so."""
    with suppress(DatabaseUnavailable):
        await context.store.threads.run(context.tier_resets.sync)


async def drain(context: AdminContext, wait: Wait, ticket: ResetTicket) -> int:
    """Wait for the disowned jobs and the tiers' resets to end; record open resets, and return how many did not end."""
    resets = context.scheduler.resets

    def is_drained() -> bool:
        if not resets.count_open(ticket):
            return True
        context.wake()
        if ticket.tiers:
            # An idle engine would read a tier's answer only once a second.
            with context.guard.guarding("expire"):
                context.scheduler.expire(time.time())
        return False

    has_ended = await wait.until(is_drained)
    if ticket.detached or (ticket.tiers and not has_ended):
        await record_open_resets(context)
    return 0 if has_ended else resets.count_open(ticket)


class Searches:
    """Searches through the pool of one service. Thread: event loop."""

    grace_s = 0.5
    """Minimum time for a search and for writing headers, so that the response for a small pool is complete."""

    def __init__(self) -> None:
        # Not the event loop's default executor, in which the engine tokenizes.
        self.threads = anyio.CapacityLimiter(MAX_SEARCHES)
        self._resets: set[asyncio.Task[ResetTicket]] = set()

    async def reset(self, wait: Wait, reset: Callable[[], ResetTicket]) -> ResetTicket | None:
        """Reset by match; return None if the search through the whole pool outlasts the wait, and goes on."""
        task = asyncio.create_task(anyio.to_thread.run_sync(reset, limiter=self.threads))
        self._resets.add(task)
        task.add_done_callback(self._resets.discard)
        return task.result() if await wait.until(task.done, self.grace_s) else None


def _reset_guarded(context: AdminContext, match: RequestFilter | None, places: list[str] | None) -> ResetTicket:
    with context.guard.guarding("reset"):
        return context.scheduler.resets.reset(time.time(), match, places)


def _count_affected(context: AdminContext, match: RequestFilter | None, places: list[str] | None) -> ResetAnswer:
    """Return the answer of a reset of the blocks of this moment."""
    scheduler, num_blocks = context.scheduler, 0
    snapshot = scheduler.snapshot()
    if places is None or HOST in places:
        num_blocks = Inventory(scheduler.manager).count_blocks(match)
    # Tiers do not count by origin.
    drops_matching = scheduler.tiers.drops_matching()
    tiers = {name: one for name, one in snapshot.tiers.items() if match is None or not drops_matching.get(name)}
    return ResetAnswer(
        epoch=snapshot.epoch,
        dropped_blocks=num_blocks,
        dropped_bytes=num_blocks * scheduler.manager.slot_bytes,
        tiers={
            name: TierReset(dropped=Dropped.ALL, dropped_blocks=one.counts.blocks, dropped_bytes=one.counts.bytes)
            for name, one in tiers.items()
            if places is None or name in places
        },
        pending_jobs=0,
    )


router = admin_router(tags=["reset"])


@router.post(
    "/reset",
    summary="Drop stored blocks",
    response_model=ResetAnswer,
    responses={
        202: {
            "model": ResetAnswer,
            "description": "The reset is effective; disowned transfers, writes of headers or the resets of tiers "
            "are still under way. A tier serves nothing before its reset is done, which a restart continues",
        }
    },
)
async def reset(
    context: Context,
    searches: Annotated[Searches, from_app("searches")],
    request: Request,
    call: Audited,
    dry_run: Annotated[bool, Query(description="count what would be dropped now, and drop nothing")] = False,
    body: Annotated[ResetBody | None, Body()] = None,
) -> Response:
    """Works while transfers are in flight: they finish or fail, publish nothing, and free their slots.

    No request fails. Idempotent, durable, and possible without the database. If offloading was switched off after
    unexpected errors, a whole reset of the pool switches it on again. `dry_run` counts the blocks of the pool, and
    those of tiers of which all go: with a `match` these are the shared ones.
    """
    wanted = body or ResetBody()
    check_places(wanted.tiers, (HOST, *context.scheduler.tiers.names))
    is_of_pool = wanted.tiers is None or HOST in wanted.tiers
    match = to_filter(wanted.match)
    if dry_run:
        call.is_dry_run = True
        affected = await anyio.to_thread.run_sync(
            _count_affected, context, match, wanted.tiers, limiter=searches.threads
        )
        return _answer(affected)
    wait = Wait(request, context.closing, wanted.drain_timeout_s)
    # Token ids are no blocks, and a reset forgets them, whatever it drops.
    context.prompts.send(KeepTokenIds(context.settings.current.explain_bytes))
    # A whole reset costs O(open jobs) and must not wait for searches.
    do_reset = partial(_reset_guarded, context, match, wanted.tiers)
    ticket = do_reset() if match is None else await searches.reset(wait, do_reset)
    if ticket is None:
        await record_open_resets(context)
        return _answer(ResetAnswer(epoch=context.scheduler.snapshot().epoch, pending_jobs=1))
    if match is None and is_of_pool:
        context.guard.resume()
    context.wake()
    resets = context.scheduler.resets
    if resets.count_open(ticket) and wanted.drain_timeout_s:
        # The process may end while the response waits.
        await call.try_begin()
    drops_matching = context.scheduler.tiers.drops_matching()
    pending = await drain(context, wait, ticket)
    # After the jobs, whose slots are invalidated as they end.
    is_written = not is_of_pool or await wait_until_written(wait, context.scheduler.manager, searches.grace_s)
    return _answer(
        ResetAnswer(
            epoch=ticket.epoch,
            dropped_blocks=ticket.dropped_blocks,
            dropped_bytes=ticket.dropped_bytes,
            tiers={
                name: TierReset(
                    dropped=Dropped.ALL if match is None or not drops_matching.get(name) else Dropped.MATCHING,
                    dropped_blocks=one.dropped_blocks,
                    dropped_bytes=one.dropped_bytes,
                )
                for name, one in resets.tier_results(ticket).items()
            },
            detached_tiers=list(ticket.detached),
            drained_jobs=len(ticket.job_ids) - pending,
            pending_jobs=pending + (not is_written),
        )
    )


def _answer(answer: ResetAnswer) -> JSONResponse:
    return JSONResponse(answer.model_dump(), 202 if answer.pending_jobs else 200)


def check_places(places: list[str] | None, known: tuple[str, ...]) -> None:
    """Refuse unknown tiers."""
    unknown = [(number, name) for number, name in enumerate(places or ()) if name not in known]
    if unknown:
        raise invalid_fields(
            [
                FieldError(field=f"tiers.{number}", message=f"there is no {name}; choose from {', '.join(known)}")
                for number, name in unknown
            ]
        )


def to_filter(match: ResetMatch | None) -> RequestFilter | None:
    """Return the filter of a body; None if it matches everything."""
    if match is None:
        return None
    wanted = RequestFilter(match.request, match.tenant_glob(), match.lora, match.session)
    return None if wanted == RequestFilter() else wanted
