"""Two services that share a folder: what one has stored the other loads, a reset holds for both, and one is killed."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving, wait_until
from tests.service.test_answers import BLOCK, OUTPUT, turn_over
from tests.service.test_tiers import NUM_TRIES, prompt_of, settings

SEEDS = itertools.count(100)
"""Different prompts each time: those that the device still holds would evict nothing."""


def tier(served: Served) -> Any:
    return served.stats()["tiers"]["fs"]


def tier_hit(served: Served, prompt: list[int], answer: list[int], name: str) -> int:
    """Ask, expect the answer, and return how many tokens came from the tier."""
    found = served.complete(prompt, name, max_tokens=OUTPUT)
    assert found["choices"][0]["token_ids"] == answer
    served.settle()
    return int(served.get(f"/admin/v1/requests/{name}")["prompt_tokens"]["tier_hit"].get("fs", 0))


def ask_with_empty_pool(served: Served, prompt: list[int], answer: list[int], name: str) -> int:
    """Ask until all full blocks came from the tier; return how many tokens did."""
    for number in range(NUM_TRIES):
        assert served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
        turn_over(served, next(SEEDS))
        hit = tier_hit(served, prompt, answer, f"{name}-{number}")
        if hit:
            return hit
    raise AssertionError(f"never served from the tier: {served.stats()}")


@pytest.mark.long
def test_two_services_share_a_folder_and_survive_a_kill(tmp_path: Path) -> None:
    entry = {"type": "fs", "path": str(tmp_path / "shared"), "max_bytes": "1GiB", "shared": True}
    given = settings(tmp_path, tiers=json.dumps([entry]))
    prompt, other = prompt_of(0), prompt_of(1)
    with serving(tmp_path / "b", **given) as second:
        with serving(tmp_path / "a", **given) as first:
            wait_until(lambda: not first.get("/readyz")["degraded"], "the folder is measured")
            answers = [first.tokens(one, max_tokens=OUTPUT) for one in (prompt, other)]
            first.settle()
            wait_until(lambda: tier(first)["stored"] >= 30 and not tier(first)["open_jobs"], "stored in the tier")
            assert ask_with_empty_pool(second, prompt, answers[0], "shared") == BLOCK * 15
            # The first engine evicts for both; killed, it returns nothing.
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        assert ask_with_empty_pool(second, other, answers[1], "killed") == BLOCK * 15
        with serving(tmp_path / "c", **given) as third:
            assert ask_with_empty_pool(third, prompt, answers[0], "cold") == BLOCK * 15
            done = third.http.post("/admin/v1/reset", json={"tiers": ["fs"]})
            assert done.status_code in (200, 202)
            wait_until(lambda: not tier(third)["open_jobs"], "the reset")
            assert second.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
            turn_over(second, next(SEEDS))
            assert tier_hit(second, prompt, answers[0], "after-reset") == 0
            for served in (second, third):
                assert (tier(served)["corrupt"], tier(served)["failed"]) == (0, 0)
                assert "Traceback" not in served.log()
                check_identities(served.settle())
