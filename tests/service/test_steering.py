"""What operators and end users say about a request takes effect, and shows."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from httpx_sse import connect_sse

from kvferry.core.keys import tenant_digest
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

BLOCK = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), device_blocks=200) as running:
        yield running


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [(number * 91 + i * 7) % 240 + 3 for i in range(blocks * BLOCK + 2)]


def test_a_cap_of_a_wrong_type_from_an_end_user_is_ignored(served: Served) -> None:
    served.complete(prompt(0), "bad-cap", max_tokens=2, kv_transfer_params={"max_offload_tokens": "5"})
    served.settle()
    about = served.get("/admin/v1/requests/bad-cap")
    assert about["policy"]["max_offload_tokens"] == {"value": "unlimited", "source": "default"}
    assert about["store"]["stored"] == 8
    assert "kv_transfer_params.max_offload_tokens" in served.log()


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


def test_a_default_limit_of_tenants_applies_while_the_engine_idles(served: Served) -> None:
    digest = tenant_digest("a-salt") or ""
    for number in (3010, 3011):
        served.complete(prompt(number), f"salted-{number}", max_tokens=2, cache_salt="a-salt")
        served.settle()
    path, block_bytes = f"/admin/v1/tenants/{digest}", served.stats()["pool"]["slot_bytes"]
    assert served.get(path)["pool_bytes"] == 16 * block_bytes
    try:
        assert served.http.patch("/admin/v1/config", json={"tenant_max_bytes": 3 * block_bytes}).status_code == 200
        assert served.get(path)["max_pool_bytes"] == {"value": 3 * block_bytes, "source": "default"}
        wait_until(lambda: served.get(path)["pool_bytes"] == 3 * block_bytes, "the limit is applied")
        blocks = [one for one in served.get("/admin/v1/blocks?limit=1000")["items"] if one["tenant"] == digest]
        assert sorted((one["request"], one["position"]) for one in blocks) == [("salted-3011", i) for i in range(3)]
    finally:
        assert served.http.patch("/admin/v1/config", json={"tenant_max_bytes": None}).status_code == 200
    assert served.get(path)["max_pool_bytes"]["value"] == "unlimited"


def test_what_if_counts_the_requests_that_end_while_it_is_on(served: Served) -> None:
    def ended(number: int, name: str) -> None:
        served.complete(prompt(number), name, max_tokens=2)
        served.settle()

    ended(3020, "before")
    wait_until(lambda: served.get("/admin/v1/what-if")["prompt_tokens"] > 0, "it is on by default")
    try:
        assert served.http.patch("/admin/v1/config", json={"what_if": False}).status_code == 200
        ended(3021, "uncounted")
        off = served.get("/admin/v1/what-if")
        assert (off["prompt_tokens"], off["points"]) == (0, [])
        assert off["notes"][0] == "Nothing is counted: KVFERRY_WHAT_IF=false."
    finally:
        assert served.http.patch("/admin/v1/config", json={"what_if": None}).status_code == 200
    for name in ("first", "again"):
        ended(3022, name)
    num_tokens = 2 * (8 * BLOCK + 2)
    wait_until(lambda: served.get("/admin/v1/what-if")["prompt_tokens"] == num_tokens, "both are counted")
    answer = served.get("/admin/v1/what-if")
    assert answer["current"]["pool_bytes"] == served.stats()["pool"]["bytes"]
    assert answer["eager"] == answer["lazy"] == answer["ceiling"] == 8 * BLOCK / num_tokens
    assert (answer["unit_tokens"], answer["sampled"]) == (BLOCK, 1)
