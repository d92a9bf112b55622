"""The advice of `GET /admin/v1/stats`: the one change that is worth most by what is measured."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.telemetry.advice import MIN_GAIN_S
from kvferry.core.auto_pause import WINDOW_S
from kvferry.core.stats import EvictionReason
from tests.api import test_breaks
from tests.api.test_what_if import answer_prompts
from tests.harness.loop_engine import BLOCK_BYTES, BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import Service, attach_tier, start_service
from tests.harness.waiting import wait_until

TENANT = "0123456789abcdef"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """A service with a pool of 100 slots, which gives advice at once."""
    with start_service(tmp_path, num_slots=100, advises_after_s=0.0) as service:
        service.context.prompts.start()
        yield service


def advise(service: Service) -> Any:
    """Return the advice with a prefill rate that was just measured."""
    for _ in range(100):
        service.engine.offload.cost_model.tokens_rate.observe(1000, 50.0)
    service.context.adviser.check()
    return service.shared_client.get("/admin/v1/stats").json()["advice"]


def answer(service: Service, name: str, num_blocks: int, **more: Any) -> None:
    request = service.engine.enqueue(LoopRequest(name, num_blocks * BLOCK_TOKENS + 1, **more))

    def is_done() -> bool:
        # A tier's results are polled at each step.
        service.engine.wake()
        return request.done.is_set()

    wait_until(is_done, f"the answer to {name}")
    service.settle()


def test_advice_when_nothing_is_worth_a_change_is_null(small: Service) -> None:
    assert advise(small) is None
    # Each prompt is a hit but for its last token, and all fit.
    for number in range(3):
        answer(small, f"r{number}", 10)
    assert advise(small) is None


def test_advice_before_its_time_is_null(tmp_path: Path) -> None:
    with start_service(tmp_path, num_slots=100, advises_after_s=WINDOW_S) as service:
        service.context.prompts.start()
        answer_prompts(service, 9)
        assert advise(service) is None


def test_advice_is_a_larger_pool_where_the_curve_says_so(small: Service) -> None:
    # 192 different blocks in turn: beside a device of 64, a pool of 100 serves none of them, one of 200 all.
    answer_prompts(small, 9)
    found = advise(small)
    assert (found["kind"], found["command"]) == (
        "pool",
        f"kvferry config set pool_bytes={200 * BLOCK_BYTES // 1024}KiB",
    )
    saved = small.shared_client.get("/admin/v1/what-if").json()["twice_pool"]
    # What it is worth an hour falls as time passes.
    assert found["seconds_per_hour"] >= saved["prefill_seconds_per_hour"] > MIN_GAIN_S
    assert re.fullmatch(r"A pool of twice the size would save [\d,]+ s of prefill an hour, .*", found["text"])


def test_advice_is_lazy_mode_where_it_serves_as_much_as_a_larger_pool(small: Service) -> None:
    # 150 different blocks in turn: device and pool together hold 164.
    for number in range(9):
        answer(small, f"r{number}", 50, seed=number % 3, num_output_tokens=1)
    wait_until(lambda: small.context.prompts.num_queued_keys == 0, "all are counted")
    found = advise(small)
    assert (found["kind"], found["command"]) == ("lazy", "kvferry config set store_mode=lazy")


def test_advice_is_the_limit_of_a_tenant_that_is_at_it(small: Service) -> None:
    limit = {"max_pool_bytes": 10 * BLOCK_BYTES}
    assert small.shared_client.put(f"/admin/v1/tenants/{TENANT}", json=limit).status_code == 200
    for number in range(6):
        answer(small, f"r{number}", 8, seed=number % 2, tenant=TENANT)
    found = advise(small)
    assert (found["kind"], found["command"]) == ("tenant", f"kvferry tenants limit 80KiB {TENANT}")
    missed = small.shared_client.get("/admin/v1/stats").json()["missed_tokens"]["evicted"]
    assert missed[EvictionReason.TENANT_LIMIT] > 0
    assert f"Tenant {TENANT} is at its limit of 40KiB." in found["text"]
    # Twice its limit would take the space of others.
    for number in range(2):
        answer(small, f"other-{number}", 60, seed=100 + number)
        answer(small, f"again-{number}", 8, seed=number, tenant=TENANT)
    assert (advise(small) or {"kind": None})["kind"] != "tenant"
    assert small.shared_client.put(f"/admin/v1/tenants/{TENANT}", json={"max_pool_bytes": "unlimited"}).is_success
    assert (advise(small) or {"kind": None})["kind"] != "tenant"


def test_advice_is_the_most_expensive_break(small: Service) -> None:
    test_breaks.start(small)
    test_breaks.answer_with_clock(small, 2)
    wait_until(lambda: bool(test_breaks.ask(small)["items"]), "they are compared")
    found = advise(small)
    assert (found["kind"], found["command"]) == ("break", "kvferry breaks")
    assert found["text"].startswith("1 prompts differ from token 60 on and are equal again behind")


def test_advice_is_a_tier_for_which_requests_waited_in_vain(small: Service) -> None:
    attach_tier(small)
    for number in range(4):
        answer(small, f"r{number}", 3, seed=number)
    waited_s = small.shared_client.get("/admin/v1/stats").json()["tier_waits"]["seconds"]
    assert waited_s > 0
    found = advise(small)
    assert (found["kind"], found["command"]) == ("tier", "kvferry tiers disable disk")
    assert found["text"].endswith("The last to answer is disk.")
    assert small.shared_client.put("/admin/v1/tiers/disk", json={"enabled": False}).status_code == 200
    assert advise(small) is None
    assert small.shared_client.put("/admin/v1/tiers/disk", json={"enabled": True}).status_code == 200
    assert advise(small)["kind"] == "tier"
    # As after ten minutes without a wait: those before are no reason any more.
    for _ in range(int(WINDOW_S) + 1):
        small.context.samples.add(small.engine.offload.snapshot(), time.time())
    assert advise(small) is None


def test_advice_names_the_tier_that_answers_last(small: Service) -> None:
    attach_tier(small)
    other = {"type": "fs", "path": str(small.database.parent / "tiers" / "other"), "max_bytes": "1GiB"}
    assert small.shared_client.put("/admin/v1/tiers/other", json=other).status_code == 201
    for client, look_up_s in zip(small.engine.offload.tiers.clients, (0.1, 2.0), strict=True):
        for _ in range(64):
            client.look_up_rate.observe(1, look_up_s)
    for number in range(4):
        answer(small, f"r{number}", 3, seed=number)
    found = advise(small)
    assert (found["kind"], found["command"]) == ("tier", "kvferry tiers disable other")
    assert found["text"].endswith("The last to answer is other.")


def test_advice_is_the_one_that_is_worth_most(small: Service) -> None:
    test_breaks.start(small)
    test_breaks.answer_with_clock(small, 2)
    wait_until(lambda: bool(test_breaks.ask(small)["items"]), "they are compared")
    answer_prompts(small, 9)
    assert advise(small)["kind"] == "pool"
