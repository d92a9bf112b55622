"""The pool changes its size while the service answers: every answer stays the same, and what cannot be is refused."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

CONFIG = "/admin/v1/config"
MIB = 1 << 20
SLOT_BYTES = 64 << 10
SETTINGS: dict[str, object] = {
    "engine_name": "resized",
    "device_blocks": 32,
    "block_size": 16,
    "dtype": "float64",
    "pool_bytes": 4 * MIB,
    "load_decision": "always",
}
"""64 slots, in extents of 8."""
PROMPTS = [[(7 * n + 3 * i) % 250 + 1 for i in range(160)] for n in range(8)]
SIZES_MIB = (1, 6, 2, 8, 4, 0.5, 3, 8)


def resize(served: Served, num_bytes: int) -> httpx.Response:
    return served.http.patch(CONFIG, json={"pool_bytes": num_bytes})


@pytest.mark.long
def test_failed_growth_when_not_replaced_shows_as_shortfall(tmp_path: Path) -> None:
    with serving(tmp_path, **SETTINGS, pool_kind="file", pool_path=tmp_path / "pool") as served:
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
        assert resize(served, 32 * MIB).status_code == 200
        wait_until(lambda: served.get(CONFIG)["pool_bytes"]["shortfall"] is not None, "the growth has failed")
        ready = served.get("/readyz")
        assert ready["degraded"] == [served.get(CONFIG)["pool_bytes"]["shortfall"]]
        assert f"pool_bytes={32 * MIB} was not applied" in ready["degraded"][0]
        assert served.tokens(PROMPTS[0], max_tokens=8)
        resized(served, 6 * MIB)
        assert served.get("/readyz")["degraded"] == []


def resized(served: Served, num_bytes: int) -> Any:
    """Have another size and wait until it is there."""
    assert resize(served, num_bytes).status_code == 200
    wait_until(lambda: served.stats()["pool"]["slots"] == num_bytes // SLOT_BYTES, "the size that was asked for")
    return served.stats()


@pytest.mark.parametrize("kind", ["pinned", pytest.param("file", marks=pytest.mark.long)])
def test_answers_when_the_pool_is_resized_under_traffic_are_equal(tmp_path: Path, kind: str) -> None:
    where = {"pool_kind": "file", "pool_path": tmp_path / "pool"} if kind == "file" else {}
    with serving(tmp_path, **SETTINGS | where) as served:
        expected = [served.tokens(prompt, max_tokens=8) for prompt in PROMPTS]
        done = threading.Event()
        wrong: list[int] = []

        def ask(first: int) -> int:
            count = 0
            while not done.is_set():
                number = (first + count) % len(PROMPTS)
                if served.tokens(PROMPTS[number], max_tokens=8) != expected[number]:
                    wrong.append(number)
                count += 1
            return count

        with ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(ask, first) for first in range(3)]
            try:
                for size in SIZES_MIB:
                    before = served.stats()["requests"]["finished"]
                    resize(served, int(size * MIB))
                    wait_until(lambda: served.stats()["requests"]["finished"] > before + 3, "answers")  # noqa: B023
                    check_identities(served.stats())
                last = resized(served, 8 * MIB)
            finally:
                done.set()
            assert all(one.result() > 0 for one in asking)
        assert wrong == []
        for _ in range(2):
            assert [served.tokens(prompt, max_tokens=8) for prompt in PROMPTS] == expected
        stats = served.settle()
        check_identities(stats)
        assert stats["pool"]["wanted_slots"] == stats["pool"]["slots"] == 128
        assert stats["pool"]["bytes"] == 8 * MIB
        assert stats["evictions"]["by_reason"]["shrink"] > 0
        assert stats["prompt_tokens"]["host_hit"] > 0
        assert (stats["load"]["corrupt"], last["load"]["corrupt"]) == (0, 0)
        wait_until(lambda: served.get("/admin/v1/evictions?reason=shrink")["items"], "rows of what left")
        assert served.get("/readyz")["ready"]
        assert "Traceback" not in served.log()
        assert served.stop() == 0


@pytest.mark.long
def test_kept_pool_when_resized_and_restarted_keeps_blocks_that_fit(tmp_path: Path) -> None:
    settings = SETTINGS | {"pool_kind": "file", "pool_path": tmp_path / "pool"}
    with serving(tmp_path, **settings) as served:
        expected = [served.tokens(prompt, max_tokens=4) for prompt in PROMPTS]
        served.settle()
        pool = resized(served, 2 * MIB)["pool"]
        assert pool["ready"] == 32
        assert served.stop() == 0
    for size, ready in ((4 * MIB, 32), (1 * MIB, 16), (8 * MIB, 16)):
        with serving(tmp_path, **settings | {"pool_bytes": size}) as served:
            pool = served.stats()["pool"]
            assert (pool["slots"], pool["ready"]) == (size // SLOT_BYTES, ready)
            served.process.kill()
            served.process.wait(DEADLINE_S)
    with serving(tmp_path, **settings) as served:
        assert served.stats()["pool"]["ready"] == 16
        assert [served.tokens(prompt, max_tokens=4) for prompt in PROMPTS] == expected
        assert served.stats()["load"]["corrupt"] == 0


@pytest.mark.long
def test_resize_when_size_is_impossible_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    with serving(tmp_path, **SETTINGS | {"pool_kind": "file", "pool_path": folder}) as served:
        before = served.stats()["pool"]
        size = next(folder.glob("*.pool")).stat().st_size
        for num_bytes, words in (
            (100 * 1024, "holds no extent of this pool, which takes 524,288 bytes"),
            (1 << 50, "is more than this process can have, which is 268,435,456 bytes"),
        ):
            answer = resize(served, num_bytes)
            assert answer.status_code == 409
            (error,) = answer.json()["errors"]
            assert error["field"] == "pool_bytes"
            assert words in error["message"]
        assert served.stats()["pool"] == before
        assert served.get(CONFIG)["pool_bytes"]["value"] == 4 * MIB
        assert next(folder.glob("*.pool")).stat().st_size == size
        served.tokens(PROMPTS[0], max_tokens=2)
        served.settle()
        blocks = served.get("/admin/v1/blocks")["items"]
        pinned = blocks[-1]["hash"]
        assert served.http.put(f"/admin/v1/blocks/{pinned}/pin").status_code == 200
        answer = resize(served, MIB // 2)
        assert answer.status_code == 409
        assert answer.json()["pinned"] == [pinned]
        assert served.stats()["pool"]["wanted_slots"] == 64
        assert served.http.delete(f"/admin/v1/blocks/{pinned}/pin").status_code == 204
        assert resized(served, MIB // 2)["pool"]["ready"] == 8
        answer = served.http.patch(CONFIG, json={"pool_bytes": None})
        assert answer.json()["pool_bytes"]["value"] == 4 * MIB
        wait_until(lambda: served.stats()["pool"]["slots"] == 64, "the size at start")
        audited = [row["what"] for row in served.get("/admin/v1/audit")["items"] if row["path"] == CONFIG]
        assert len(audited) == 5


def test_memory_that_is_not_there_is_refused_by_its_numbers(tmp_path: Path) -> None:
    """A process has room for a pool of all the machine's memory, of which some is taken."""
    share = psutil.virtual_memory().total // 32
    with serving(tmp_path, **SETTINGS | {"pool_bytes": share, "engine": "none"}) as served:
        before = served.stats()["pool"]["bytes"]
        largest = resize(served, 1 << 60).json()["errors"][0]["message"]
        most = int(largest.split("which is ")[1].split(" bytes")[0].replace(",", ""))
        answer = resize(served, most)
        assert answer.status_code == 409
        assert f"POOL_BYTES asks for {most - before:,} bytes" in answer.json()["errors"][0]["message"]
        assert served.stats()["pool"]["bytes"] == before
        assert resize(served, before // 2).status_code == 200
        wait_until(lambda: before // 2 >= served.stats()["pool"]["bytes"] > before // 3, "what fits")
