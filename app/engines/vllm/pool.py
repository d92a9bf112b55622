"""Host pool of an engine: one mapping per node that all of its processes share; rows are slots, columns are ranks.

Workers start before the scheduler. The first rank creates the pool, the other ranks map it, and the scheduler process
maps it last if it needs to, for tiers and for persistent pools. With one rank and neither of these, the pool is private
memory of that rank. The file of a pool that is not persistent is unlinked when all processes have mapped it, so that
its memory is freed with the last of them, however they end.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.fingerprint import engine_name, fingerprint, start_digest
from kvferry.app.engines.vllm.layout import VllmLayout, read_layout
from kvferry.app.engines.vllm.versions import hash_block_size, skips_last_block, unsettled_tokens
from kvferry.app.pool.recovery import open_kept_file
from kvferry.app.pool.sizing import log_pool_size, plan_host_pool
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import PoolKind
from kvferry.core.errors import StartError
from kvferry.core.groups import GroupLayout
from kvferry.cuda_ops.persistent.pool_file import KeptFile, read_boot_id
from kvferry.cuda_ops.persistent.transient_file import TransientFile, sweep_names
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import check_fits, memory_limits
from kvferry.cuda_ops.pool.prepare import Preparation
from kvferry.cuda_ops.pool.processors import allowed_processors

_log = logging.getLogger(__name__)

_MAX_UNUSED_FRACTION = 0.25
"""Fraction of unused bytes in slots above which a warning is logged."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Slots of an engine's pool; `slots` is their layout with the bytes of all ranks together.

    A slot has one column for each `ranks_per_copy` consecutive ranks, which hold identical bytes. The first of these
    ranks stores.
    """

    slots: GroupLayout
    extents: PoolPlan
    num_ranks: int
    ranks_per_copy: int = 1

    @property
    def num_columns(self) -> int:
        """Number of columns of a slot."""
        return self.num_ranks // self.ranks_per_copy

    def column(self, rank: int) -> int:
        """Return the column that a rank loads from."""
        return rank // self.ranks_per_copy

    def stores(self, rank: int) -> bool:
        """Return whether a rank stores to its column."""
        return rank % self.ranks_per_copy == 0

    @property
    def num_slots(self) -> int:
        """Number of slots; a persistent pool that was resized may have a few more or less."""
        return self.extents.num_slots

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of a slot on one rank."""
        return self.slots.slot_bytes // self.num_columns

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool on all ranks together."""
        return self.num_slots * self.slots.slot_bytes


def pool_geometry(settings: Settings, layout: VllmLayout, parallel: Any) -> PoolGeometry:
    """Compute the pool for the setting `pool_bytes`. Raises `StartError`."""
    num_ranks, ranks_per_copy = int(parallel.world_size), layout.ranks_per_copy
    slots = layout.group_layout(settings.blocks_per_slot, num_ranks // ranks_per_copy)
    extents = plan_host_pool(settings, slots.slot_bytes)
    return PoolGeometry(slots, extents, num_ranks, ranks_per_copy)


def check_pool_memory(geometry: PoolGeometry, settings: Settings, layout: VllmLayout) -> None:
    """Log the pool's size and check that its memory is available. Raises `NotEnoughMemory`."""
    device_bytes = layout.device_bytes * geometry.num_columns
    log_pool_size(settings, geometry.num_slots, geometry.slots.slot_bytes, geometry.num_columns, device_bytes)
    if geometry.ranks_per_copy > 1:
        _log.info("blocks are stored once for %d ranks, which hold identical KV (MLA)", geometry.ranks_per_copy)
    elif layout.replicas > 1:
        _log.info("blocks are stored %d times: as many ranks hold the same heads, and each stores", layout.replicas)
    unused = geometry.slots.waste()
    if unused > _MAX_UNUSED_FRACTION:
        _log.warning(
            "%.0f%% of the pool is unused, because blocks of the model's KV cache groups differ in size: %s bytes",
            100 * unused,
            ", ".join(f"{group.slot_bytes:,}" for group in geometry.slots.groups),
        )
    if settings.pool_kind is PoolKind.PINNED:
        # A persistent pool may exist already and then needs no more memory.
        check_fits("pool_bytes", geometry.num_bytes, memory_limits())


@dataclass(frozen=True)
class EngineConfig:
    """vLLM's configuration, kvferry's settings, and what every process of an engine computes from them."""

    vllm: Any
    cache: Any
    settings: Settings
    layout: VllmLayout
    geometry: PoolGeometry

    @classmethod
    def make(cls, vllm_config: Any, cache: Any, settings: Settings) -> EngineConfig:
        """Compute layout and pool from a `VllmConfig` and a `KVCacheConfig`. Raises `StartError`."""
        layout = read_layout(
            cache,
            hash_block_size(vllm_config, cache),
            skips_last_block=skips_last_block(vllm_config),
            unsettled_tokens=unsettled_tokens(vllm_config),
        )
        return cls(vllm_config, cache, settings, layout, pool_geometry(settings, layout, vllm_config.parallel_config))

    @property
    def rank(self) -> int:
        """Number of this process's worker rank."""
        return int(self.vllm.parallel_config.rank)

    @cached_property
    def fingerprint(self) -> dict[str, object]:
        """Fingerprint of the engine; reads the model's files if blocks outlive the engine."""
        digests = DigestCache(self.settings.state_dir) if self.settings.has_lasting_blocks else None
        return fingerprint(self.vllm, self.cache, self.layout, digests)

    @property
    def rank_suffix(self) -> str:
        """Data-parallel rank as part of a name; empty for a single engine."""
        parallel = self.vllm.parallel_config
        # For a dense model, vLLM configures each data-parallel engine as a single one, except for its index.
        is_one_of_several = parallel.data_parallel_size > 1 or parallel.data_parallel_index
        return f"-dp{parallel.data_parallel_index}" if is_one_of_several else ""

    @cached_property
    def name(self) -> str:
        """Name of the engine and its pool."""
        return (self.settings.engine_name or engine_name(self.vllm, self.fingerprint)) + self.rank_suffix

    def shared_name(self, claimed: str) -> str:
        """Return the common name of an engine's data-parallel ranks, given the name that this rank claimed.

        A number at the end of the claimed name, which distinguishes engines with the same default name, is kept.
        """
        if not self.rank_suffix:
            return claimed
        head, _, number = claimed.rpartition(self.rank_suffix)
        return head + number

    @property
    def is_mapped_by_scheduler(self) -> bool:
        """Whether the scheduler process maps the pool, too."""
        return self.settings.has_lasting_blocks

    @property
    def is_shared(self) -> bool:
        """Whether several processes map the pool."""
        return self.is_mapped_by_scheduler or self.geometry.num_ranks > 1


@dataclass(frozen=True, slots=True)
class MappedPool:
    """One process's mapping of the pool, and its file: `persistent`, or `temporary`, which still has a name.

    `rank` is the rank that mapped it; several ranks may have the same column of the pool.
    """

    pool: HostPool
    persistent: KeptFile | None = None
    temporary: TransientFile | None = None
    rank: int = 0

    def file_id(self) -> tuple[object, ...]:
        """Return an id of the mapped file that is equal in all processes that map it."""
        file = self.persistent or self.temporary
        if file is None:
            return ()
        status = os.stat(file.path)
        return read_boot_id(), status.st_dev, status.st_ino


def map_for_rank(config: EngineConfig, rank: int, preparation: Preparation | None = None) -> MappedPool:
    """Map the pool on a worker rank and prepare it for the rank's device. Called on every rank.

    Raises:
        StartError: A rank cannot map the pool; raised on every rank.
        NotEnoughMemory: There is no memory for the pool.
    """
    geometry = config.geometry
    if not config.is_shared:
        extent_bytes = geometry.extents.extent_slots * geometry.slots.slot_bytes
        return MappedPool(HostPool(geometry.num_slots, geometry.rank_slot_bytes, extent_bytes, preparation=preparation))
    shares = _all_gather(config, (geometry.num_slots, geometry.rank_slot_bytes))
    if len(set(shares)) > 1:
        each = ", ".join(f"{num_slots:,} of {slot_bytes:,} bytes" for num_slots, slot_bytes in shares)
        raise StartError(
            f"the ranks have different shares of the KV cache, in slots {each}, which is not supported; choose a "
            "pipeline_parallel_size that divides the layers"
        )
    mapped: MappedPool | None = None
    error_text: str | None = None
    errors: list[str] = []
    # First rank 0, which creates the file, then all others.
    for is_first in (True, False):
        if is_first is (rank == 0) and not errors:
            try:
                mapped = _map(config, rank, is_first=is_first, preparation=preparation)
            except (OSError, ValueError) as error:
                error_text = str(error) if geometry.num_ranks == 1 else f"rank {rank}: {error}"
        errors = [text for text in _all_gather(config, error_text) if text is not None]
    if not errors and len(set(_all_gather(config, None if mapped is None else mapped.file_id()))) > 1:
        errors = ["the ranks of this engine do not share memory; run them on one host, in one container"]
    if mapped is None or errors:
        if mapped is not None:
            mapped.pool.close()
        raise StartError("; ".join(errors))
    if mapped.temporary is not None and not config.is_mapped_by_scheduler:
        mapped.temporary.unlink()
    return mapped


def copy_processors(config: EngineConfig) -> frozenset[int]:
    """Return the CPUs to copy on: those that no rank computes on, or all if there are none. Called on every rank.

    vLLM's CPU backend binds each rank to the CPUs that it computes on.
    """
    allowed = allowed_processors()
    computing = frozenset[int]().union(*_all_gather(config, frozenset(os.sched_getaffinity(0))))
    return allowed - computing or allowed


def map_for_scheduler(config: EngineConfig) -> MappedPool | None:
    """Map the pool in the scheduler process after all ranks have mapped it; None if it is not needed there.

    Raises:
        StartError: The pool cannot be mapped.
    """
    if not config.is_mapped_by_scheduler:
        return None
    try:
        mapped = _map(config, 0, is_first=False, is_ready=True)
    except FileNotFoundError as error:
        raise StartError(
            f"the pool {error.filename} of this engine's ranks does not exist here: tiers and persistent pools need "
            "the ranks and the scheduler process on one host, in one container; remove tiers and set pool_kind=pinned"
        ) from error
    except OSError as error:
        raise StartError(str(error)) from error
    if mapped.temporary is not None:
        mapped.temporary.unlink()
    return mapped


def _map(
    config: EngineConfig, rank: int, *, is_first: bool, is_ready: bool = False, preparation: Preparation | None = None
) -> MappedPool:
    geometry, plan = config.geometry, config.geometry.extents
    persistent = open_kept_file(
        config.settings,
        config.name,
        config.fingerprint,
        plan,
        geometry.rank_slot_bytes,
        geometry.num_columns,
        join=not is_first,
    )
    temporary: TransientFile | None = None
    if persistent is None:
        if is_first:
            sweep_names()
        temporary = TransientFile(start_digest(config.vllm), is_ready=is_ready)
    shape = plan if persistent is None else persistent.shape
    pool = HostPool(
        shape.num_slots,
        geometry.rank_slot_bytes,
        shape.extent_slots * geometry.slots.slot_bytes,
        backing=persistent or temporary,
        num_ranks=geometry.num_columns,
        rank=geometry.column(rank),
        preparation=preparation,
    )
    if persistent is not None and is_first:
        try:
            persistent.downgrade_lock()
        except BaseException:
            pool.close()
            raise
    return MappedPool(pool, persistent, temporary, rank)


def _all_gather(config: EngineConfig, value: _T) -> list[_T]:
    """Return the values of all ranks; waits for every rank."""
    if config.geometry.num_ranks == 1:
        return [value]
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values
