"""Reset: forget the pool, or what some requests stored, while transfers are in flight."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.api.audit_trail import EMERGENCY
from app.api.context import AdminContext
from core.origins import OriginMatch
from core.scheduler import ResetTicket

MAX_DRAIN_S = 3600.0
FIRST_POLL_S = 0.002
LAST_POLL_S = 0.1

Glob = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class ResetMatch(BaseModel):
    """Which request's blocks: shell globs, all given ones together, of the request that stored the block."""

    model_config = ConfigDict(extra="forbid", strict=True)
    tenant: Glob | None = Field(default=None, description="of the tenant's digest (16 hex digits)")
    lora: Glob | None = None
    request: Glob | None = None


class ResetBody(BaseModel):
    """What to forget, and how long to wait for the transfers under way."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"tiers": ["host"], "match": {"lora": "sql-*"}, "drain_timeout_s": 30}]},
    )
    tiers: Annotated[list[Literal["host"]], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="tiers to empty; null is all"
    )
    match: ResetMatch | None = Field(default=None, description="null, or without any glob, is everything")
    drain_timeout_s: float = Field(default=30.0, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False)
    reason: Annotated[str, StringConstraints(max_length=1000)] | None = Field(
        default=None, description="for the audit table"
    )


class ResetAnswer(BaseModel):
    """What a reset dropped, and the jobs that it disowned."""

    epoch: int
    dropped_blocks: int
    dropped_bytes: int
    drained_jobs: int = Field(description="disowned jobs that have ended")
    pending_jobs: int = Field(description="disowned jobs (or a search) still under way; the reset holds all the same")


def reset_router(context: AdminContext) -> APIRouter:
    """`POST /admin/v1/reset`."""
    router = APIRouter(tags=["reset"])
    searches: set[asyncio.Task[ResetTicket]] = set()

    async def begin(match: ResetMatch | None) -> asyncio.Task[ResetTicket]:
        # A search goes through the whole pool in batches; it outlives the call that asked for it.
        task = asyncio.create_task(asyncio.to_thread(context.scheduler.reset, time.time(), _to_core(match)))
        searches.add(task)
        task.add_done_callback(searches.discard)
        return task

    async def drain(request: Request, ticket: ResetTicket, deadline_s: float) -> int:
        """Wait for the disowned jobs to end and say how many did not."""
        loop = asyncio.get_running_loop()
        poll_s = FIRST_POLL_S
        while pending := context.scheduler.open_jobs(ticket.job_ids):
            wait_s = min(poll_s, deadline_s - loop.time())
            if wait_s <= 0 or context.closing() or await request.is_disconnected():
                break
            context.wake()
            await asyncio.sleep(wait_s)
            poll_s = min(poll_s * 2, LAST_POLL_S)
        return pending

    @router.post(
        "/reset",
        summary="Forget stored blocks",
        response_model=ResetAnswer,
        responses={
            202: {"model": ResetAnswer, "description": "The reset holds; transfers it disowned are still under way"}
        },
        dependencies=[EMERGENCY],
    )
    async def reset(request: Request, body: Annotated[ResetBody | None, Body()] = None) -> Response:
        """Works while transfers are in flight: those under way finish or fail, publish nothing, and free their slots.

        No request loses its answer. Idempotent, and durable. Works without the database, too.
        """
        asked = body or ResetBody()
        deadline_s = asyncio.get_running_loop().time() + asked.drain_timeout_s
        task = await begin(asked.match)
        ticket = await _first(task, asked.drain_timeout_s)
        if ticket is None:
            epoch = context.scheduler.snapshot().epoch
            return _answer(ResetAnswer(epoch=epoch, dropped_blocks=0, dropped_bytes=0, drained_jobs=0, pending_jobs=1))
        context.wake()
        pending = await drain(request, ticket, deadline_s)
        return _answer(
            ResetAnswer(
                epoch=ticket.epoch,
                dropped_blocks=ticket.dropped_blocks,
                dropped_bytes=ticket.dropped_bytes,
                drained_jobs=len(ticket.job_ids) - pending,
                pending_jobs=pending,
            )
        )

    return router


SEARCH_GRACE_S = 0.5


async def _first(task: asyncio.Task[ResetTicket], timeout_s: float) -> ResetTicket | None:
    """The ticket, or None when the search outlasts the timeout. A whole reset gets the moment it takes."""
    done, _ = await asyncio.wait({task}, timeout=max(timeout_s, SEARCH_GRACE_S))
    return task.result() if done else None


def _answer(answer: ResetAnswer) -> JSONResponse:
    return JSONResponse(answer.model_dump(), 202 if answer.pending_jobs else 200)


def _to_core(match: ResetMatch | None) -> OriginMatch | None:
    if match is None or (match.tenant is None and match.lora is None and match.request is None):
        return None
    return OriginMatch(request=match.request, tenant=match.tenant, lora=match.lora)
