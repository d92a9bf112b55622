"""Offloading beside an engine, whichever engine it is: core, history, tiers and their supervision.

The caller has an engine and a pool, and closes them after the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial

from fastapi import APIRouter

from kvferry.app.api.audit import PrefetchAudit
from kvferry.app.api.context import AdminContext, EngineInfo, KVEventCounts
from kvferry.app.common.threads import ThreadWatch, WatchedThread
from kvferry.app.guard import ErrorLog, OffloadGuard, guarded_sink
from kvferry.app.operations.policy_store import PolicyStore
from kvferry.app.operations.tenant_store import TenantStore
from kvferry.app.operations.tier_flushes import TierFlushes
from kvferry.app.operations.tier_resets import TierResets
from kvferry.app.pool.recovery import BootVerification, WarmStart, recover_pool
from kvferry.app.pool.resizer import PoolResizer, ResizeEnd
from kvferry.app.pool.watch import PoolWatch
from kvferry.app.service.startup import StartProgress, load_traces
from kvferry.app.service.supervisor import Supervisor
from kvferry.app.settings import Settings
from kvferry.app.settings.live import LiveSettings
from kvferry.app.settings.store_mode import choose_store_mode
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.store import (
    DatabaseUnavailable,
    HistoryLimits,
    MetadataStore,
    NameClaim,
    claim_name,
)
from kvferry.app.telemetry.advice import Adviser
from kvferry.app.telemetry.balance import BalanceWatch
from kvferry.app.telemetry.curve import Present, WhatIf
from kvferry.app.telemetry.events import EventFeed, EventType
from kvferry.app.telemetry.history import MINUTE_S, NUM_MINUTES, Row, StatsHistory
from kvferry.app.telemetry.prompts import PromptFeed
from kvferry.app.tiers.opening import PoolSlots, close_tiers, open_tiers
from kvferry.app.tiers.registry import TierRegistry
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import DeviceView, HashPrompt
from kvferry.core.errors import StartError
from kvferry.core.groups import GroupLayout
from kvferry.core.partings import KeepTokenIds, Partings
from kvferry.core.policy import PolicyResolver
from kvferry.core.pool.events import EventSink
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.resize import PoolResize
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.scheduler.scheduler import OffloadScheduler, SchedulerOptions
from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import Slots
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.pool.extents import PoolMemory, PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Rows that are not in the database by then are lost: container engines and vLLM kill a process that stops slowly."""
OVERDUE_S = 60.0
"""Age from which an open job is reported; it keeps its blocks, since a copy never times out."""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Calls from the service to the engine. Each returns at once, except for `hash_prompt`. Thread: any."""

    wake: Callable[[], None] = lambda: None
    """Called when a tier has a result that a request may wait for."""
    step: Callable[[], None] = lambda: None
    """Has an idle engine take a step."""
    reasons: Callable[[], list[str]] = list
    """Returns why the engine should get no traffic."""
    hash_prompt: HashPrompt | None = None
    """Makes the block hashes of a prompt; None without an engine."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Returns the text of token ids; None where no tokenizer is at hand."""
    kv_events: Callable[[], KVEventCounts | None] = lambda: None
    """Returns the counts of the engine's KV events; None where it publishes none."""


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """An engine as the service sees it."""

    name: str
    info: EngineInfo
    layout: GroupLayout
    fingerprint: Mapping[str, object]
    """Everything that changes what bytes mean."""
    device: DeviceView
    watermark_blocks: int
    """How many of the next blocks to leave the device are stored ahead, in lazy mode."""
    steps_in_flight: int = 0
    """Steps that may be planned while one is computed."""
    hooks: EngineHooks = field(default_factory=EngineHooks)
    sinks: Sequence[EventSink] = ()
    """Receivers of the pool's events, besides the feed."""
    device_bytes: int = 0
    """Size of the device's KV cache on all ranks; 0: unknown."""


@dataclass(frozen=True, slots=True)
class PoolBinding:
    """The host pool as the service sees it."""

    plan: PoolPlan
    memory: PoolMemory
    """The pool on all ranks."""
    mapped: HostPool | None
    """This process's mapping; None if it has none."""
    kept: HeaderWriter | None = None
    """The header writer of a kept pool."""


class OffloadService:
    """Offloading for one engine: made, then started. `stop` and `close` may follow at any time."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineBinding,
        pool: PoolBinding,
        configure_logs: Callable[[Settings], None],
        stopping: threading.Event,
        progress: StartProgress | None = None,
        claim: NameClaim | None = None,
    ) -> None:
        """Open the store and the tiers, and make core.

        Args:
            stopping: Set by `stop`, or before.
            claim: The claim of the engine's name, if the caller made it.

        Raises:
            ValueError: The service cannot start; everything opened so far is closed.
        """
        self.name = engine.name
        self.warm_start: WarmStart | None = None
        """What was recovered of a kept pool; set by `start`."""
        self._engine = engine
        self._pool = pool
        self._configure_logs = configure_logs
        self._stopping = stopping
        self._progress = StartProgress() if progress is None else progress
        self._verification: BootVerification | None = None
        kept, plan = pool.kept, pool.plan
        with ExitStack() as undo:
            if kept is not None:
                undo.callback(kept.close)
            traces = load_traces(settings)
            self.traces = None if traces is None else traces(engine.name, engine.info.model)
            if self.traces is not None:
                undo.callback(self.traces.close)
            self.store = self._open_store(settings, claim, undo)
            tiers = self._open_tiers(settings.tiers)
            undo.callback(close_tiers, tiers)
            self.feed = EventFeed(self.store.journal.append, engine.layout.prefix_group.slot_tokens)
            self._errors = errors = ErrorLog()
            undo.callback(errors.flush)
            self.what_if = WhatIf(
                lambda: Present.of(self.scheduler), engine.layout, engine.device_bytes, settings.what_if
            )
            self._partings = Partings(engine.layout.prefix_group.slot_tokens)
            self.prompts = PromptFeed([self.what_if, self._partings])
            undo.callback(self.prompts.close)
            self.manager = OffloadManager(
                plan.num_slots,
                engine.layout.slot_bytes,
                settings.eviction_policy,
                sink=guarded_sink([self.feed.publish, self.prompts.receive, *engine.sinks], errors),
                header_queue=kept,
                max_slots=plan.max_slots,
            )
            pool_bytes = plan.num_slots * engine.layout.slot_bytes
            self._store_mode = choose_store_mode(settings.store_mode, pool_bytes, engine.device_bytes)
            _log.info("store mode: %s", self._store_mode)
            self.scheduler = self._make_scheduler(settings, tiers)
            opens = None if pool.mapped is None else self._open_tiers
            self._tier_resets = TierResets(self.store, self.scheduler.resets)
            self.tier_registry = TierRegistry(settings.tiers, tiers, self.scheduler, self._tier_resets.prepare, opens)
            started_s = time.time() - (time.monotonic() - self._progress.started_s)
            self._samples = StatsHistory(started_s, self._keep_minute)
            self.guard = OffloadGuard(self.scheduler, engine.info.workers, errors, wake=engine.hooks.step)
            undo.callback(lambda: self.scheduler.tiers.close(time.time()))
            self.balance = BalanceWatch(self.scheduler, self._samples, partial(self.feed.changed, EventType.STORING))
            undo.callback(lambda: self._samples.end(self.scheduler.snapshot(), time.time()))
            self._tier_flushes = TierFlushes(self.scheduler, self.guard, self.feed, self._verify)
            undo.callback(self._tier_flushes.close)
            self._prefetch_audit = PrefetchAudit(self.store)
            undo.callback(self._prefetch_audit.flush, 0.0)
            self.policies = PolicyStore(self.store, self.scheduler.policies, self.feed)
            limits = TenantLimits(self.manager)
            self.tenants = TenantStore(self.store, limits, self.guard.guarding)
            self._adviser = Adviser(self.scheduler, self._samples, self.prompts, self.what_if, self._partings, limits)
            self._apply_to_core(settings)
            self._keep_token_ids(settings.explain_bytes)
            undo.callback(self._tier_resets.check)
            self._resizer = PoolResizer(
                PoolResize(self.manager, plan.extent_slots),
                pool.memory,
                plan,
                wait_for_readers=lambda timeout_s: kept is None or kept.wait_for_readers(timeout_s),
                wake=engine.hooks.step,
                on_end=self._on_resized,
                guarding=self.guard.guarding,
            )
            self._pool_watch = None if kept is None or pool.mapped is None else PoolWatch(kept, self._on_pool_truncated)
            self.settings = LiveSettings(settings, self._apply)
            self._threads = ThreadWatch(self._watched_threads)
            self._supervisor = Supervisor(stopping, self._checks())
            self._undo = undo.pop_all()
        self._helpers = ExitStack()
        self._helpers.callback(self._resizer.close)
        self._helpers.callback(self._supervisor.close)

    def start(self) -> None:
        """Recover blocks and what operators had set, then start history and supervision. Raises `StartError`."""
        self._progress.note("reading overrides, rules, limits and open resets")
        # Before the journal starts, which would overwrite the rows of another database with what memory has.
        try:
            self.policies.load(time.time())
            self.tenants.load()
            self._tier_resets.load(time.time())
        except DatabaseUnavailable as error:
            raise StartError(
                "KVFERRY_DATABASE_URL: overrides, rules, limits and open resets of an earlier process cannot be read: "
                f"{error}"
            ) from error
        now_s = time.time()
        try:
            self._samples.restore(self.store.reader.stats_rows(now_s - NUM_MINUTES * MINUTE_S, now_s, NUM_MINUTES))
        except DatabaseUnavailable as error:
            _log.warning("database: no history of stats from before the start: %s", error)
        pool = self._pool
        if pool.kept is not None:
            pool.kept.start()
        if pool.kept is not None and pool.mapped is not None:
            self.warm_start, self._verification = recover_pool(
                pool.kept.file, pool.mapped, self.store, self.manager, self._stopping, self._progress.note
            )
        self.store.start(Inventory(self.manager))
        self._resizer.start()
        self._supervisor.start()
        self.prompts.start()

    def context(self, closing: Callable[[], bool], engine_router: APIRouter | None = None) -> AdminContext:
        """Return the parts that the admin API uses; `closing` returns true once the server stops."""
        hooks = self._engine.hooks
        return AdminContext(
            engine=self._engine.info,
            scheduler=self.scheduler,
            guard=self.guard,
            wake=hooks.step,
            started_s=self._progress.started_s,
            readiness=self.readiness,
            degraded=self.degraded,
            closing=closing,
            samples=self._samples,
            balance=self.balance,
            adviser=self._adviser,
            prompts=self.prompts,
            what_if=self.what_if,
            partings=self._partings,
            store_mode=lambda: self._store_mode,
            store=self.store,
            policies=self.policies,
            tenants=self.tenants,
            feed=self.feed,
            settings=self.settings,
            tier_registry=self.tier_registry,
            tier_flushes=self._tier_flushes,
            tier_resets=self._tier_resets,
            prefetch_audit=self._prefetch_audit,
            hash_prompt=hooks.hash_prompt,
            decode=hooks.decode,
            warm_start=self.warm_start,
            threads=self._threads.counts,
            traces=lambda: None if self.traces is None else self.traces.counts(),
            kv_events=hooks.kv_events,
            engine_router=engine_router,
        )

    def readiness(self) -> list[str]:
        """Return why this process should get no traffic; empty if it is ready."""
        overdue = self.scheduler.overdue_jobs(time.time(), OVERDUE_S)
        return [
            *(["stopping"] if self._stopping.is_set() else []),
            *self._engine.hooks.reasons(),
            *([] if self._verification is None else self._verification.reasons()),
            *([] if self._pool_watch is None else self._pool_watch.reasons()),
            *([f"{overdue} transfers have been open for more than {OVERDUE_S:.0f} s"] if overdue else []),
        ]

    def degraded(self) -> list[str]:
        """Return what does less than it should, while requests are served."""
        watch = [] if self._pool_watch is None else [self._pool_watch.degraded]
        parts = (
            self.guard.degraded,
            self.scheduler.tiers.health,
            self.balance.degraded,
            self._resizer.degraded,
            self.store.degraded,
            self._tier_resets.degraded,
            *watch,
            self.settings.degraded,
            self.prompts.degraded,
            *([] if self.traces is None else [self.traces.degraded]),
            self._threads.degraded,
        )
        return [text for degraded in parts for text in degraded()]

    def stop(self) -> None:
        """Stop supervision and resizing; the caller stops the engine next, then its copies. May be called again."""
        self._stopping.set()
        self._helpers.close()

    def close(self) -> None:
        """Close tiers and history; the pool is not used after this. May be called again."""
        with self._undo:
            # If stopping is interrupted, the rest is closed all the same.
            self.stop()

    # --- construction ---------------------------------------------------------------------------------------------

    def _open_store(self, settings: Settings, claim: NameClaim | None, undo: ExitStack) -> MetadataStore:
        self._progress.note("opening the database")
        url, kept = settings.resolved_database_url(), self._pool.kept
        if claim is None:
            claim = claim_name(url, self._engine.name)
            undo.callback(claim.close)
        store = MetadataStore(
            url,
            self._engine.name,
            settings.pool_kind.value,
            _history_limits(settings),
            num_recovered_slots=self._pool.plan.num_slots if kept is not None and kept.file.found.is_kept else 0,
            claim=claim,
        )
        undo.callback(store.close, CLOSE_S)
        return store

    def _open_tiers(self, entries: Sequence[TierSettings]) -> dict[str, ThreadedTier]:
        """Open tiers, in the process that maps the pool."""
        engine, mapped, kept = self._engine, self._pool.mapped, self._pool.kept
        if mapped is None:
            return {}
        slots = PoolSlots(mapped, None if kept is None else kept.before_tier_write)
        return open_tiers(
            entries, engine.fingerprint, engine.layout.slot_bytes, slots, engine.hooks.wake, engine=engine.name
        )

    def _verify(self, slots: Slots) -> None:
        if self._verification is not None:
            self._verification.verify(slots)

    def _make_scheduler(self, settings: Settings, tiers: dict[str, ThreadedTier]) -> OffloadScheduler:
        engine = self._engine
        return OffloadScheduler(
            self.manager,
            PolicyResolver(settings.request_policy(), settings.request_policy_sources(), self.manager.lock),
            engine.device,
            engine.layout,
            SchedulerOptions(
                request_fields=settings.request_fields,
                num_workers=engine.info.workers,
                store_mode=self._store_mode.mode,
                watermark_blocks=engine.watermark_blocks,
                steps_in_flight=engine.steps_in_flight,
            ),
            cost_model=LoadOrCompute(),
            tiers=tiers,
        )

    # --- changes while running ------------------------------------------------------------------------------------

    def _apply(self, settings: Settings, names: Collection[str]) -> None:
        """Apply settings that can change while running, of which those with these names may have changed.

        Raises `SizeNotPossible` or `PinnedBlocks` for a valid change that is not possible now.
        """
        if "pool_bytes" in names:
            self._resizer.check(settings.pool_bytes)
        self._configure_logs(settings)
        with self.guard.guarding("settings"):
            self._apply_to_core(settings)
            if "store_mode" in names:
                self._set_store_mode(settings, "pool_bytes" in names)
        with self.prompts.lock:
            self.what_if.enable(settings.what_if)
        if "explain_bytes" in names:
            self._keep_token_ids(settings.explain_bytes)
        self.store.set_limits(_history_limits(settings))
        self._resizer.begin(settings.pool_bytes)

    def _apply_to_core(self, settings: Settings) -> None:
        """Apply the settings of core that can change while running, at start and by `_apply`."""
        self.manager.operator_pins.max_fraction = settings.max_pinned_fraction
        self.scheduler.retention.max_retain_s = settings.max_retain_s
        self.scheduler.cost_model.decision = settings.load_decision
        self.manager.admission.set_threshold(settings.store_threshold)
        self.manager.switch_policy(settings.eviction_policy)
        self.balance.enable(settings.auto_pause)
        self.tenants.limits.set_default(settings.tenant_max_bytes)

    def _keep_token_ids(self, max_bytes: int) -> None:
        """Keep token ids of prompts in so many bytes from now on; those kept before are forgotten."""
        self.scheduler.emits_token_ids = max_bytes > 0
        self.prompts.send(KeepTokenIds(max_bytes))

    def _set_store_mode(self, settings: Settings, is_resized: bool) -> None:
        """Choose the store mode anew, by the present size of the pool, or by that of a resize which follows."""
        slots = self.manager.table.target_slots * self.manager.slot_bytes
        pool_bytes = settings.pool_bytes if is_resized else slots
        self._store_mode = choose_store_mode(settings.store_mode, pool_bytes, self._engine.device_bytes)
        if self._store_mode.mode is not self.scheduler.store_mode:
            self.scheduler.set_store_mode(self._store_mode.mode)

    def _on_resized(self, end: ResizeEnd) -> None:
        """Record the end of a resize, and the current size if it failed."""
        if end.error is not None:
            self.settings.record_unapplied("pool_bytes", end.asked_bytes, end.bytes, end.error)
        self.feed.changed(EventType.RESIZED, asdict(end), time.time())

    def _on_pool_truncated(self, reason: str) -> None:
        """Drop all blocks of the pool, whose memory must not be accessed any more, and switch offloading off."""
        self.scheduler.resets.reset(time.time(), places=[HOST])
        self.guard.disable(reason)

    # --- supervision ----------------------------------------------------------------------------------------------

    def _checks(self) -> list[Callable[[], None]]:
        watch = [] if self._pool_watch is None else [self._pool_watch.check]
        return [
            lambda: self._samples.add(self.scheduler.snapshot(), time.time()),
            lambda: self.balance.check(time.monotonic()),
            self._adviser.check,
            self._threads.check,
            self._step_unready,
            *watch,
            self._expire,
            self.tenants.check,
            self._tier_resets.check,
            self.settings.reread_tokens,
            self._prefetch_audit.flush,
            self._errors.flush,
        ]

    def _watched_threads(self) -> list[WatchedThread]:
        own = [self._supervisor.thread, self.store.journal.thread, self._resizer.thread, self.prompts.thread]
        own += [] if self._verification is None else [self._verification.thread]
        return own

    def _step_unready(self) -> None:
        """Have an engine take a step that gets no traffic: dead copy threads are started again in one."""
        if self._engine.hooks.reasons():
            self._engine.hooks.step()

    def _keep_minute(self, row: Row) -> None:
        with self.manager.lock:
            self.store.journal.append(row)

    def _expire(self) -> None:
        with self.guard.guarding("expire"):
            self.scheduler.expire(time.time())


def _history_limits(settings: Settings) -> HistoryLimits:
    return HistoryLimits(settings.eviction_history_rows, float(settings.eviction_history_days))
