"""Two services that share a Redis: what one has stored the other loads, and resets and failures reach both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.identities import check_identities
from tests.harness.redis_server import RedisServer, redis_server
from tests.harness.server_process import paused
from tests.harness.service_process import Served, is_well, serving, wait_until
from tests.service.test_answers import BLOCK, OUTPUT, turn_over
from tests.service.test_tiers import NUM_TRIES, prompt_of, settings

OUTAGE = "tier redis: the server cannot be reached; no block is kept or found"


def redis_settings(server: RedisServer, folder: Path) -> dict[str, object]:
    tier = {"type": "redis", "url": server.url, "connect_timeout_s": 0.5, "io_timeout_s": 1, "timeout_s": 5}
    return settings(folder, tiers=json.dumps([tier]))


def tier(served: Served) -> Any:
    return served.stats()["tiers"]["redis"]


def hit_of(served: Served, prompt: list[int], answer: list[int], name: str) -> int:
    """Ask, expect the answer, and return how many tokens came from the tier."""
    found = served.complete(prompt, name, max_tokens=OUTPUT)
    assert found["choices"][0]["token_ids"] == answer
    served.settle()
    return int(served.get(f"/admin/v1/requests/{name}")["prompt_tokens"]["tier_hit"].get("redis", 0))


def empty(served: Served, number: int) -> None:
    """Empty the pool and the device."""
    assert served.http.post("/admin/v1/reset", json={"tiers": ["host"]}).status_code == 200
    turn_over(served, number)


def blocks_of(served: Served) -> list[str]:
    """Hashes of the blocks in the pool, in the order of their position."""
    items = served.get("/admin/v1/blocks?limit=1000")["items"]
    return [one["hash"] for one in sorted(items, key=lambda one: one["position"])]


@pytest.mark.long
@pytest.mark.parametrize("what", ["all", "match", "block"])
def test_reset_of_a_server_that_is_down_holds_over_a_kill(tmp_path: Path, what: str) -> None:
    prompt, other = prompt_of(0), prompt_of(1)
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        given = redis_settings(server, tmp_path)
        with serving(tmp_path / "a", **given) as first:
            answer = first.tokens(prompt, max_tokens=OUTPUT)
            first.settle()
            blocks = blocks_of(first)
            other_answer = first.tokens(other, max_tokens=OUTPUT)
            first.settle()
            wait_until(lambda: tier(first)["stored"] >= 30 and not tier(first)["open_jobs"], "stored in the tier")
            assert tier(first)["open_resets"] == 0

            server.kill()
            if what == "block":
                done = first.http.delete(f"/admin/v1/blocks/{blocks[4]}")
            else:
                body = {"drain_timeout_s": 0.0, "tiers": ["redis"]}
                match = {} if what == "all" else {"match": {"request": "*"}}
                done = first.http.post("/admin/v1/reset", json=body | match)
            assert done.status_code == 202, done.text
            assert tier(first)["open_resets"] == 1
            first.process.kill()
            first.process.wait(60)

        with serving(tmp_path / "a", is_up=lambda answer: answer.status_code == 200, **given) as second:
            assert tier(second)["open_resets"] == 1
            assert hit_of(second, prompt, answer, "while-down") == 0
            server.start()
            wait_until(lambda: is_well(second.http.get("/readyz")), "well again")
            wait_until(lambda: tier(second)["open_resets"] == 0, "the reset")
        # What the server holds now, as any engine finds it.
        with serving(tmp_path / "b", **given) as third:
            for number in range(NUM_TRIES):
                found = hit_of(third, prompt, answer, f"after-{number}")
                rest = hit_of(third, other, other_answer, f"other-{number}")
                assert found <= (BLOCK * 4 if what == "block" else 0)
                if what != "block" or (found, rest) == (BLOCK * 4, BLOCK * 15):
                    assert what == "block" or rest == 0
                    break
                empty(third, number)
            else:
                raise AssertionError(f"never served from the tier: {third.stats()}")


@pytest.mark.long
def test_prompts_are_answered_while_the_server_hangs(tmp_path: Path) -> None:
    prompt = prompt_of(0)
    with redis_server(tmp_path) as server, serving(tmp_path / "a", **redis_settings(server, tmp_path)) as one:
        answer = one.tokens(prompt, max_tokens=OUTPUT)
        one.settle()
        wait_until(lambda: tier(one)["stored"] >= 15 and not tier(one)["open_jobs"], "stored in the tier")
        with paused(server):
            for number in range(NUM_TRIES):
                empty(one, number)
                assert hit_of(one, prompt, answer, f"paused-{number}") == 0
                if tier(one)["unavailable"]:
                    break
            late = "tier redis: the server did not answer in time; no block is kept or found"
            wait_until(lambda: late in one.get("/readyz")["degraded"], "degraded")
            assert 'kvferry_tier_unavailable{tier="redis"} 1' in one.http.get("/metrics").text
        wait_until(lambda: is_well(one.http.get("/readyz")), "well again")
        for number in range(NUM_TRIES):
            empty(one, NUM_TRIES + number)
            if hit_of(one, prompt, answer, f"again-{number}") == BLOCK * 15:
                break
        else:
            raise AssertionError(f"never served from the tier: {one.stats()}")
        assert tier(one)["corrupt"] == 0
        check_identities(one.settle())


@pytest.mark.long
def test_two_services_share_blocks_resets_and_outages(tmp_path: Path) -> None:
    prompt = prompt_of(0)
    with (
        redis_server(tmp_path) as server,
        serving(tmp_path / "a", **redis_settings(server, tmp_path)) as first,
        serving(tmp_path / "b", **redis_settings(server, tmp_path)) as second,
    ):
        answer = first.tokens(prompt, max_tokens=OUTPUT)
        first.settle()
        wait_until(lambda: tier(first)["stored"] >= 15 and not tier(first)["open_jobs"], "stored in the tier")

        for number in range(NUM_TRIES):
            if hit_of(second, prompt, answer, f"shared-{number}") == BLOCK * 15:
                break
            empty(second, number)
        else:
            raise AssertionError(f"never served from the tier: {second.stats()}")
        assert tier(second)["promoted"] >= 15

        done = first.http.post("/admin/v1/reset", json={"tiers": ["redis"]})
        assert done.status_code in (200, 202)
        wait_until(lambda: not tier(first)["open_jobs"], "the reset")
        empty(second, NUM_TRIES)
        assert hit_of(second, prompt, answer, "after-reset") == 0

        server.kill()
        for number in range(NUM_TRIES):
            for served in (first, second):
                empty(served, NUM_TRIES + 1 + number)
                assert hit_of(served, prompt, answer, f"killed-{number}") == 0
            if all(tier(served)["unavailable"] for served in (first, second)):
                break
        for served in (first, second):
            wait_until(lambda served=served: OUTAGE in served.get("/readyz")["degraded"], "degraded")
            assert 'kvferry_tier_unavailable{tier="redis"} 1' in served.http.get("/metrics").text
            assert "Traceback" not in served.log()
            assert str(server.port) not in json.dumps(served.get("/readyz"))
        server.start()
        for served in (first, second):
            wait_until(lambda served=served: not served.get("/readyz")["degraded"], "well again")
            assert tier(served)["corrupt"] == 0
            check_identities(served.settle())

        # One engine dies while the other resets what both share.
        for number in range(NUM_TRIES):
            empty(first, number)
            assert first.tokens(prompt, max_tokens=OUTPUT) == answer
            first.settle()
            wait_until(lambda: not tier(first)["open_jobs"], "stored in the tier")
            # What is stored before the tier sees that the server has lost its state is lost with it.
            if tier(first)["blocks"] >= 15:
                break
        else:
            raise AssertionError(f"never stored in the tier: {first.stats()}")
        second.process.kill()
        second.process.wait(60)
        assert first.http.post("/admin/v1/reset", json={"tiers": ["redis"]}).status_code in (200, 202)
        wait_until(lambda: not tier(first)["open_resets"], "the reset")
        with serving(tmp_path / "b", **redis_settings(server, tmp_path)) as again:
            assert hit_of(again, prompt, answer, "after-kill") == 0
