"""The service as the routers of the admin API see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter

from kvferry.app.event_feed import EventFeed
from kvferry.app.guard import OffloadGuard
from kvferry.app.policy_store import PolicyStore
from kvferry.app.pool.recovery import WarmStart
from kvferry.app.settings.live import LiveSettings
from kvferry.app.stats_history import StatsHistory
from kvferry.app.store import MetadataStore
from kvferry.core.scheduler.scheduler import OffloadScheduler


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that hosts the cache, as in stats."""

    name: str
    model: str
    device: str
    block_size: int = field(metadata={"description": "tokens per block"})
    groups: int = field(metadata={"description": "KV-cache groups of the model"})
    workers: int = field(metadata={"description": "ranks that move bytes"})


@dataclass(frozen=True, slots=True)
class Cache:
    """Core as routes use it. `wake` makes an idle engine take a step; it must not block. Thread: any."""

    scheduler: OffloadScheduler
    guard: OffloadGuard
    wake: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of the process.

    Attributes:
        started_s: Unix time.
        readiness: returns why the service is not ready, empty when it is. May take a moment. Thread: worker.
        degraded: returns what does less than it should while requests are served. Thread: worker.
        closing: returns true once the server stops, which ends streams and waiting resets.
        samples: counters over time.
        warm_start: result of recovering a pool that outlived its process.
    """

    engine: EngineInfo
    started_s: float
    readiness: Callable[[], list[str]]
    degraded: Callable[[], list[str]]
    closing: Callable[[], bool]
    samples: StatsHistory
    warm_start: WarmStart | None = None


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The service as the admin API sees it.

    Attributes:
        engine_router: serves `/v1`; None if another engine hosts kvferry.
        retry_after_s: returns after how many seconds a client address may call `/v1` again, None if it may now.
    """

    cache: Cache
    process: ProcessState
    store: MetadataStore
    policies: PolicyStore
    feed: EventFeed
    settings: LiveSettings
    engine_router: APIRouter | None = None
    retry_after_s: Callable[[str], int | None] = lambda client: None
