"""What routes need from the process: the service's parts, and threads for calls to the metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import anyio
from fastapi import APIRouter

from kvferry.app.api.auth import Tokens
from kvferry.app.api.errors import Problem, unavailable
from kvferry.app.event_feed import EventFeed
from kvferry.app.guard import OffloadGuard
from kvferry.app.policy_store import PolicyStore
from kvferry.app.pool.recovery import WarmStart
from kvferry.app.settings.live import LiveSettings
from kvferry.app.store import MetadataStore
from kvferry.app.store.database import CommitDecision, deciding
from kvferry.app.tiers.opening import TierNews
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler

P = ParamSpec("P")
T = TypeVar("T")

STORE_TIMEOUT_S = 10.0
MAX_STORE_THREADS = 8


class StoreThreads:
    """Threads for calls to the metadata store, bounded in number and time.

    A call that takes too long is abandoned, answered with 503, and never committed. Other routes use other threads, so
    that a database that hangs does not affect them.
    """

    def __init__(self, max_threads: int = MAX_STORE_THREADS, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._timeout_s = timeout_s

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on a thread and return its result.

        Raises:
            Problem: 503 if the call did not end in time, and then nothing is written; 504 if it began to commit and
                that did not end either.
        """
        decision = CommitDecision()

        def work() -> T:
            with deciding(decision):
                return call(*args, **kwargs)

        task = asyncio.ensure_future(
            anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True),
        )
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                if decision.abandon():
                    raise unavailable(f"the metadata store did not answer within {self._timeout_s:g} s")
                await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                detail = f"the metadata store did not commit within {self._timeout_s:g} s: the outcome is not known"
                raise Problem(504, detail, slug="outcome-unknown")
            return task.result()
        finally:
            decision.abandon()
            task.cancel()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that hosts the cache, as in stats."""

    name: str
    model: str
    device: str
    block_size: int = field(metadata={"description": "tokens per block"})
    groups: int = field(metadata={"description": "KV-cache groups of the model"})
    workers: int = field(metadata={"description": "ranks that move bytes"})


def _never() -> bool:
    return False


def _no_limit(client: str) -> None:
    """Accept every call, for an engine with a server of its own."""


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The process as the admin API sees it.

    Attributes:
        readiness: returns why the service is not ready, empty when it is. May take a moment. Thread: worker.
        degraded: returns what does less than it should while requests are served. Thread: worker.
        wake: makes an idle engine take a step. Must not block. Thread: any.
        started_s: Unix time.
        closing: returns true once the server stops, which ends streams and waiting resets.
        engine_router: serves `/v1`; None if another engine hosts kvferry.
        retry_after_s: returns after how many seconds a client address may call `/v1` again, None if it may now.
        pool_kind: the setting KVFERRY_POOL_KIND.
        warm_start: result of recovering a pool that outlived its process.
        tier_news: notified whenever a tier has an answer.
        store_threads: for calls to `store`.
    """

    scheduler: OffloadScheduler
    guard: OffloadGuard
    manager: OffloadManager
    store: MetadataStore
    policies: PolicyStore
    feed: EventFeed
    settings: LiveSettings
    engine_info: EngineInfo
    pool_kind: str
    tokens: Tokens
    readiness: Callable[[], list[str]]
    degraded: Callable[[], list[str]]
    wake: Callable[[], None]
    started_s: float
    closing: Callable[[], bool] = _never
    engine_router: APIRouter | None = None
    retry_after_s: Callable[[str], int | None] = _no_limit
    warm_start: WarmStart | None = None
    tier_news: TierNews = field(default_factory=TierNews)
    store_threads: StoreThreads = field(default_factory=StoreThreads)
    version: str = "0.1.0"
