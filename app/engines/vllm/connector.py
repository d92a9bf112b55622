"""The KV connector class that vLLM loads: the list of vLLM's hooks.

vLLM creates one connector in each worker process, registers the KV caches, and then creates one in the scheduler
process. Settings and the environment are checked in the constructor and in `register_kv_caches`, which raise. All later
hooks are guarded: an exception would end the engine, so it is recorded, and the hook returns a default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.fingerprint import prefetch_digests
from kvferry.app.engines.vllm.metadata import RankHandshake, StepMetadata, WorkerReports
from kvferry.app.engines.vllm.metrics import KVFerryPromMetrics, KVFerryStats, hits_by_source
from kvferry.app.engines.vllm.options import (
    check_parallel,
    check_prefix_caching,
    log_refusal,
    read_options,
    set_recompute_policy,
)
from kvferry.app.engines.vllm.pool import EngineConfig
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler
from kvferry.app.engines.vllm.versions import cache_source
from kvferry.app.engines.vllm.wiring import EngineCore, SharedLogs, attach_worker
from kvferry.app.engines.vllm.worker import ConnectorWorker, step_metadata
from kvferry.app.service.startup import enable_crash_report
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from kvferry.core.transfers import TransferJob

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


def _none() -> Any:
    return None


def _guarded(
    default: Callable[[], Any] = _none, recover: Callable[..., Any] | None = None
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Decorate a hook so that it does not raise.

    After an exception the hook returns `recover(connector, error, ...)`, called with the hook's arguments. If there is
    no `recover`, or it raises, the error is recorded and the hook returns `default()`.
    """

    def decorate(hook: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @wraps(hook)
        def guarded(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            try:
                return hook(*args, **kwargs)
            except Exception as hook_error:  # noqa: BLE001 - it would end the engine
                connector: KVFerryConnector = args[0]  # type: ignore[assignment]
                error = hook_error
                if recover is not None:
                    try:
                        return recover(connector, hook_error, *args[1:], **kwargs)  # type: ignore[no-any-return]
                    except Exception as recover_error:  # noqa: BLE001 - likewise
                        error = recover_error
                connector._record_error(hook.__name__, error)
                return default()  # type: ignore[no-any-return]

        return guarded

    return decorate


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores KV blocks in host memory and loads them again."""

    _cache_hit_source = cache_source("HOST")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker: ConnectorWorker | None = None
        self._core: EngineCore | None = None
        self._logs: SharedLogs | None = None
        self._settings: Settings | None = None
        self._handshake: RankHandshake | None = None
        enable_crash_report()
        with self._starting():
            check_prefix_caching(vllm_config)
            check_parallel(vllm_config.parallel_config)
            settings = self._settings = read_options(self._kv_transfer_config)
            self._logs = SharedLogs(settings)
            self._config = EngineConfig.make(vllm_config, kv_cache_config, settings)
            if role is KVConnectorRole.WORKER:
                rank = self._config.rank
                self._worker = ConnectorWorker(rank, stores=self._config.geometry.stores(rank))
            else:
                set_recompute_policy(self._kv_transfer_config)
                self._core = EngineCore(self._config, self._logs)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return None: every supported layout can be used.

        vLLM calls this after it has loaded the model and before it profiles memory, a time in which the model's files
        can be read for their digest.
        """
        try:
            settings = read_options(vllm_config.kv_transfer_config)
        except StartError:
            # Raised again by the constructor.
            return None
        if settings.has_lasting_blocks:
            prefetch_digests(vllm_config, DigestCache(settings.state_dir))
        return None

    # --- worker hooks ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Map the pool and start the copy engine."""
        with self._starting():
            self._handshake = attach_worker(self._config, self._the_worker(), kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True. vLLM resets its connectors before it sleeps; the pool is empty then and stays mapped."""
        return True

    def unregister_kv_caches(self) -> None:
        """Stop accessing the KV caches, whose memory is freed next; if this raises, vLLM does not sleep."""
        self._the_worker().release_caches()

    @_guarded()
    def restore_kv_caches(self) -> None:
        """Access the KV caches again, at their addresses after wake-up."""
        self._the_worker().restore_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the first rank found in a persistent pool.

        Beside other connectors None: vLLM delivers one connector's metadata to all, and NIXL refuses another's.
        """
        return self._handshake if get_kv_transfer_group() is self else None

    @_guarded(
        recover=lambda self, error, kv_connector_metadata: self._fail_jobs(
            "handle_preemptions", error, step_metadata(kv_connector_metadata).stores_ahead
        )
    )
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Store blocks that this step reuses; vLLM calls this before it writes to the KV caches."""
        self._the_worker().copy_ahead(step_metadata(kv_connector_metadata))

    @_guarded(
        recover=lambda self, error, forward_context, **kwargs: self._fail_jobs(
            "start_load_kv", error, self._step.loads, self._step.failed_loads
        )
    )
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads, which are asynchronous."""
        self._the_worker().start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step runs on blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored with all layers after the step."""

    @_guarded(recover=lambda self, error: self._fail_jobs("wait_for_save", error, self._step.stores))
    def wait_for_save(self) -> None:
        """Start the step's stores of blocks that the step has filled."""
        self._the_worker().start_stores(self._step)

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended; failures by request, since groups may use the same block ids."""
        worker = self._the_worker()
        try:
            worker.collect(self._step)
        except Exception as error:  # noqa: BLE001 - what was collected before it is returned
            worker.record_error("get_transfer_results", error)
        received, worker.finished_recving = worker.finished_recving, set()
        failed, worker.failed_recving = worker.failed_recving, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @_guarded()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the jobs and resize commands that have ended."""
        worker = self._worker
        if worker is None:
            return None
        try:
            worker.collect_reports()
        except Exception as error:  # noqa: BLE001 - results collected before it must reach the scheduler
            worker.record_error("build_connector_worker_meta", error)
        reports, worker.reports = worker.reports, WorkerReports()
        return reports if reports else None

    # --- scheduler hooks ------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Set the block pool whose blocks transfers hold."""
        core = self._the_core()
        core.device.bind(gpu_block_pool)
        if core.events is not None:
            core.events.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Start the admin server.

        This is the last hook before vLLM serves. vLLM repeats the call after each wake-up from sleep, with the ranks'
        metadata from the start.
        """
        ranks = [rank for rank in metadata.values() if isinstance(rank, RankHandshake)]
        self._the_core().serve(ranks)

    @_guarded()
    def on_new_request(self, request: Any) -> None:
        """See `ConnectorScheduler.on_new_request`."""
        self._the_scheduler().on_new_request(request)

    @_guarded(
        lambda: (0, False),
        recover=lambda self, error, request, num_computed_tokens: self._the_scheduler().match_failed(request, error),
    )
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `ConnectorScheduler.match`."""
        return self._the_scheduler().match(request, num_computed_tokens)

    @_guarded(
        recover=lambda self, error, request, blocks, num_external_tokens: self._the_scheduler().commit_failed(
            request, num_external_tokens, error
        )
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `ConnectorScheduler.commit`."""
        self._the_scheduler().commit(request, blocks, num_external_tokens)

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the tokens of a load by the source of their blocks: host memory, or a tier."""
        if self._core is None or not num_external_tokens:
            return {}
        by_tier = self._core.service.scheduler.tier_hit(request.request_id, num_external_tokens)
        return hits_by_source(num_external_tokens, by_tier, self._core.tier_types)

    @_guarded(StepMetadata, recover=lambda self, error, scheduler_output: self._the_scheduler().plan_failed(error))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `ConnectorScheduler.plan`."""
        scheduler = self._the_scheduler()
        step = scheduler.plan(scheduler_output)
        scheduler.planned = None
        return step

    @_guarded(
        recover=lambda self, error, connector_output: self._the_scheduler().process_output_failed(
            connector_output, error
        )
    )
    def update_connector_output(self, connector_output: Any) -> None:
        """See `ConnectorScheduler.process_output`."""
        self._the_scheduler().process_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `ConnectorScheduler.finish`."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(
        lambda: (False, None), recover=lambda self, error, request, block_ids: self._finish_failed(request, error)
    )
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `ConnectorScheduler.finish`. vLLM may free the blocks at once, since open transfers hold theirs."""
        is_aborted = str(request.get_finished_reason()) in ("abort", "error")
        self._the_scheduler().finish(request.request_id, is_aborted=is_aborted)
        return False, None

    @_guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Return whether transfers are open, whose ends are collected in steps only."""
        return self._core is not None and self._core.scheduler.has_open_work()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Drop all stored blocks and return True; transfers may be open."""
        self._the_scheduler().reset()
        return True

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return the KV events of the pool since the last call."""
        return () if self._core is None or self._core.events is None else self._core.events.take()

    def shutdown(self) -> None:
        """Close all parts; not called when the engine is killed."""
        for part in (self._worker, self._core, self._logs):
            if part is not None:
                try:
                    part.close()
                except Exception:  # noqa: BLE001 - the other parts have to be closed
                    _log.exception("unexpected error while closing %s", type(part).__name__)

    # --- statistics -----------------------------------------------------------------------------------------------

    @_guarded()
    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Return the statistics since the last call, in the scheduler process only."""
        return None if self._core is None else self._core.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats | None:
        """Return statistics received from the engine-core process."""
        return KVFerryStats(data=data) if data is not None else KVFerryStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVFerryPromMetrics:
        """Return kvferry's metrics for vLLM's `/metrics`."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> StepMetadata:
        """Metadata of the current step."""
        return step_metadata(self._connector_metadata)

    def _the_worker(self) -> ConnectorWorker:
        if self._worker is None:
            raise RuntimeError("this connector is the scheduler's, not a worker's")
        return self._worker

    def _the_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this connector is a worker's, not the scheduler's")
        return self._core

    def _the_scheduler(self) -> ConnectorScheduler:
        return self._the_core().scheduler

    def _fail_jobs(
        self, where: str, error: Exception, jobs: Sequence[TransferJob], failed_loads: Sequence[str] = ()
    ) -> None:
        self._the_worker().fail_jobs(where, jobs, error, failed_loads)

    def _finish_failed(self, request: Any, error: Exception) -> tuple[bool, None]:
        self._the_scheduler().finish_failed(request.request_id, error)
        return False, None

    def _record_error(self, hook: str, error: Exception) -> None:
        if self._core is not None:
            self._core.scheduler.offload.record_error(hook, error)
        elif self._worker is not None:
            self._worker.record_error(hook, error)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """If the connector does not start, close all parts, and log a refusal with settings spelled as the user did."""
        try:
            yield
        except BaseException as error:
            refused = None
            if isinstance(error, StartError):
                text = str(error)
                refused = StartError(text if self._settings is None else self._settings.as_written(text))
                log_refusal(refused)
            self.shutdown()
            if refused is None:
                raise
            raise refused from error
