from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, pages
from tests.harness.waiting import wait_until

LIST = "/admin/v1/requests"


def test_a_request_is_shown_with_everything_the_contract_names(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.answer(LoopRequest("first", 160, seed=1, num_output_tokens=32, tenant="a1b2", lora="sql"))
    fresh.settle()
    fresh.engine.answer(LoopRequest("second", 160, seed=1, num_output_tokens=32, tenant="a1b2", lora="sql"))
    fresh.settle()
    shown = client.get(f"{LIST}/second").json()
    stats = client.get("/admin/v1/stats").json()
    assert shown["id"] == "second"
    assert shown["state"] == "finished"
    assert (shown["num_prompt_tokens"], shown["num_output_tokens"]) == (160, 32)
    assert (shown["tenant"], shown["lora"]) == ("a1b2", "sql")
    assert shown["prompt_tokens"] == {"total": 160, "device_hit": 0, "host_hit": 144, "tier_hit": {}, "recomputed": 16}
    assert shown["store"].keys() == stats["store"].keys()
    assert shown["store"]["skipped"].keys() == stats["store"]["skipped"].keys()
    store = shown["store"]
    assert store["offered"] == store["stored"] + sum(store["skipped"].values()) + store["failed"] + store["in_flight"]
    assert store["offered"] > 0
    assert shown["policy"].keys() == client_policy(fresh).keys()


def test_request_shows_when_it_arrived_waited_and_answered(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.answer(LoopRequest("first", 160, seed=1))
    fresh.settle()
    fresh.engine.answer(LoopRequest("second", 160, seed=1))
    first, second = (client.get(f"{LIST}/{name}").json() for name in ("first", "second"))
    for shown in (first, second):
        arrived, finished = (datetime.fromisoformat(shown[name]) for name in ("arrived_at", "finished_at"))
        lived_s = (finished - arrived).total_seconds() + 0.001
        assert 0 <= shown["wait_s"] + shown["load_s"] <= shown["first_token_s"] + 0.001 <= lived_s + 0.001
    assert first["load_s"] == 0 < second["load_s"]
    metrics = client.get("/metrics").text
    for prefix in ("none", "loaded"):
        series = f'kvferry_time_to_first_token_seconds_count{{length="<1k",prefix="{prefix}"}} 1.0'
        assert series in metrics
    assert "kvferry_load_wait_seconds_count 1.0" in metrics


def test_request_shows_where_its_prompt_left_an_earlier_one(fresh: Service, client: httpx.Client) -> None:
    fresh.context.prompts.start()
    first = LoopRequest("first", 100, seed=1, num_output_tokens=20)
    fresh.engine.answer(first)
    fresh.settle()
    next_turn = LoopRequest("next", 160, head=first.tokens)
    other = LoopRequest("other", 100, head=[*first.tokens[:60], 7])
    for request in (next_turn, other, LoopRequest("again", 100, seed=1), LoopRequest("short", 10)):
        fresh.engine.answer(request)
        fresh.settle()

    def prefix(name: str) -> dict[str, Any] | None:
        shown = client.get(f"{LIST}/{name}").json()
        assert shown["shortest_hit_tokens"] == 17
        found: dict[str, Any] | None = shown["prefix"]
        return found

    wait_until(lambda: prefix("again") is not None, "the last one is read")
    assert prefix("short") is None
    parted = prefix("other")
    assert parted == {
        "outcome": "parted",
        "shared_tokens": 48,
        "position": 48,
        "exact": False,
        "earlier": "next",
        "ways": 2,
        "text": "Its first 48 tokens are those of request next, which it left in the 16 tokens after them; in the last "
        "hour, prompts went on from there in 2 ways.",
    }
    stories = {name: prefix(name) or {} for name in ("first", "next", "again")}
    assert {name: one["outcome"] for name, one in stories.items()} == {
        "first": "new",
        "next": "continued",
        "again": "repeated",
    }
    assert stories["next"]["earlier"] == "first"
    # What was stored of the beginning was loaded.
    loaded = client.get(f"{LIST}/other").json()["prompt_tokens"]["host_hit"]
    assert loaded == 48
    assert "kvferry_prompt_tokens_parted_total 52.0" in client.get("/metrics").text


def test_requests_when_filtered_are_those_that_fit(fresh: Service, client: httpx.Client) -> None:
    for number in range(6):
        fresh.engine.answer(LoopRequest(f"r{number}", 161, seed=number // 2, tenant=f"{number // 2}"))
        fresh.settle()

    def ids(**query: object) -> list[str]:
        return [item["id"] for item in client.get(LIST, params=query).raise_for_status().json()["items"]]

    assert ids(tenant="1") == ["r3", "r2"]
    missed = [name for name in ids() if client.get(f"{LIST}/{name}").json()["missed_tokens"]["causes"]["new"]]
    assert ids(missed=True) == missed
    assert 0 < len(missed) < 6
    arrived = {name: client.get(f"{LIST}/{name}").json()["arrived_at"] for name in ids()}
    since = arrived["r3"]
    # Two that arrive within a millisecond have the same time.
    assert ids(since=since) == [name for name, at in arrived.items() if at >= since]
    assert len(ids(since=since)) < 6
    assert ids(since=since, tenant="1", limit=1) == ["r3"]
    assert client.get(LIST, params={"since": "yesterday"}).status_code == 422


def test_finished_request_shows_stores_that_end_later(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.hold_copies()
    fresh.engine.answer(LoopRequest("last", 160, seed=1))
    assert client.get(f"{LIST}/last").json()["store"]["in_flight"] == 10
    fresh.engine.release_copies()
    fresh.settle()
    store = client.get(f"{LIST}/last").json()["store"]
    assert (store["in_flight"], store["stored"], store["offered"]) == (0, 10, 10)


def client_policy(service: Service) -> dict[str, Any]:
    with service.client() as client:
        policy: dict[str, Any] = client.get("/admin/v1/policy").json()
        return policy


def test_unknown_request_is_404(api: httpx.Client) -> None:
    answer = api.get(f"{LIST}/nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json()["detail"]


def test_pages_are_stable_while_requests_come(fresh: Service, client: httpx.Client) -> None:
    for number in range(10):
        fresh.engine.answer(LoopRequest(f"r{number}", 32, seed=number))
    first = client.get(LIST, params={"limit": 4}).json()
    for number in range(10, 15):
        fresh.engine.answer(LoopRequest(f"r{number}", 32, seed=number))
    second = client.get(LIST, params={"limit": 100, "cursor": first["next_cursor"]}).json()
    assert [item["id"] for item in first["items"] + second["items"]] == [f"r{number}" for number in reversed(range(10))]
    for limit in (1, 7, 100):
        assert [item["id"] for item in pages(client, LIST, limit)] == [f"r{number}" for number in reversed(range(15))]


@pytest.mark.parametrize("state", ["", "done", "expected", "Running"])
def test_a_state_that_no_listed_request_has_is_refused(api: httpx.Client, state: str) -> None:
    answer = api.get(LIST, params={"state": state})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["state"]


@pytest.mark.parametrize("url", [LIST, "/admin/v1/evictions"])
def test_list_when_a_filter_is_unknown_is_refused(api: httpx.Client, url: str) -> None:
    answer = api.get(url, params={"State": "running"})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["State"]


def test_requests_are_listed_by_state(fresh: Service, client: httpx.Client) -> None:
    fresh.engine.answer(LoopRequest("done", 32))
    assert client.get(LIST, params={"state": "running"}).json()["items"] == []
    assert [item["id"] for item in client.get(LIST, params={"state": "finished"}).json()["items"]] == ["done"]


LISTS = (LIST, "/admin/v1/blocks", "/admin/v1/evictions", "/admin/v1/audit", "/admin/v1/rules")


@pytest.mark.parametrize("url", LISTS)
@pytest.mark.parametrize("limit", ["0", "1001", "-1", "ten", "1.5", "", "1e2", str(2**70)])
def test_the_size_of_a_page_is_bounded(api: httpx.Client, url: str, limit: str) -> None:
    answer = api.get(url, params={"limit": limit})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["limit"]


@pytest.mark.parametrize("url", LISTS)
@pytest.mark.parametrize(
    "cursor",
    ["", "nonsense", "-1", "1.5", str(2**63), "x" * 8193, "WyJhIl0", "WyJydWxlcyIsMS4wLCJhIl0", "\u0663", "\x00", "1 "],
)
def test_list_when_its_cursor_is_invalid_is_refused(api: httpx.Client, url: str, cursor: str) -> None:
    answer = api.get(url, params={"cursor": cursor})
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == ["cursor"]
