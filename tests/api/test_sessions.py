"""Sessions over HTTP: whose they are, what the list and a single one show, what matches by them, and their leases."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from kvferry.core.keys import tenant_digest
from kvferry.core.scheduler.sessions import MAX_HASH_BYTES, SessionKey
from kvferry.core.stats import PromptTokens
from tests.harness.loop_engine import BLOCK_BYTES, BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import Service, attach_tier, errors_of, pages
from tests.harness.waiting import wait_until

SESSIONS = "/admin/v1/sessions"
RED, BLUE = (tenant_digest(salt) or "" for salt in ("red", "blue"))


def answer(service: Service, name: str, session: str | None, tenant: str | None = None, **fields: Any) -> LoopRequest:
    """A request of ten blocks, all of which are stored."""
    tokens = fields.pop("tokens", 160)
    request = service.engine.answer(LoopRequest(name, tokens, session=session, tenant=tenant, **fields))
    service.settle()
    return request


def path_of(session: str, part: str = "") -> str:
    return f"{SESSIONS}/{quote(session, safe='')}{part}"


def show(client: httpx.Client, session: str, **query: str) -> Any:
    return client.get(path_of(session), params=query).raise_for_status().json()


def test_session_shows_its_counters_and_blocks(fresh: Service, client: httpx.Client) -> None:
    answer(fresh, "first", "chat", seed=1, num_output_tokens=32)
    answer(fresh, "second", "chat", seed=1, num_output_tokens=32)
    answer(fresh, "none", None, seed=2)
    finished = client.get("/admin/v1/requests/second").json()["finished_at"]
    (listed,) = client.get(SESSIONS).json()["items"]
    assert listed == {
        "id": "chat",
        "tenant": None,
        "requests": 2,
        "last_seen": finished,
        "prompt_tokens": {"total": 320, "device_hit": 0, "host_hit": 144, "tier_hit": {}, "recomputed": 176},
        "retained_until": None,
    }
    # The last token of the answer is not computed, and nothing of the answer is stored.
    held = {"num_tokens": 176, "device": 176, "pool": 160, "tiers": {}, "anywhere": 176}
    assert show(client, "chat") == listed | held
    client.post("/admin/v1/reset")
    assert show(client, "chat") == listed | held | {"pool": 0}


def test_list_has_the_latest_sessions_first_page_by_page(fresh: Service, client: httpx.Client) -> None:
    for number in range(8):
        answer(fresh, f"r{number}", f"s{number}", tokens=20)
    answer(fresh, "again", "s3", tokens=20)
    assert [one["id"] for one in pages(client, SESSIONS, 4)] == ["s3", "s7", "s6", "s5", "s4", "s2", "s1", "s0"]
    assert client.get(path_of("s8")).status_code == 404
    assert errors_of(client.get(SESSIONS, params={"cursor": "x"})) == ["cursor"]


def test_id_of_several_tenants_needs_the_tenant(fresh: Service, client: httpx.Client) -> None:
    for number, tenant in enumerate([RED, BLUE, None]):
        answer(fresh, f"r{number}", "same", tenant, seed=number)
    for call in ("GET", "PUT", "DELETE"):
        body = {"json": {"retain_s": 5}} if call == "PUT" else {}
        refused = client.request(call, path_of("same"), **body)
        assert refused.status_code == 409
        assert all(name in refused.json()["detail"] for name in (RED, BLUE, "none"))
    assert client.post(path_of("same", "/prefetch")).status_code == 409
    found = [show(client, "same", tenant=tenant)["tenant"] for tenant in (RED, BLUE, "")]
    assert found == [RED, BLUE, None]
    assert client.put(path_of("same"), params={"tenant": RED}, json={"retain_s": 5}).json()["outcome"] == "accepted"
    retained = {one["tenant"]: one["retained_until"] for one in client.get(SESSIONS).json()["items"]}
    assert [tenant for tenant, until in retained.items() if until] == [RED]
    assert client.get(path_of("same"), params={"tenant": "0" * 16}).status_code == 404
    assert errors_of(client.get(path_of("same"), params={"tenant": "a salt"})) == ["tenant"]


def test_prefetch_of_more_than_an_eighth_of_the_pool_is_429(fresh: Service, client: httpx.Client) -> None:
    num_tokens = (fresh.engine.manager.num_slots // 8 + 1) * BLOCK_TOKENS
    answer(fresh, "r", "s", tokens=num_tokens)
    attach_tier(fresh)
    client.post("/admin/v1/tiers/disk/flush", json={}).raise_for_status()
    wait_until(lambda: client.get("/admin/v1/tiers/disk").json()["flush"]["state"] == "done", "the tier has them")
    client.post("/admin/v1/reset", json={"tiers": ["host"]}).raise_for_status()
    refused = client.post(path_of("s", "/prefetch"))
    assert (refused.status_code, "eighth" in refused.json()["detail"]) == (429, True)


@pytest.mark.parametrize("session", ["a/b", "100%", "a/prefetch", "%2F", "é ü", "a?b#c", "policy", "x" * 256])
def test_session_with_any_id_is_found_by_its_path(fresh: Service, client: httpx.Client, session: str) -> None:
    answer(fresh, "r", session)
    assert show(client, session)["id"] == session
    assert client.put(path_of(session), json={"retain_s": 5}).json()["blocks"] == 10
    assert client.post(path_of(session, "/prefetch")).json() == {"num_blocks": 0}
    assert client.delete(path_of(session)).status_code == 204
    assert client.get("/admin/v1/requests", params={"session": session}).json()["items"][0]["session"] == session


def test_session_that_is_too_long_is_ignored_and_counted(fresh: Service, client: httpx.Client) -> None:
    answer(fresh, "r", "x" * 257)
    assert client.get(SESSIONS).json() == {"items": [], "next_cursor": None}
    assert client.get(path_of("x" * 257)).status_code == 404
    assert client.get("/admin/v1/requests/r").json()["session"] is None
    assert client.get("/admin/v1/stats").json()["requests"]["ignored_sessions"] == 1
    metrics = client.get("/metrics").text
    assert "kvferry_requests_ignored_sessions_total 1.0" in metrics


def test_no_session_is_in_metrics_or_logs(
    fresh: Service, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answer(fresh, "r", "a-secret-name", RED)
    client.put(path_of("a-secret-name"), json={"retain_s": 5})
    assert "a-secret-name" not in client.get("/metrics").text
    assert "a-secret-name" not in client.get("/admin/v1/stats").text
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("kvferry")]
    assert [text for text in logged if "a-secret-name" in text] == []


def test_requests_rules_and_resets_match_by_session(fresh: Service, client: httpx.Client) -> None:
    rule = {"match": {"session": "agent-*"}, "policy": {"priority": "high"}}
    assert client.put("/admin/v1/rules/agents", json=rule).json()["match"]["session"] == "agent-*"
    assert client.put("/admin/v1/rules/any", json={"match": {"session": "*"}, "policy": {"priority": "low"}})
    for number, session in enumerate(["agent-1", "agent-2", "chat", "[x]", None]):
        answer(fresh, f"r{number}", session, seed=number)

    def ids(**query: object) -> list[str]:
        return [
            item["id"] for item in client.get("/admin/v1/requests", params=query).raise_for_status().json()["items"]
        ]

    priorities = {one["id"]: one["policy"]["priority"] for one in client.get("/admin/v1/requests").json()["items"]}
    assert {name: (one["value"], one["source"]) for name, one in priorities.items()} == {
        "r0": ("high", "rule:agents"),
        "r1": ("high", "rule:agents"),
        "r2": ("low", "rule:any"),
        "r3": ("low", "rule:any"),
        "r4": ("normal", "default"),
    }
    tested = client.post("/admin/v1/rules/test", json={"rule": {"name": "t", "match": {"session": "?*"}, "policy": {}}})
    assert tested.status_code == 200, tested.text
    assert ids(session="agent-1") == ["r0"]
    assert ids(session="agent-*") == ["r1", "r0"]
    assert ids(session="*") == ["r3", "r2", "r1", "r0"]
    assert ids(session="[x]") == ["r3"]
    blocks = client.get("/admin/v1/blocks?limit=1000").json()["items"]
    assert {one["request"]: one["session"] for one in blocks} == {
        "r0": "agent-1",
        "r1": "agent-2",
        "r2": "chat",
        "r3": "[x]",
        "r4": None,
    }
    dry = client.post("/admin/v1/reset?dry_run=true", json={"match": {"session": "agent-?"}}).json()
    assert dry["dropped_blocks"] == 20
    dropped = client.post("/admin/v1/reset", json={"match": {"session": "agent-?", "request": "r1"}}).json()
    assert (dropped["dropped_blocks"], dropped["epoch"]) == (10, 0)
    assert client.post("/admin/v1/reset", json={"match": {"session": "*"}}).json()["dropped_blocks"] == 30
    left = {one["request"] for one in client.get("/admin/v1/blocks").json()["items"]}
    assert left == {"r4"}
    fresh.settle_history()
    evicted = client.get("/admin/v1/evictions?request=r0").json()["items"]
    assert {(one["session"], one["reason"]) for one in evicted} == {("agent-1", "reset")}
    assert {one["session"] for one in client.get("/admin/v1/evictions?request=r1").json()["items"]} == {"agent-2"}


def test_lease_of_a_session_begins_is_shown_and_ends(fresh: Service, client: httpx.Client) -> None:
    first = answer(fresh, "a", "mine", seed=1)
    answer(fresh, "b", "other", tokens=240, head=[*first.tokens[:80], 7])
    receipt = client.put(path_of("mine"), json={"retain_s": 60}).json()
    until = receipt.pop("until")
    expected = {"outcome": "accepted", "blocks": 10, "pending": 0, "bytes": 10 * BLOCK_BYTES, "reason": None}
    assert receipt == expected
    assert show(client, "mine")["retained_until"] == until
    assert show(client, "other")["retained_until"] is None
    ended = client.put(path_of("mine"), json={"retain_s": 0}).json()
    assert (ended["blocks"], ended["until"]) == (0, None)
    assert show(client, "mine")["retained_until"] is None
    assert client.put(path_of("mine"), json={"retain_s": 60}).json()["outcome"] == "accepted"
    assert client.delete(path_of("mine")).status_code == 204
    assert show(client, "mine")["retained_until"] is None
    # Those of its end that the other one has not are evicted next, the last first.
    fill = (fresh.engine.manager.num_slots - client.get("/admin/v1/stats").json()["pool"]["ready"] + 3) * 16
    answer(fresh, "fill", None, tokens=fill, seed=9)
    assert show(client, "mine")["pool"] == (10 - 3) * 16
    assert show(client, "other")["pool"] == 240
    assert client.delete(path_of("unknown")).status_code == 404
    audit = client.get("/admin/v1/audit").json()["items"]
    assert [(one["method"], one["what"]) for one in audit if "/sessions/mine" in one["path"]] == [
        ("DELETE", None),
        ("PUT", {"retain_s": 60}),
        ("PUT", {"retain_s": 0}),
        ("PUT", {"retain_s": 60}),
    ]


def test_reset_by_match_ends_the_lease_whose_blocks_it_drops(fresh: Service, client: httpx.Client) -> None:
    answer(fresh, "a", "mine", seed=1)
    assert client.put(path_of("mine"), json={"retain_s": 60}).json()["outcome"] == "accepted"
    assert client.post("/admin/v1/reset", json={"match": {"session": "mine"}}).json()["dropped_blocks"] == 10
    assert show(client, "mine")["retained_until"] is None


def test_session_whose_hashes_were_forgotten_says_so(fresh: Service, client: httpx.Client) -> None:
    hashes = answer(fresh, "a", "first", seed=1).block_hashes
    with fresh.engine.manager.lock:
        large = bytes(MAX_HASH_BYTES - len(b"".join(hashes)))
        fresh.engine.offload.sessions.record(SessionKey(None, "large"), PromptTokens(0, 0, 0, {}, 0), [large], 1.0)
    answer(fresh, "b", "second", seed=2)
    shown = show(client, "first")
    assert (shown["requests"], shown["num_tokens"], shown["pool"], shown["tiers"]) == (1, None, None, None)
    assert show(client, "second")["pool"] == 160
    receipt = client.put(path_of("first"), json={"retain_s": 60})
    assert (receipt.status_code, receipt.json()["outcome"], receipt.json()["blocks"]) == (200, "rejected", 0)
    assert "not known" in receipt.json()["reason"]
    assert client.put(path_of("first"), json={"retain_s": 0}).status_code == 200
    assert client.post(path_of("first", "/prefetch")).status_code == 409
    assert client.delete(path_of("first")).status_code == 204


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "retain_s"),
        ({"retain_s": -1}, "retain_s"),
        ({"retain_s": "5"}, "retain_s"),
        ({"retain_s": True}, "retain_s"),
        ({"retain_s": 3601}, "retain_s"),
        ({"retain_s": 1, "ttl_s": 1}, "ttl_s"),
    ],
)
def test_lease_with_a_wrong_body_is_refused(fresh: Service, body: dict[str, Any], field: str) -> None:
    answer(fresh, "a", "s")
    assert errors_of(fresh.shared_client.put(path_of("s"), json=body)) == [field]
