"""Construction of the connector's parts, for a worker rank and for the scheduler process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.common.discovery import announce_service
from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.copies import RankCopies, check_caches, cuda_device, pool_preparation
from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.exclusions import KeyRules
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.fingerprint import has_random_hashes, hash_bytes, prompt_hasher, start_digest
from kvferry.app.engines.vllm.kv_events import KVEventSink
from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.metadata import RankHandshake
from kvferry.app.engines.vllm.metrics import COUNTERS, KVFerryStats, read_metrics
from kvferry.app.engines.vllm.pool import (
    EngineConfig,
    MappedPool,
    check_pool_memory,
    copy_processors,
    map_for_rank,
    map_for_scheduler,
)
from kvferry.app.engines.vllm.requests import Adapters
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler, StepSignals
from kvferry.app.engines.vllm.versions import hashes_embeddings
from kvferry.app.engines.vllm.worker import ConnectorWorker
from kvferry.app.service.server import PortTaken, Server, listen, make_server, raise_file_limit, url_of
from kvferry.app.service.service import EngineBinding, EngineHooks, OffloadService, PoolBinding
from kvferry.app.settings import Settings
from kvferry.app.store import claim_name
from kvferry.app.telemetry.logs import LogPipe, start_logging
from kvferry.core.pool.inventory import Inventory
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.sealing import TierSealer

_log = logging.getLogger(__name__)

_HASHES_PER_BLOCK = 4
"""Limit of extended hashes kept per device block; more than the device can hold."""
CLOSE_S = 5.0
MAX_PORT = 65535


class SharedLogs:
    """Reference to the process's log pipe, which is closed with the last one; worker and scheduler may share it."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _pipe: ClassVar[LogPipe | None] = None
    _num_open: ClassVar[int] = 0

    def __init__(self, settings: Settings) -> None:
        self._is_open = True
        with SharedLogs._lock:
            if SharedLogs._pipe is None:
                SharedLogs._pipe = start_logging(settings, own_loggers_only=True)
            SharedLogs._num_open += 1

    def configure(self, settings: Settings) -> None:
        """Apply settings that have changed to the log pipe."""
        with SharedLogs._lock:
            if SharedLogs._pipe is not None:
                SharedLogs._pipe.configure(settings)

    def close(self) -> None:
        """Drop the reference; may be called again."""
        with SharedLogs._lock:
            if not self._is_open:
                return
            self._is_open = False
            SharedLogs._num_open -= 1
            if not SharedLogs._num_open and SharedLogs._pipe is not None:
                SharedLogs._pipe.close()
                SharedLogs._pipe = None


def attach_worker(config: EngineConfig, worker: ConnectorWorker, caches: Mapping[str, Any]) -> RankHandshake | None:
    """Map the pool on this rank and start the rank's copy engine; return what the first rank found in a kept pool.

    Raises:
        StartError: The KV caches are not supported, or the pool cannot be mapped.
    """
    layout, settings, geometry = config.layout, config.settings, config.geometry
    check_caches(layout, caches)
    if config.rank == 0:
        check_pool_memory(geometry, settings, layout)
    cuda = cuda_device(layout, caches)
    mapped = map_for_rank(config, config.rank, pool_preparation(cuda, is_private=not config.is_shared))
    cpus = copy_processors(config)
    worker.attach(lambda on_finished: RankCopies(layout, settings, caches, mapped, on_finished, cuda, cpus))
    kept = mapped.persistent
    if kept is None or config.rank != 0:
        return None
    return RankHandshake(kept.found, kept.take_foreign_keys(), dict(kept.num_dropped))


class EngineCore:
    """kvferry's parts in vLLM's engine-core process, from construction to `close`.

    Exceptions on other threads than the engine's are logged and do not affect vLLM.
    """

    def __init__(self, config: EngineConfig, logs: SharedLogs) -> None:
        """Map the pool if it is needed in this process, start the offload service, and reserve the admin port.

        Raises:
            StartError: A part cannot be started; the others are closed.
        """
        vllm_config, settings, layout = config.vllm, config.settings, config.layout
        self._config = config
        self._is_serving = False
        self.tier_types = {tier.name: tier.type for tier in settings.tiers}
        num_hashes = _HASHES_PER_BLOCK * layout.num_blocks
        adapters = Adapters(start_digest(vllm_config), num_hashes, DigestCache(settings.state_dir))
        self._hash_prompt = prompt_hasher(vllm_config, layout.hash_block_size, adapters)
        # The first model runner calls `handle_preemptions` before it writes to any block.
        writes_early = getattr(vllm_config, "use_v2_model_runner", True)
        self.device = VllmDevice(adapters, hash_bytes(vllm_config), writes_early=writes_early)
        self.events = KVEventSink.for_config(vllm_config, layout, config.geometry.slots)
        self._signals = StepSignals(threading.Event() if settings.tiers else None)
        with ExitStack() as undo:
            self._open_service(logs, undo)
            rank = int(vllm_config.parallel_config.data_parallel_index)
            self._listener = _listen((settings.host, settings.port), rank)
            undo.callback(self._listener.close)
            self.admin_url = url_of(self._listener)
            self.service.start()
            self._report_recovered()
            self.scheduler = ConnectorScheduler(
                self.service.guard,
                self.device,
                layout,
                self.events,
                self._signals,
                self._extents,
                self.service.traces,
                self._key_rules(),
            )
            self._num_changes_taken = -1
            self._counters = dict.fromkeys(COUNTERS, 0.0)
            self._metrics: socket.socket | None = None
            if settings.metrics_address is not None:
                self._metrics = _listen(settings.metrics_address, rank, "METRICS_")
                undo.callback(self._metrics.close)
            self._undo = undo.pop_all()

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """Return the context of the admin API; `closing` returns true once the server is stopping."""
        return self.service.context(closing)

    def abort_requests(self) -> None:
        """Do nothing: vLLM serves the requests and aborts them itself."""

    def serve(self, ranks: Sequence[RankHandshake]) -> None:
        """Record what the ranks dropped and serve the admin API on a thread; has no effect when called again.

        The discovery file lets clients on this host find the API.
        """
        if self._is_serving:
            return
        self._is_serving = True
        for rank in ranks:
            self._record_dropped(rank)
        raise_file_limit()
        server = make_server(self, self._metrics)
        thread = threading.Thread(target=_serve, args=(server, self._listener), name="kvferry-admin", daemon=True)
        thread.start()
        self._undo.callback(thread.join, CLOSE_S)
        self._undo.callback(setattr, server, "should_exit", True)
        state_dir = self._config.settings.state_dir
        metrics_url = None if self._metrics is None else url_of(self._metrics)
        announced = announce_service(state_dir, self.service.name, self.admin_url, self._engine_name, metrics_url)
        self._undo.callback(announced)
        _log.info("admin API on %s: dashboard /ui/, API /docs", self.admin_url)
        if metrics_url is not None:
            _log.info("metrics alone on %s/metrics", metrics_url)

    def take_stats(self) -> KVFerryStats | None:
        """Return the statistics since the last call, or None if no transfer has started or ended."""
        if self.scheduler.num_changes == self._num_changes_taken:
            return None
        self._num_changes_taken = self.scheduler.num_changes
        # Without a copy, which takes most of the time: it is called every step.
        previous, (self._counters, gauges) = self._counters, self.service.scheduler.read_counters(read_metrics)
        changed = {name: value - previous[name] for name, value in self._counters.items() if value != previous[name]}
        return KVFerryStats(data=changed | gauges)

    def close(self) -> None:
        """Close all parts in reverse order; may be called again."""
        self._undo.close()

    # --- construction ---------------------------------------------------------------------------------------------

    def _open_service(self, logs: SharedLogs, undo: ExitStack) -> None:
        """Map the pool if it is needed here, and create the offload service."""
        config = self._config
        vllm_config, layout, geometry, settings = config.vllm, config.layout, config.geometry, config.settings
        request_step, stopping = self._signals.step_requested.set, threading.Event()
        if config.is_mapped_by_scheduler and has_random_hashes(vllm_config):
            _log.warning(
                "PYTHONHASHSEED is not set and vLLM's hash seed is random: blocks stored now are not found after a "
                "restart; set PYTHONHASHSEED, or prefix_caching_hash_algo=sha256"
            )
        has_default_name = settings.engine_name is None
        claim = claim_name(settings.resolved_database_url(), config.name, is_default=has_default_name)
        undo.callback(claim.close)
        self._engine_name = config.shared_name(claim.name)
        mapped = map_for_scheduler(config)
        if mapped is not None:
            undo.callback(mapped.pool.close)
        pool = None if mapped is None else mapped.pool
        writer = _open_header_writer(config, mapped, undo)
        plan = geometry.extents if writer is None else writer.file.shape.plan
        self._extents = EngineExtents(
            plan, geometry.slots.slot_bytes, geometry.num_ranks, pool, step=request_step, stopping=stopping
        )
        engine = EngineBinding(
            name=claim.name,
            info=EngineInfo(
                "vllm",
                str(vllm_config.model_config.model),
                str(vllm_config.device_config.device_type),
                layout.groups[0].spec.block_size,
                groups=len(layout.groups),
                workers=geometry.num_ranks,
            ),
            layout=geometry.slots,
            fingerprint=config.fingerprint,
            device=self.device,
            watermark_blocks=_watermark_blocks(vllm_config, layout),
            device_bytes=layout.device_bytes * geometry.num_columns,
            steps_in_flight=getattr(vllm_config, "max_concurrent_batches", 1) - 1,
            hooks=EngineHooks(
                self._signals.wake,
                request_step,
                self._signals.reasons,
                self._hash_prompt,
                kv_events=lambda: None if self.events is None else self.events.counts(),
            ),
            sinks=() if self.events is None else (self.events.receive,),
        )
        binding = PoolBinding(plan, self._extents, pool, writer)
        self.service = OffloadService(settings, engine, binding, logs.configure, stopping, claim=claim)
        undo.callback(self.service.close)

    def _key_rules(self) -> KeyRules:
        settings = self._config.settings
        is_multimodal = self._config.vllm.model_config.multimodal_config is not None
        if is_multimodal and settings.has_lasting_blocks and not settings.trust_mm_uuids:
            _log.info("TRUST_MM_UUIDS=false: requests with images, audio or video are not offloaded")
        return KeyRules(
            hashes_embeddings=hashes_embeddings(),
            trusts_mm_ids=settings.trust_mm_uuids,
            has_multimodal_model=is_multimodal,
            has_diffusion_model=getattr(self._config.vllm.model_config, "is_diffusion", False),
            # Without, the scheduler does not map the pool, and no tier can be attached.
            keeps_blocks=settings.has_lasting_blocks,
        )

    def _report_recovered(self) -> None:
        """Report blocks recovered from an earlier process in KV events."""
        if self.events is None:
            return
        manager = self.service.manager
        inventory, step = Inventory(manager), manager.table.batch_slots
        for start in range(0, manager.table.end_slot, step):
            # In one hold: verification may drop a block in between, and its removal would be reported before its store.
            with manager.lock:
                self.events.recovered(inventory.list_blocks(start, step, start + step).keys)

    def _record_dropped(self, rank: RankHandshake) -> None:
        """Add what the first rank found and dropped in the persistent pool's file to the result of the recovery."""
        recovery = self.service.warm_start
        if recovery is None or rank.found is None:
            return
        self.service.manager.history.record_foreign(rank.foreign_keys)
        self.service.warm_start = recovery.opened(rank.found, rank.dropped)
        _log.info("pool of this engine's ranks: %s", self.service.warm_start)


def _listen(address: tuple[str, int], data_parallel_rank: int, prefix: str = "") -> socket.socket:
    """Listen on the port plus the data-parallel rank, or on a free port if that is taken. Raises `StartError`."""
    host, first_port = address
    port = first_port + data_parallel_rank if first_port else 0
    if port <= MAX_PORT:
        try:
            return listen(host, port, prefix)
        except PortTaken:
            pass
    listener = listen(host, 0, prefix)
    _log.warning(
        "%s port %d is taken: listening on %s, where clients on this host find it; set %sport=0 to use a free port",
        "metrics" if prefix else "admin",
        port,
        url_of(listener),
        prefix.lower(),
    )
    return listener


def _serve(server: Server, listener: socket.socket) -> None:
    try:
        server.run(sockets=[listener])
    except Exception:  # noqa: BLE001 - the engine continues without the admin API
        _log.exception("the admin API has stopped; the engine continues")


def _open_header_writer(config: EngineConfig, mapped: MappedPool | None, undo: ExitStack) -> HeaderWriter | None:
    """Return the writer of a persistent pool. Blocks from tiers and imports are sealed here, stores by the ranks."""
    if mapped is None or mapped.persistent is None:
        return None
    writer = HeaderWriter(mapped.persistent)
    columns = range(config.geometry.num_columns)
    sealer = TierSealer([SlotHeaders(writer.file, mapped.pool, column) for column in columns])
    writer.seal_with(sealer)
    undo.callback(sealer.close)
    return writer


def _watermark_blocks(config: Any, layout: VllmLayout) -> int:
    """Return how many blocks of all groups one step may allocate, at most a quarter of the device's blocks."""
    scheduler = config.scheduler_config
    step_blocks = sum(
        -(-scheduler.max_num_batched_tokens // group.spec.block_size) + scheduler.max_num_seqs
        for group in layout.groups
    )
    return max(min(int(step_blocks), layout.num_blocks // 4), 1)
