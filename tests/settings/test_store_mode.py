"""The store mode that follows from the sizes of pool and device."""

from __future__ import annotations

import pytest

from kvferry.app.settings import Settings
from kvferry.app.settings.store_mode import StoreModeSetting, choose_store_mode
from kvferry.core.engine_api import StoreMode


@pytest.mark.parametrize(
    ("setting", "pool_bytes", "device_bytes", "mode", "reason"),
    [
        ("auto", 399, 100, "lazy", "auto: the pool has 3.99 times the device's KV cache, less than 4"),
        ("auto", 400, 100, "eager", "auto: the pool has 4.00 times the device's KV cache, at least 4"),
        ("auto", 400, 0, "eager", "auto: the size of the device's KV cache is not known"),
        ("eager", 1, 100, "eager", "as set"),
        ("lazy", 1000, 100, "lazy", "as set"),
    ],
)
def test_store_mode_auto_is_lazy_below_four_times_the_device(
    setting: str, pool_bytes: int, device_bytes: int, mode: str, reason: str
) -> None:
    choice = choose_store_mode(StoreModeSetting(setting), pool_bytes, device_bytes)
    assert (choice.mode, choice.setting, choice.reason) == (StoreMode(mode), setting, reason)
    assert Settings(_env_file=None).store_mode is StoreModeSetting.AUTO
