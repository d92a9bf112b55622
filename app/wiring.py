"""Wiring: from settings to engine, pool, scheduler, copy engine and store, started in order and stopped in reverse.

This is the one place that knows all rooms. What cannot start raises `StartRefused` before anything serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.api.auth import Tokens
from app.api.context import AdminContext, EngineInfo
from app.api.live_settings import LiveSettings
from app.event_feed import EventFeed
from app.logs import LogPipe
from app.policies import KeptPolicies
from app.pool_size import PoolSize
from app.settings import Settings
from app.settings.kinds import Engine
from app.starting import StartProgress
from app.store import Store, StoreError, StoreUnavailable
from app.tiers.news import TierNews
from app.tiers.opening import close_tiers, open_tiers
from app.tiers.pool_slots import PoolSlots
from app.upkeep import Upkeep, history_limits
from app.warm_start import BootVerification, WarmStart, begin_warm, largest_pool_bytes, open_kept_file
from core.groups import GroupLayout, GroupSpec
from core.manager import OffloadManager
from core.policy import PolicyBook
from core.rates import LoadOrCompute
from core.resize import PoolResize
from core.scheduler import OffloadScheduler
from cuda_ops.copy_engine import CopyEngine
from cuda_ops.extents import PoolPlan, plan_pool
from cuda_ops.host_pool import HostPool
from cuda_ops.kept_copies import KeptCopies
from cuda_ops.kept_file import KeptFile
from cuda_ops.kept_pool import KeptRecord
from cuda_ops.limits import NotEnoughMemory
from cuda_ops.prepare import Preparation
from cuda_ops.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from app.engines.cuda import CudaSide

_log = logging.getLogger(__name__)

CLOSE_S = 10.0
OVERDUE_S = 60.0
"""A job that has been open for so long is reported; it goes on holding its blocks, since a copy never times out."""
BARE_BLOCK_BYTES = 64 << 10
"""Size of a block where there is no engine that would give it."""


class StartRefused(Exception):
    """What was asked for cannot be served; the message says which setting, and what to do."""


class NoDevice:
    """The device blocks of a process without an engine: there are none to hold."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Nothing to hold."""

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """Nothing to release."""

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        """None are free."""
        return None

    def contents(self, block_ids: Sequence[int]) -> Sequence[bytes | None]:
        """Nothing is held."""
        return [None] * len(block_ids)

    def resident(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Nothing is held."""
        return [False] * len(keys)


@dataclass(frozen=True, slots=True)
class _Host:
    """What the engine side has to offer, whichever it is. `fingerprint` is whatever changes what bytes mean."""

    info: EngineInfo
    layout: GroupLayout
    device_bytes: int
    fingerprint: dict[str, object]

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes


class Process:
    """One kvferry in one process. Made, then started; `close` may follow at any time and undoes what was done."""

    def __init__(self, settings: Settings, logs: LogPipe, progress: StartProgress | None = None) -> None:
        """Load the model, map the pool, open the store. Raises `StartRefused`. `progress` is told how far that is."""
        self._progress = StartProgress() if progress is None else progress
        self.settings = LiveSettings(
            settings,
            lambda changed: self._upkeep.apply(changed),
            check=lambda changed, names: self._upkeep.check(changed, names),
        )
        self._logs = logs
        self._closers: list[Callable[[], object]] = []
        self._tier_news = TierNews()
        self._stopping = threading.Event()
        self._started_s = time.time()
        self._kept_file: KeptFile | None = None
        self._warm_start: WarmStart | None = None
        self._verification: BootVerification | None = None
        try:
            self._build(settings)
        except (ValueError, StoreError) as error:
            self.close()
            raise StartRefused(str(error)) from error
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Read what is kept, then start the threads: history, then the engine."""
        self._progress.note("reading overrides and rules")
        # Before the journal, which in another database would write what memory knows over it.
        try:
            kept = self.policies.load(time.time())
        except StoreUnavailable as error:
            raise StartRefused(
                f"DATABASE_URL: the overrides and rules that were kept cannot be read: {error}"
            ) from error
        if kept.num_overrides or kept.num_rules:
            _log.info("%d overrides and %d rules of an earlier process hold", kept.num_overrides, kept.num_rules)
        if self._kept_file is not None:
            self._warm_start, self._verification = begin_warm(
                self._kept_file, self._pool, self.store, self.manager, self._stopping, self._progress.note
            )
        self.store.start(self.manager.inventory)
        if self.engine is not None:
            self.engine.start()
        self._upkeep.start()
        if self._kept_file is not None:
            self._kept_file.goes_if_new = False

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """What the admin API gets to see; `closing` turns true once the server is to stop."""
        from app.api.completions import completions_router

        settings = self.settings.current
        admin, read = settings.admin_token, settings.read_token
        return AdminContext(
            scheduler=self.scheduler,
            manager=self.manager,
            store=self.store,
            policies=self.policies,
            feed=self.feed,
            settings=self.settings,
            engine_info=self._host.info,
            pool_kind=settings.pool_kind.value,
            tokens=Tokens(
                admin=None if admin is None else admin.get_secret_value(),
                read=None if read is None else read.get_secret_value(),
            ),
            readiness=self.readiness,
            degraded=self._upkeep.degraded,
            tier_news=self._tier_news,
            wake=self.wake,
            started_s=self._started_s,
            closing=closing,
            warm_start=self._warm_start,
            engine_router=None if self.engine is None else completions_router(self.engine),
        )

    def readiness(self) -> list[str]:
        """Why this process should get no traffic now; empty when it should."""
        reasons: list[str] = []
        if self._stopping.is_set():
            reasons.append("stopping")
        if self.engine is not None and not self.engine.is_alive():
            reasons.append(f"the engine's thread does not run; its last error: {self.engine.last_error}")
        verifying = None if self._verification is None else self._verification.reason()
        if verifying is not None:
            reasons.append(verifying)
        if self.copies is not None and not self.copies.is_alive():
            reasons.append("the copy engine does not run; its log says why")
        overdue = self.scheduler.overdue_jobs(time.time(), OVERDUE_S)
        if overdue:
            reasons.append(f"{overdue} transfers have been open for more than {OVERDUE_S:.0f} s")
        return reasons + self.store.health()

    def wake(self) -> None:
        """Have an idle engine take a step."""
        if self.engine is not None:
            self.engine.wake()

    def abort_requests(self) -> None:
        """End what the engine works on; clients are told."""
        if self.engine is not None:
            self.engine.abort_all()

    def close(self) -> None:
        """Stop everything, the last thing started first; each within its time."""
        self._stopping.set()
        while self._closers:
            self._closers.pop()()

    def _build(self, settings: Settings) -> None:
        self.engine = None
        self.copies: CopyEngine | None = None
        self._cuda: CudaSide | None = None
        if settings.engine is Engine.EMBEDDED:
            from app.engines.embedded import EmbeddedEngine, EngineConfig

            self._progress.note(f"loading the model {settings.model}")
            self.engine = EmbeddedEngine(
                EngineConfig(
                    model=settings.model,
                    device=settings.device,
                    dtype=settings.dtype.value,
                    device_blocks=settings.device_blocks,
                    block_size=settings.block_size,
                    max_batched_tokens=settings.max_batched_tokens,
                    max_running=settings.max_running,
                )
            )
        self._host = self._describe(settings)
        slot_bytes = self._host.slot_bytes
        plan = plan_pool(settings.pool_bytes, slot_bytes, largest_pool_bytes(settings))
        if not plan.num_slots:
            raise NotEnoughMemory(
                f"POOL_BYTES={settings.pool_bytes} holds no slot: one takes {slot_bytes:,} bytes; make it larger"
            )
        self.name = name = settings.engine_name or _name_of(self._host)
        file = open_kept_file(settings, name, self._host.fingerprint, plan, slot_bytes)
        if file is not None:
            file.goes_if_new = True
            plan = PoolPlan(file.shape.num_slots, file.shape.extent_slots, file.shape.max_slots)
        num_slots = plan.num_slots
        self._announce_pool(settings, num_slots)
        if self.engine is not None and self.engine.model.device.type == "cuda":
            from app.engines.cuda import CudaSide

            self._cuda = CudaSide(self.engine.model.device)
            self._closers.append(self._cuda.close)
        preparation = Preparation() if self._cuda is None else self._cuda.preparation()
        preparation = replace(preparation, progress=self._progress.note_pool)
        pool = HostPool(num_slots, slot_bytes, plan.extent_slots * slot_bytes, backing=file, preparation=preparation)
        self._closers.append(pool.close)
        self._pool = pool
        self._kept_file = file
        self._progress.note("opening the database")
        self.store = Store(
            settings.resolved_database_url(),
            name,
            settings.pool_kind.value,
            history_limits(settings),
            num_kept_slots=num_slots if file is not None and file.found.is_kept else 0,
            on_replaced=lambda: self.policies.write_again(time.time()),
        )
        self._closers.append(lambda: self.store.close(CLOSE_S))
        tiers = open_tiers(
            settings.tiers,
            self._host.fingerprint,
            self._host.slot_bytes,
            PoolSlots(pool),
            self._tier_news.telling(self.wake),
            engine=name,
        )
        self._closers.append(lambda: close_tiers(tiers))
        self.feed = EventFeed(self.store.journal)
        record = None if file is None else KeptRecord(file)
        self.manager = OffloadManager(
            num_slots,
            self._host.slot_bytes,
            settings.eviction_policy,
            sink=self.feed,
            max_pinned_fraction=settings.max_pinned_fraction,
            store_threshold=settings.store_threshold,
            record=record,
            epoch=0 if file is None else file.min_epoch,
            max_slots=plan.max_slots,
        )
        self.scheduler = OffloadScheduler(
            self.manager,
            PolicyBook(settings.request_policy(), settings.request_policy_sources(), self.manager.lock),
            NoDevice() if self.engine is None else self.engine.pool,
            self._host.layout,
            choice=LoadOrCompute(settings.load_decision),
            request_fields=settings.request_fields,
            store_mode=settings.store_mode,
            watermark_blocks=_watermark_blocks(settings),
            tiers=tiers,
        )
        self._closers.append(lambda: self.scheduler.tiers.close(time.time()))
        self.policies = KeptPolicies(self.store, self.scheduler.policies, self.feed)
        if self.engine is not None:
            self._attach(settings, pool, record)
        self._pool_size = PoolSize(
            PoolResize(self.manager, plan.extent_slots),
            pool,
            plan,
            settle=self._settle,
            wake=self.wake,
            tell=lambda end: self._upkeep.note_resize(end),
        )
        self._upkeep = Upkeep(
            self.settings,
            self._logs.set_level,
            self.store,
            self.feed,
            self.scheduler,
            self.manager,
            self._pool_size,
            self._stopping,
        )
        self._closers.append(self._upkeep.close)

    def _attach(self, settings: Settings, pool: HostPool, record: KeptRecord | None) -> None:
        """Give the engine its copy engine. On stop, copies end before the memory that they touch goes."""
        from cuda_ops.cpu_copy import CpuCopyEngine
        from cuda_ops.layout import DeviceLayout

        engine = self.engine
        if engine is None:
            return
        blocks = DeviceLayout.of_tensors([[engine.cache.block_bytes]], self._host.layout.blocks_per_slot)
        copies: CopyEngine
        if self._cuda is None:
            copies = CpuCopyEngine(blocks, pool, engine.wake)
        else:
            copies = self._cuda.copies(
                blocks,
                pool,
                engine.wake,
                settings.state_dir,
                settings.kernel_below_bytes,
            )
        if self._kept_file is not None and record is not None:
            copies = record.fillings = KeptCopies(copies, SlotHeaders(self._kept_file.headers(0), pool), engine.wake)
        self.copies = copies
        self._closers.append(copies.close)
        engine.attach(self.scheduler, copies)
        self._closers.append(lambda: engine.close(CLOSE_S))

    def _describe(self, settings: Settings) -> _Host:
        if self.engine is None:
            info = EngineInfo("none", "none", "none", settings.block_size, groups=1, workers=1)
            layout = GroupLayout([GroupSpec(settings.block_size, BARE_BLOCK_BYTES)], settings.blocks_per_slot)
            return _Host(info, layout, 0, {"engine": "none", "block_size": settings.block_size})
        from app.engines.embedded.hashing import HASH_SEED

        about = self.engine.info
        info = EngineInfo(about.name, about.model, about.device, about.block_size, groups=1, workers=1)
        fingerprint: dict[str, object] = {
            "model": about.model,
            "revision": about.revision,
            "dtype": about.dtype,
            "block_size": about.block_size,
            "block_bytes": about.block_bytes,
            "num_layers": about.num_layers,
            "hash_seed": HASH_SEED.hex(),
        }
        layout = GroupLayout([GroupSpec(about.block_size, about.block_bytes)], settings.blocks_per_slot)
        return _Host(info, layout, about.kv_bytes, fingerprint)

    def _announce_pool(self, settings: Settings, num_slots: int) -> None:
        """Say how many slots the pool gets, before anything is allocated."""
        slot_bytes, device_bytes = self._host.slot_bytes, self._host.device_bytes
        share = f", {num_slots * slot_bytes / device_bytes:.1f} times the device's KV cache" if device_bytes else ""
        _log.info(
            "host pool: %s slots of %s bytes, %s bytes in all on 1 rank%s",
            f"{num_slots:,}",
            f"{slot_bytes:,}",
            f"{num_slots * slot_bytes:,}",
            share,
        )
        if num_slots * slot_bytes < device_bytes:
            _log.warning(
                "POOL_BYTES=%d is less than the device's KV cache of %d bytes: in eager mode such a pool mostly holds "
                "what the device still has, and brings little",
                settings.pool_bytes,
                device_bytes,
            )

    def _settle(self, timeout_s: float) -> bool:
        """Wait until nobody looks at slots that have left the pool."""
        return self.copies.settle(timeout_s) if isinstance(self.copies, KeptCopies) else True


def _watermark_blocks(settings: Settings) -> int:
    """What one step may take from the device's free queue, but no more of the device than a quarter."""
    step_blocks = -(-settings.max_batched_tokens // settings.block_size) + settings.max_running
    return max(min(step_blocks, settings.device_blocks // 4), 1)


def _name_of(host: _Host) -> str:
    """A name for an engine that was given none: the model's, and what tells apart all that changes its bytes."""
    text = json.dumps(host.fingerprint, sort_keys=True, default=str)
    short = "".join(char if char.isalnum() else "-" for char in host.info.model.rstrip("/").rsplit("/", 1)[-1])
    return f"{short[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
