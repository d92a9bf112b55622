"""What operators and end users say about a request takes effect, and shows."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from httpx_sse import connect_sse

from tests.harness.service_process import Served, serving, wait_until

BLOCK = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), device_blocks=200) as running:
        yield running


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [(number * 91 + i * 7) % 240 + 3 for i in range(blocks * BLOCK + 2)]


@pytest.mark.parametrize(("number", "value"), list(enumerate([True, "5", 5.5, -1])))
def test_a_cap_of_a_wrong_type_from_an_end_user_is_ignored(served: Served, number: int, value: object) -> None:
    name = f"bad-cap-{value}"
    served.complete(prompt(number), name, max_tokens=2, kv_transfer_params={"max_offload_tokens": value})
    served.settle()
    about = served.get(f"/admin/v1/requests/{name}")
    assert about["policy"]["max_offload_tokens"] == {"value": "unlimited", "source": "default"}
    assert about["store"]["stored"] == 8
    assert "kv_transfer_params.max_offload_tokens" in served.log()


def test_an_override_changed_while_the_request_runs(served: Served) -> None:
    body = {"model": "tiny", "prompt": prompt(2002), "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with served.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-ID": "running"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert served.get("/admin/v1/requests/running")["state"] == "running"
        before = served.get("/admin/v1/requests/running")["store"]["skipped"]["prompt_only"]
        put = served.http.put("/admin/v1/requests/running/policy", json={"offload_prompt_only": False})
        assert put.status_code == 200
        wait_until(lambda: served.get("/admin/v1/requests/running")["store"]["stored"] > 8, "decode blocks are stored")
        about = served.get("/admin/v1/requests/running")
        assert about["policy"]["offload_prompt_only"] == {"value": False, "source": "override"}
        assert about["store"]["skipped"]["prompt_only"] >= before
        assert served.http.delete("/admin/v1/requests/running/policy").status_code in (200, 204)
        assert served.get("/admin/v1/requests/running")["policy"]["offload_prompt_only"]["source"] == "default"
    wait_until(lambda: served.get("/admin/v1/requests/running")["state"] == "finished", "canceled when we left")


def test_rule_by_tenant_and_priority_sets_the_policy(served: Served) -> None:
    salt = "a-salt-of-this-test"
    match = {"cache_salt": salt, "priority": {"min": 5}, "prompt_tokens": {"max": 1000}}
    made = served.http.post("/admin/v1/rules", json={"name": "paying", "match": match, "policy": {"store": False}})
    assert made.status_code == 201, made.text
    for number, name, priority, cache_salt in (
        (3001, "matches", 5, salt),
        (3002, "of-too-low-a-priority", 4, salt),
        (3003, "of-another-tenant", 5, "another-salt"),
        (3004, "of-no-tenant", 5, None),
    ):
        served.complete(prompt(number), name, max_tokens=2, priority=priority, cache_salt=cache_salt)
        source = served.get(f"/admin/v1/requests/{name}")["policy"]["store"]["source"]
        assert source == ("rule:paying" if name == "matches" else "default"), name
    served.settle()
    assert served.get("/admin/v1/requests/matches")["store"]["skipped"]["disabled"] == 8
    assert served.get("/admin/v1/requests/of-no-tenant")["store"]["stored"] == 8
    assert made.json()["match"]["tenant"] == served.get("/admin/v1/requests/matches")["tenant"]
    assert salt not in served.log()
    assert served.http.delete("/admin/v1/rules/paying").status_code == 204


def test_a_pin_ends_by_itself_while_the_engine_idles(served: Served) -> None:
    served.complete(prompt(3006), "pinned", max_tokens=2)
    served.settle()
    block = next(item for item in served.get("/admin/v1/blocks?limit=1000")["items"] if item["request"] == "pinned")
    path = f"/admin/v1/blocks/{block['hash']}"
    assert block["state"] == "ready"
    assert served.http.put(f"{path}/pin", json={"ttl_s": 2}).status_code == 200
    assert served.get(path)["state"] == "pinned"
    wait_until(lambda: served.get(path)["state"] == "ready", "the pin has ended")
    assert served.get(path)["pinned_until"] is None
    assert served.http.delete(f"{path}/pin").status_code == 404


def test_events_report_the_blocks_of_a_request(served: Served) -> None:
    with connect_sse(served.http, "GET", "/admin/v1/events", params={"type": ["stored", "finished"]}) as source:
        events = (json.loads(event.data) for event in source.iter_sse())
        assert next(events)["type"] == "open"
        served.complete(prompt(3005), "watched", max_tokens=3, ignore_eos=True)
        seen = {event["type"]: event for event in (next(events), next(events))}
    assert seen["finished"]["request"] == seen["stored"]["request"] == "watched"
    assert (seen["finished"]["num_prompt_tokens"], seen["finished"]["num_output_tokens"]) == (8 * BLOCK + 2, 3)
    assert seen["stored"]["blocks"] == len(seen["stored"]["hashes"]) == 8
    for block in seen["stored"]["hashes"]:
        assert served.get(f"/admin/v1/blocks/{block}")["request"] == "watched"


def test_rules_when_process_is_killed_or_database_removed_hold(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ruled")
    with serving(folder) as first:
        rule = first.http.put("/admin/v1/rules/kept", json={"order": 3, "policy": {"load": False}}).json()
        first.http.put("/admin/v1/requests/kept/policy", json={"store": False})
        first.process.kill()
        first.process.wait()
    with serving(folder) as second:
        assert "policies: restored 1 overrides and 1 rules" in second.log()
        for name in ("kvferry.db", "kvferry.db-wal", "kvferry.db-shm"):
            (folder / name).unlink(missing_ok=True)
        wait_until(lambda: second.get("/readyz")["degraded"], "the removed file is noticed")
        assert second.http.put("/admin/v1/requests/other/policy", json={"store": False}).status_code == 503
        assert second.get("/admin/v1/rules")["items"] == [rule]
        second.complete(prompt(1), "any", max_tokens=2)
        assert second.get("/admin/v1/requests/any")["policy"]["load"] == {"value": False, "source": "rule:kept"}
