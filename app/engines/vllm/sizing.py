"""How large the pool is, worked out alike on every rank and in the scheduler, and said before anything is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.refusal import ConnectorRefused
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import PoolKind
from kvferry.app.warm_start import largest_pool_bytes
from kvferry.core.engine import StoreMode
from kvferry.core.groups import GroupLayout
from kvferry.cuda_ops.extents import PoolPlan, plan_pool
from kvferry.cuda_ops.limits import check_fits, memory_limits

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
