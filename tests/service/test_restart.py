"""A service with a kept pool, killed or stopped and started again: its next process begins warm, with right bytes."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import httpx
import pytest

from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

POOL_BYTES = 4 << 20
SETTINGS: dict[str, object] = {
    "engine_name": "kept",
    "device_blocks": 24,
    "block_size": 16,
    "dtype": "float64",
    "pool_bytes": POOL_BYTES,
    "pool_kind": "file",
    "load_decision": "always",
}
PROMPTS = [[(7 * n + 3 * i) % 250 + 1 for i in range(160)] for n in range(6)]
BLOCKS = 9
"""Whole blocks of a prompt that a hit may have: the last token is computed."""


@pytest.fixture
def shared_name() -> Iterator[str]:
    """The name of an engine whose pool lies in shared memory for as long as the test runs."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    for path in SHARED_MEMORY.glob(f"kvferry-{name}.pool*"):
        path.unlink()


@contextmanager
def kept(folder: Path, **settings: object) -> Iterator[Served]:
    where = {} if settings.get("pool_kind") == "shm" else {"pool_path": folder / "pool"}
    with serving(folder, **SETTINGS | where | settings) as served:
        yield served


def kill(served: Served) -> None:
    served.process.send_signal(signal.SIGKILL)
    served.process.wait(DEADLINE_S)


def warm_up(served: Served) -> list[list[int]]:
    answers = [served.tokens(prompt, max_tokens=8) for prompt in PROMPTS]
    served.settle()
    return answers


def evictions(served: Served, reason: str) -> list[Any]:
    return list(served.get(f"/admin/v1/evictions?reason={reason}")["items"])


@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_a_restart_begins_warm_and_answers_the_same(tmp_path: Path, end: str) -> None:
    with kept(tmp_path) as served:
        expected = warm_up(served)
        before = served.stats()["pool"]
        if end == "stop":
            assert served.stop() == 0
        else:
            kill(served)
    with kept(tmp_path) as served:
        pool = served.stats()["pool"]
        assert pool["ready"] == pool["unverified"]
        assert pool["ready"] >= 0.9 * before["ready"] if end == "kill" else pool["ready"] == before["ready"]
        recovery = served.stats()["recovery"]
        assert recovery["recovered"] == pool["ready"] >= recovery["known"]
        if end == "stop":
            # What stops in order has sealed every slot and written every row.
            assert (recovery["known"], recovery["dropped"]) == (recovery["recovered"], {})
        assert warm_up(served) == expected
        stats = served.stats()
        check_identities(stats)
        assert stats["prompt_tokens"]["host_hit"] >= (len(PROMPTS) - 1) * BLOCKS * 16
        assert (stats["load"]["failed"], stats["load"]["corrupt"]) == (0, 0)
        assert stats["pool"]["unverified"] < pool["unverified"]
        assert "slots of an earlier process recovered" in served.log()
        metrics = served.http.get("/metrics").text
        assert f"kvferry_recovered_slots {float(pool['ready'])}" in metrics
        assert ("kvferry_recovery_dropped_slots{" in metrics) <= (end == "kill")


@pytest.mark.long
def test_five_kills_of_the_whole_service_under_load(tmp_path: Path, shared_name: str) -> None:
    """Killed at a random moment each time, while requests come; every answer is that of a service that was not."""
    random = Random(5)
    expected: dict[int, list[int]] = {}
    recovered = ready = 0
    for _ in range(5):
        with kept(tmp_path, pool_kind="shm", engine_name=shared_name) as served:
            recovered += min(served.stats()["pool"]["ready"], ready)
            for _ in range(12):
                number = random.randrange(len(PROMPTS))
                tokens = served.tokens(PROMPTS[number], max_tokens=6)
                assert tokens == expected.setdefault(number, tokens)
            stats = served.stats()
            check_identities(stats)
            assert (stats["load"]["failed"], stats["load"]["corrupt"]) == (0, 0)
            ready = stats["pool"]["ready"]
            busy = Thread(target=stream_until_death, args=(served, random.randrange(len(PROMPTS))))
            busy.start()
            wait_until(lambda: served.stats()["requests"]["running"] > 0, "under load")
            kill(served)
            busy.join(DEADLINE_S)
    assert recovered > 0


@pytest.mark.long
def test_a_stop_under_load_drains_within_its_limit_and_loses_nothing(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        expected = warm_up(served)
        busy = Thread(target=stream_until_death, args=(served, 0))
        busy.start()
        wait_until(lambda: served.stats()["requests"]["running"] > 0, "under load")
        assert served.stop() == 0
        busy.join(DEADLINE_S)
        assert "not sealed in time" not in served.log()
        assert "still under transfer" not in served.log()
    with kept(tmp_path) as served:
        recovery = served.stats()["recovery"]
        assert (recovery["known"], recovery["dropped"]) == (recovery["recovered"], {})
        assert warm_up(served) == expected
        assert served.stats()["load"]["corrupt"] == 0


def stream_until_death(served: Served, number: int) -> None:
    """Long answers, one after another, the last of which ends with its service."""
    with suppress(httpx.HTTPError, AssertionError):
        while True:
            served.complete(PROMPTS[number], max_tokens=200)


@pytest.mark.long
def test_a_second_service_on_the_same_pool_is_refused(tmp_path: Path) -> None:
    other_database = {"database_url": f"sqlite:///{tmp_path}/other.db"}
    refusal = pytest.raises(AssertionError, match="in use by another process")
    with kept(tmp_path), refusal, kept(tmp_path, **other_database):
        pass


def test_flipped_bytes_are_a_miss_a_count_and_a_row_in_history(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        expected = warm_up(served)
        # Not killed, as blocks that are not sealed yet would be lost.
        assert served.stop() == 0
    pool = tmp_path / "pool" / "kept.pool"
    raw = bytearray(pool.read_bytes())
    for at in range(len(raw) - POOL_BYTES + 100, len(raw), 1 << 14):
        raw[at] ^= 0xFF
    pool.write_bytes(raw)
    with kept(tmp_path) as served:
        for number in (5, 0, 1, 2):
            served.complete(PROMPTS[number], f"bad-{number}", max_tokens=1, kv_transfer_params={"store": False})
        served.complete(PROMPTS[5], "after", max_tokens=1)
        assert missed(served, "bad-5")["causes"]["load_failed"] == BLOCKS * 16
        assert missed(served, "after")["evicted"] == {"failed_verification": BLOCKS * 16}
        assert warm_up(served) == expected
        stats = served.stats()
        check_identities(stats)
        assert stats["load"]["corrupt"] > 0
        assert stats["evictions"]["by_reason"]["failed_verification"] == stats["load"]["corrupt"]
        wait_until(lambda: len(evictions(served, "failed_verification")) > 0, "the rows")


def missed(served: Served, name: str) -> Any:
    return served.get(f"/admin/v1/requests/{name}")["missed_tokens"]


def hashes(served: Served, request: str) -> set[str]:
    """Return the blocks of requests whose id starts with this; an unknown request has an empty id."""
    blocks = served.get("/admin/v1/blocks?limit=1000")["items"]
    return {block["hash"] for block in blocks if block["request"].startswith(request)}


@pytest.mark.long
def test_restart_after_a_reset_by_match_recovers_the_rest_only(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        for number, prompt in enumerate(PROMPTS):
            served.tokens(prompt, max_tokens=2, request_id=f"{'dropped' if number % 2 else 'other'}-{number}")
        served.settle()
        others = hashes(served, "other")
        assert hashes(served, "dropped")
        answer = served.http.post("/admin/v1/reset", json={"match": {"request": "dropped-*"}})
        kill(served)
        assert answer.status_code == 200
        assert answer.json()["dropped_blocks"] > 0
    with kept(tmp_path) as served:
        assert hashes(served, "") == others
        assert served.stats()["epoch"] == 0, "only a reset of the whole pool raises it"
        answer = served.http.post("/admin/v1/reset", json={})
        kill(served)
        assert (answer.json()["dropped_blocks"], answer.json()["epoch"]) == (len(others), 1)
    with kept(tmp_path) as served:
        assert hashes(served, "") == set()
        assert served.stats()["epoch"] == 1, "it goes on"
        assert served.http.post("/admin/v1/reset", json={}).json()["epoch"] == 2


SMALL = {"pool_bytes": 1 << 20, "block_size": 32}
"""A pool that holds a few prompts only."""


def prompt_of(number: int) -> list[int]:
    return [(11 * number + 3 * i) % 250 + 1 for i in range(161)]


@pytest.mark.long
def test_kill_after_reset_by_match_does_not_restore_evicted_blocks(tmp_path: Path) -> None:
    with kept(tmp_path, **SMALL) as served:
        doomed: set[str] = set()
        for number in range(12):
            served.complete(prompt_of(number), f"doomed-{number}", max_tokens=1)
            served.settle()
            doomed |= hashes(served, "doomed")
        left = hashes(served, "doomed")
        served.complete(prompt_of(20), "other", max_tokens=1)
        served.settle()
        assert len(left) < len(doomed), "some were evicted"
        answer = served.http.post("/admin/v1/reset", json={"match": {"request": "doomed-*"}})
        kill(served)
        assert answer.status_code == 200
    with kept(tmp_path, **SMALL) as served:
        assert not hashes(served, "") & doomed


@pytest.mark.long
def test_a_pool_that_is_moved_or_cut_under_a_service_is_named(tmp_path: Path) -> None:
    pool = tmp_path / "pool" / "kept.pool"

    def degraded() -> str:
        answer = served.http.get("/readyz")
        assert answer.status_code == 200
        return "; ".join(answer.json()["degraded"])

    with kept(tmp_path) as served:
        expected = served.tokens(PROMPTS[0], max_tokens=8)
        served.settle()
        assert served.stats()["pool"]["ready"] > 0
        pool.rename(tmp_path / "elsewhere")
        wait_until(lambda: "kept.pool was removed or renamed: " in degraded(), "it is named")
        (tmp_path / "elsewhere").rename(pool)
        wait_until(lambda: not degraded(), "it is back")
        half = pool.stat().st_size // 2
        os.truncate(pool, half)
        wait_until(lambda: f"kept.pool was truncated to {half:,} bytes" in degraded(), "it is named")
        assert "restart the engine, which empties the pool" in degraded()
        assert served.stats()["pool"]["ready"] == 0
        assert served.tokens(PROMPTS[0], max_tokens=8) == expected
        assert served.settle()["pool"]["ready"] == 0
        os.truncate(pool, 0)
        num_bytes = served.stats()["pool"]["bytes"]
        assert served.http.patch("/admin/v1/config", json={"pool_bytes": num_bytes + num_bytes // 2}).is_success
        wait_until(lambda: "pool resize: failed" in served.log(), "a growth fails")
        assert served.http.patch("/admin/v1/config", json={"pool_bytes": num_bytes // 2}).is_success
        wait_until(lambda: served.stats()["pool"]["bytes"] == num_bytes // 2, "the pool has shrunk")
        assert served.tokens(PROMPTS[0], max_tokens=8) == expected
        answer = served.http.post("/admin/v1/reset", json={})
        assert (answer.status_code, answer.json()["pending_jobs"]) == (200, 0)
        assert served.stop() == 0
        assert "a restart may recover" not in served.log()
    with kept(tmp_path) as served:
        assert served.stats()["recovery"]["recovered"] == 0


@pytest.mark.long
def test_restart_when_dtype_differs_counts_drops_and_misses(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        served.complete(PROMPTS[0], max_tokens=1)
        served.settle()
        ready = served.stats()["pool"]["ready"]
        assert served.stats()["recovery"] == {
            "recovered": 0, "known": 0, "dropped": {}, "foreign": None, "slots": 0, "empty": 0, "is_new": True,
            "seconds": served.stats()["recovery"]["seconds"],
        }  # fmt: skip
        assert "new pool: there was no file of an earlier process" in served.log()
        num_slots = served.stats()["pool"]["slots"]
        assert served.stop() == 0
    with kept(tmp_path, dtype="float32") as served:
        recovery = served.stats()["recovery"]
        assert (recovery["recovered"], recovery["dropped"]) == (0, {"foreign": ready})
        assert (recovery["slots"], recovery["empty"], recovery["is_new"]) == (num_slots, num_slots - ready, False)
        account = f"dropped: {ready} foreign; empty: {num_slots - ready}; in all: {num_slots}"
        assert f"{account}; the pool was dropped as a whole" in served.log()
        assert "dtype was 'float64', now 'float32'" in recovery["foreign"]
        served.complete(PROMPTS[0], "missed", max_tokens=1)
        causes = missed(served, "missed")["causes"]
        assert (causes["other_fingerprint"], causes["new"]) == (BLOCKS * 16, 0)
        served.complete([9, *PROMPTS[0]], "unheard-of", max_tokens=1)
        causes = missed(served, "unheard-of")["causes"]
        assert (causes["other_fingerprint"], causes["new"]) == (0, (BLOCKS + 1) * 16)
        assert served.stats()["missed_tokens"]["causes"]["other_fingerprint"] == BLOCKS * 16


@pytest.mark.long
def test_restart_when_database_or_pool_is_lost_keeps_the_other(tmp_path: Path) -> None:
    with kept(tmp_path) as served:
        expected = warm_up(served)
        ready = served.stats()["pool"]["ready"]
        assert served.stop() == 0
    for path in tmp_path.glob("kvferry.db*"):
        path.unlink()
    with kept(tmp_path) as served:
        assert served.stats()["pool"]["ready"] == ready
        assert warm_up(served) == expected
        assert served.stop() == 0
    (tmp_path / "pool" / "kept.pool").unlink()
    with kept(tmp_path) as served:
        assert served.stats()["pool"]["ready"] == 0
