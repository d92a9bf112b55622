"""Health, readiness and metrics."""

from __future__ import annotations

import asyncio
from typing import Literal

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, Field

from kvferry.app.api.context import Cache, ProcessState
from kvferry.app.api.metrics import build_registry
from kvferry.app.store import MetadataStore

READINESS_TIMEOUT_S = 5.0


class Health(BaseModel):
    """The process can answer."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether the service may receive traffic, and if not, why."""

    ready: bool
    reasons: list[str] = Field(description="why it is not ready: empty while it is")
    degraded: list[str] = Field(
        default=[],
        description="what does less than it should while requests are served: a database that cannot be "
        "written, a tier that does not work, a resize that waits for slots in use, a size of the pool that was not "
        "possible, or another process that writes to the database under the same name",
        examples=[["tier disk: the disk is full"]],
    )


class _ReadinessCheck:
    """Runs the process's check on a thread of its own, one at a time; a check that hangs is a reason."""

    def __init__(self, process: ProcessState) -> None:
        self._process = process
        self._task: asyncio.Task[Readiness] | None = None
        self._limiter: anyio.CapacityLimiter | None = None

    async def answer(self) -> Readiness:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._start())
        try:
            return await asyncio.wait_for(asyncio.shield(self._task), READINESS_TIMEOUT_S)
        except TimeoutError:
            return Readiness(ready=False, reasons=[f"the readiness check did not end within {READINESS_TIMEOUT_S:g} s"])

    async def _start(self) -> Readiness:
        # Not the common threads, which may all be busy.
        self._limiter = self._limiter or anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(self._check, limiter=self._limiter)

    def _check(self) -> Readiness:
        reasons = self._process.readiness()
        return Readiness(ready=not reasons, reasons=reasons, degraded=self._process.degraded())


def health_router(cache: Cache, process: ProcessState, store: MetadataStore) -> APIRouter:
    """Return the routes `/healthz`, `/readyz` and `/metrics`."""
    router = APIRouter(tags=["health"])
    readiness = _ReadinessCheck(process)
    registry = build_registry(cache, process, store)

    @router.get("/healthz", summary="Whether the process can answer")
    async def healthz() -> Health:
        """Uses nothing else. Needs no token."""
        return Health()

    @router.get(
        "/readyz",
        summary="Whether the service may receive traffic",
        response_model=Readiness,
        responses={503: {"model": Readiness, "description": "Not ready, and why"}},
    )
    async def readyz() -> Response:
        """Engine attached, pool mapped, recovery finished, threads alive, no overdue job, no step above 10 s.

        Requests are served without database and tiers, so that their failures are listed under `degraded`.
        """
        answer = await readiness.answer()
        return JSONResponse(answer.model_dump(), 200 if answer.ready else 503)

    @router.get(
        "/metrics",
        summary="Counters for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        """Every name is prefixed `kvferry_`; all of core's counters are of one moment."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return router
