"""Two services that share a Mooncake Store: what one has stored the other loads, and resets and failures reach both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.identities import check_identities
from tests.harness.mooncake_server import MooncakeMaster, mooncake_store
from tests.harness.service_process import Served, serving, wait_until
from tests.service.test_answers import BLOCK, OUTPUT
from tests.service.test_redis_tier import empty, hit_of, tier
from tests.service.test_tiers import NUM_TRIES, prompt_of, settings

NAME = "mooncake"
OUTAGE = "tier mooncake: the master cannot be reached; no block is kept or found"


def mooncake_settings(master: MooncakeMaster, folder: Path) -> dict[str, object]:
    entry = {"type": NAME, "master": master.address, "connect_timeout_s": 0.5, "io_timeout_s": 1, "timeout_s": 10}
    return settings(folder, tiers=json.dumps([entry]))


def wait_until_shared(served: Served, prompt: list[int], answer: list[int], first: int) -> None:
    """Ask until the whole prompt comes from the tier."""
    for number in range(first, first + NUM_TRIES):
        if hit_of(served, prompt, answer, f"shared-{number}", NAME) == BLOCK * 15:
            return
        empty(served, number)
    raise AssertionError(f"never served from the tier: {served.stats()}")


@pytest.mark.long
def test_two_services_share_a_mooncake_store_resets_and_outages(tmp_path: Path) -> None:
    prompt = prompt_of(0)
    with (
        mooncake_store(tmp_path) as (master, _),
        serving(tmp_path / "a", **mooncake_settings(master, tmp_path)) as first,
        serving(tmp_path / "b", **mooncake_settings(master, tmp_path)) as second,
    ):
        answer = first.tokens(prompt, max_tokens=OUTPUT)
        first.settle()
        wait_until(lambda: tier(first, NAME)["stored"] >= 15 and not tier(first, NAME)["open_jobs"], "stored")
        wait_until_shared(second, prompt, answer, 0)

        done = first.http.post("/admin/v1/reset", json={"tiers": [NAME]})
        assert done.status_code in (200, 202)
        wait_until(lambda: not tier(first, NAME)["open_jobs"], "the reset")
        empty(second, NUM_TRIES)
        assert hit_of(second, prompt, answer, "after-reset", NAME) == 0

        master.kill()
        for served in (first, second):
            for number in range(NUM_TRIES):
                empty(served, NUM_TRIES + 1 + number)
                assert hit_of(served, prompt, answer, f"killed-{number}", NAME) == 0
                if tier(served, NAME)["unavailable"]:
                    break
            wait_until(lambda served=served: OUTAGE in served.get("/readyz")["degraded"], "degraded")
            assert "Traceback" not in served.log()
            assert str(master.port) not in json.dumps(served.get("/readyz"))
        master.start()
        for served in (first, second):
            wait_until(lambda served=served: not served.get("/readyz")["degraded"], "well again")
            assert tier(served, NAME)["corrupt"] == 0
            check_identities(served.settle())
