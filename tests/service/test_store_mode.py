"""The store mode that a service chooses by size, as an operator sees it."""

from __future__ import annotations

from pathlib import Path

from tests.harness.service_process import serving
from tests.harness.waiting import wait_until

CONFIG = "/admin/v1/config"


def test_store_mode_auto_is_decided_at_start_and_when_it_is_set(tmp_path: Path) -> None:
    # A block of the built-in model has 32 KiB: the device has 1 MiB.
    with serving(tmp_path, pool_bytes="2MiB", device_blocks=32, store_mode="auto") as served:
        why = "auto: the pool has 2.00 times the device's KV cache, less than 4"
        assert f"store mode: lazy ({why})" in served.log()
        assert served.stats()["store_mode"] == {"mode": "lazy", "setting": "auto", "reason": why}
        view = served.get(CONFIG)["store_mode"]
        assert (view["value"], view["in_use"]) == ("auto", f"lazy ({why})")

        assert served.http.patch(CONFIG, json={"pool_bytes": "4MiB"}).status_code == 200
        wait_until(lambda: served.stats()["pool"]["bytes"] == 4 << 20, "resized")
        assert served.stats()["store_mode"]["mode"] == "lazy", "a resize changes nothing"

        assert served.http.patch(CONFIG, json={"store_mode": "auto"}).status_code == 200
        stats = served.stats()["store_mode"]
        assert (stats["mode"], stats["reason"].endswith("at least 4")) == ("eager", True)
        assert served.get("/admin/v1/what-if")["current"]["store_mode"] == "eager"

        both = {"store_mode": "auto", "pool_bytes": "3MiB"}
        assert served.http.patch(CONFIG, json=both).status_code == 200
        assert served.stats()["store_mode"]["mode"] == "lazy", "the size that the pool is to have counts"
        assert served.http.patch(CONFIG, json={"store_mode": "eager"}).status_code == 200
        assert served.stats()["store_mode"] == {"mode": "eager", "setting": "eager", "reason": "as set"}
