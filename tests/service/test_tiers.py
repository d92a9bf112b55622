"""The service with a tier of files below its pool: blocks go down, come back, and a broken tier costs hits only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until
from tests.service.test_answers import BLOCK, OUTPUT, ask_all, prompts, turn_over

NUM_TRIES = 20
"""How often to ask until a request was served from the tier: on a busy machine its patience may end before."""


def settings(folder: Path, **others: object) -> dict[str, object]:
    tiers = [{"type": "fs", "name": "disk", "path": str(folder), "max_bytes": "1GiB"}]
    given = {"dtype": "float64", "device_blocks": 90, "pool_bytes": "16MiB", "load_decision": "always"}
    return given | {"tiers": json.dumps(tiers)} | others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "files"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), **settings(folder)) as running:
        yield running
        assert running.stop() == 0
        errors = [line for line in running.log().splitlines() if " ERROR " in line]
        assert all("the folder was moved, deleted or unmounted" in line for line in errors), errors
        assert "Traceback" not in running.log()


def prompt_of(number: int) -> list[int]:
    return [(i * (number * 2 + 37) + number) % 240 + 3 for i in range(BLOCK * 15 + 3)]


def disk(served: Served) -> Any:
    return served.stats()["tiers"]["disk"]


def settle(served: Served) -> None:
    """Wait until the tier has ended all jobs."""
    served.settle()
    wait_until(lambda: disk(served)["open_jobs"] == 0, "the tier is idle")


def store_in_tier(served: Served, prompt: list[int]) -> list[int]:
    """The answer to a prompt, all of whose blocks are in the tier afterwards."""
    before = disk(served)["stored"]
    answer = served.tokens(prompt, max_tokens=OUTPUT)
    settle(served)
    assert disk(served)["stored"] == before + len(prompt) // BLOCK
    return answer


def turn_over_pool(served: Served, first: int) -> None:
    """Store other prompts until the pool and the device hold none of the earlier blocks."""
    num_slots = served.stats()["pool"]["slots"]
    for number in range(first, first + num_slots // 15 + 2):
        served.tokens(prompt_of(number), max_tokens=1)
    # The engine polls the tier for ended stores at its next request, and once a second while it has none.
    settle(served)
    turn_over(served)


def ask_until_from_tier(served: Served, prompt: list[int], answer: list[int], name: str) -> Any:
    """Ask until the tier served it, with the pool emptied before each time; the answer is always the same."""
    for number in range(NUM_TRIES):
        found = served.complete(prompt, f"{name}-{number}", max_tokens=OUTPUT)
        assert found["choices"][0]["token_ids"] == answer
        served.settle()
        about = served.get(f"/admin/v1/requests/{name}-{number}")["prompt_tokens"]
        if about["tier_hit"].get("disk"):
            return about
        assert served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
        turn_over(served, number)
    raise AssertionError(f"never served from the tier: {served.stats()}")


def test_block_lists_the_tiers_that_hold_it(served: Served) -> None:
    store_in_tier(served, prompt_of(900))
    before = disk(served)["looked_up"]
    items = served.get("/admin/v1/blocks?limit=1000")["items"]
    assert [item["tiers"] for item in items] == [["host", "disk"]] * 15
    assert served.http.post("/admin/v1/reset", json={"tiers": ["disk"]}).status_code == 200
    assert served.get(f"/admin/v1/blocks/{items[3]['hash']}")["tiers"] == ["host"]
    assert [item["tiers"] for item in served.get("/admin/v1/blocks")["items"]] == [["host"]] * 15
    assert disk(served)["looked_up"] == before, "a listing is not counted as a lookup"


def test_blocks_evicted_from_the_pool_are_promoted_from_the_tier(served: Served) -> None:
    prompt = prompt_of(0)
    answer = store_in_tier(served, prompt)
    turn_over_pool(served, 100)
    about = ask_until_from_tier(served, prompt, answer, "again")
    assert about == {
        "total": BLOCK * 15 + 3, "device_hit": 0, "host_hit": 0, "tier_hit": {"disk": BLOCK * 15}, "recomputed": 3,
    }  # fmt: skip
    stats = served.stats()
    check_identities(stats)
    assert stats["prompt_tokens"]["tier_hit"]["disk"] >= BLOCK * 15
    assert stats["tiers"]["disk"]["promoted"] >= 15
    assert stats["tiers"]["disk"]["corrupt"] == 0
    waited_s = [one["tier_wait_s"] for one in served.get("/admin/v1/requests?limit=1000")["items"]]
    waited_s = [seconds for seconds in waited_s if seconds is not None]
    assert len(waited_s) == stats["tier_waits"]["requests"] > 0
    assert sum(waited_s) == pytest.approx(stats["tier_waits"]["seconds"])
    metrics = served.http.get("/metrics").text
    assert 'kvferry_tier_promoted_total{tier="disk"}' in metrics
    assert 'kvferry_prompt_tokens_total{source="tier:disk"}' in metrics


def test_prefetched_prompt_is_served_from_the_pool(served: Served) -> None:
    prompt = prompt_of(1)
    answer = store_in_tier(served, prompt)
    assert served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
    turn_over(served)
    body = {"token_ids": prompt, "tiers": ["disk"]}
    wrong = served.http.post("/admin/v1/prefetch", json=body | {"tiers": ["floppy"]})
    assert (wrong.status_code, "disk" in wrong.text) == (422, True)
    before = disk(served)
    begun = served.http.post("/admin/v1/prefetch", json=body)
    assert (begun.status_code, begun.json()) == (202, {"num_blocks": 15})
    wait_until(lambda: disk(served)["prefetched"] == before["prefetched"] + 15, "the blocks are in the pool")
    held = served.http.post("/admin/v1/lookup", json={"token_ids": prompt}).json()
    assert (held["device"], held["pool"], held["anywhere"]) == (0, BLOCK * 15, BLOCK * 15)
    assert (held["num_tokens"], held["tiers"]) == (len(prompt), {"disk": BLOCK * 15})
    assert served.complete(prompt, "fetched", max_tokens=OUTPUT)["choices"][0]["token_ids"] == answer
    served.settle()
    about = served.get("/admin/v1/requests/fetched")["prompt_tokens"]
    assert (about["host_hit"], about["tier_hit"].get("disk", 0)) == (BLOCK * 15, 0)


@pytest.mark.long
def test_prefetches_of_a_minute_are_one_record_of_the_audit(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'audit.db'}"
    given = settings(tmp_path / "files", database_url=database)
    with serving(tmp_path / "one", **given) as served:
        for _ in range(3):
            assert served.http.post("/admin/v1/prefetch", json={"hashes": ["00"]}).status_code == 202
        assert served.stop() == 0
    with serving(tmp_path / "one", **given) as served:
        (record,) = served.get("/admin/v1/audit")["items"]
    assert (record["path"], record["what"]) == ("/admin/v1/prefetch", {"calls": 3, "blocks": 0})


def test_settings_show_the_tier_and_unknown_ones_are_refused(served: Served, folder: Path) -> None:
    assert served.get("/admin/v1/config")["tiers"]["value"][0]["path"] == str(folder)
    answer = served.http.post("/admin/v1/reset", json={"tiers": ["host", "disc"]})
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": "tiers.1", "message": "there is no disc; choose from host, disk"}]


def test_tier_when_gone_under_load_costs_hits_and_is_degraded(served: Served, folder: Path) -> None:
    asked = prompts(11, 16)
    answers = ask_all(served, asked)
    away = folder.with_name("away")
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(ask_all, served, asked * 2)
        folder.rename(away)
        wait_until(lambda: served.get("/readyz")["degraded"], "told of")
        assert again.result(300) == answers * 2
    degraded = served.get("/readyz")["degraded"]
    assert any(reason.startswith("tier disk: ") for reason in degraded), degraded
    turn_over(served)
    assert ask_all(served, asked) == answers
    check_identities(served.settle())
    away.rename(folder)
    wait_until(lambda: not served.get("/readyz")["degraded"], "well again")
    store_in_tier(served, prompt_of(2))


@pytest.mark.long
def test_restart_when_a_tier_brought_blocks_recovers_them(tmp_path: Path) -> None:
    prompt, kept = prompt_of(6), {"pool_kind": "file", "pool_path": tmp_path / "pool", "engine_name": "promoted"}
    with serving(tmp_path, **settings(tmp_path / "files", **kept)) as first:
        answer = store_in_tier(first, prompt)
        assert first.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
        turn_over(first)
        ask_until_from_tier(first, prompt, answer, "promoted")
        settle(first)
        num_ready = first.stats()["pool"]["ready"]
        assert first.stop() == 0
    with serving(tmp_path, **settings(tmp_path / "files", **kept) | {"tiers": "[]"}) as second:
        assert second.stats()["recovery"]["recovered"] == num_ready
        assert second.tokens(prompt, max_tokens=OUTPUT) == answer
        stats = second.settle()
        assert (stats["prompt_tokens"]["host_hit"], stats["load"]["corrupt"]) == (BLOCK * 15, 0)


@pytest.mark.long
@pytest.mark.parametrize("level", ["block", "request"])
def test_tier_stores_by_the_offload_level_of_the_settings(tmp_path: Path, level: str) -> None:
    prompt = prompt_of(5)
    with serving(tmp_path, **settings(tmp_path / "files", offload_level=level)) as running:
        running.http.put("/admin/v1/requests/first/policy", json={"tiers": []})
        running.complete(prompt, "first", max_tokens=1)
        settle(running)
        assert disk(running)["cascaded"] == 0
        running.complete(prompt, "second", max_tokens=1)
        settle(running)
        assert disk(running)["stored"] == (15 if level == "request" else 0)


@pytest.mark.long
def test_tier_before_evictions_has_only_what_the_pool_lost(tmp_path: Path) -> None:
    entry = {"type": "fs", "name": "disk", "path": str(tmp_path / "files"), "max_bytes": "1GiB", "when": "evict"}
    with serving(tmp_path / "one", **settings(tmp_path, tiers=json.dumps([entry]))) as served:
        prompt = prompt_of(0)
        answer = served.tokens(prompt, max_tokens=OUTPUT)
        settle(served)
        assert (served.stats()["store"]["stored"], disk(served)["cascaded"]) == (15, 0)
        turn_over_pool(served, 100)
        assert 15 <= disk(served)["stored"] < served.stats()["store"]["stored"]
        about = ask_until_from_tier(served, prompt, answer, "again")
        assert about["tier_hit"]["disk"] > 0
        assert disk(served)["corrupt"] == 0
