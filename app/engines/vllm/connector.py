"""The class that vLLM loads. It splits by role and passes every hook on; what it does is in the two sides.

vLLM makes the workers' halves first, hands them their tensors, and then makes the scheduler's. Once started, no hook
raises: an exception would end the engine. It is recorded, and the hook answers that there is nothing to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.app.engines.digests import DigestCache
from kvferry.app.engines.vllm.adapters import Adapters
from kvferry.app.engines.vllm.admin import AdminServer
from kvferry.app.engines.vllm.copies import Copies, check_caches, device_side, preparation_for
from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.fingerprint import hash_bytes, read_ahead, start_digest
from kvferry.app.engines.vllm.host import EngineCoreHost, GuestLogs
from kvferry.app.engines.vllm.kv_events import KVEventSink
from kvferry.app.engines.vllm.layout import VllmLayout, read_layout
from kvferry.app.engines.vllm.metadata import RankFacts, StepOrders, StepReports
from kvferry.app.engines.vllm.metrics import KVFerryPromMetrics, KVFerryStats, StatsSource, hits_by_source
from kvferry.app.engines.vllm.options import (
    ConnectorRefused,
    check_caching,
    check_parallel,
    log_refusal,
    read_options,
    recompute_failed_loads,
)
from kvferry.app.engines.vllm.pool import EnginePool, PoolSize, announce, map_for_rank, processors_beside, size_pool
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler
from kvferry.app.engines.vllm.versions import cache_source, hash_block_size
from kvferry.app.engines.vllm.worker import ConnectorWorker, orders_of
from kvferry.app.service.startup import enable_crash_report
from kvferry.app.settings import Settings
from kvferry.cuda_ops.pool.limits import NotEnoughMemory

_log = logging.getLogger(__name__)

_HASHES_PER_BLOCK = 4
"""Hashes of blocks computed with adapters that are remembered, for each block of the device: more than it can hold."""


_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


def _none() -> Any:
    return None


def _guarded(
    nothing: Callable[[], Any] = _none,
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Decorate a hook so that an exception is recorded and the hook returns `nothing()`."""

    def decorate(hook: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @wraps(hook)
        def guarded(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - it would end the engine
                connector: KVFerryConnector = args[0]  # type: ignore[assignment]
                connector._record_error(hook.__name__, error)
                return nothing()  # type: ignore[no-any-return]

        return guarded

    return decorate


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in host memory, and brings them back."""

    _cache_hit_source = cache_source("HOST")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker: ConnectorWorker | None = None
        self._scheduler: ConnectorScheduler | None = None
        self._host: EngineCoreHost | None = None
        self._admin: AdminServer | None = None
        self._stats: StatsSource | None = None
        self._events: KVEventSink | None = None
        self._facts: RankFacts | None = None
        self._logs: GuestLogs | None = None
        self._is_serving = False
        enable_crash_report()
        try:
            check_caching(vllm_config)
            check_parallel(vllm_config.parallel_config)
            settings = read_options(self._kv_transfer_config)
            self._logs = GuestLogs(settings)
            layout = read_layout(kv_cache_config, hash_block_size(vllm_config, kv_cache_config))
            size = size_pool(settings, layout, vllm_config.parallel_config)
            if role is KVConnectorRole.WORKER:
                self._settings, self._layout, self._size = settings, layout, size
                rank = vllm_config.parallel_config.rank
                self._worker = ConnectorWorker(rank, stores=size.stores(rank))
            else:
                recompute_failed_loads(self._kv_transfer_config)
                self._start_scheduler(settings, self._logs, layout, size)
        except BaseException as error:
            self._refuse(error)
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a block that is not stored is only a miss later."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """No layout is required. vLLM asks once the model is loaded and before it measures memory, so that the weights
        can be read for their digest meanwhile."""
        try:
            settings = read_options(vllm_config.kv_transfer_config)
        except ConnectorRefused:
            # Reported when the connector is made.
            return None
        if settings.has_lasting_blocks:
            read_ahead(vllm_config, DigestCache(settings.state_dir))
        return None

    # --- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Map the pool and start copying."""
        worker, rank = self._the_worker(), self._vllm_config.parallel_config.rank
        try:
            check_caches(self._layout, kv_caches)
            if rank == 0:
                announce(self._size, self._settings, self._layout)
            wanted = self._wanted_pool(self._settings, self._layout, self._size)
            cuda = device_side(self._layout, kv_caches)
            mapped = map_for_rank(wanted, rank, preparation_for(cuda, is_own=not wanted.is_shared))
            cpus = processors_beside(wanted)
            worker.attach(
                lambda on_finished: Copies(self._layout, self._settings, kv_caches, mapped, on_finished, cuda, cpus)
            )
        except BaseException as error:
            self._refuse(error)
            raise
        facts = RankFacts(rank, self._size.num_slots, self._size.rank_slot_bytes)
        if mapped.file is not None:
            facts.dropped, facts.foreign_keys = mapped.file.found.dropped, mapped.file.take_foreign_keys()
            facts.num_cut_off = mapped.file.num_cut_off
        self._facts = facts

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Yes. vLLM resets its connectors before it sleeps, so that the pool is empty then; it stays mapped."""
        return True

    def unregister_kv_caches(self) -> None:
        """Stop using the KV caches, whose memory is about to go. vLLM does not sleep if this raises."""
        self._the_worker().release_caches()

    @_guarded()
    def restore_kv_caches(self) -> None:
        """Use the KV caches again, wherever they are after wake-up."""
        self._the_worker().restore_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank made of the configuration."""
        return self._facts

    @_guarded()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy blocks that this step takes from the prefix cache: vLLM calls this before it touches the KV caches."""
        worker, orders = self._the_worker(), orders_of(kv_connector_metadata)
        try:
            worker.copy_ahead(orders)
        except Exception as error:  # noqa: BLE001 - what was not submitted has failed
            worker.jobs_failed("handle_preemptions", orders.ahead, error)

    @_guarded()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads. Nobody waits for them within the step."""
        worker, orders = self._the_worker(), orders_of(self._connector_metadata)
        try:
            worker.start_loads(orders)
        except Exception as error:  # noqa: BLE001 - what was not submitted has failed
            worker.jobs_failed("start_load_kv", orders.loads, error, orders.lost)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step runs on blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, behind the step."""

    @_guarded()
    def wait_for_save(self) -> None:
        """Start the step's stores, whose blocks the step has just filled."""
        worker, orders = self._the_worker(), orders_of(self._connector_metadata)
        try:
            worker.start_stores(orders)
        except Exception as error:  # noqa: BLE001 - what was not submitted has failed
            worker.jobs_failed("wait_for_save", orders.stores, error)

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended. Failures go by request, since blocks are named alike in several groups."""
        worker = self._the_worker()
        try:
            worker.collect(orders_of(self._connector_metadata))
        except Exception as error:  # noqa: BLE001 - what was collected before is returned all the same
            worker.record_error("get_transfer_results", error)
        received, worker.received = worker.received, set()
        failed, worker.failed = worker.failed, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same without failures, for callers that do not know them: there are none."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @_guarded()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The jobs that have ended."""
        worker = self._worker
        if worker is None:
            return None
        try:
            worker.collect_reports()
        except Exception as error:  # noqa: BLE001 - the results below must reach the scheduler all the same
            worker.record_error("build_connector_worker_meta", error)
        reports, worker.reports = worker.reports, StepReports()
        return reports if reports else None

    # --- scheduler ------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The blocks that transfers hold."""
        self._the_scheduler().device.bind(gpu_block_pool)
        if self._events is not None:
            self._events.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Refuse ranks that hold other bytes than the scheduler thinks; remember what was dropped with another pool.

        Then all is known that operators may ask for: the last thing that vLLM does before it serves. vLLM repeats the
        call after each wake-up from sleep, with what the ranks found at start.
        """
        ranks = [facts for facts in metadata.values() if isinstance(facts, RankFacts)]
        for facts in ranks:
            self._compare(facts)
        if self._is_serving:
            return
        self._is_serving = True
        if self._host is not None:
            for facts in ranks:
                self._host.note_dropped(facts)
        if self._admin is not None:
            self._admin.start()

    @_guarded()
    def on_new_request(self, request: Any) -> None:
        """See `ConnectorScheduler`."""
        self._the_scheduler().on_new_request(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `ConnectorScheduler`."""
        return self._the_scheduler().match(request, num_computed_tokens)

    @_guarded()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `ConnectorScheduler`."""
        side = self._the_scheduler()
        try:
            side.commit(request, blocks, num_external_tokens)
        except Exception as error:  # noqa: BLE001 - the request recomputes
            side.commit_failed(request, num_external_tokens, error)

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Split the tokens of a load by where their blocks were: host memory, or a tier that brought them for it."""
        if self._host is None or not num_external_tokens:
            return {}
        by_tier = self._host.service.scheduler.tier_hit(request.request_id, num_external_tokens)
        return hits_by_source(num_external_tokens, by_tier, self._host.tier_types)

    @_guarded(StepOrders)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `ConnectorScheduler`."""
        side = self._the_scheduler()
        try:
            orders = side.plan(scheduler_output)
        except Exception as error:  # noqa: BLE001 - nothing is stored or loaded in this step
            orders = side.plan_failed(error)
        side.planned = None
        return orders

    @_guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        """See `ConnectorScheduler`."""
        side = self._the_scheduler()
        try:
            side.take_reports(connector_output)
        except Exception as error:  # noqa: BLE001 - the reports are read again
            side.reports_failed(connector_output, error)

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks may be freed at once, since those under transfer are held."""
        side = self._the_scheduler()
        try:
            side.finish(request.request_id)
        except Exception as error:  # noqa: BLE001 - its last blocks are not stored
            side.finish_failed(request.request_id, error)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several groups."""
        return self.request_finished(request, [])

    @_guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether transfers are open, whose ends are only seen in a step."""
        return self._scheduler is not None and self._scheduler.has_open_work()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget everything that was stored; True, also while transfers are under way."""
        self._the_scheduler().reset()
        return True

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """What entered and left the pool since the last call."""
        return () if self._events is None else self._events.take()

    def shutdown(self) -> None:
        """Stop. A killed engine never calls this."""
        for part in (self._worker, self._admin, self._host, self._logs):
            if part is not None:
                try:
                    part.close()
                except Exception:  # noqa: BLE001 - the other parts are closed all the same
                    _log.exception("unexpected error while %s was closed", type(part).__name__)

    # --- vLLM's statistics ----------------------------------------------------------------------------------------

    @_guarded()
    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """What happened since the last call, of the scheduler's half only."""
        return None if self._stats is None else self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats | None:
        """Statistics as they came over from the engine's process."""
        return KVFerryStats(data=data) if data is not None else KVFerryStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVFerryPromMetrics:
        """vLLM's `/metrics` shows ours."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _start_scheduler(self, settings: Settings, logs: GuestLogs, layout: VllmLayout, size: PoolSize) -> None:
        config = self._vllm_config
        digests = DigestCache(settings.state_dir)
        adapters = Adapters(start_digest(config), _HASHES_PER_BLOCK * layout.num_blocks, digests)
        device = VllmDevice(adapters, hash_bytes(config))
        self._events = KVEventSink.for_config(config, layout, size.slots)
        self._size = size
        woken = threading.Event()
        # Other work waits for a step with requests; an engine that has any open work goes on stepping.
        step_wanted = threading.Event()
        self._host = EngineCoreHost(
            config,
            self._wanted_pool(settings, layout, size),
            layout,
            device,
            logs,
            wake=woken.set,
            step=step_wanted.set,
            listen=lambda sink: sink if self._events is None else self._events.before(sink),
        )
        self._host.start()
        if self._events is not None:
            self._host.report_recovered(self._events.recovered)
        core = self._host.service.scheduler
        waits_for = woken if settings.tiers else None
        self._scheduler = ConnectorScheduler(
            self._host.service.guard,
            device,
            layout,
            adapters,
            size.num_ranks,
            events=self._events,
            woken=waits_for,
            extents=self._host.extents,
            step_wanted=step_wanted,
            # The first model runner calls `handle_preemptions` before it touches a block.
            writes_early=getattr(config, "use_v2_model_runner", True),
        )
        self._host.reasons = self._scheduler.reasons
        self._stats = StatsSource(core, self._scheduler)
        self._admin = AdminServer(self._host, settings)

    def _wanted_pool(self, settings: Settings, layout: VllmLayout, size: PoolSize) -> EnginePool:
        return EnginePool.make(self._vllm_config, self._kv_cache_config, settings, layout, size)

    def _compare(self, facts: RankFacts) -> None:
        if (facts.num_slots, facts.slot_bytes) != (self._size.num_slots, self._size.rank_slot_bytes):
            self._refuse(
                error := ConnectorRefused(
                    f"rank {facts.rank} has {facts.num_slots:,} slots of {facts.slot_bytes:,} bytes, the scheduler "
                    f"{self._size.num_slots:,} of {self._size.rank_slot_bytes:,}: ranks with unequal shares of the KV "
                    "cache are not supported; choose a pipeline_parallel_size that divides the layers"
                )
            )
            raise error

    def _refuse(self, error: BaseException) -> None:
        """Say why in one line of our own, and undo what was started."""
        if isinstance(error, (ConnectorRefused, NotEnoughMemory)):
            log_refusal(error)
        self.shutdown()

    def _record_error(self, hook: str, error: Exception) -> None:
        if self._scheduler is not None:
            self._scheduler.offload.record_error(hook, error)
        elif self._worker is not None:
            self._worker.record_error(hook, error)

    def _the_worker(self) -> ConnectorWorker:
        if self._worker is None:
            raise RuntimeError("this is the scheduler's half of the connector")
        return self._worker

    def _the_scheduler(self) -> ConnectorScheduler:
        if self._scheduler is None:
            raise RuntimeError("this is a worker's half of the connector")
        return self._scheduler
