"""Too little of everything and clients that go away: everyone is answered, nothing raises, nothing leaks."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.harness.service_process import Served, check_identities, serving


def one_client(served: Served, seed: int) -> str:
    rng = random.Random(seed)
    family = random.Random(seed % 5)
    prompt = [family.randint(3, 249) for _ in range(rng.randint(1, 300))] + [rng.randint(3, 249) for _ in range(9)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randint(1, 40), "stream": True, "ignore_eos": True}
    leave_after = rng.choice((0, 1, 3, 10_000, 10_000))
    with httpx.Client(base_url=served.url, timeout=120, verify=False) as http:
        if leave_after == 0:
            # Gone before the first byte of an answer.
            with contextlib.suppress(httpx.TimeoutException):
                http.post("/v1/completions", json={**body, "stream": False}, timeout=0.05)
                return "answered"
            return "left"
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for number, line in enumerate(answer.iter_lines()):
                if number >= leave_after:
                    return "left"
                if line == "data: [DONE]":
                    return "answered"
    raise AssertionError("the stream ended without [DONE]")


@pytest.mark.long
def test_fifty_clients_a_pool_of_few_slots_and_a_tiny_device(tmp_path: Path) -> None:
    with serving(tmp_path, device_blocks=24, max_running=16, pool_bytes=32768 * 5, load_decision="always") as served:
        assert served.stats()["pool"]["slots"] == 5
        snapshots = []
        done = threading.Event()

        def watch() -> None:
            with httpx.Client(base_url=served.url, verify=False) as http:
                while not done.wait(0.05):
                    snapshots.append(http.get("/admin/v1/stats").json())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(50) as threads:
                ends = list(threads.map(lambda seed: one_client(served, seed), range(150)))
        finally:
            done.set()
            watcher.join()
        assert ends.count("answered") > 40
        assert ends.count("left") > 20
        stats = served.settle()
        for snapshot in [*snapshots, stats]:
            check_identities(snapshot)
        assert len(snapshots) > 20
        assert stats["requests"]["seen"] == stats["requests"]["finished"] <= 150
        assert stats["requests"]["waiting_for_load"] == 0
        assert (stats["pool"]["pinned"], stats["pool"]["loading"], stats["pool"]["storing"]) == (0, 0, 0)
        assert served.get("/readyz") == {"ready": True, "reasons": [], "degraded": []}
        # All of the device is free again: a request that needs every block gets them.
        assert len(served.tokens([9] * (24 * 16 - 8), max_tokens=8, ignore_eos=True)) == 8
        assert served.stop() == 0
        assert "ERROR" not in served.log()
        assert "WARNING" not in served.log().replace("POOL_BYTES", "", 1).split("serving on")[1]
