"""Leases over HTTP, on the embedded engine: the field `retain_s`, its limit, receipts, and what a lease keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.app.cli.requests import explain
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

BLOCK, SLOTS, SLOT_BYTES = 16, 64, 32768


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    sizes = {"device_blocks": 40, "pool_bytes": SLOTS * SLOT_BYTES, "load_decision": "always"}
    with serving(folder, request_fields='["retain_s"]', max_retain_s=900, **sizes) as running:
        assert running.stats()["pool"]["slots"] == SLOTS
        yield running
        assert running.stats()["offloading"]["num_errors"] == 0


def prompt(number: int, blocks: int) -> list[int]:
    return [(number * 91 + i * 7 + i // 240 * (number % 13 + 1)) % 240 + 3 for i in range(blocks * BLOCK + 2)]


def lease_of(served: Served, name: str) -> Any:
    return served.get(f"/admin/v1/requests/{name}")["lease"]


def flood(served: Served, first: int) -> None:
    for number in range(first, first + 12):
        served.complete(prompt(number, 16), max_tokens=2)
    served.settle()


def hit(served: Served, name: str) -> int:
    tokens = served.get(f"/admin/v1/requests/{name}")["prompt_tokens"]
    return int(tokens["device_hit"] + tokens["host_hit"])


def reset(served: Served) -> None:
    assert served.http.post("/admin/v1/reset", json={}).status_code == 200


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_blocks_under_a_lease_outlast_a_flood_and_others_do_not(served: Served, mode: str) -> None:
    assert served.http.patch("/admin/v1/config", json={"store_mode": mode}).status_code == 200
    reset(served)
    given = {"retain_s": 600}
    served.complete(prompt(1, 10), "leased", max_tokens=2, kv_transfer_params=given)
    served.complete(prompt(2, 10), "other", max_tokens=2)
    lease = lease_of(served, "leased")
    assert (lease["outcome"], lease["blocks"], lease["reason"]) == ("accepted", 10, None)
    assert lease["bytes"] == 10 * SLOT_BYTES
    assert 0 <= lease["pending"] <= 10
    assert lease["until"] is not None
    assert lease_of(served, "other") is None
    policy = served.get("/admin/v1/requests/leased")["policy"]
    assert policy["retain_s"] == {"value": 600, "source": "request"}
    flood(served, 100)
    stats = served.stats()
    assert (stats["leases"]["slots"], stats["leases"]["pending"]) == (10, 0)
    assert stats["pool"]["pinned"] >= 10
    metrics = served.http.get("/metrics").text
    assert "kvferry_leased_slots 10.0" in metrics
    assert 'kvferry_leases_total{outcome="accepted"}' in metrics
    assert 'kvferry_leases_ended_total{cause="time"}' in metrics
    served.complete(prompt(2, 10), "other again", max_tokens=2)
    served.complete(prompt(1, 10), "leased again", max_tokens=2)
    assert hit(served, "leased again") == 10 * BLOCK
    assert hit(served, "other again") < 10 * BLOCK


def test_lease_ends_with_its_time_also_while_the_engine_idles(served: Served) -> None:
    reset(served)
    served.complete(prompt(3, 4), "short lease", max_tokens=2, kv_transfer_params={"retain_s": 1.5})
    flood(served, 200)
    before = served.stats()["leases"]["ended"]["time"]
    if served.stats()["leases"]["slots"] + served.stats()["leases"]["pending"]:
        wait_until(lambda: served.stats()["leases"]["ended"]["time"] > before, "the lease has ended")
    wait_until(lambda: served.stats()["leases"]["slots"] == served.stats()["leases"]["pending"] == 0, "it is released")


def test_leases_beyond_the_share_are_clipped_and_rejected(served: Served) -> None:
    reset(served)
    for number in range(3):
        served.complete(prompt(10 + number, 10), f"share{number}", max_tokens=2, kv_transfer_params={"retain_s": 600})
    leases = [lease_of(served, f"share{number}") for number in range(3)]
    assert [one["outcome"] for one in leases] == ["accepted", "clipped", "rejected"]
    assert [one["blocks"] for one in leases] == [10, SLOTS // 4 - 10, 0]
    assert "KVFERRY_MAX_PINNED_FRACTION" in leases[2]["reason"]
    assert leases[2]["until"] is None
    told = [" ".join(explain(served.get(f"/admin/v1/requests/share{number}"))) for number in range(3)]
    assert f"Its lease was accepted, for 10 blocks until {leases[0]['until']}" in told[0]
    assert f"Its lease was rejected, for 0 blocks: {leases[2]['reason']}" in told[2]
    answer = served.http.post("/admin/v1/reset", json={})
    assert answer.status_code == 200
    assert served.stats()["leases"]["slots"] == 0


def test_retain_s_over_http_has_a_type_and_a_limit(served: Served) -> None:
    http = served.http

    def put(path: str, policy: dict[str, Any]) -> httpx.Response:
        if path == "policy":
            return http.patch("/admin/v1/policy", json=policy)
        if path == "rules":
            return http.put("/admin/v1/rules/agents", json={"match": {"request": "agent-*"}, "policy": policy})
        return http.put("/admin/v1/requests/agent-1/policy", json=policy)

    for path, field in (("policy", "retain_s"), ("rules", "policy.retain_s"), ("requests", "retain_s")):
        for value in (901, 1e300, -1, True, "5", [5]):
            answer = put(path, {"retain_s": value})
            assert answer.status_code == 422, (path, value)
            assert [each["field"] for each in answer.json()["errors"]] == [field]
        for value in (900, 0.5, 0):
            assert put(path, {"retain_s": value}).status_code in (200, 201), (path, value)
    assert put("rules", {"retain_s": 60}).status_code == 200
    http.delete("/admin/v1/requests/agent-1/policy")
    http.patch("/admin/v1/policy", json={"retain_s": None})
    served.complete(prompt(30, 3), "agent-1", max_tokens=2)
    about = served.get("/admin/v1/requests/agent-1")
    assert about["policy"]["retain_s"] == {"value": 60, "source": "rule:agents"}
    assert about["lease"]["outcome"] == "accepted"
    assert http.patch("/admin/v1/config", json={"max_retain_s": 30}).status_code == 200
    assert put("rules", {"retain_s": 60}).status_code == 422
    assert http.patch("/admin/v1/config", json={"max_retain_s": 900}).status_code == 200
    assert http.delete("/admin/v1/rules/agents").status_code == 204


def test_requests_at_once_have_leases_and_all_end_with_a_reset(served: Served) -> None:
    reset(served)
    begun = served.stats()["leases"]["outcomes"]
    threads = [
        threading.Thread(
            target=served.complete,
            args=(prompt(50 + number % 2, 6), f"at once {number}"),
            kwargs={"max_tokens": 8, "kv_transfer_params": {"retain_s": 600}},
        )
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served.settle()
    leases = served.stats()["leases"]
    assert sum(leases["outcomes"].values()) == sum(begun.values()) + 6
    assert leases["slots"] + leases["pending"] == 12
    reset(served)
    leases = served.stats()["leases"]
    assert (leases["slots"], leases["pending"]) == (0, 0)
