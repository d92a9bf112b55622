"""The process of `kvferry serve`: from settings to engine, pool, copy engine and service, closed in reverse order.

A failure before requests are served raises `StartError`.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.common.discovery import announce_service
from kvferry.app.engines.embedded.block_pool import HASH_SEED, BlockPool, hash_prompt
from kvferry.app.engines.identity import name_in_fingerprint, name_of_engine
from kvferry.app.guard import GuardedCopies
from kvferry.app.pool.recovery import open_kept_file
from kvferry.app.pool.sizing import log_pool_size, plan_host_pool
from kvferry.app.serve.preflight import BARE_BLOCK_BYTES, start_problems
from kvferry.app.service.server import (
    answering,
    listen,
    listen_for_metrics,
    make_server,
    raise_file_limit,
    url_of,
)
from kvferry.app.service.service import EngineBinding, EngineHooks, OffloadService, PoolBinding
from kvferry.app.service.startup import StartProgress, enable_crash_report
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import Engine
from kvferry.app.store import NameClaim, claim_name
from kvferry.app.telemetry.logs import LogPipe
from kvferry.core.engine_api import HashPrompt
from kvferry.core.errors import StartError
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import Preparation

if TYPE_CHECKING:
    from kvferry.app.engines.cuda import CudaDevice
    from kvferry.app.engines.embedded.engine import EmbeddedEngine

_log = logging.getLogger(__name__)

CLOSE_ENGINE_S = 10.0
THREAD_SWITCH_S = 0.0005
"""Longest time that the event loop waits for the interpreter lock, for each of the several times that a request takes
it; with Python's 5 ms, threads that compute delay responses by seconds."""


def run(settings: Settings, logs: LogPipe) -> None:
    """Serve until SIGINT or SIGTERM, with the garbage collector enabled once it starts to. Raises `StartError`."""
    enable_crash_report()
    raise_file_limit()
    sys.setswitchinterval(THREAD_SWITCH_S)
    with listen(settings.host, settings.port) as listener, listen_for_metrics(settings) as metrics:
        problems = start_problems(settings)
        if problems:
            raise StartError("\n".join(problems))
        progress = StartProgress()
        with ExitStack() as undo:
            with answering(listener, progress, metrics):
                process = Process(settings, logs, progress)
                undo.callback(process.close)
                process.start()
                server = make_server(process, metrics)
            # From here a signal stops the server, and raises nothing.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, server.handle_exit)
            metrics_url = None if metrics is None else url_of(metrics)
            undo.callback(announce_service(settings.state_dir, process.name, url_of(listener), metrics_url=metrics_url))
            _log.info("serving on %s: dashboard /ui/, API /docs", url_of(listener))
            if metrics_url is not None:
                _log.info("metrics alone on %s/metrics", metrics_url)
            # Without a collection before it, which takes half a second and frees 20,000 small objects.
            gc.freeze()
            gc.enable()
            server.run(sockets=[listener])
    _log.info("stopped")


class Process:
    """One kvferry in one process. Made, then started; `close` may follow at any time."""

    def __init__(self, settings: Settings, logs: LogPipe, progress: StartProgress | None = None) -> None:
        """Load the model, map the pool, open the store. Raises `StartError`. `progress` gets the stages."""
        self._settings = settings
        self._progress = StartProgress() if progress is None else progress
        self._stopping = threading.Event()
        self.engine: EmbeddedEngine | None = None
        self.copies: CopyEngine | None = None
        self._cuda: CudaDevice | None = None
        self._kept: HeaderWriter | None = None
        with ExitStack() as undo:
            try:
                self.service = self._build(logs, undo)
            except ValueError as error:
                raise StartError(str(error)) from error
            self._undo = undo.pop_all()
        self.name = self.service.name

    def start(self) -> None:
        """Recover blocks and policies, then start the threads of the service and of the engine. Raises `StartError`."""
        self.service.start()
        if self.engine is not None:
            self.engine.start()
        if self._kept is not None:
            self._kept.file.remove_if_new = False

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """Return the parts that the admin API uses; `closing` returns true once the server stops."""
        if self.engine is None:
            return self.service.context(closing)
        from kvferry.app.engines.embedded.api import completions_router

        return self.service.context(closing, completions_router(self.engine, self.service.traces))

    def abort_requests(self) -> None:
        """End all requests of the engine; their clients get an error."""
        if self.engine is not None:
            self.engine.abort_all()

    def close(self) -> None:
        """Stop everything in reverse order, each part within its time limit."""
        self._undo.close()

    # --- construction ---------------------------------------------------------------------------------------------

    def _build(self, logs: LogPipe, undo: ExitStack) -> OffloadService:
        settings = self._settings
        if settings.engine is Engine.EMBEDDED:
            self._load_engine(undo)
        engine, claim = self._bind_engine(undo)
        pool = self._map_pool(engine, undo)
        service = OffloadService(settings, engine, pool, logs.configure, self._stopping, self._progress, claim)
        undo.callback(service.close)
        if self.engine is not None and pool.mapped is not None:
            self._attach(self.engine, service, engine.layout, pool.mapped, undo)
        undo.callback(service.stop)
        return service

    def _load_engine(self, undo: ExitStack) -> None:
        from kvferry.app.engines.embedded.engine import EmbeddedEngine

        settings = self._settings
        self._progress.note(f"loading the model {settings.model}")
        self.engine = engine = EmbeddedEngine(settings)
        if engine.model.device.type == "cuda":
            from kvferry.app.engines.cuda import CudaDevice

            self._cuda = CudaDevice(engine.model.device)
            undo.callback(self._cuda.close)

    def _bind_engine(self, undo: ExitStack) -> tuple[EngineBinding, NameClaim]:
        """Return the engine as the service sees it, and the claim of its name."""
        engine, settings = self.engine, self._settings
        fingerprint: dict[str, object]
        hash_blocks: HashPrompt | None = None
        decode: Callable[[Sequence[int]], str] | None = None
        if engine is None:
            info = EngineInfo("none", "none", "none", settings.block_size, groups=1, workers=1)
            group = GroupSpec(settings.block_size, BARE_BLOCK_BYTES)
            fingerprint = {"engine": "none", "block_size": settings.block_size}
            device, device_bytes = BlockPool(0), 0
        else:
            model, block_size = engine.model, engine.settings.block_size
            info = EngineInfo("embedded", model.name, str(model.device), block_size, groups=1, workers=1)
            group = GroupSpec(block_size, engine.block_bytes)
            fingerprint = {
                "model": name_in_fingerprint(model.name, model.revision),
                "revision": model.revision,
                "dtype": str(model.dtype).removeprefix("torch."),
                "block_size": block_size,
                "block_bytes": engine.block_bytes,
                "num_layers": engine.cache.shape.num_layers,
                "hash_seed": HASH_SEED.hex(),
            }
            device, device_bytes = engine.block_pool, engine.block_pool.num_blocks * engine.block_bytes
            hash_blocks, decode = partial(hash_prompt, block_size), engine.model.tokenizer.decode
        name = settings.engine_name or name_of_engine(info.model, fingerprint)
        # Before the pool, whose file has the same name.
        claim = claim_name(settings.resolved_database_url(), name, is_default=settings.engine_name is None)
        undo.callback(claim.close)
        binding = EngineBinding(
            name=claim.name,
            info=info,
            layout=GroupLayout([group], settings.blocks_per_slot),
            fingerprint=fingerprint,
            device=device,
            watermark_blocks=_watermark_blocks(settings),
            device_bytes=device_bytes,
            hooks=EngineHooks(self._wake, self._wake, self._reasons, hash_blocks, decode),
        )
        return binding, claim

    def _map_pool(self, engine: EngineBinding, undo: ExitStack) -> PoolBinding:
        settings, slot_bytes = self._settings, engine.layout.slot_bytes
        plan = plan_host_pool(settings, slot_bytes)
        preparation = Preparation() if self._cuda is None else self._cuda.preparation()
        preparation = replace(preparation, progress=self._progress.note_pool)
        file = open_kept_file(settings, engine.name, engine.fingerprint, plan, slot_bytes)
        if file is not None:
            # Removed if the start fails: a new file holds nothing yet.
            file.remove_if_new = True
            plan = file.shape.plan
            self._kept = HeaderWriter(file)
        log_pool_size(settings, plan.num_slots, slot_bytes, 1, engine.device_bytes)
        pool = HostPool(
            plan.num_slots, slot_bytes, plan.extent_slots * slot_bytes, backing=file, preparation=preparation
        )
        undo.callback(pool.close)
        return PoolBinding(plan, pool, pool, self._kept)

    def _attach(
        self, engine: EmbeddedEngine, service: OffloadService, layout: GroupLayout, pool: HostPool, undo: ExitStack
    ) -> None:
        """Give the engine a copy engine. On stop, copies end before their memory is unmapped."""
        from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
        from kvferry.cuda_ops.copy.layout import DeviceLayout

        settings = self._settings
        blocks = DeviceLayout.of_tensors([[engine.cache.blocks]], layout.blocks_per_slot)
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
            copies = KeptCopies(copies, headers, engine.wake)
            self._kept.seal_with(copies)
        self.copies = copies
        undo.callback(copies.close)
        engine.attach(service.guard, GuardedCopies(copies, service.guard.record_error, service.guard.hook_timer))
        undo.callback(engine.close, CLOSE_ENGINE_S)

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Have an idle engine take a step."""
        if self.engine is not None:
            self.engine.wake()

    def _reasons(self) -> list[str]:
        """Return why the engine should get no traffic."""
        reasons = [] if self.engine is None else self.engine.reasons()
        if self.copies is not None and not self.copies.is_alive():
            reasons.append("the copy engine does not run; its log says why")
        return reasons


def _watermark_blocks(settings: Settings) -> int:
    """Return the blocks that one step may take from the device's free queue, at most a quarter of the device."""
    step_blocks = -(-settings.max_batched_tokens // settings.block_size) + settings.max_running
    return max(min(step_blocks, settings.device_blocks // 4), 1)
