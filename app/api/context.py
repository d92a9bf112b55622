"""The service as the routes of the admin API see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter

from kvferry.app.api.audit import PrefetchAudit
from kvferry.app.api.calls import from_app
from kvferry.app.common.threads import ThreadCounts
from kvferry.app.guard import OffloadGuard
from kvferry.app.operations.policy_store import PolicyStore
from kvferry.app.operations.tenant_store import TenantStore
from kvferry.app.operations.tier_flushes import TierFlushes
from kvferry.app.operations.tier_resets import TierResets
from kvferry.app.pool.recovery import WarmStart
from kvferry.app.settings.live import LiveSettings
from kvferry.app.settings.store_mode import StoreModeChoice
from kvferry.app.store import MetadataStore
from kvferry.app.telemetry.advice import Adviser
from kvferry.app.telemetry.balance import BalanceWatch
from kvferry.app.telemetry.curve import WhatIf
from kvferry.app.telemetry.events import EventFeed
from kvferry.app.telemetry.history import StatsHistory
from kvferry.app.telemetry.prompts import PromptFeed
from kvferry.app.tiers.registry import TierRegistry
from kvferry.core.counters import counter
from kvferry.core.engine_api import HashPrompt
from kvferry.core.partings import Partings
from kvferry.core.scheduler.scheduler import OffloadScheduler

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import TraceCounts


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
class KVEventCounts:
    """KV events of the pool, as in stats."""

    published: int = counter("KV events of the pool that the engine's publisher received", "kv_events_published")


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The service as the admin API sees it. Thread: any, unless stated."""

    engine: EngineInfo
    scheduler: OffloadScheduler
    guard: OffloadGuard
    """`guarding` encloses calls that change the scheduler beside the engine."""
    wake: Callable[[], None]
    """Makes an idle engine take a step; does not block."""
    started_s: float
    """When the process started, on the monotonic clock."""
    readiness: Callable[[], list[str]]
    """Returns why the service is not ready, empty when it is. Thread: executor, as for `degraded`."""
    degraded: Callable[[], list[str]]
    closing: Callable[[], bool]
    """Returns true once the server stops, which ends streams and waiting resets."""
    samples: StatsHistory
    balance: BalanceWatch
    adviser: Adviser
    prompts: PromptFeed
    """Requests that have ended, on their way to `what_if` and `partings`."""
    what_if: WhatIf
    partings: Partings
    store_mode: Callable[[], StoreModeChoice]
    store: MetadataStore
    policies: PolicyStore
    """Changes overrides and rules; they are read from the scheduler."""
    tenants: TenantStore
    feed: EventFeed
    settings: LiveSettings
    tier_registry: TierRegistry
    tier_flushes: TierFlushes
    tier_resets: TierResets
    prefetch_audit: PrefetchAudit
    hash_prompt: HashPrompt | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    warm_start: WarmStart | None = None
    threads: Callable[[], ThreadCounts] = ThreadCounts
    traces: Callable[[], TraceCounts | None] = lambda: None
    kv_events: Callable[[], KVEventCounts | None] = lambda: None
    engine_router: APIRouter | None = None
    """Serves `/v1`; None if another engine hosts kvferry."""


Context = Annotated[AdminContext, from_app("context")]
"""The service, as a parameter of a route."""
