"""What other pools would have found, over HTTP and in the queue before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.app.what_if import MAX_QUEUED_KEYS, Present, WhatIf
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import RequestBlocks
from tests.harness.loop_engine import BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import READ, Service
from tests.harness.waiting import wait_until

PATH = "/admin/v1/what-if"


def ask(service: Service) -> dict[str, Any]:
    answer = service.shared_client.get(PATH)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_if_before_any_request_has_no_curves(fresh: Service) -> None:
    answer = ask(fresh)
    assert answer["since"] is None
    assert answer["curves"] == []
    assert answer["next_gib"] == {"hit_tokens_per_hour": None, "prefill_seconds_per_hour": None}
    assert answer["bias"]


def test_what_if_shows_what_other_sizes_would_have_found(fresh: Service) -> None:
    for number in range(12):
        fresh.engine.answer(LoopRequest(f"one{number}", 64 * BLOCK_TOKENS + 1, seed=number % 3, num_output_tokens=1))
        fresh.settle()
    fresh.context.process.what_if.start()
    wait_until(lambda: ask(fresh)["prompt_tokens"] == 12 * (64 * BLOCK_TOKENS + 1), "all requests are simulated")
    answer = ask(fresh)
    stats = fresh.shared_client.get("/admin/v1/stats").json()
    served = 1 - stats["prompt_tokens"]["recomputed"] / stats["prompt_tokens"]["total"]
    assert answer["current"] == {
        "pool_bytes": stats["pool"]["bytes"],
        "eviction_policy": "lru",
        "store_mode": "eager",
        "hit_rate": served,
    }
    assert len(answer["curves"]) == 6
    for curve in answer["curves"]:
        sizes = [point["pool_bytes"] for point in curve["points"]]
        assert sizes == [int(stats["pool"]["bytes"] * factor) for factor in (0.25, 0.5, 1, 2, 4, 8)]
        assert all(point["low"] <= point["hit_rate"] <= point["high"] for point in curve["points"])
    eager = next(one for one in answer["curves"] if (one["eviction_policy"], one["store_mode"]) == ("lru", "eager"))
    # Three prompts of 64 blocks in turn: 64 slots hold none of them long enough, 256 all.
    assert eager["points"][0]["hit_rate"] == 0
    assert abs(eager["points"][2]["hit_rate"] - served) < 1e-9
    assert served > 0.7
    assert answer["sampled_share"] == 1
    assert answer["dropped_requests"] == 0


def test_what_if_needs_a_token_and_the_read_token_is_enough(guarded: Service) -> None:
    with guarded.client() as client:
        assert client.get(PATH).status_code == 401
        assert client.get(PATH, headers={"Authorization": f"Bearer {READ}"}).status_code == 200


def test_requests_beyond_the_queue_are_dropped_and_counted() -> None:
    what_if = WhatIf(lambda: Present(100, 1, "lru", StoreMode.EAGER), 0, 16, 0, enabled=True)
    keys = [b"%06d" % number for number in range(MAX_QUEUED_KEYS // 4)]
    for _ in range(6):
        what_if.receive(RequestBlocks(1.0, keys, len(keys) * 16, 1, len(keys), 0))
    assert what_if.answer().dropped_requests == 2
    what_if.start()
    wait_until(lambda: what_if.answer().prompt_tokens == 4 * len(keys) * 16, "the others are simulated")
    keys = [b"%06d" % number for number in range(MAX_QUEUED_KEYS + 1)]
    what_if.receive(RequestBlocks(1.0, keys, len(keys) * 16, 1, len(keys), 0))
    wait_until(lambda: what_if.num_queued_keys == 0, "a request longer than the queue is simulated")
    assert what_if.answer().dropped_requests == 2
    what_if.enable(False)
    what_if.receive(RequestBlocks(1.0, keys, len(keys) * 16, 1, len(keys), 0))
    assert what_if.answer().prompt_tokens == 0
    what_if.close()


def hot_and_scans(count: int) -> Iterator[RequestBlocks]:
    """Four prompts of 32 blocks in turn, with prompts of 100 new blocks between: ARC keeps the former, LRU nothing."""
    for number in range(count):
        name, length = (f"hot{number // 2 % 4}", 32) if number % 2 else (f"scan{number}", 100)
        keys = [f"{name}/{i}".encode().ljust(16) for i in range(length)]
        yield RequestBlocks(float(number), keys, length * BLOCK_TOKENS + 1, 1, length, 0)


def test_auto_switches_audits_and_ends_when_an_operator_sets_a_policy(
    fresh: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, what_if = fresh.shared_client, fresh.context.process.what_if

    def patch(**values: Any) -> None:
        assert client.patch("/admin/v1/config", json=values).status_code == 200

    def auto() -> Any:
        return client.get("/admin/v1/stats").json()["auto"]

    def replay(count: int) -> None:
        for one in hot_and_scans(count):
            wait_until(lambda: what_if.num_queued_keys < MAX_QUEUED_KEYS // 2, "the queue is shorter")
            what_if.receive(one)
        wait_until(lambda: what_if.num_queued_keys == 0, "all are simulated")

    what_if.start()
    assert auto() == {"eviction_policy": False, "store_mode": False, "requests": 0, "num_switches": 0, "last": []}
    patch(eviction_policy="auto")
    with monkeypatch.context() as faults:
        faults.setattr("kvferry.core.auto_policy.AutoPolicy.observe", lambda *args: 1 / 0)
        replay(30)
        replay(30)
    # A failed comparison has changed nothing that requests depend on.
    assert client.get("/admin/v1/stats").json()["offloading"]["num_errors"] == 0
    assert what_if.degraded() == ["what-if: requests were not simulated: ZeroDivisionError; its curves have begun anew"]
    replay(600)
    assert what_if.degraded() == []
    state = auto()
    (last,) = state.pop("last")
    assert (state["eviction_policy"], state["store_mode"], state["num_switches"]) == (True, False, 1)
    assert (last["previous_eviction_policy"], last["store_mode"]) == ("lru", "eager")
    assert client.get("/admin/v1/stats").json()["pool"]["eviction_policy"] == last["eviction_policy"] != "lru"
    assert ask(fresh)["auto"]["last"] == [last]
    assert "kvferry_auto_switches_total 1.0" in client.get("/metrics").text
    record = client.get("/admin/v1/audit").json()["items"][0]
    assert (record["token"], record["outcome"], record["what"]["reason"]) == ("service", "applied", last["reason"])
    patch(log_level="info")
    assert auto()["num_switches"] == 1
    patch(eviction_policy="lru")
    replay(600)
    assert client.get("/admin/v1/stats").json()["pool"]["eviction_policy"] == "lru"
    assert (auto()["eviction_policy"], auto()["num_switches"]) == (False, 1)
