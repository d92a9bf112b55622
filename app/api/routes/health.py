"""Health, readiness and metrics."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, Field

from kvferry import __version__
from kvferry.app.api.calls import from_app
from kvferry.app.api.context import AdminContext
from kvferry.app.api.metrics import ReadinessCounts, build_registry

READINESS_TIMEOUT_S = 5.0
METRICS_TIMEOUT_S = 1.0
"""Time that a scrape waits for the readiness check, below the timeouts of scrapers."""


class Health(BaseModel):
    """The process can answer."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The version of kvferry."""

    version: str


class Readiness(BaseModel):
    """Whether the service may receive traffic, and if not, why."""

    ready: bool
    reasons: list[str] = Field(description="why it is not ready: empty while it is")
    degraded: list[str] = Field(
        default=[],
        description="what does less than it should while requests are served: a database that cannot be "
        "written, a tier that does not work, a resize that waits for slots in use, a size of the pool that was not "
        "possible, or another process that writes to the database under the same name",
        examples=[["tier disk: /var/cache/kvferry: No space left on device; new blocks are not kept"]],
    )


class Probes:
    """Readiness check and metrics of one service. Thread: event loop."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        # Not the common threads, which may all be busy. One check at a time, also while one hangs.
        self._threads = anyio.CapacityLimiter(1)
        self._check: asyncio.Task[Readiness] | None = None
        self._counts = ReadinessCounts()
        self._registry = build_registry(context, __version__, lambda: self._counts)

    async def readiness(self, timeout_s: float) -> Readiness:
        """Return the result of the check under way, or of a new one; not ready if that has none in time."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(anyio.to_thread.run_sync(self._check_readiness, limiter=self._threads))
        try:
            return await asyncio.wait_for(asyncio.shield(self._check), timeout_s)
        except TimeoutError:
            return Readiness(ready=False, reasons=[f"the readiness check did not end within {timeout_s:g} s"])

    def _check_readiness(self) -> Readiness:
        reasons = self._context.readiness()
        return Readiness(ready=not reasons, reasons=reasons, degraded=self._context.degraded())

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that this `Accept` header asks for, and the metrics in that form."""
        readiness = await self.readiness(METRICS_TIMEOUT_S)
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):
            # The library compares parts of the header's version with numbers.
            encode, content_type = choose_encoder("")
        self._counts = ReadinessCounts(readiness.ready, len(readiness.reasons), len(readiness.degraded))
        return content_type, encode(self._registry)


AppProbes = Annotated[Probes, from_app("probes")]

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Whether the process can answer")
async def healthz() -> Health:
    """Uses nothing else. Needs no token."""
    return Health()


@router.get(
    "/health",
    summary="The same as `/readyz`, at vLLM's path",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready, and why"}},
)
@router.get(
    "/readyz",
    summary="Whether the service may receive traffic",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready, and why"}},
)
async def readyz(probes: AppProbes) -> Response:
    """Engine attached, pool mapped, recovery finished, threads alive, no overdue job, no step above 10 s, the
    last three steps not all failed.

    Requests are served without database and tiers, so that their failures are listed under `degraded`.
    """
    answer = await probes.readiness(READINESS_TIMEOUT_S)
    return JSONResponse(answer.model_dump(), 200 if answer.ready else 503)


@router.get("/version", summary="The version of kvferry")
async def get_version() -> Version:
    """At vLLM's path."""
    return Version(version=__version__)


@router.get(
    "/metrics",
    summary="Counters for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, probes: AppProbes) -> Response:
    """Names are prefixed `kvferry_`, but for the usual `process_*`; all of core's counters are of one moment."""
    content_type, encoded = await probes.metrics(request.headers.get("accept", ""))
    return Response(encoded, headers={"Content-Type": content_type})
