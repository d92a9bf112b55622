from __future__ import annotations

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.core.keys import tenant_digest
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service, fill, start_service
from tests.harness.waiting import DEADLINE_S, wait_until

RED = "c0ffee0123456789"
RESET = "/admin/v1/reset"


def stats_of(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/admin/v1/stats").json()
    return answer


def test_reset_returns_counts_and_drops_all_blocks(fresh: Service, client: httpx.Client) -> None:
    """LMCache#1660, LMCache#1692, LMCache#1693: clear said success and freed nothing."""
    fill(fresh, LoopRequest("one", 160, seed=1))
    answer = client.post(RESET)
    assert answer.status_code == 200
    assert answer.json() == {
        "epoch": 1,
        "dropped_blocks": 10,
        "dropped_bytes": 10 * BLOCK_BYTES,
        "tiers": {},
        "detached_tiers": [],
        "drained_jobs": 0,
        "pending_jobs": 0,
    }
    again = client.post(RESET, json={}).json()
    assert (again["epoch"], again["dropped_blocks"]) == (2, 0)
    assert client.get("/admin/v1/blocks").json()["items"] == []
    fill(fresh, LoopRequest("two", 160, seed=1))
    stats = stats_of(client)
    assert stats["prompt_tokens"]["host_hit"] == 0
    assert stats["pool"]["ready"] == 10
    assert stats["epoch"] == 2


def test_reset_when_its_drain_times_out_still_drops_the_blocks(fresh: Service, client: httpx.Client) -> None:
    """LMCache#2942, vllm#57959: unbounded waits for a buffer or for a pending store."""
    fresh.engine.hold_copies()
    fresh.engine.answer(LoopRequest("one", 160, seed=1))
    wait_until(lambda: fresh.engine.num_held_copies > 0, "a store is in flight")
    assert stats_of(client)["store"]["in_flight"] == 10
    answer = client.post(RESET, json={"drain_timeout_s": 0.1})
    assert answer.status_code == 202
    body = answer.json()
    assert (body["pending_jobs"], body["drained_jobs"], body["epoch"]) == (1, 0, 1)
    assert stats_of(client)["pool"]["storing"] == 10
    fresh.engine.release_copies()
    fresh.settle()
    after = stats_of(client)
    assert after["pool"]["free"] == after["pool"]["slots"]
    assert (after["store"]["stored"], after["store"]["skipped"]["reset"]) == (0, 10)


def audited(client: httpx.Client) -> list[tuple[str, int | None]]:
    return [(one["path"], one["status"]) for one in client.get("/admin/v1/audit").json()["items"]]


def test_a_reset_waits_for_the_jobs_it_disowned(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.hold_copies()
    fresh.engine.answer(LoopRequest("one", 160, seed=1))
    wait_until(lambda: fresh.engine.num_held_copies > 0, "a store is in flight")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, RESET, json={"drain_timeout_s": 60})
        with fresh.client() as other:
            wait_until(lambda: stats_of(other)["epoch"] == 1, "the reset has happened")
            assert other.get("/healthz").status_code == 200
            wait_until(lambda: audited(other) == [(RESET, None)], "it is recorded before it has ended")
            assert not waiting.done()
            fresh.engine.release_copies()
        answer = waiting.result(DEADLINE_S)
        assert audited(client) == [(RESET, 200)]
        assert (answer.status_code, answer.json()["drained_jobs"], answer.json()["pending_jobs"]) == (200, 1, 0)
        assert stats_of(client)["pool"]["free"] == 256


def test_a_request_whose_load_is_disowned_still_ends(fresh: Service, client: httpx.Client) -> None:
    fill(fresh, LoopRequest("one", 160, seed=1))
    fresh.engine.hold_copies()
    two = fresh.engine.enqueue(LoopRequest("two", 160, seed=1))
    wait_until(lambda: fresh.engine.num_held_copies > 0, "a load is in flight")
    assert client.post(RESET, json={"drain_timeout_s": 0}).status_code == 202
    fresh.engine.release_copies()
    assert two.done.wait(DEADLINE_S)
    fresh.settle()
    stats = stats_of(client)
    assert stats["requests"]["running"] == 0
    assert stats["pool"]["slots"] == stats["pool"]["free"] + stats["pool"]["ready"]
    assert not any(fresh.engine.device.held)


def test_reset_when_its_client_disconnects_still_holds(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.hold_copies()
    fresh.engine.answer(LoopRequest("one", 160, seed=1))
    wait_until(lambda: fresh.engine.num_held_copies > 0, "a store is in flight")
    with socket.create_connection(("127.0.0.1", fresh.port), DEADLINE_S) as raw:
        head = f"POST {RESET} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 25\r\n"
        raw.sendall(f'{head}\r\n{{"drain_timeout_s": 3600}}'.encode())
        wait_until(lambda: stats_of(client)["epoch"] == 1, "the reset has happened")

    def recorded() -> bool:
        items = client.get("/admin/v1/audit").json()["items"]
        return bool(items) and items[0]["status"] == 202

    wait_until(recorded, "the reset whose client went is in the audit table")
    fresh.engine.release_copies()


def test_a_waiting_reset_ends_with_the_server(tmp_path: Path) -> None:
    with start_service(tmp_path) as running:
        running.engine.hold_copies()
        running.engine.answer(LoopRequest("one", 160, seed=1))
        wait_until(lambda: running.engine.num_held_copies > 0, "a store is in flight")
        with running.client() as client, running.client() as other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, RESET, json={"drain_timeout_s": 3600})
            wait_until(lambda: stats_of(other)["epoch"] == 1, "the reset has happened")
            running.server.should_exit = True
            assert waiting.result(DEADLINE_S).status_code == 202
        wait_until(lambda: not running.thread.is_alive(), "the server has stopped")


@pytest.mark.parametrize(
    ("match", "kept"),
    [
        ({"request": "a*"}, {"b1", "c1"}),
        ({"tenant": RED}, {"a2", "c1"}),
        ({"lora": "sql-?"}, {"a1", "a2", "b1"}),
        ({"tenant": "c*", "request": "a*"}, {"a2", "b1", "c1"}),
        ({"tenant": "0*"}, {"a1", "a2", "b1", "c1"}),
        ({"cache_salt": "salt-of-blue"}, {"a1", "b1", "c1"}),
        ({"cache_salt": "blue"}, {"a1", "a2", "b1", "c1"}),
        ({"cache_salt": "salt-of-blue", "request": "b*"}, {"a1", "a2", "b1", "c1"}),
        ({"request": "*"}, set()),
        ({"request": "a1", "tenant": None}, {"a2", "b1", "c1"}),
        ({}, set()),
        (None, set()),
    ],
)
def test_reset_by_match_drops_blocks_of_matching_requests(
    service: Service, api: httpx.Client, match: dict[str, str | None] | None, kept: set[str]
) -> None:
    assert api.post(RESET, json={}).status_code == 200
    fill(
        service,
        LoopRequest("a1", 32, seed=1, tenant=RED),
        LoopRequest("a2", 32, seed=2, tenant=tenant_digest("salt-of-blue")),
        LoopRequest("b1", 32, seed=3, tenant=RED),
        LoopRequest("c1", 32, seed=4, lora="sql-7"),
    )
    answer = api.post(RESET, json={"match": match, "reason": "test"})
    assert answer.status_code == 200
    items = api.get("/admin/v1/blocks").json()["items"]
    assert {item["request"] for item in items} == kept
    assert answer.json()["dropped_blocks"] == 8 - 2 * len(kept)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"tiers": ["disk"]}, ["tiers.0"]),
        ({"tiers": ["host", "disk"]}, ["tiers.1"]),
        ({"tiers": []}, ["tiers"]),
        ({"tiers": "host"}, ["tiers"]),
        ({"match": {"tenants": "x"}}, ["match.tenants"]),
        ({"match": {"tenant": 5}}, ["match.tenant"]),
        ({"match": {"tenant": ""}}, ["match.tenant"]),
        ({"match": {"tenant": "salt-of-blue"}}, ["match.tenant"]),
        ({"match": {"cache_salt": ""}}, ["match.cache_salt"]),
        ({"match": {"cache_salt": "x", "tenant": "c"}}, ["match"]),
        ({"match": "x"}, ["match"]),
        ({"drain_timeout_s": -1}, ["drain_timeout_s"]),
        ({"drain_timeout_s": 3601}, ["drain_timeout_s"]),
        ({"drain_timeout_s": "5"}, ["drain_timeout_s"]),
        ({"drain_timeout_s": True}, ["drain_timeout_s"]),
        ({"drain_timeout_s": None}, ["drain_timeout_s"]),
        ({"reason": 5}, ["reason"]),
        ({"reason": "x" * 1001}, ["reason"]),
        ({"force": True, "now": 1}, ["force", "now"]),
        ([], ["body"]),
        ("now", ["body"]),
        (5, ["body"]),
    ],
)
def test_reset_when_its_body_is_invalid_changes_nothing(api: httpx.Client, body: Any, fields: list[str]) -> None:
    before = stats_of(api)["epoch"]
    answer = api.post(RESET, json=body)
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == fields
    assert stats_of(api)["epoch"] == before


@pytest.mark.parametrize(
    "body", ['{"drain_timeout_s": NaN}', '{"drain_timeout_s": Infinity}', '{"drain_timeout_s": 1e400}']
)
def test_reset_when_a_number_is_not_finite_is_refused(api: httpx.Client, body: str) -> None:
    answer = api.post(RESET, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize("body", [None, {}, {"tiers": None}, {"tiers": ["host"]}, {"match": None, "reason": None}])
def test_everything_about_a_reset_is_optional(api: httpx.Client, body: Any) -> None:
    answer = (
        api.post(RESET)
        if body is None
        else api.post(RESET, content=json.dumps(body), headers={"Content-Type": "application/json"})
    )
    assert answer.status_code == 200


def test_resets_at_once_each_have_their_epoch(fresh: Service) -> None:
    stop = threading.Event()

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            fresh.engine.answer(LoopRequest(f"t{number}", 96, seed=number % 5))
            number += 1

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        with ThreadPoolExecutor(8) as pool, fresh.client() as client:
            answers = list(pool.map(lambda _: client.post(RESET, json={"drain_timeout_s": 60}), range(40)))
    finally:
        stop.set()
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["epoch"] for answer in answers) == list(range(1, 41))
    assert fresh.engine.failure is None


def test_reset_by_match_when_its_timeout_ends_continues(fresh: Service, client: httpx.Client) -> None:
    fresh.server.config.app.state.searches.grace_s = 0.0
    fill(fresh, LoopRequest("a1", 160, seed=1), LoopRequest("b1", 160, seed=2))
    answer = client.post(RESET, json={"match": {"request": "a*"}, "drain_timeout_s": 0})
    assert answer.status_code == 202
    assert answer.json()["pending_jobs"] == 1

    def is_done() -> bool:
        return {item["request"] for item in client.get("/admin/v1/blocks").json()["items"]} == {"b1"}

    wait_until(is_done, "the search has dropped what matches")


def test_resets_by_match_when_many_wait_leave_threads_to_the_engine(fresh: Service, client: httpx.Client) -> None:
    num_resets = 2 * (os.cpu_count() or 1) + 8
    with ThreadPoolExecutor(num_resets) as pool:
        with fresh.engine.manager.lock:
            body = {"match": {"request": "none-*"}}
            resets = [pool.submit(fresh.shared_client.post, "/admin/v1/reset", json=body) for _ in range(num_resets)]
            tasks = fresh.server.server_state.tasks
            wait_until(lambda: len(tasks) == num_resets, "all searches are under way")
            assert client.get("/v1/thread").json() == "done"
        assert {reset.result().status_code for reset in resets} == {200}


def test_dry_run_however_it_is_spelled_is_audited_as_one(client: httpx.Client) -> None:
    values = ("true", "1", "True", "yes", "on")
    assert {client.post(f"{RESET}?dry_run={value}", json={}).status_code for value in values} == {200}
    assert audited(client) == [(f"{RESET}?dry_run=true", 200)] * len(values)


def test_dry_run_counts_what_a_reset_drops_and_drops_nothing(fresh: Service, client: httpx.Client) -> None:
    for name in ("one", "two"):
        fresh.engine.answer(LoopRequest(name, 160, seed=len(name) + ord(name[0])))
        fresh.settle()
    before = client.get("/admin/v1/stats").json()
    bodies = ({}, {"match": {"request": "one"}}, {"match": {"request": "nobody"}})
    counted = [client.post("/admin/v1/reset", params={"dry_run": True}, json=body) for body in bodies]
    assert [answer.status_code for answer in counted] == [200] * 3
    after = client.get("/admin/v1/stats").json()
    assert (after["pool"], after["epoch"]) == (before["pool"], before["epoch"])
    assert client.get("/admin/v1/audit?limit=1").json()["items"][0]["path"] == "/admin/v1/reset?dry_run=true"
    assert [answer.json()["dropped_blocks"] for answer in counted] == [20, 10, 0]
    assert counted[0].json()["dropped_bytes"] == before["pool"]["slot_bytes"] * 20
    assert client.post("/admin/v1/reset", json=bodies[1]).json()["dropped_blocks"] == 10
    assert client.post("/admin/v1/reset", json={}).json()["dropped_blocks"] == 10


def test_reset_with_a_query_it_does_not_know_drops_nothing(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.answer(LoopRequest("one", 160, seed=1))
    fresh.settle()
    for query in ("dry-run=true", "dryrun=true", "dry_run=perhaps", "dry_run=true&dry_run=false"):
        answer = client.post(f"/admin/v1/reset?{query}", json={})
        assert answer.status_code == 422, query
        assert client.get("/admin/v1/stats").json()["pool"]["ready"] == 10, query
        record = client.get("/admin/v1/audit?limit=1").json()["items"][0]
        assert (record["path"], record["request_id"]) == ("/admin/v1/reset", answer.headers["X-Request-ID"])
