"""One ferry beside an engine, whichever engine it is: core, history, tiers and their upkeep, made and closed in order.

Who starts it has an engine and a pool already, and closes them when the ferry has stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from fastapi import APIRouter

from kvferry.app.api.auth import Tokens
from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.event_feed import EventFeed
from kvferry.app.offload_guard import ErrorLog, GuardedSink, OffloadGuard
from kvferry.app.policy_store import PolicyStore
from kvferry.app.pool_size import PoolSize
from kvferry.app.pool_watch import PoolWatch
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import LogLevel
from kvferry.app.settings.live import LiveSettings
from kvferry.app.starting import StartRefused
from kvferry.app.store import MetadataStore, NameClaim, StoreUnavailable, claim_name
from kvferry.app.tiers.opening import PoolSlots, TierNews, close_tiers, open_tiers
from kvferry.app.upkeep import Upkeep, history_limits
from kvferry.app.warm_start import BootVerification, WarmStart, begin_warm, nobody_is_told
from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import GroupLayout
from kvferry.core.policy import PolicyResolver
from kvferry.core.pool.events import EventSink
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.resize import PoolResize
from kvferry.core.scheduler.scheduler import OffloadScheduler, SchedulerOptions
from kvferry.core.tiers.base import HOST, Tier
from kvferry.cuda_ops.persistent.record import KeptRecord
from kvferry.cuda_ops.pool.extents import PoolMemory, PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""What is not in the database by then is lost to it: container engines and vLLM kill what takes longer to stop."""
OVERDUE_S = 60.0
"""A job that has been open for so long is reported; it goes on holding its blocks, since a copy never times out."""


def _nothing() -> None:
    """Nobody has to be woken."""


def _no_reasons() -> list[str]:
    return []


def _as_it_is(sink: EventSink) -> EventSink:
    return sink


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The engine, as far as the ferry has to know it.

    `fingerprint` is whatever changes what bytes mean. In lazy mode so many blocks as `watermark_blocks` are looked at
    before they leave the device. The start began at `started_s`, in Unix time. `wake` is called when a tier has
    something that a request may wait for, `step` to have an idle engine take one; both on any thread, and neither
    waits. `claim` is that of `name`, where it had to be made before the pool. `listen` may put itself before the sink
    of what the cache does. `reasons` says why this engine should get no traffic.
    """

    name: str
    info: EngineInfo
    layout: GroupLayout
    fingerprint: Mapping[str, object]
    device: DeviceView
    watermark_blocks: int
    null_block: int = -1
    started_s: float = field(default_factory=time.time)
    wake: Callable[[], None] = _nothing
    step: Callable[[], None] = _nothing
    listen: Callable[[EventSink], EventSink] = _as_it_is
    reasons: Callable[[], list[str]] = _no_reasons
    claim: NameClaim | None = None


@dataclass(frozen=True, slots=True)
class PoolSide:
    """The host pool: its `memory` as a whole, this process's own view of it if it is `mapped` here, and the record of
    what is `kept`, if it outlives the engine."""

    plan: PoolPlan
    memory: PoolMemory
    mapped: HostPool | None
    kept: KeptRecord | None = None


class Ferry:
    """Made, then started. `stop` and `close` may follow at any time, and undo what was done."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineSide,
        pool: PoolSide,
        set_log_level: Callable[[LogLevel], None],
        stopping: threading.Event,
        note: Callable[[str], object] = nobody_is_told,
    ) -> None:
        """Open the store and the tiers, and make core. Raises `ValueError` and `StoreError`; nothing is left open then.

        `stopping` is set once all is to stop: by `stop`, or before. `note` is told what the start is at.
        """
        self.settings = LiveSettings(
            settings,
            lambda changed: self._upkeep.apply(changed),
            check=lambda changed, names: self._upkeep.check(changed, names),
        )
        self.warm_start: WarmStart | None = None
        """What a kept pool brought back, once this has started."""
        self.name = engine.name
        self._engine = engine
        self._pool = pool
        self._stopping = stopping
        self._note = note
        self._verification: BootVerification | None = None
        self._news = TierNews()
        self._beside = ExitStack()
        with ExitStack() as undo:
            self._make(settings, set_log_level, undo)
            self._undo = undo.pop_all()
        self._beside.callback(self._upkeep.close)

    def start(self) -> None:
        """Take over what is kept of blocks and of what operators had set; start history, and what looks after all.

        Raises `StartRefused`.
        """
        self._note("reading overrides and rules")
        # Before the journal, which in another database would write what memory knows over it.
        try:
            kept = self.policies.load(time.time())
        except StoreUnavailable as error:
            raise StartRefused(
                f"KVFERRY_DATABASE_URL: the overrides and rules that were kept cannot be read: {error}"
            ) from error
        if kept.num_overrides or kept.num_rules:
            _log.info("%d overrides and %d rules of an earlier process hold", kept.num_overrides, kept.num_rules)
        pool = self._pool
        if pool.kept is not None:
            pool.kept.start()
        if pool.kept is not None and pool.mapped is not None:
            self.warm_start, self._verification = begin_warm(
                pool.kept.file, pool.mapped, self.store, self.manager, self._stopping, self._note
            )
        self.store.start(Inventory(self.manager))
        self._upkeep.start()

    def context(self, closing: Callable[[], bool], engine_router: APIRouter | None = None) -> AdminContext:
        """What the admin API gets to see; `closing` turns true once the server is to stop."""
        settings = self.settings.current
        admin, read = settings.admin_token, settings.read_token
        return AdminContext(
            scheduler=self.scheduler,
            manager=self.manager,
            store=self.store,
            policies=self.policies,
            feed=self.feed,
            settings=self.settings,
            engine_info=self._engine.info,
            pool_kind=settings.pool_kind.value,
            tokens=Tokens(
                admin=None if admin is None else admin.get_secret_value(),
                read=None if read is None else read.get_secret_value(),
            ),
            readiness=self.readiness,
            degraded=lambda: [*self.guard.degraded(), *self._upkeep.degraded()],
            guard=self.guard,
            tier_news=self._news,
            wake=self._engine.step,
            started_s=self._engine.started_s,
            closing=closing,
            warm_start=self.warm_start,
            engine_router=engine_router,
        )

    def readiness(self) -> list[str]:
        """Why this process should get no traffic now; empty when it should."""
        reasons = ["stopping"] if self._stopping.is_set() else []
        reasons += self._engine.reasons()
        verifying = None if self._verification is None else self._verification.reason()
        if verifying is not None:
            reasons.append(verifying)
        unwritten = None if self._pool_watch is None else self._pool_watch.reason()
        if unwritten is not None:
            reasons.append(unwritten)
        overdue = self.scheduler.overdue_jobs(time.time(), OVERDUE_S)
        if overdue:
            reasons.append(f"{overdue} transfers have been open for more than {OVERDUE_S:.0f} s")
        return reasons

    def stop(self) -> None:
        """Begin nothing any more beside the engine, which is stopped next, and then its copies. May be called again."""
        self._stopping.set()
        self._beside.close()

    def close(self) -> None:
        """End what the tiers were at, and history: then the pool is nobody's. May be called again."""
        with self._undo:
            # Whoever loses patience with the one still has the other end in order.
            self.stop()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _make(self, settings: Settings, set_log_level: Callable[[LogLevel], None], undo: ExitStack) -> None:
        engine, pool = self._engine, self._pool
        kept, plan = pool.kept, pool.plan
        if kept is not None:
            undo.callback(kept.close)
        self._note("opening the database")
        claim = engine.claim
        if claim is None:
            claim = claim_name(settings.resolved_database_url(), engine.name)
            undo.callback(claim.close)
        self.store = MetadataStore(
            settings.resolved_database_url(),
            engine.name,
            settings.pool_kind.value,
            history_limits(settings),
            num_recovered_slots=plan.num_slots if kept is not None and kept.file.found.is_kept else 0,
            claim=claim,
        )
        undo.callback(self.store.close, CLOSE_S)
        tiers = self._open_tiers(settings)
        undo.callback(close_tiers, tiers)
        self.feed = EventFeed(self.store.journal)
        errors = ErrorLog()
        self.manager = OffloadManager(
            plan.num_slots,
            engine.layout.slot_bytes,
            settings.eviction_policy,
            sink=GuardedSink(engine.listen(self.feed), errors),
            store_threshold=settings.store_threshold,
            record=kept,
            epoch=0 if kept is None else kept.file.min_epoch,
            max_slots=plan.max_slots,
        )
        self.manager.operator_pins.max_fraction = settings.max_pinned_fraction
        self.scheduler = OffloadScheduler(
            self.manager,
            PolicyResolver(settings.request_policy(), settings.request_policy_sources(), self.manager.lock),
            engine.device,
            engine.layout,
            SchedulerOptions(
                request_fields=settings.request_fields,
                num_workers=engine.info.workers,
                null_block=engine.null_block,
                store_mode=settings.store_mode,
                watermark_blocks=engine.watermark_blocks,
            ),
            choice=LoadOrCompute(settings.load_decision),
            tiers=tiers,
        )
        self.guard = OffloadGuard(self.scheduler, engine.info.workers, errors, wake=engine.step)
        undo.callback(lambda: self.scheduler.tiers.close(time.time()))
        self.policies = PolicyStore(self.store, self.scheduler.policies, self.feed)
        size = PoolSize(
            PoolResize(self.manager, plan.extent_slots),
            pool.memory,
            plan,
            settle=lambda timeout_s: kept is None or kept.settle(timeout_s),
            wake=engine.step,
            tell=lambda end: self._upkeep.note_resize(end),
            guarding=self.guard.guarding,
        )
        self._pool_watch = (
            None if kept is None or pool.mapped is None else PoolWatch(kept, pool.mapped, self._on_pool_cut)
        )
        self._upkeep = Upkeep(
            self.settings,
            set_log_level,
            self.store,
            self.feed,
            self.scheduler,
            self.manager,
            self.guard,
            size,
            self._stopping,
            self._pool_watch,
        )

    def _on_pool_cut(self, reason: str) -> None:
        """Find no block in the pool any more, so that nothing is loaded from it."""
        self.scheduler.resets.reset(time.time(), places=[HOST])
        self.guard.shut(reason)

    def _open_tiers(self, settings: Settings) -> dict[str, Tier]:
        """Those of the settings, where there is memory here that they can reach."""
        engine, mapped = self._engine, self._pool.mapped
        if mapped is None:
            return {}
        return open_tiers(
            settings.tiers,
            engine.fingerprint,
            engine.layout.slot_bytes,
            PoolSlots(mapped, None if self._pool.kept is None else self._pool.kept.before_tier_write),
            self._news.telling(engine.wake),
            engine=engine.name,
        )
