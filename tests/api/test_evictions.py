from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, fill, pages

EVICTIONS = "/admin/v1/evictions"


def overflow(service: Service) -> None:
    """Store more than the pool holds, drop one block by hand, and write it all down."""
    for number in range(20):
        fill(service, LoopRequest(f"r{number}", 320, seed=number, tenant=f"tenant{number % 2}"))
    with service.client() as client:
        block = client.get("/admin/v1/blocks").json()["items"][0]["hash"]
        client.delete(f"/admin/v1/blocks/{block}")
    service.settle_history()


def test_eviction_shows_its_reason_and_the_request_that_needed_space(fresh: Service, client: httpx.Client) -> None:
    """vllm#53893, dynamo#10066: no eviction counter, no view of what is held."""
    overflow(fresh)
    stats = client.get("/admin/v1/stats").json()["evictions"]
    items = pages(client, EVICTIONS, 50)
    assert len(items) == stats["total"] == sum(stats["by_reason"].values()) > 100
    by_hand, *others = items
    assert (by_hand["reason"], by_hand["needed_by"]) == ("operator", None)
    assert {item["reason"] for item in others} == {"capacity"}
    assert all(item["needed_by"].startswith("r") for item in others)
    assert others[0]["tenant"] in ("tenant0", "tenant1")
    assert others[0]["policy"] == "lru"
    assert others[0]["age_s"] >= 0
    assert others[0]["size"] > 0
    assert others[0]["regretted_at"] is None
    assert others[0]["time"].endswith("Z")
    times = [item["time"] for item in items]
    assert times == sorted(times, reverse=True)
    assert len({item["id"] for item in items}) == len(items)


def test_filters_hold_together(fresh: Service, client: httpx.Client) -> None:
    overflow(fresh)

    def found(client: httpx.Client, **filters: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = client.get(EVICTIONS, params={"limit": 1000, **filters}).json()["items"]
        return items

    everything = found(client)
    assert {item["reason"] for item in found(client, reason="operator")} == {"operator"}
    assert found(client, reason="load_failed") == []
    assert {item["request"] for item in found(client, request="r1")} == {"r1"}
    assert {item["tenant"] for item in found(client, tenant="tenant1")} == {"tenant1"}
    assert found(client, tenant="tenant0", request="r1") == []
    assert found(client, request="' OR 1=1 --") == []
    middle = datetime.fromisoformat(everything[len(everything) // 2]["time"]).isoformat()
    before, since = found(client, until=middle), found(client, since=middle)
    assert len(before) + len(since) == len(everything)
    assert before
    assert since
    assert found(client, since="2999-01-01T00:00:00Z") == []
    assert len(found(client, since="1999-01-01T00:00:00+02:00")) == len(everything)


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"reason": "boredom"}, ["reason"]),
        ({"since": "yesterday"}, ["since"]),
        ({"since": "2026-01-01T00:00:00"}, ["since"]),
        ({"since": "2026-01-01"}, ["since"]),
        ({"since": "1767225600"}, ["since"]),
        ({"until": "-1"}, ["until"]),
        ({"until": "2026-13-01T00:00:00Z"}, ["until"]),
        ({"until": "2026-01-01T00:00:00 02:00"}, ["until"]),
        ({"reson": "capacity"}, ["reson"]),
        ({"request": ""}, ["request"]),
        ({"tenant": "x" * 513}, ["tenant"]),
    ],
)
def test_evictions_filter_when_invalid_is_refused(api: httpx.Client, params: dict[str, str], fields: list[str]) -> None:
    answer = api.get(EVICTIONS, params=params)
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == fields


def test_pages_are_stable_while_evictions_come(fresh: Service, client: httpx.Client) -> None:
    overflow(fresh)
    everything = [item["id"] for item in pages(client, EVICTIONS, 1000)]
    first = client.get(EVICTIONS, params={"limit": 10}).json()
    fill(fresh, LoopRequest("more", 320, seed=999))
    fresh.settle_history()
    rest = client.get(EVICTIONS, params={"limit": 1000, "cursor": first["next_cursor"]}).json()
    assert [item["id"] for item in first["items"] + rest["items"]] == everything


def test_the_summary_adds_up(fresh: Service, client: httpx.Client) -> None:
    overflow(fresh)
    fresh.engine.answer(LoopRequest("again", 320, seed=0, tenant="tenant0"))
    fresh.settle()
    client.post("/admin/v1/reset")
    fresh.settle_history()
    stats = client.get("/admin/v1/stats").json()["evictions"]
    summary = client.get(f"{EVICTIONS}/summary").json()
    listed = pages(client, EVICTIONS, 1000)
    assert summary["total"] == len(listed) == sum(summary["by_reason"].values())
    assert summary["total"] + summary["reset_blocks"] == stats["total"]
    assert summary["resets"] == 1
    assert summary["regretted"] == stats["regretted"] == sum(1 for item in listed if item["regretted_at"]) > 0
    assert summary["regret_rate"] == pytest.approx(summary["regretted"] / summary["total"])
    assert sum(bucket["count"] for bucket in summary["age"]["buckets"]) == summary["total"]
    assert summary["age"]["buckets"][-1]["upto_s"] is None
    assert summary["age"]["min_s"] <= summary["age"]["mean_s"] <= summary["age"]["max_s"]
    now = datetime.now(UTC).isoformat()
    assert client.get(f"{EVICTIONS}/summary", params={"since": now}).json()["total"] == 0
    assert client.get(f"{EVICTIONS}/summary", params={"reason": "capacity"}).status_code == 422


def test_an_empty_summary_has_no_ages(client: httpx.Client) -> None:
    summary = client.get(f"{EVICTIONS}/summary").json()
    assert (summary["total"], summary["regret_rate"]) == (0, 0)
    assert summary["age"]["mean_s"] is None
