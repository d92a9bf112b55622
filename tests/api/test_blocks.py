from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from kvferry.core.pool.resize import PoolResize, Todo
from tests.harness.loop_engine import BLOCK_BYTES, LoopRequest
from tests.harness.loop_service import Service, fill, pages
from tests.harness.waiting import DEADLINE_S, wait_until

BLOCKS = "/admin/v1/blocks"


def test_a_block_is_shown_with_everything_the_contract_names(fresh: Service, client: httpx.Client) -> None:
    """vllm#53893, dynamo#10066: no eviction counter, no view of what is held."""
    hashes = fill(fresh, LoopRequest("one", 64, seed=1, tenant="a1b2", lora="sql"))
    fill(fresh, LoopRequest("two", 64, seed=1, tenant="a1b2", lora="sql"))
    shown = client.get(f"{BLOCKS}/{hashes[1]}").json()
    listed = client.get(BLOCKS).json()["items"]
    assert client.get(f"{BLOCKS}/{hashes[1].upper()}").json() == shown
    assert shown in listed
    assert shown["key"] == shown["hash"] == hashes[1]
    assert (shown["group"], shown["size"], shown["state"], shown["position"]) == (0, BLOCK_BYTES, "ready", 1)
    assert (shown["request"], shown["tenant"], shown["lora"]) == ("one", "a1b2", "sql")
    assert shown["stored_at"].endswith("Z")
    assert shown["last_hit"].endswith("Z")
    assert (shown["hits"], shown["tiers"], shown["pinned_until"]) == (1, ["host"], None)
    tail = next(item for item in listed if item["hash"] == hashes[3])
    assert (tail["hits"], tail["last_hit"]) == (0, None)


def test_a_block_shows_the_class_in_which_it_is_evicted(fresh: Service, client: httpx.Client) -> None:
    """The highest that it was offered in: a request of a lower one does not take it back."""
    for name in ("low", "high"):
        client.put(f"/admin/v1/requests/{name}/policy", json={"priority": name})
    stored = {name: fill(fresh, LoopRequest(name, 64, seed=1)) for name in ("low", "normal")}
    assert stored["low"] == stored["normal"]
    stored["high"] = fill(fresh, LoopRequest("high", 64, seed=2))
    fill(fresh, LoopRequest("low", 64, seed=2))
    for name, priority in (("normal", "normal"), ("high", "high")):
        assert {client.get(f"{BLOCKS}/{block}").json()["priority"] for block in stored[name]} == {priority}
    other = fill(fresh, LoopRequest("low", 64, seed=3))
    listed = {item["hash"]: item["priority"] for item in client.get(BLOCKS).json()["items"]}
    assert {listed[block] for block in other} == {"low"}


def test_block_state_follows_pins_and_loads(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("one", 96, seed=1))

    def states(client: httpx.Client) -> list[str]:
        listed = {item["hash"]: item["state"] for item in client.get(BLOCKS).json()["items"]}
        one_by_one = [client.get(f"{BLOCKS}/{block}").json()["state"] for block in hashes]
        assert [listed[block] for block in hashes] == one_by_one
        return one_by_one

    assert states(client) == ["ready"] * 6
    client.put(f"{BLOCKS}/{hashes[0]}/pin")
    client.put(f"{BLOCKS}/{hashes[5]}/pin")
    assert states(client) == ["pinned", *["ready"] * 4, "pinned"]
    fresh.engine.hold_copies()
    two = fresh.engine.enqueue(LoopRequest("two", 80, seed=1))
    wait_until(lambda: fresh.engine.num_held_copies == 1, "a load is in flight")
    assert states(client) == [*["loading"] * 4, "ready", "pinned"]
    pool = client.get("/admin/v1/stats").json()["pool"]
    assert (pool["loading"], pool["pinned"], pool["ready"]) == (4, 5, 6)
    fresh.engine.release_copies()
    assert two.done.wait(DEADLINE_S)
    assert states(client) == ["pinned", *["ready"] * 4, "pinned"]
    client.delete(f"{BLOCKS}/{hashes[0]}/pin")
    assert states(client) == [*["ready"] * 5, "pinned"]


def test_pages_hold_each_block_once(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, *(LoopRequest(f"r{number}", 96, seed=number) for number in range(5)))
    for limit in (1, 7, 1000):
        items = pages(client, BLOCKS, limit)
        assert sorted(item["hash"] for item in items) == sorted(hashes)
        assert [item["slot"] for item in items] == sorted(item["slot"] for item in items)


def test_pages_are_stable_while_blocks_go(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("one", 320, seed=1))
    first = client.get(BLOCKS, params={"limit": 5}).json()
    shown = [item["hash"] for item in first["items"]]
    gone = [shown[0], next(block for block in hashes if block not in shown)]
    for block in gone:
        assert client.delete(f"{BLOCKS}/{block}").status_code == 204
    rest = client.get(BLOCKS, params={"limit": 100, "cursor": first["next_cursor"]}).json()
    assert sorted(shown + [item["hash"] for item in rest["items"]]) == sorted(set(hashes) - {gone[1]})


def test_a_block_is_dropped(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("one", 64, seed=1))
    assert client.delete(f"{BLOCKS}/{hashes[0]}").status_code == 204
    assert client.delete(f"{BLOCKS}/{hashes[0]}").status_code == 404
    assert client.get(f"{BLOCKS}/{hashes[0]}").status_code == 404
    assert client.get("/admin/v1/stats").json()["evictions"]["by_reason"]["operator"] == 1
    fresh.engine.answer(LoopRequest("two", 64, seed=1))
    assert client.get("/admin/v1/stats").json()["prompt_tokens"]["host_hit"] == 0


@pytest.mark.parametrize(
    "name", ["00", "zz", "abc", "00ff", "ff" * 33, "f" * 2000, "-", "0x00ff", "%00%00", "caf\u00e9", " "]
)
def test_block_hash_when_invalid_is_404_or_422(api: httpx.Client, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("PUT", "/pin"), ("DELETE", "/pin")):
        answer = api.request(method, f"{BLOCKS}/{name}{path}")
        assert answer.status_code in (404, 422)
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_pinned_block_when_all_others_are_evicted_stays(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("pinned", 64, seed=1))
    answer = client.put(f"{BLOCKS}/{hashes[0]}/pin", json={"ttl_s": 3600})
    assert answer.status_code == 200
    assert answer.json()["hash"] == hashes[0]
    assert client.get(f"{BLOCKS}/{hashes[0]}").json()["pinned_until"] == answer.json()["pinned_until"]
    assert client.get("/admin/v1/stats").json()["pool"]["pinned"] == 1
    fill(fresh, *(LoopRequest(f"r{number}", 320, seed=100 + number) for number in range(20)))
    assert client.get(f"{BLOCKS}/{hashes[0]}").status_code == 200
    assert client.get(f"{BLOCKS}/{hashes[1]}").status_code == 404
    assert client.delete(f"{BLOCKS}/{hashes[0]}/pin").status_code == 204
    assert client.delete(f"{BLOCKS}/{hashes[0]}/pin").status_code == 404
    assert client.get("/admin/v1/stats").json()["pool"]["pinned"] == 0


def test_pin_of_a_block_in_a_leaving_extent_is_409(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("one", 96, seed=1))
    resize = PoolResize(fresh.engine.manager, extent_slots=2)
    resize.request(4)
    leaving, staying = client.get(f"{BLOCKS}/{hashes[4]}").json(), client.get(f"{BLOCKS}/{hashes[1]}").json()
    assert (staying["slot"], leaving["slot"]) == (1, 4)
    resize.step(0.0)
    answer = client.put(f"{BLOCKS}/{hashes[4]}/pin")
    assert answer.status_code == 409
    assert "is being removed" in answer.json()["detail"]
    assert client.put(f"{BLOCKS}/{hashes[1]}/pin").status_code == 200
    while resize.step(0.0) is not Todo.MEMORY:
        pass
    resize.acknowledge(4)
    assert client.get(f"{BLOCKS}/{hashes[4]}").status_code == 404
    pool = client.get("/admin/v1/stats").json()["pool"]
    assert (pool["slots"], pool["wanted_slots"], pool["pinned"]) == (4, 4, 1)
    assert "kvferry_pool_wanted_slots 4.0" in client.get("/metrics").text
    assert client.get("/admin/v1/slots/map").json()["slots"] == 4


def test_a_pin_needs_no_body_moves_and_ends_by_itself(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("pinned", 64, seed=1))
    url = f"{BLOCKS}/{hashes[0]}/pin"
    first = client.put(url).json()["pinned_until"]
    assert client.put(url, json={"ttl_s": 7200}).json()["pinned_until"] > first
    client.put(url, json={"ttl_s": 0.01})

    def unpinned() -> bool:
        fresh.engine.wake()
        return bool(client.get("/admin/v1/stats").json()["pool"]["pinned"] == 0)

    wait_until(unpinned, "the pin has ended")


def test_pin_when_its_body_is_invalid_is_refused(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("one", 64, seed=1))
    bodies: list[Any] = [{"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": "60"}, {"ttl_s": True}, {"ttl": 5}, [], "x"]
    for body in bodies:
        assert client.put(f"{BLOCKS}/{hashes[0]}/pin", json=body).status_code == 422, body
        assert client.get("/admin/v1/stats").json()["pool"]["pinned"] == 0, body


def test_pins_beyond_their_share_of_the_pool_are_409(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, *(LoopRequest(f"r{number}", 320, seed=number) for number in range(4)))
    statuses = [client.put(f"{BLOCKS}/{block}/pin").status_code for block in hashes[:70]]
    assert statuses == [200] * 64 + [409] * 6
    refused = client.put(f"{BLOCKS}/{hashes[70]}/pin")
    assert refused.json()["type"] == "urn:kvferry:problem:pin-limit"
    assert "25% of the pool" in refused.json()["detail"]
    assert client.put(f"{BLOCKS}/{hashes[0]}/pin").status_code == 200
    client.delete(f"{BLOCKS}/{hashes[0]}/pin")
    assert client.put(f"{BLOCKS}/{hashes[70]}/pin").status_code == 200


def test_pin_limit_when_below_one_percent_is_shown_exactly(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, LoopRequest("r", 320, seed=1))
    client.patch("/admin/v1/config", json={"max_pinned_fraction": 0.001})
    details = [client.put(f"{BLOCKS}/{block}/pin").json().get("detail", "") for block in hashes[:2]]
    client.patch("/admin/v1/config", json={"max_pinned_fraction": None})
    assert "0.1% of the pool" in details[-1]


def test_the_map_shows_every_slot(fresh: Service, client: httpx.Client) -> None:
    fill(fresh, LoopRequest("one", 160, seed=1))
    fresh.engine.hold_copies()
    fresh.engine.answer(LoopRequest("two", 64, seed=2))
    wait_until(lambda: fresh.engine.num_held_copies > 0, "a store is in flight")
    answer = client.get("/admin/v1/slots/map").json()
    pool = client.get("/admin/v1/stats").json()["pool"]
    fresh.engine.release_copies()
    states = base64.b64decode(answer["states"], validate=True)
    counts = {name: states.count(code) for name, code in answer["legend"].items()}
    assert len(states) == answer["slots"] == pool["slots"]
    assert sum(counts.values()) == pool["slots"]
    assert (counts["ready"], counts["storing"], counts["free"]) == (10, 4, pool["free"])


def totals(client: httpx.Client, **query: Any) -> dict[str, int]:
    answer = client.get("/admin/v1/slots/map", params=query).json()
    return {name: sum(counts) for name, counts in zip(answer["classes"], answer["counts"], strict=True)}


def test_slot_cells_when_asked_for_count_neighbors_by_class(fresh: Service, client: httpx.Client) -> None:
    fill(fresh, LoopRequest("one", 160, seed=1, tenant="a1"), LoopRequest("one", 160, seed=1, tenant="a1"))
    fill(fresh, LoopRequest("two", 64, seed=2))
    answer = client.get("/admin/v1/slots/map?cells=100").json()
    assert (answer["slots"], answer["slots_per_cell"], answer["by"]) == (256, 3, "state")
    by_state = dict(zip(answer["classes"], answer["counts"], strict=True))
    assert by_state["ready"] == [3, 3, 3, 3, 2, *[0] * 81]
    assert by_state["free"] == [0, 0, 0, 0, 1, *[3] * 80, 1]
    hits = totals(client, by="hits", cells=7)
    assert hits == {"no block": 242, "0": 5, "1": 9, "2 to 3": 0, "4 to 15": 0, "16 to 63": 0, "64 or more": 0}
    assert totals(client, by="tenant") == {"no block": 242, "no tenant": 4, "a1": 10, "other tenants": 0}
    assert sum(totals(client, by="age").values()) - totals(client, by="age")["no block"] == 14


def test_slot_cells_when_tenants_are_many_name_the_largest(fresh: Service, client: httpx.Client) -> None:
    fill(fresh, *(LoopRequest(f"r{number}", 16 * number, seed=number, tenant=f"{number}") for number in range(1, 10)))
    largest = {f"{number}": number for number in (9, 8, 7, 6, 5, 4)}
    counts = totals(client, by="tenant", cells=1)
    assert counts == {"no block": 211, "no tenant": 0, **largest, "other tenants": 6}


def test_blocks_of_a_range_of_slots_are_listed_page_by_page(fresh: Service, client: httpx.Client) -> None:
    fill(fresh, LoopRequest("one", 320, seed=1))
    part = {"first_slot": 3, "last_slot": 11, "limit": 6}
    first = client.get(BLOCKS, params=part).json()
    second = client.get(BLOCKS, params={**part, "cursor": first["next_cursor"]}).json()
    assert [block["slot"] for block in first["items"] + second["items"]] == list(range(3, 12))
    assert client.get(f"{BLOCKS}?first_slot=5&last_slot=4").json() == {"items": [], "next_cursor": None}
