from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.core.keys import tenant_digest
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service, pages, start_service

TENANTS = "/admin/v1/tenants"
FIRST, SECOND = (tenant_digest(salt) or "" for salt in ("first-salt", "second-salt"))


def answer(service: Service, name: str, num_blocks: int, seed: int, tenant: str | None) -> None:
    """A prompt of whole blocks, all of which are stored."""
    service.engine.answer(LoopRequest(name, 16 * num_blocks, seed=seed, tenant=tenant))
    service.settle()


def tenant(client: httpx.Client, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{TENANTS}/{digest}").json()
    return found


def limit(client: httpx.Client, digest: str, num_blocks: float) -> httpx.Response:
    return client.put(f"{TENANTS}/{digest}", json={"max_pool_bytes": int(num_blocks * BLOCK_BYTES)})


def test_usage_of_each_tenant_is_shown_the_largest_first(fresh: Service, client: httpx.Client) -> None:
    answer(fresh, "none", 2, 1, None)
    answer(fresh, "first", 5, 2, FIRST)
    answer(fresh, "again", 5, 2, FIRST)
    answer(fresh, "second", 3, 3, SECOND)
    limit(client, "0" * 16, 1)
    found = pages(client, TENANTS, 2)
    assert [(one["tenant"], one["pool_bytes"] // BLOCK_BYTES) for one in found] == [
        (FIRST, 5),
        (SECOND, 3),
        (None, 2),
        ("0" * 16, 0),
    ]
    assert found[0] == tenant(client, FIRST)
    assert found[0]["prompt_tokens"] == {
        "total": 160,
        "device_hit": 0,
        "host_hit": 64,
        "tier_hit": {},
        "recomputed": 96,
    }
    assert (found[0]["stored_blocks"], found[0]["stored_bytes"]) == (5, 5 * BLOCK_BYTES)
    assert found[0]["max_pool_bytes"] == {"value": "unlimited", "source": "default"}
    assert found[3]["max_pool_bytes"] == {"value": BLOCK_BYTES, "source": "tenant"}
    stats = client.get("/admin/v1/stats").json()["prompt_tokens"]
    for name in ("total", "host_hit", "recomputed"):
        assert sum(one["prompt_tokens"][name] for one in found) == stats[name]


def test_tenant_at_its_limit_evicts_its_own_blocks_only(fresh: Service, client: httpx.Client) -> None:
    assert limit(client, FIRST, 4).json()["max_pool_bytes"] == {"value": 4 * BLOCK_BYTES, "source": "tenant"}
    answer(fresh, "other", 3, 1, SECOND)
    answer(fresh, "one", 3, 2, FIRST)
    answer(fresh, "two", 3, 3, FIRST)
    assert [tenant(client, one)["pool_bytes"] // BLOCK_BYTES for one in (FIRST, SECOND)] == [4, 3]
    evictions = client.get("/admin/v1/stats").json()["evictions"]
    assert evictions["by_reason"] == {"tenant_limit": 2}
    answer(fresh, "long", 6, 4, FIRST)
    store = client.get("/admin/v1/requests/long").json()["store"]
    assert (store["stored"], store["skipped"]["tenant_limit"], store["offered"]) == (4, 2, 6)
    stats = client.get("/admin/v1/stats").json()["store"]
    assert stats["offered"] == stats["stored"] + sum(stats["skipped"].values()) + stats["failed"] + stats["in_flight"]
    assert 'kvferry_store_skipped_blocks_total{reason="tenant_limit"} 2.0' in client.get("/metrics").text
    answer(fresh, "longer", 6, 4, FIRST)
    missed = client.get("/admin/v1/requests/longer").json()["missed_tokens"]
    assert missed["not_stored"] == {"tenant_limit": 16}
    assert FIRST not in client.get("/metrics").text


def test_limit_when_lowered_applies_to_blocks_in_the_pool(fresh: Service, client: httpx.Client) -> None:
    answer(fresh, "one", 5, 1, FIRST)
    answer(fresh, "two", 3, 2, FIRST)
    assert limit(client, FIRST, 3.5).status_code == 200
    fresh.context.tenants.check()
    assert tenant(client, FIRST)["pool_bytes"] == 3 * BLOCK_BYTES
    blocks = client.get("/admin/v1/blocks").json()["items"]
    assert {one["request"] for one in blocks} == {"two"}, "the latest stay"


def test_limits_survive_a_restart_and_can_be_deleted(tmp_path: Path) -> None:
    with start_service(tmp_path) as service:
        limit(service.shared_client, FIRST, 2)
        service.shared_client.put(f"{TENANTS}/{SECOND}", json={"max_pool_bytes": "unlimited"})
    with start_service(tmp_path) as service:
        client = service.shared_client
        assert tenant(client, FIRST)["max_pool_bytes"] == {"value": 2 * BLOCK_BYTES, "source": "tenant"}
        assert tenant(client, SECOND)["max_pool_bytes"] == {"value": "unlimited", "source": "tenant"}
        answer(service, "one", 4, 1, FIRST)
        assert tenant(client, FIRST)["pool_bytes"] == 2 * BLOCK_BYTES
        assert client.delete(f"{TENANTS}/{FIRST}").status_code == 204
        missing = client.delete(f"{TENANTS}/{FIRST}")
        assert (missing.status_code, missing.json()["detail"]) == (404, f"tenant {FIRST} has no limit of its own")
        answer(service, "two", 4, 2, FIRST)
        assert tenant(client, FIRST)["pool_bytes"] == 6 * BLOCK_BYTES
        (put,) = [
            one
            for one in client.get("/admin/v1/audit").json()["items"]
            if one["method"] == "PUT" and FIRST in one["path"]
        ]
        assert (put["what"], put["outcome"]) == ({"max_pool_bytes": 2 * BLOCK_BYTES}, "applied")


@pytest.mark.parametrize(
    "body",
    [{}, {"max_pool_bytes": -1}, {"max_pool_bytes": True}, {"max_pool_bytes": "5"}, {"max_pool_bytes": None}, {"x": 1}],
)
def test_limit_that_is_no_number_of_bytes_is_refused(api: httpx.Client, body: dict[str, Any]) -> None:
    assert api.put(f"{TENANTS}/{FIRST}", json=body).status_code == 422
    assert tenant(api, FIRST)["max_pool_bytes"]["source"] == "default"


def test_tenant_that_is_no_digest_is_refused(api: httpx.Client) -> None:
    for name in ("salt", "0" * 15, "A" * 16):
        assert api.get(f"{TENANTS}/{name}").status_code == 422
        assert api.put(f"{TENANTS}/{name}", json={"max_pool_bytes": 1}).status_code == 422
    assert api.get(TENANTS, params={"cursor": "tenants_1"}).status_code == 422
