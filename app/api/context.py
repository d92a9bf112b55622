"""What the admin API needs from the process it lives in: the wiring builds it, and nothing else is reached for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter

from kvferry.app.api.auth import Tokens
from kvferry.app.event_feed import EventFeed
from kvferry.app.offload_guard import OffloadGuard
from kvferry.app.policies.kept import KeptPolicies
from kvferry.app.settings.live import LiveSettings
from kvferry.app.store import Store
from kvferry.app.tiers.opening import TierNews
from kvferry.app.warm_start import WarmStart
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that hosts the cache, as `stats` shows it. `workers` are the ranks that move bytes."""

    name: str
    model: str
    device: str
    block_size: int
    groups: int
    workers: int


def _never() -> bool:
    return False


def _not_busy(client: str) -> None:
    """An engine of another process accepts its calls itself."""


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The process as the admin API sees it.

    `readiness` answers why the service is not ready, one reason an item, and nothing when it is; it may take a moment,
    so it is called on a thread, and so is `degraded`, which answers what does less than it should while requests are
    served all the same. `wake` makes an idle engine take a step, so that transfers and admin work go on; it is
    called from the event loop and from threads, and must not block. `closing` turns true once the server is to stop:
    streams and waiting resets end then. `engine_router` serves `/v1`; None when another engine hosts us.
    `retry_after_s` returns after how many seconds a client address should call `/v1` again, None where it may now.
    `tier_news` is told whenever a tier has an answer for whoever waits. `pool_kind` is the setting `POOL_KIND`;
    `warm_start` is what a kept pool brought back. `started_s` is Unix time.
    """

    scheduler: OffloadScheduler
    guard: OffloadGuard
    manager: OffloadManager
    store: Store
    policies: KeptPolicies
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
    retry_after_s: Callable[[str], int | None] = _not_busy
    warm_start: WarmStart | None = None
    tier_news: TierNews = field(default_factory=TierNews)
    version: str = "0.1.0"
