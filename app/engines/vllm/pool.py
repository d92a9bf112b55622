"""The host pool of an engine: one mapping a node that all of its processes share, rows slots and columns ranks.

Workers start before the scheduler. The first rank makes the pool ready, the others map it, and last the scheduler's
process does where it has to reach it: for tiers, and for a pool that outlives the engine. Without either, and with one
rank only, the pool is that rank's own memory. A pool that is not kept has lost its name once all have mapped it, so
that it goes with the last of them, however they end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.app.engines.digests import DigestCache
from kvferry.app.engines.vllm.fingerprint import engine_name, fingerprint, has_random_hashes, start_digest
from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.app.pool.recovery import largest_pool_bytes, open_kept_file
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import PoolKind
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout
from kvferry.core.transfers import SlotLabels
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import KeptFile, read_boot_id
from kvferry.cuda_ops.persistent.transient_file import PassingFile, sweep_names
from kvferry.cuda_ops.pool.extents import PoolPlan, plan_pool
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import check_fits, memory_limits
from kvferry.cuda_ops.pool.prepare import Preparation
from kvferry.cuda_ops.pool.processors import allowed_processors

_log = logging.getLogger(__name__)


_MUCH_WASTE = 0.25


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Slots of an engine. `slots` is how groups lie in them, with the bytes of all ranks together.

    A slot has one column for `ranks_per_copy` consecutive ranks, which hold the same bytes. The first of them stores.
    """

    slots: GroupLayout
    extents: PoolPlan
    num_ranks: int
    ranks_per_copy: int = 1

    @property
    def num_columns(self) -> int:
        """Parts of a slot."""
        return self.num_ranks // self.ranks_per_copy

    def column(self, rank: int) -> int:
        """The part of each slot that a rank loads from."""
        return rank // self.ranks_per_copy

    def stores(self, rank: int) -> bool:
        """Whether a rank stores to its column; the others of the column find its bytes there."""
        return rank % self.ranks_per_copy == 0

    @property
    def num_slots(self) -> int:
        """Slots in all. A pool that was kept since it had another size may round them otherwise."""
        return self.extents.num_slots

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of a slot on one rank."""
        return self.slots.slot_bytes // self.num_columns

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool on all ranks."""
        return self.num_slots * self.slots.slot_bytes


def size_pool(settings: Settings, layout: VllmLayout, parallel: Any) -> PoolSize:
    """The pool that `pool_bytes` make. Raises `ConnectorRefused`."""
    num_ranks, ranks_per_copy = int(parallel.world_size), layout.ranks_per_copy
    try:
        slots = layout.of_core(settings.blocks_per_slot, num_ranks // ranks_per_copy)
    except ValueError as error:
        raise ConnectorRefused(str(error)) from error
    extents = plan_pool(settings.pool_bytes, slots.slot_bytes, largest_pool_bytes(settings))
    if not extents.num_slots:
        raise ConnectorRefused(
            f"pool_bytes={settings.pool_bytes} holds no slot: one takes {slots.slot_bytes:,} bytes, of "
            f"{num_ranks} ranks together; make it larger"
        )
    return PoolSize(slots, extents, num_ranks, ranks_per_copy)


def announce(size: PoolSize, settings: Settings, layout: VllmLayout) -> None:
    """Say what the pool will be, and check that there is room for it. Raises `NotEnoughMemory`."""
    device_bytes = layout.device_bytes * size.num_columns
    _log.info(
        "host pool: %s slots of %s bytes; %s bytes on each of %d ranks, %s in all, %.2f times the device's KV cache",
        f"{size.num_slots:,}",
        f"{size.slots.slot_bytes:,}",
        f"{size.num_slots * size.rank_slot_bytes:,}",
        size.num_columns,
        f"{size.num_bytes:,}",
        size.num_bytes / device_bytes,
    )
    if size.ranks_per_copy > 1:
        _log.info("each block is stored once for %d ranks: they hold identical KV (MLA)", size.ranks_per_copy)
    elif layout.replicas > 1:
        _log.info(
            "each block is stored %d times: so many ranks hold the same heads, and each stores its own",
            layout.replicas,
        )
    if size.slots.waste() > _MUCH_WASTE:
        _log.warning(
            "%.0f%% of the pool stays unused, since blocks of this model's groups differ in size: %s bytes",
            100 * size.slots.waste(),
            ", ".join(f"{group.slot_bytes:,}" for group in size.slots.groups),
        )
    if settings.store_mode is StoreMode.EAGER and size.num_bytes < device_bytes:
        _log.warning(
            "pool_bytes=%d is less than the device's KV cache of %d bytes: in eager mode such a pool mostly holds what "
            "the device still has, and brings little; make it larger, or set store_mode=lazy",
            settings.pool_bytes,
            device_bytes,
        )
    if settings.pool_kind is PoolKind.PINNED:
        # A pool that is kept may be there already, and then takes nothing.
        check_fits("pool_bytes", size.num_bytes, memory_limits())


CLOSE_S = 10.0


class EngineFillings:
    """A `kvferry.cuda_ops.persistent.record.Fillings`. Any thread, but for `close`."""

    def __init__(self, headers: Sequence[SlotHeaders]) -> None:
        """`headers` are those of each rank."""
        self._headers = headers
        self._thread = ThreadPoolExecutor(1, "kvferry-seal")
        self._last: Future[None] | None = None

    def begin_tier_write(self, labels: SlotLabels) -> None:
        """See `kvferry.cuda_ops.persistent.record.Fillings`. Thread: any but the engine's."""
        for headers in self._headers:
            headers.begin(labels)

    def end_tier_write(self, labels: SlotLabels) -> None:
        """See `kvferry.cuda_ops.persistent.record.Fillings`."""
        try:
            self._last = self._thread.submit(self._seal, labels)
        except RuntimeError as error:
            _log.warning("%d blocks of a tier are not sealed, so a restart loses them: %s", len(labels.slots), error)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was filled by now is sealed; whether that came true in time."""
        last = self._last
        return last is None or bool(wait([last], timeout_s).done)

    def close(self) -> None:
        """Seal what was filled, within its time."""
        if not self.settle(CLOSE_S):
            _log.warning("blocks of tiers were not sealed in time: a restart loses them")
        self._thread.shutdown(cancel_futures=True)

    def _seal(self, labels: SlotLabels) -> None:
        try:
            for headers in self._headers:
                headers.seal(labels)
        except Exception:  # noqa: BLE001 - these blocks are lost to a restart, the next ones need not be
            _log.exception("slots could not be sealed")


_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class EnginePool:
    """What the pool is to be. Every process of an engine comes to the same wanted."""

    settings: Settings
    size: PoolSize
    name: str
    """The engine's, with `rank_suffix`."""
    rank_suffix: str
    """The data-parallel rank as part of a name; empty for an engine that is the only one."""
    fingerprint: dict[str, object]
    start: str
    """Tells this start of the engine from all others."""
    has_random_hashes: bool

    @classmethod
    def make(cls, config: Any, cache: Any, settings: Settings, layout: VllmLayout, size: PoolSize) -> EnginePool:
        """What follows from vLLM's configuration and ours."""
        digests = DigestCache(settings.state_dir) if settings.has_lasting_blocks else None
        about = fingerprint(config, cache, layout, digests)
        name = settings.engine_name or engine_name(config, about)
        parallel = config.parallel_config
        # vLLM runs the engines of a dense model as if each were alone: they still have their number.
        is_one_of_several = parallel.data_parallel_size > 1 or parallel.data_parallel_index
        suffix = f"-dp{parallel.data_parallel_index}" if is_one_of_several else ""
        return cls(settings, size, name + suffix, suffix, about, start_digest(config), has_random_hashes(config))

    def shared_name(self, claimed: str) -> str:
        """Return the name that all data-parallel ranks of the engine have, given the one that this rank claimed.

        A number behind the claimed name, which tells apart engines of one default name, stays.
        """
        if not self.rank_suffix:
            return claimed
        head, _, number = claimed.rpartition(self.rank_suffix)
        return head + number

    @property
    def is_kept(self) -> bool:
        """Whether the pool outlives the engine."""
        return self.settings.pool_kind is not PoolKind.PINNED

    @property
    def is_for_scheduler(self) -> bool:
        """Whether the scheduler's process has to reach the pool, too."""
        return self.settings.has_lasting_blocks

    @property
    def is_shared(self) -> bool:
        """Whether several mappings are made of it."""
        return self.is_for_scheduler or self.size.num_ranks > 1


@dataclass(frozen=True, slots=True)
class MappedPool:
    """One process's view of the pool; `file` is that of a kept one. `passing` still has a name."""

    pool: HostPool
    file: KeptFile | None = None
    passing: PassingFile | None = None
    rank: int = 0
    """The rank whose view this is; several ranks may have one column of the pool."""

    def place(self) -> tuple[object, ...]:
        """The same for all who have mapped the same memory."""
        backing = self.file or self.passing
        if backing is None:
            return ()
        about = os.stat(backing.path)
        return read_boot_id(), about.st_dev, about.st_ino


def map_for_rank(wanted: EnginePool, rank: int, preparation: Preparation | None = None) -> MappedPool:
    """This rank's view of the pool, made ready for its device. Raises `ConnectorRefused`, on every rank if one of them
    cannot map it, and `NotEnoughMemory`."""
    if not wanted.is_shared:
        size = wanted.size
        extent_bytes = size.extents.extent_slots * size.slots.slot_bytes
        return MappedPool(HostPool(size.num_slots, size.rank_slot_bytes, extent_bytes, preparation=preparation))
    mapped: MappedPool | None = None
    problem: str | None = None
    problems: list[str] = []
    for turn_of_first in (True, False):
        if turn_of_first is (rank == 0) and not problems:
            try:
                mapped = _map(wanted, rank, is_first=rank == 0, preparation=preparation)
            except (OSError, ValueError) as error:
                problem = str(error) if wanted.size.num_ranks == 1 else f"rank {rank}: {error}"
        problems = [found for found in _of_all_ranks(wanted, problem) if found is not None]
    if not problems and len(set(_of_all_ranks(wanted, None if mapped is None else mapped.place()))) > 1:
        problems = ["the ranks of this engine do not share memory: kvferry wants them on one host, in one container"]
    if mapped is None or problems:
        if mapped is not None:
            mapped.pool.close()
        raise ConnectorRefused(wanted.settings.as_written("; ".join(problems)))
    if mapped.passing is not None and not wanted.is_for_scheduler:
        mapped.passing.unlink()
    return mapped


def processors_beside(wanted: EnginePool) -> frozenset[int]:
    """Where to copy: the processors that no rank of this engine computes on, to which vLLM's CPU backend binds each.
    All of the engine's where none is left. Every rank has to ask."""
    allowed = allowed_processors()
    computing = frozenset[int]().union(*_of_all_ranks(wanted, frozenset(os.sched_getaffinity(0))))
    return allowed - computing or allowed


def map_for_scheduler(wanted: EnginePool) -> MappedPool | None:
    """The scheduler's view of the pool, last of all; None where it has no use for one. Raises `ConnectorRefused`."""
    if not wanted.is_for_scheduler:
        return None
    try:
        mapped = _map(wanted, 0, is_first=False, is_ready=True)
    except FileNotFoundError as error:
        raise ConnectorRefused(
            f"the pool {error.filename} of this engine's ranks is not there: tiers and kept pools need the ranks and "
            "the engine's own process on one host, in one container; leave tiers out, and set pool_kind=pinned"
        ) from error
    except (OSError, ValueError) as error:
        raise ConnectorRefused(wanted.settings.as_written(str(error))) from error
    if mapped.passing is not None:
        mapped.passing.unlink()
    return mapped


def _map(
    wanted: EnginePool, rank: int, *, is_first: bool, is_ready: bool = False, preparation: Preparation | None = None
) -> MappedPool:
    size, slots = wanted.size, wanted.size.extents
    file = open_kept_file(
        wanted.settings,
        wanted.name,
        wanted.fingerprint,
        slots,
        size.rank_slot_bytes,
        size.num_columns,
        join=not is_first,
    )
    passing: PassingFile | None = None
    if file is None:
        if is_first:
            sweep_names()
        passing = PassingFile(wanted.start, is_ready=is_ready)
    shape = slots if file is None else file.shape
    pool = HostPool(
        shape.num_slots,
        size.rank_slot_bytes,
        shape.extent_slots * size.slots.slot_bytes,
        backing=file or passing,
        num_ranks=size.num_columns,
        rank=size.column(rank),
        preparation=preparation,
    )
    if file is not None and is_first:
        try:
            file.share()
        except BaseException:
            pool.close()
            raise
    return MappedPool(pool, file, passing, rank)


def _of_all_ranks(wanted: EnginePool, mine: _Said) -> list[_Said]:
    """What each rank has to say. Nobody goes on before all have spoken."""
    if wanted.size.num_ranks == 1:
        return [mine]
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, mine, group=group.cpu_group)
    return found
