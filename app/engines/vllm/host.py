"""kvferry in vLLM's engine-core process: its mapping of the pool and an OffloadService, stopped with the engine.

Nothing here is needed for an answer: what fails beside the engine's thread is logged, and the engine goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.layout import NULL_BLOCK, VllmLayout
from kvferry.app.engines.vllm.metadata import RankFacts
from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.app.engines.vllm.pool import EngineFillings, EnginePool, MappedPool, map_for_scheduler
from kvferry.app.logs import LogPipe, start_logging
from kvferry.app.service.service import EngineBinding, EngineHooks, OffloadService, PoolBinding
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import LogLevel
from kvferry.app.store import StoreError, claim_name
from kvferry.core.errors import StartError
from kvferry.core.keys import Key
from kvferry.core.pool.events import EventSink
from kvferry.core.pool.inventory import Inventory
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.record import KeptRecord
from kvferry.cuda_ops.persistent.recovery import DropReason

_log = logging.getLogger(__name__)


class GuestLogs:
    """A share in the process's log pipe, which closes with the last share. Scheduler and worker may be one process."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _pipe: ClassVar[LogPipe | None] = None
    _shares: ClassVar[int] = 0

    def __init__(self, settings: Settings) -> None:
        self._is_open = True
        with GuestLogs._lock:
            if GuestLogs._pipe is None:
                GuestLogs._pipe = start_logging(settings, guest=True)
            GuestLogs._shares += 1

    def set_level(self, level: LogLevel) -> None:
        """Change the least that is logged, now."""
        with GuestLogs._lock:
            if GuestLogs._pipe is not None:
                GuestLogs._pipe.set_level(level)

    def close(self) -> None:
        """Give the share back; may be called again."""
        with GuestLogs._lock:
            if not self._is_open:
                return
            self._is_open = False
            GuestLogs._shares -= 1
            if not GuestLogs._shares and GuestLogs._pipe is not None:
                GuestLogs._pipe.close()
                GuestLogs._pipe = None


class EngineCoreHost:
    """One kvferry in one engine-core process. Made, then started; `close` undoes what was done."""

    def __init__(
        self,
        config: Any,
        wanted: EnginePool,
        layout: VllmLayout,
        device: VllmDevice,
        logs: GuestLogs,
        wake: Callable[[], None],
        step: Callable[[], None],
        listen: Callable[[EventSink], EventSink],
    ) -> None:
        """Map the pool where it is needed here, and make the service. Raises `ConnectorRefused`.

        `wake` is called on a tier's thread when there is something that a request waits for. `step` has an idle engine
        take one, in which vLLM hears what has become of the pool. `listen` may put itself before the sink of what the
        cache does.
        """
        self.reasons: Callable[[], list[str]] = list
        """Why the engine should get no traffic; set by the connector."""
        self.data_parallel_rank = int(config.parallel_config.data_parallel_index)
        self.tier_types = {tier.name: tier.type for tier in wanted.settings.tiers}
        size = wanted.size
        if wanted.is_for_scheduler and wanted.has_random_hashes:
            _log.warning(
                "PYTHONHASHSEED is not set, and vLLM's hashes have another random seed at each start: nothing that is "
                "kept now will be found after a restart; set PYTHONHASHSEED, or prefix_caching_hash_algo=sha256"
            )
        stopping = threading.Event()
        engine = EngineBinding(
            name=wanted.name,
            info=EngineInfo(
                "vllm",
                str(config.model_config.model),
                str(config.device_config.device_type),
                layout.groups[0].spec.block_size,
                groups=len(layout.groups),
                workers=size.num_ranks,
            ),
            layout=size.slots,
            fingerprint=wanted.fingerprint,
            device=device,
            watermark_blocks=_watermark_blocks(config, layout),
            null_block=NULL_BLOCK,
            hooks=EngineHooks(wake, step, listen, reasons=lambda: self.reasons()),
        )
        with ExitStack() as undo:
            try:
                settings = wanted.settings
                is_default = settings.engine_name is None
                claim = claim_name(settings.resolved_database_url(), wanted.name, is_default=is_default)
                undo.callback(claim.close)
                engine = replace(engine, name=claim.name)
                self.engine_name = wanted.shared_name(claim.name)
                mapped = map_for_scheduler(wanted)
                if mapped is not None:
                    undo.callback(mapped.pool.close)
                kept = _record(wanted, mapped, undo)
                plan = size.extents if kept is None else kept.file.shape.plan
                pool = None if mapped is None else mapped.pool
                self.extents = EngineExtents(
                    plan, size.slots.slot_bytes, size.num_ranks, pool, step=step, stopping=stopping
                )
                # Each rank waits besides until nobody looks at what it unmaps.
                side = PoolBinding(plan, self.extents, pool, kept)
                self.service = OffloadService(wanted.settings, engine, side, logs.set_level, stopping, claim=claim)
            except (ValueError, StoreError) as error:
                raise ConnectorRefused(wanted.settings.as_written(str(error))) from error
            undo.callback(self.service.close)
            self._undo = undo.pop_all()

    def start(self) -> None:
        """See `OffloadService.start`. Raises `ConnectorRefused`."""
        try:
            self.service.start()
        except StartError as error:
            raise ConnectorRefused(str(error)) from error

    def note_dropped(self, facts: RankFacts) -> None:
        """What the first rank has dropped of a kept pool, or all of it, before this process could see it."""
        started = self.service.warm_start
        if started is None:
            return
        self.service.manager.history.record_foreign(facts.foreign_keys)
        counts = {DropReason.TRUNCATED: facts.num_cut_off}
        if facts.dropped is not None:
            counts[DropReason.FOREIGN] = len(facts.foreign_keys)
            started = replace(started, foreign=facts.dropped)
        dropped = {reason.value: count for reason, count in counts.items() if count or reason is DropReason.FOREIGN}
        self.service.warm_start = replace(started, dropped={**started.dropped, **dropped})

    def report_recovered(self, report: Callable[[Sequence[Key]], None]) -> None:
        """Pass the keys of all blocks of an earlier process to `report`, with the manager lock held."""
        manager = self.service.manager
        with manager.lock:
            report(Inventory(manager).list_blocks(0, manager.counts().slots).keys)

    def context(self, closing: Callable[[], bool]) -> AdminContext:
        """What the admin API gets to see; `closing` turns true once the server is to stop."""
        return self.service.context(closing)

    def abort_requests(self) -> None:
        """Clients are vLLM's, and so is what becomes of their requests."""

    def close(self) -> None:
        """Stop what was started, the last first; may be called again."""
        self._undo.close()


def _record(wanted: EnginePool, mapped: MappedPool | None, undo: ExitStack) -> KeptRecord | None:
    """That of a kept pool. What tiers bring into it is sealed here; what ranks store, by them."""
    if mapped is None or mapped.file is None:
        return None
    record, file = KeptRecord(mapped.file), mapped.file
    if wanted.settings.tiers:
        headers = [SlotHeaders(file, mapped.pool, rank) for rank in range(wanted.size.num_columns)]
        record.fillings = fillings = EngineFillings(headers)
        undo.callback(fillings.close)
    return record


def _watermark_blocks(config: Any, layout: VllmLayout) -> int:
    """What one step may take from the free queue, in all groups, but no more of the device than a quarter."""
    scheduler = config.scheduler_config
    step_blocks = sum(
        -(-scheduler.max_num_batched_tokens // group.spec.block_size) + scheduler.max_num_seqs
        for group in layout.groups
    )
    return max(min(int(step_blocks), layout.num_blocks // 4), 1)
