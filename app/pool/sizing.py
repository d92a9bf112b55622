"""Size of a host pool, known before it is allocated."""

from __future__ import annotations

import logging

from kvferry.app.pool.recovery import largest_pool_bytes
from kvferry.app.settings import Settings
from kvferry.app.settings.store_mode import StoreModeSetting
from kvferry.cuda_ops.pool.extents import PoolPlan, plan_pool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory

_log = logging.getLogger(__name__)


def check_holds_slot(pool_bytes: int, slot_bytes: int) -> None:
    """Raise `NotEnoughMemory` for a pool that is smaller than one slot."""
    if pool_bytes < slot_bytes:
        raise NotEnoughMemory(
            f"KVFERRY_POOL_BYTES={pool_bytes}: holds no slot, which takes {slot_bytes:,} bytes; make it larger"
        )


def plan_host_pool(settings: Settings, slot_bytes: int) -> PoolPlan:
    """Return the extents of a pool of slots of `slot_bytes` on all ranks. Raises `NotEnoughMemory`."""
    check_holds_slot(settings.pool_bytes, slot_bytes)
    return plan_pool(settings.pool_bytes, slot_bytes, largest_pool_bytes(settings))


def log_pool_size(settings: Settings, num_slots: int, slot_bytes: int, num_columns: int, device_bytes: int) -> None:
    """Log the size of the pool, and that it is too small for eager mode.

    Args:
        slot_bytes: A slot on all ranks.
        num_columns: Ranks that have bytes of their own.
        device_bytes: The device's KV cache on all ranks, 0 without one.
    """
    pool_bytes = num_slots * slot_bytes
    _log.info(
        "host pool: %s slots of %s bytes; %s bytes on each of %d ranks, %s in all%s",
        f"{num_slots:,}",
        f"{slot_bytes:,}",
        f"{pool_bytes // num_columns:,}",
        num_columns,
        f"{pool_bytes:,}",
        f", {pool_bytes / device_bytes:.2f} times the device's KV cache" if device_bytes else "",
    )
    if settings.store_mode is StoreModeSetting.EAGER and pool_bytes < device_bytes:
        _log.warning(
            "%s=%d: less than the device's KV cache of %d bytes, so that in eager mode the pool mostly holds blocks "
            "that the device still has; increase it, or set %s=auto",
            settings.as_written("KVFERRY_POOL_BYTES"),
            settings.pool_bytes,
            device_bytes,
            settings.as_written("KVFERRY_STORE_MODE"),
        )
