"""What caches of other sizes would have served, over HTTP and in the queue before it."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.app.telemetry.curve import Present, WhatIf, WhatIfAnswer
from kvferry.app.telemetry.prompts import MAX_QUEUED_KEYS, PromptFeed
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.pool.events import RequestBlocks, ResetEvent
from tests.harness.loop_engine import BLOCK_BYTES, BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import DEVICE_BYTES, Service
from tests.harness.tier_slots import ORIGIN
from tests.harness.waiting import wait_until

PATH = "/admin/v1/what-if"
LAYOUT = GroupLayout([GroupSpec(16, 1)])


def ask(service: Service) -> dict[str, Any]:
    answer = service.shared_client.get(PATH)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def answer_of(feed: PromptFeed, what_if: WhatIf) -> WhatIfAnswer:
    with feed.lock:
        return what_if.answer(feed.num_dropped)


def answer_prompts(service: Service, count: int, prefix: str = "one") -> None:
    """Have the engine answer prompts of 64 blocks and a token, three different ones in turn, and wait for the curve."""
    for number in range(count):
        service.engine.answer(
            LoopRequest(f"{prefix}{number}", 64 * BLOCK_TOKENS + 1, seed=number % 3, num_output_tokens=1)
        )
        service.settle()
    prompts = service.context.prompts
    wait_until(lambda: prompts.num_queued_keys == 0 and bool(ask(service)["points"]), "all requests are counted")


def blocks(keys: list[bytes]) -> RequestBlocks:
    return RequestBlocks(1.0, 1, ORIGIN, keys, len(keys) * 16 + 1, 1, len(keys), 0)


def test_what_if_before_any_request_has_no_points(fresh: Service) -> None:
    answer = ask(fresh)
    assert answer["points"] == []
    assert (answer["eager"], answer["lazy"], answer["ceiling"], answer["prompt_tokens"]) == (0, 0, 0, 0)
    assert answer["next_gib"] == {"hit_tokens_per_hour": None, "prefill_seconds_per_hour": None}
    assert answer["notes"]


def test_what_if_shows_what_other_sizes_would_have_served(fresh: Service) -> None:
    fresh.context.prompts.start()
    answer_prompts(fresh, 12)
    answer = ask(fresh)
    assert set(answer) == {
        *("since", "prompt_tokens", "current", "points", "unit_tokens", "sampled", "notes"),
        *("ceiling", "eager", "lazy", "next_gib", "twice_pool", "lazy_mode"),
    }
    stats = fresh.shared_client.get("/admin/v1/stats").json()
    served = 1 - stats["prompt_tokens"]["recomputed"] / stats["prompt_tokens"]["total"]
    assert answer["prompt_tokens"] == 12 * (64 * BLOCK_TOKENS + 1)
    assert answer["current"] == {
        "pool_bytes": stats["pool"]["bytes"],
        "device_bytes": DEVICE_BYTES,
        "eviction_policy": "lru",
        "store_mode": "eager",
        "hit_rate": served,
    }
    # Three prompts of 64 blocks in turn: a cache of 192 blocks holds them, one of 128 none of them long enough.
    rates = {point["bytes"] // BLOCK_BYTES: point["hit_rate"] for point in answer["points"]}
    assert len(rates) == 29
    for size, rate in rates.items():
        assert rate == pytest.approx(served if size >= 192 else 0 if size <= 128 else rate), size
    assert answer["eager"] == answer["lazy"] == answer["ceiling"] == pytest.approx(served)
    assert served > 0.7
    assert (answer["unit_tokens"], answer["sampled"]) == (BLOCK_TOKENS, 1)


def test_what_if_counts_anew_when_the_policy_changes(fresh: Service) -> None:
    fresh.context.prompts.start()
    answer_prompts(fresh, 3)
    before = ask(fresh)
    assert fresh.shared_client.patch("/admin/v1/config", json={"eviction_policy": "arc"}).status_code == 200
    after = ask(fresh)
    assert (after["prompt_tokens"], after["points"], after["current"]["eviction_policy"]) == (0, [], "arc")
    assert after["since"] > before["since"]
    # What was used before is not forgotten.
    answer_prompts(fresh, 3, "again")
    assert ask(fresh)["eager"] > 0.9


def test_what_if_forgets_what_a_reset_drops(fresh: Service) -> None:
    fresh.context.prompts.start()
    answer_prompts(fresh, 3)
    assert fresh.shared_client.post("/admin/v1/reset", json={}).status_code == 200
    answer_prompts(fresh, 3, "again")
    answer = ask(fresh)
    assert answer["prompt_tokens"] == 6 * (64 * BLOCK_TOKENS + 1)
    assert (answer["eager"], answer["ceiling"]) == (0, 0)


def test_what_if_leaves_out_requests_that_offloading_does_not_concern(fresh: Service) -> None:
    fresh.context.prompts.start()
    # The device may serve these, as the curve cannot.
    alone = {"kv_transfer_params": {"store": False, "load": False}}
    either = [{"kv_transfer_params": {field: False}} for field in ("load", "store")]
    for number, fields in enumerate([alone, alone, *either, alone]):
        fresh.engine.answer(LoopRequest(f"one{number}", 64 * BLOCK_TOKENS + 1, num_output_tokens=1, **fields))
        fresh.settle()
    wait_until(lambda: fresh.context.prompts.num_queued_keys == 0, "all requests are counted")
    answer = ask(fresh)
    assert answer["prompt_tokens"] == 2 * (64 * BLOCK_TOKENS + 1)
    assert answer["ceiling"] == answer["current"]["hit_rate"] == pytest.approx(0.5, abs=0.01)
    assert any(text.startswith("Requests that may neither store nor load") for text in answer["notes"])


def test_requests_beyond_the_queue_are_dropped_and_counted() -> None:
    what_if = WhatIf(lambda: Present(100, "lru", StoreMode.EAGER), LAYOUT, 0, enabled=True)
    feed = PromptFeed([what_if])
    keys = [b"%06d" % number for number in range(MAX_QUEUED_KEYS // 4)]
    for _ in range(6):
        feed.receive(blocks(keys))
    assert feed.num_dropped == 2
    assert answer_of(feed, what_if).notes[0] == "2 requests are left out: they came faster than they were counted."
    feed.start()
    wait_until(lambda: answer_of(feed, what_if).prompt_tokens == 4 * (len(keys) * 16 + 1), "the others are counted")
    feed.receive(blocks([b"%06d" % number for number in range(MAX_QUEUED_KEYS + 1)]))
    wait_until(lambda: feed.num_queued_keys == 0, "a request longer than the queue is counted")
    assert feed.num_dropped == 2
    feed.close()
    what_if.enable(False)
    what_if.read([blocks(keys)])
    assert what_if.answer(0).prompt_tokens == 0


def test_sizes_count_the_slots_of_all_groups() -> None:
    # A slot of the first group is as many tokens as two of the second one, so that a unit takes three.
    layout = GroupLayout([GroupSpec(32, 64), GroupSpec(16, 32)])
    what_if = WhatIf(lambda: Present(30, "lru", StoreMode.LAZY), layout, 30 * layout.slot_bytes, enabled=True)
    prompt = blocks([b"%06d" % number for number in range(15)])._replace(num_prompt_tokens=15 * 32 + 1)
    what_if.read([prompt, prompt])
    answer = what_if.answer(0)
    assert answer.prompt_tokens == 2 * (15 * 32 + 1)
    assert answer.eager == pytest.approx(10 * 32 / answer.prompt_tokens)
    assert answer.lazy == pytest.approx(15 * 32 / answer.prompt_tokens) == answer.ceiling
    assert answer.notes[-1].startswith("The keys of one group stand for all")


def test_a_request_that_cannot_be_counted_begins_the_curve_anew() -> None:
    what_if = WhatIf(lambda: Present(100, "lru", StoreMode.EAGER), LAYOUT, 0, enabled=True)
    feed = PromptFeed([what_if])
    feed.start()
    feed.receive(blocks([b"1"]))
    wait_until(lambda: answer_of(feed, what_if).prompt_tokens == 17, "it is counted")
    feed.receive(blocks([b"2"])._replace(num_prompt_tokens=None))  # type: ignore[arg-type]
    wait_until(lambda: bool(feed.degraded()), "it is reported")
    assert feed.degraded() == [
        "prompts: requests were not studied: TypeError; the curve of hit rates and partings have begun anew"
    ]
    feed.receive(ResetEvent(1.0, 1, 0))
    feed.receive(blocks([b"3"]))
    wait_until(lambda: not feed.degraded(), "the next one is counted")
    assert answer_of(feed, what_if).prompt_tokens == 17
    feed.close()
