"""The store mode as it was set, or chosen by the size of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.engine_api import StoreMode

LAZY_BELOW = 4
"""Automatic: lazy while the pool is smaller than so many times the device's KV cache. See bench/RESULTS.md."""


class StoreModeSetting(StrEnum):
    """Store modes, and the choice of one by size."""

    EAGER = StoreMode.EAGER.value
    LAZY = StoreMode.LAZY.value
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class StoreModeChoice:
    """The store mode in use."""

    mode: StoreMode
    setting: StoreModeSetting = field(metadata={"description": "`auto` was decided at start, or when it was set"})
    reason: str

    def __str__(self) -> str:
        return f"{self.mode} ({self.reason})"


def choose_store_mode(setting: StoreModeSetting, pool_bytes: int, device_bytes: int) -> StoreModeChoice:
    """Return the store mode for a pool and a device's KV cache, both on all ranks; 0 for a device of unknown size."""
    if setting is not StoreModeSetting.AUTO:
        return StoreModeChoice(StoreMode(setting.value), setting, "as set")
    if not device_bytes:
        return StoreModeChoice(StoreMode.EAGER, setting, "auto: the size of the device's KV cache is not known")
    times = f"auto: the pool has {pool_bytes / device_bytes:.2f} times the device's KV cache"
    if pool_bytes < LAZY_BELOW * device_bytes:
        return StoreModeChoice(StoreMode.LAZY, setting, f"{times}, less than {LAZY_BELOW}")
    return StoreModeChoice(StoreMode.EAGER, setting, f"{times}, at least {LAZY_BELOW}")
