"""How large the pool is, worked out alike on every rank and in the scheduler, and said before anything is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from app.engines.vllm.layout import VllmLayout
from app.engines.vllm.refusal import ConnectorRefused
from app.settings import Settings
from core.engine import StoreMode
from core.groups import GroupLayout
from cuda_ops.limits import check_fits, memory_limits

_log = logging.getLogger(__name__)

_MUCH_WASTE = 0.25


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Slots of an engine. `slots` is how groups lie in them, with the bytes of all ranks together."""

    slots: GroupLayout
    num_slots: int
    num_ranks: int

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of a slot on one rank."""
        return self.slots.slot_bytes // self.num_ranks

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool on all ranks."""
        return self.num_slots * self.slots.slot_bytes


def size_pool(settings: Settings, layout: VllmLayout, parallel: Any) -> PoolSize:
    """The pool that `pool_bytes` make. Raises `ConnectorRefused`."""
    num_ranks = int(parallel.world_size)
    try:
        slots = layout.of_core(settings.blocks_per_slot, num_ranks)
    except ValueError as error:
        raise ConnectorRefused(str(error)) from error
    num_slots = settings.pool_bytes // slots.slot_bytes
    if num_slots < 1:
        raise ConnectorRefused(
            f"pool_bytes={settings.pool_bytes} holds no slot: one takes {slots.slot_bytes:,} bytes, of "
            f"{num_ranks} ranks together; make it larger"
        )
    return PoolSize(slots, num_slots, num_ranks)


def announce(size: PoolSize, settings: Settings, layout: VllmLayout) -> None:
    """Say what the pool will be, and check that there is room for it. Raises `NotEnoughMemory`."""
    device_bytes = layout.device_bytes * size.num_ranks
    _log.info(
        "host pool: %s slots of %s bytes; %s bytes on each of %d ranks, %s in all, %.2f times the device's KV cache",
        f"{size.num_slots:,}",
        f"{size.slots.slot_bytes:,}",
        f"{size.num_slots * size.rank_slot_bytes:,}",
        size.num_ranks,
        f"{size.num_bytes:,}",
        size.num_bytes / device_bytes,
    )
    if layout.replicas > 1:
        _log.info(
            "each block is stored %d times: so many ranks hold identical KV (as with MLA), and each stores its own",
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
    check_pool_fits(size)


def check_pool_fits(size: PoolSize) -> None:
    """Raise `NotEnoughMemory` if all ranks' pools together do not fit this machine."""
    check_fits("pool_bytes", size.num_bytes, memory_limits())
