"""kvferry in vLLM's engine-core process: core, history and the admin API, started with the engine and stopped with it.

Nothing here is needed for an answer: what fails beside the engine's thread is logged, and the engine goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.api.auth import Tokens
from app.api.context import AdminContext, EngineInfo
from app.api.live_settings import LiveSettings
from app.engines.vllm.device import VllmDevice
from app.engines.vllm.engine_extents import EngineExtents
from app.engines.vllm.fillings import EngineFillings
from app.engines.vllm.layout import NULL_BLOCK, VllmLayout
from app.engines.vllm.logs import GuestLogs
from app.engines.vllm.metadata import RankFacts
from app.engines.vllm.pool import EnginePool, map_for_scheduler
from app.engines.vllm.refusal import ConnectorRefused
from app.event_feed import EventFeed
from app.policies import KeptPolicies
from app.pool_size import PoolSize
from app.store import Store, StoreError, StoreUnavailable
from app.tiers.news import TierNews
from app.tiers.opening import close_tiers, open_tiers
from app.tiers.pool_slots import PoolSlots
from app.upkeep import Upkeep, history_limits
from app.warm_start import BootVerification, WarmStart, begin_warm
from core.events import EventSink
from core.manager import OffloadManager
from core.policy import PolicyBook
from core.rates import LoadOrCompute
from core.resize import PoolResize
from core.scheduler import OffloadScheduler
from core.tiers import Tier
from cuda_ops.extents import PoolPlan
from cuda_ops.kept_pool import DropReason, KeptRecord
from cuda_ops.slot_headers import SlotHeaders

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
OVERDUE_S = 60.0
"""A job that has been open for so long is reported; it goes on holding its blocks, since a copy never times out."""


class EngineCoreHost:
    """One kvferry in one engine-core process. Made, then started; `close` undoes what was done."""

    def __init__(
        self,
        config: Any,
        wanted: EnginePool,
        layout: VllmLayout,
        device: VllmDevice,
        logs: GuestLogs,
        wake: Callable[[], None] = lambda: None,
        step: Callable[[], None] = lambda: None,
        wrap_sink: Callable[[EventSink], EventSink] = lambda sink: sink,
    ) -> None:
        """Map the pool where it is needed here, open the store and the tiers, and make core. Raises `ConnectorRefused`.

        `wake` is called on a tier's thread when there is something that a request waits for. `step` has an idle engine
        take one, in which vLLM hears what has become of the pool. `wrap_sink` may listen to what the cache does.
        """
        settings, size = wanted.settings, wanted.size
        self.settings = LiveSettings(
            settings,
            lambda changed: self._upkeep.apply(changed),
            check=lambda changed, names: self._upkeep.check(changed, names),
        )
        self._logs = logs
        self._step = step
        self._stopping = threading.Event()
        self._started_s = time.time()
        self._closers: list[Callable[[], object]] = []
        self._tier_news = TierNews()
        self._warm_start: WarmStart | None = None
        self._verification: BootVerification | None = None
        self.data_parallel_rank = int(config.parallel_config.data_parallel_index)
        self.name = wanted.name
        self.info = EngineInfo(
            "vllm",
            str(config.model_config.model),
            str(config.device_config.device_type),
            layout.groups[0].spec.block_size,
            groups=len(layout.groups),
            workers=size.num_ranks,
        )
        try:
            tiers = self._open(wanted, wake)
        except (ValueError, StoreError) as error:
            self.close()
            raise ConnectorRefused(str(error)) from error
        except BaseException:
            self.close()
            raise
        file = None if self._mapped is None else self._mapped.file
        record = None if file is None else KeptRecord(file)
        self._fillings: EngineFillings | None = None
        if self._mapped is not None and file is not None and record is not None and tiers:
            self._fillings = record.fillings = EngineFillings(
                [SlotHeaders(file.headers(rank), self._mapped.pool, rank) for rank in range(size.num_ranks)]
            )
            self._closers.append(self._fillings.close)
        plan = size.extents
        if file is not None:
            plan = PoolPlan(file.shape.num_slots, file.shape.extent_slots, file.shape.max_slots)
        self.feed = EventFeed(self.store.journal)
        self.manager = OffloadManager(
            plan.num_slots,
            size.slots.slot_bytes,
            settings.eviction_policy,
            sink=wrap_sink(self.feed),
            max_pinned_fraction=settings.max_pinned_fraction,
            store_threshold=settings.store_threshold,
            record=record,
            epoch=0 if file is None else file.min_epoch,
            max_slots=plan.max_slots,
        )
        self.core = OffloadScheduler(
            self.manager,
            PolicyBook(settings.request_policy(), settings.request_policy_sources(), self.manager.lock),
            device,
            size.slots,
            choice=LoadOrCompute(settings.load_decision),
            request_fields=settings.request_fields,
            num_workers=size.num_ranks,
            null_block=NULL_BLOCK,
            store_mode=settings.store_mode,
            watermark_blocks=_watermark_blocks(config, layout),
            tiers=tiers,
        )
        self._closers.append(lambda: self.core.tiers.close(time.time()))
        self.policies = KeptPolicies(self.store, self.core.policies, self.feed)
        self.extents = EngineExtents(
            plan,
            size.slots.slot_bytes,
            size.num_ranks,
            None if self._mapped is None else self._mapped.pool,
            step=step,
            stopping=self._stopping,
        )
        self._pool_size = PoolSize(
            PoolResize(self.manager, plan.extent_slots),
            self.extents,
            plan,
            # Each rank waits besides until nobody looks at what it unmaps.
            settle=lambda timeout_s: self._fillings is None or self._fillings.settle(timeout_s),
            wake=step,
            tell=lambda end: self._upkeep.note_resize(end),
        )
        self._upkeep = Upkeep(
            self.settings,
            self._logs.set_level,
            self.store,
            self.feed,
            self.core,
            self.manager,
            self._pool_size,
            self._stopping,
        )
        self._closers.append(self._upkeep.close)

    def start(self) -> None:
        """Take over what is kept of blocks and of what operators had set; start history and the supervisor."""
        # Before the journal, which in another database would write what memory knows over it.
        try:
            kept = self.policies.load(time.time())
        except StoreUnavailable as error:
            raise ConnectorRefused(
                f"database_url: the overrides and rules that were kept cannot be read: {error}"
            ) from error
        if kept.num_overrides or kept.num_rules:
            _log.info("%d overrides and %d rules of an earlier process hold", kept.num_overrides, kept.num_rules)
        if self._mapped is not None and self._mapped.file is not None:
            self._warm_start, self._verification = begin_warm(
                self._mapped.file, self._mapped.pool, self.store, self.manager, self._stopping
            )
        self.store.start(self.manager.inventory)
        self._upkeep.start()

    def note_dropped(self, facts: RankFacts) -> None:
        """What the first rank has dropped of a kept pool, or all of it, before this process could see it."""
        if self._warm_start is None:
            return
        self.manager.missing.note_foreign(facts.foreign_keys)
        counts = {DropReason.TRUNCATED: facts.num_cut_off}
        if facts.dropped is not None:
            counts[DropReason.FOREIGN] = len(facts.foreign_keys)
            self._warm_start = replace(self._warm_start, foreign=facts.dropped)
        dropped = {reason.value: count for reason, count in counts.items() if count or reason is DropReason.FOREIGN}
        self._warm_start = replace(self._warm_start, dropped={**self._warm_start.dropped, **dropped})

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """What the admin API gets to see; `closing` turns true once the server is to stop."""
        settings = self.settings.current
        admin, read = settings.admin_token, settings.read_token
        return AdminContext(
            scheduler=self.core,
            manager=self.manager,
            store=self.store,
            policies=self.policies,
            feed=self.feed,
            settings=self.settings,
            engine_info=self.info,
            pool_kind=settings.pool_kind.value,
            tokens=Tokens(
                admin=None if admin is None else admin.get_secret_value(),
                read=None if read is None else read.get_secret_value(),
            ),
            readiness=self.readiness,
            degraded=self._upkeep.degraded,
            tier_news=self._tier_news,
            wake=self._step,
            started_s=self._started_s,
            closing=closing,
            warm_start=self._warm_start,
        )

    def readiness(self) -> list[str]:
        """Why this process should get no traffic now; empty when it should."""
        reasons = ["stopping"] if self._stopping.is_set() else []
        verifying = None if self._verification is None else self._verification.reason()
        if verifying is not None:
            reasons.append(verifying)
        overdue = self.core.overdue_jobs(time.time(), OVERDUE_S)
        if overdue:
            reasons.append(f"{overdue} transfers have been open for more than {OVERDUE_S:.0f} s")
        return reasons + self.store.health()

    def abort_requests(self) -> None:
        """Clients are vLLM's, and so is what becomes of their requests."""

    def close(self) -> None:
        """Stop what was started, the last first; may be called again."""
        self._stopping.set()
        while self._closers:
            self._closers.pop()()

    def _open(self, wanted: EnginePool, wake: Callable[[], None]) -> dict[str, Tier]:
        """Map the pool, and open the store and the tiers, which are the answer."""
        settings, size = wanted.settings, wanted.size
        if wanted.is_for_scheduler and wanted.has_random_hashes:
            _log.warning(
                "PYTHONHASHSEED is not set, and vLLM's hashes have another random seed at each start: nothing that is "
                "kept now will be found after a restart; set PYTHONHASHSEED, or prefix_caching_hash_algo=sha256"
            )
        self._mapped = mapped = map_for_scheduler(wanted)
        if mapped is not None:
            self._closers.append(mapped.pool.close)
        is_kept = mapped is not None and mapped.file is not None and mapped.file.found.is_kept
        self.store = Store(
            settings.resolved_database_url(),
            self.name,
            settings.pool_kind.value,
            history_limits(settings),
            num_kept_slots=mapped.pool.num_slots if mapped is not None and is_kept else 0,
            on_replaced=lambda: self.policies.write_again(time.time()),
        )
        self._closers.append(lambda: self.store.close(CLOSE_S))
        if mapped is None:
            return {}
        tiers = open_tiers(
            settings.tiers,
            wanted.fingerprint,
            size.slots.slot_bytes,
            PoolSlots(mapped.pool),
            self._tier_news.telling(wake),
            engine=self.name,
        )
        self._closers.append(lambda: close_tiers(tiers))
        return tiers


def _watermark_blocks(config: Any, layout: VllmLayout) -> int:
    """What one step may take from the free queue, in all groups, but no more of the device than a quarter."""
    scheduler = config.scheduler_config
    step_blocks = sum(
        -(-scheduler.max_num_batched_tokens // group.spec.block_size) + scheduler.max_num_seqs
        for group in layout.groups
    )
    return max(min(int(step_blocks), layout.num_blocks // 4), 1)
