"""`/tiers/{name}/flush`: what is begun, refused, shown, ended and audited."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, attach_tier
from tests.harness.toy_tiers import ToyTier
from tests.harness.waiting import wait_until

TIER = "/admin/v1/tiers/disk"
FLUSH = f"{TIER}/flush"


@pytest.fixture
def tier(fresh: Service) -> ToyTier:
    """A tier that is attached to a service whose pool has blocks of two tenants."""
    for number in range(2):
        fresh.engine.answer(LoopRequest(f"r{number}", 128, seed=number, tenant=f"{number}" * 16))
    fresh.settle()
    return attach_tier(fresh)


def current(client: httpx.Client) -> Any:
    return client.get("/admin/v1/tiers").json()["items"][0]["flush"]


def wait_for_event(service: Service) -> Any:
    """The events, once a flush is among them."""

    def events() -> Any:
        return service.context.feed.read(0, 1000)[1]

    wait_until(lambda: any(str(event.type) == "flushed" for event in events()), "the event of a flush")
    return events()


def ended(client: httpx.Client) -> Any:
    wait_until(lambda: current(client)["state"] != "running", "the end of the flush")
    return current(client)


def test_flush_is_begun_shown_and_audited(fresh: Service, client: httpx.Client, tier: ToyTier) -> None:
    num_blocks = client.get("/admin/v1/stats").json()["pool"]["ready"]
    assert current(client) is None
    begun = client.post(FLUSH, json={"tenant": None})
    assert (begun.status_code, begun.json()) == (202, {"num_blocks": num_blocks})
    flushed = ended(client)
    assert flushed.pop("began") <= flushed.pop("ended")
    counts = {"num_blocks": num_blocks, "stored_blocks": num_blocks, "left_blocks": 0}
    assert flushed == {"state": "done", "tenant": None, "reason": None} | counts
    assert len(tier.blocks) == num_blocks
    assert client.delete(FLUSH).status_code == 204
    audited = client.get("/admin/v1/audit").json()["items"]
    assert [(one["method"], one["path"], one["status"], one["what"]) for one in audited][:2] == [
        ("DELETE", FLUSH, 204, None),
        ("POST", FLUSH, 202, {"tenant": None}),
    ]
    types = [str(event.type) for event in wait_for_event(fresh)]
    assert types.count("flushed") == 1


def test_flush_of_a_tenant_copies_its_blocks_alone(client: httpx.Client, tier: ToyTier) -> None:
    num_blocks = client.post(FLUSH, json={"tenant": "1111*"}).json()["num_blocks"]
    assert ended(client)["tenant"] == "1111*"
    assert 0 < num_blocks == len(tier.blocks)
    assert {origin.tenant for _, origin in tier.blocks.values()} == {"1" * 16}
    assert client.post(FLUSH).json()["num_blocks"] == 2 * num_blocks


def test_delete_during_a_flush_ends_it(client: httpx.Client, tier: ToyTier) -> None:
    tier.due = lambda number: False
    assert client.post(FLUSH, json={}).status_code == 202
    again = client.post(FLUSH, json={})
    assert (again.status_code, again.json()["type"]) == (409, "urn:kvferry:problem:tier-conflict")
    assert again.json()["detail"] == "tier disk is being flushed: wait for its end, or end it with DELETE"
    assert client.delete(FLUSH).status_code == 204
    assert current(client)["state"] == "canceled"
    tier.due = lambda number: True
    assert client.post(FLUSH, json={}).status_code == 202
    assert ended(client)["state"] == "done"


@pytest.mark.parametrize("body", [{}, {"match": {"tenant": "0*"}}, {"tiers": ["disk"]}])
def test_reset_during_a_flush_ends_it(client: httpx.Client, tier: ToyTier, body: dict[str, Any]) -> None:
    tier.due = lambda number: False
    assert client.post(FLUSH, json={}).status_code == 202
    assert client.post("/admin/v1/reset", json=body | {"drain_timeout_s": 0}).status_code in (200, 202)
    assert ended(client)["state"] == "reset"


@pytest.mark.parametrize("is_shared", [False, True])
def test_reset_by_match_says_which_blocks_of_a_tier_it_drops(
    client: httpx.Client, tier: ToyTier, is_shared: bool
) -> None:
    assert client.post(FLUSH, json={}).status_code == 202
    assert ended(client)["state"] == "done"
    tier.drops_matching = not is_shared
    num_blocks = len(tier.blocks)
    body = {"tiers": ["disk"], "match": {"tenant": "0*"}}
    affected = client.post("/admin/v1/reset?dry_run=true", json=body).json()["tiers"]
    assert {name: (one["dropped"], one["dropped_blocks"]) for name, one in affected.items()} == (
        {"disk": ("all", num_blocks)} if is_shared else {}
    )
    dropped = client.post("/admin/v1/reset", json=body).json()["tiers"]["disk"]
    assert (dropped["dropped"], dropped["dropped_blocks"]) == (
        ("all", num_blocks) if is_shared else ("matching", num_blocks // 2)
    )
    assert client.post("/admin/v1/reset").json()["tiers"]["disk"]["dropped"] == "all"


@pytest.mark.parametrize("body", [{"tenant": 5}, {"tenant": ""}, {"match": {}}, {"tenant": None, "max_bytes": 1}])
def test_bad_body_is_422(client: httpx.Client, tier: ToyTier, body: dict[str, Any]) -> None:
    assert client.post(FLUSH, json=body).status_code == 422
    assert current(client) is None


def test_flush_of_an_unknown_tier_is_404(api: httpx.Client) -> None:
    for answer in (api.post("/admin/v1/tiers/none/flush", json={}), api.delete("/admin/v1/tiers/none/flush")):
        assert (answer.status_code, "no tier called none" in answer.json()["detail"]) == (404, True)


def test_flush_of_a_tier_that_is_disabled_or_fails_is_409(client: httpx.Client, tier: ToyTier) -> None:
    assert client.put(TIER, json={"enabled": False}).status_code == 200
    answer = client.post(FLUSH, json={})
    assert (answer.status_code, answer.json()["detail"]) == (409, "tier disk is disabled: enable it first")
    assert client.put(TIER, json={"enabled": True}).status_code == 200
    tier.is_unavailable = True
    answer = client.post(FLUSH, json={})
    assert (answer.status_code, "flush it once it works" in answer.json()["detail"]) == (409, True)


def test_tier_that_fails_during_a_flush_fails_it(client: httpx.Client, tier: ToyTier) -> None:
    tier.raises = {"store"}
    assert client.post(FLUSH, json={}).status_code == 202
    failed = ended(client)
    assert (failed["state"], failed["stored_blocks"]) == ("failed", 0)
    assert "store failed" in failed["reason"]
    assert client.get("/admin/v1/stats").json()["pool"]["pinned"] == 0
