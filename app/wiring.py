"""Wiring: a process of our own, from settings to engine, pool, copy engine and ferry, closed in reverse.

What cannot start raises `StartRefused` before anything serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.engines.naming import name_of_engine
from kvferry.app.engines.revision import name_in_fingerprint
from kvferry.app.ferry import EngineSide, Ferry, PoolSide
from kvferry.app.logs import LogPipe
from kvferry.app.offload_guard import GuardedCopies
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import Engine
from kvferry.app.starting import StartProgress, StartRefused
from kvferry.app.store import StoreError, claim_name
from kvferry.app.warm_start import largest_pool_bytes, open_kept_file
from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.record import KeptRecord
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.extents import PoolPlan, plan_pool
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory
from kvferry.cuda_ops.pool.prepare import Preparation

if TYPE_CHECKING:
    from kvferry.app.engines.cuda import CudaSide
    from kvferry.app.engines.embedded import EmbeddedEngine

_log = logging.getLogger(__name__)

CLOSE_ENGINE_S = 10.0
BARE_BLOCK_BYTES = 64 << 10
"""Size of a block where there is no engine that would give it."""


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

    def take_given_out(self, among: Container[int]) -> Mapping[int, bytes | None]:
        """Nothing is given out."""
        return {}


class Process:
    """One kvferry in one process. Made, then started; `close` may follow at any time and undoes what was done."""

    def __init__(self, settings: Settings, logs: LogPipe, progress: StartProgress | None = None) -> None:
        """Load the model, map the pool, open the store. Raises `StartRefused`. `progress` is told how far that is."""
        self._settings = settings
        self._progress = StartProgress() if progress is None else progress
        self._stopping = threading.Event()
        self._started_s = time.time()
        self.engine: EmbeddedEngine | None = None
        self.copies: CopyEngine | None = None
        self._cuda: CudaSide | None = None
        with ExitStack() as undo:
            try:
                self._build(logs, undo)
            except (ValueError, StoreError) as error:
                raise StartRefused(str(error)) from error
            self._undo = undo.pop_all()
        self.name = self.ferry.name

    def start(self) -> None:
        """Read what is kept, then start the threads: history, then the engine. Raises `StartRefused`."""
        self.ferry.start()
        if self.engine is not None:
            self.engine.start()
        if self._kept is not None:
            self._kept.file.goes_if_new = False

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """What the admin API gets to see; `closing` turns true once the server is to stop."""
        if self.engine is None:
            return self.ferry.context(closing)
        from kvferry.app.engines.embedded.completions import completions_router

        context = self.ferry.context(closing, completions_router(self.engine))
        return replace(context, retry_after_s=self.engine.retry_after_s)

    def abort_requests(self) -> None:
        """End what the engine works on; clients are told."""
        if self.engine is not None:
            self.engine.abort_all()

    def close(self) -> None:
        """Stop everything, the last thing started first; each within its time."""
        self._undo.close()

    def _build(self, logs: LogPipe, undo: ExitStack) -> None:
        settings = self._settings
        if settings.engine is Engine.EMBEDDED:
            self._load_engine(undo)
        side, device_bytes = self._describe(undo)
        pool = self._map_pool(side, device_bytes, undo)
        self.ferry = Ferry(settings, side, pool, logs.set_level, self._stopping, self._progress.note)
        undo.callback(self.ferry.close)
        if self.engine is not None and pool.mapped is not None:
            self._attach(self.engine, side.layout, pool.mapped, undo)
        undo.callback(self.ferry.stop)

    def _load_engine(self, undo: ExitStack) -> None:
        from kvferry.app.engines.embedded import EmbeddedEngine, EngineConfig

        settings = self._settings
        self._progress.note(f"loading the model {settings.model}")
        self.engine = engine = EmbeddedEngine(
            EngineConfig(
                model=settings.model,
                device=settings.device,
                dtype=settings.dtype.value,
                device_blocks=settings.device_blocks,
                block_size=settings.block_size,
                max_batched_tokens=settings.max_batched_tokens,
                max_running=settings.max_running,
                max_waiting=settings.max_waiting,
                max_wait_s=settings.max_wait_s,
                state_dir=settings.state_dir if settings.has_lasting_blocks else None,
            )
        )
        if engine.model.device.type == "cuda":
            from kvferry.app.engines.cuda import CudaSide

            self._cuda = CudaSide(engine.model.device)
            undo.callback(self._cuda.close)

    def _describe(self, undo: ExitStack) -> tuple[EngineSide, int]:
        """The engine as the ferry sees it, and the size of its own KV cache in bytes."""
        engine, settings = self.engine, self._settings
        device: DeviceView
        fingerprint: dict[str, object]
        if engine is None:
            info = EngineInfo("none", "none", "none", settings.block_size, groups=1, workers=1)
            group = GroupSpec(settings.block_size, BARE_BLOCK_BYTES)
            fingerprint = {"engine": "none", "block_size": settings.block_size}
            device, device_bytes = NoDevice(), 0
        else:
            from kvferry.app.engines.embedded.hashing import HASH_SEED

            about = engine.info
            info = EngineInfo(about.name, about.model, about.device, about.block_size, groups=1, workers=1)
            group = GroupSpec(about.block_size, about.block_bytes)
            fingerprint = {
                "model": name_in_fingerprint(about.model, about.revision),
                "revision": about.revision,
                "dtype": about.dtype,
                "block_size": about.block_size,
                "block_bytes": about.block_bytes,
                "num_layers": about.num_layers,
                "hash_seed": HASH_SEED.hex(),
            }
            device, device_bytes = engine.pool, about.kv_bytes
        name = settings.engine_name or name_of_engine(info.model, fingerprint)
        # Before the pool, whose file has the same name.
        claim = claim_name(settings.resolved_database_url(), name, is_default=settings.engine_name is None)
        undo.callback(claim.close)
        side = EngineSide(
            name=claim.name,
            info=info,
            layout=GroupLayout([group], settings.blocks_per_slot),
            fingerprint=fingerprint,
            device=device,
            watermark_blocks=_watermark_blocks(settings),
            started_s=self._started_s,
            wake=self._wake,
            step=self._wake,
            reasons=self._reasons,
            claim=claim,
        )
        return side, device_bytes

    def _map_pool(self, engine: EngineSide, device_bytes: int, undo: ExitStack) -> PoolSide:
        settings, slot_bytes = self._settings, engine.layout.slot_bytes
        plan = plan_pool(settings.pool_bytes, slot_bytes, largest_pool_bytes(settings))
        if not plan.num_slots:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES={settings.pool_bytes} holds no slot: one takes {slot_bytes:,} bytes; make it "
                "larger"
            )
        preparation = Preparation() if self._cuda is None else self._cuda.preparation()
        preparation = replace(preparation, progress=self._progress.note_pool)
        file = open_kept_file(settings, engine.name, engine.fingerprint, plan, slot_bytes)
        if file is not None:
            # Until it has served once, it holds nothing that anybody would miss.
            file.goes_if_new = True
            plan = file.shape.plan
        self._announce_pool(plan, slot_bytes, device_bytes)
        pool = HostPool(
            plan.num_slots, slot_bytes, plan.extent_slots * slot_bytes, backing=file, preparation=preparation
        )
        undo.callback(pool.close)
        self._kept = None if file is None else KeptRecord(file)
        return PoolSide(plan, pool, pool, self._kept)

    def _announce_pool(self, plan: PoolPlan, slot_bytes: int, device_bytes: int) -> None:
        """Say how many slots the pool gets, before anything is allocated."""
        pool_bytes = plan.num_slots * slot_bytes
        share = f", {pool_bytes / device_bytes:.1f} times the device's KV cache" if device_bytes else ""
        _log.info(
            "host pool: %s slots of %s bytes, %s bytes in all on 1 rank%s",
            f"{plan.num_slots:,}",
            f"{slot_bytes:,}",
            f"{pool_bytes:,}",
            share,
        )
        if pool_bytes < device_bytes:
            _log.warning(
                "KVFERRY_POOL_BYTES=%d is less than the device's KV cache of %d bytes: in eager mode such a pool "
                "mostly holds "
                "what the device still has, and brings little",
                self._settings.pool_bytes,
                device_bytes,
            )

    def _attach(self, engine: EmbeddedEngine, layout: GroupLayout, pool: HostPool, undo: ExitStack) -> None:
        """Give the engine its copy engine. On stop, copies end before the memory that they touch goes."""
        from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
        from kvferry.cuda_ops.copy.layout import DeviceLayout

        settings = self._settings
        blocks = DeviceLayout.of_tensors([[engine.cache.block_bytes]], layout.blocks_per_slot)
        copies: CopyEngine
        headers = None if self._kept is None else SlotHeaders(self._kept.file, pool)
        before = None if headers is None else headers.before_copy
        if self._cuda is None:
            copies = CpuCopyEngine(blocks, pool, engine.wake, before=before)
        else:
            copies = self._cuda.copies(
                blocks,
                pool,
                engine.wake,
                settings.state_dir,
                settings.kernel_below_bytes,
                before,
            )
        if self._kept is not None and headers is not None:
            copies = self._kept.fillings = KeptCopies(copies, headers, engine.wake)
        self.copies = copies
        undo.callback(copies.close)
        engine.attach(self.ferry.guard, GuardedCopies(copies, self.ferry.guard.record_error))
        undo.callback(engine.close, CLOSE_ENGINE_S)

    def _wake(self) -> None:
        """Have an idle engine take a step."""
        if self.engine is not None:
            self.engine.wake()

    def _reasons(self) -> list[str]:
        """Why the engine should get no traffic."""
        reasons = [] if self.engine is None else self.engine.reasons()
        if self.copies is not None and not self.copies.is_alive():
            reasons.append("the copy engine does not run; its log says why")
        return reasons


def _watermark_blocks(settings: Settings) -> int:
    """What one step may take from the device's free queue, but no more of the device than a quarter."""
    step_blocks = -(-settings.max_batched_tokens // settings.block_size) + settings.max_running
    return max(min(step_blocks, settings.device_blocks // 4), 1)
