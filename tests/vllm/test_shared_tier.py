"""Two vLLM servers that share a Redis: what one has stored the other loads; failures and resets reach both."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.harness.redis_server import RedisServer, redis_server
from tests.harness.waiting import wait_until
from tests.vllm.engines import transfer_config
from tests.vllm.server import VllmServer, serving
from tests.vllm.test_parallel import BIND
from tests.vllm.test_server import ask, assert_equal_tokens
from tests.vllm.workload import Answer, shared_prefixes

PROMPTS = shared_prefixes(8, prefixes=8, seed=67)
FEW_TOKENS = 3
NUM_TRIES = 10
"""How often to ask until requests were served from the tier: none waits for it longer than computing would take."""
DOWN = "tier redis: the server cannot be reached; no block is kept or found"


def config(redis: RedisServer) -> dict[str, Any]:
    tier = {"type": "redis", "url": redis.url, "connect_timeout_s": 0.5, "io_timeout_s": 1, "timeout_s": 5}
    return transfer_config(load_decision="always", tiers=[tier])


def tier(server: VllmServer) -> Any:
    return server.stats()["tiers"]["redis"]


def empty(server: VllmServer) -> None:
    """Leave the prompts to the tier."""
    server.admin.post("/admin/v1/reset", json={"tiers": ["host"]}).raise_for_status()
    server.client.post("/reset_prefix_cache").raise_for_status()


def ask_all(server: VllmServer, truth: Sequence[Answer]) -> int:
    """Ask for a few tokens of each prompt, and return how many tokens came from the tier."""
    before = server.settled()["prompt_tokens"]["tier_hit"].get("redis", 0)
    few = [replace(answer, token_ids=answer.token_ids[:FEW_TOKENS]) for answer in truth]
    assert_equal_tokens([ask(server, prompt, max_tokens=FEW_TOKENS) for prompt in PROMPTS], few)
    stats = server.settled()
    assert stats["load"]["failed"] == stats["tiers"]["redis"]["corrupt"] == 0
    return int(stats["prompt_tokens"]["tier_hit"].get("redis", 0)) - before


def store_all(server: VllmServer, truth: Sequence[Answer]) -> None:
    """Ask until the tier has stored blocks, and nothing is on its way."""
    before = tier(server)["stored"]
    empty(server)
    ask_all(server, truth)
    wait_until(lambda: tier(server)["stored"] > before and not tier(server)["open_jobs"], "stored in the tier")


def is_served_by_tier(server: VllmServer, truth: Sequence[Answer]) -> bool:
    empty(server)
    return ask_all(server, truth) > 0


def degraded(server: VllmServer) -> list[str]:
    return list(server.admin.get("/readyz").json()["degraded"])


def test_two_servers_share_blocks_outages_and_resets(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    # Block hashes are random otherwise.
    env = BIND | {"PYTHONHASHSEED": "0"}
    with redis_server(tmp_path) as redis, ExitStack() as running:
        first, second = (running.enter_context(serving(llama, config(redis), one, env)) for one in folders)
        store_all(first, truth)
        assert any(is_served_by_tier(second, truth) for _ in range(NUM_TRIES))
        assert tier(second)["promoted"] > 0

        redis.kill()
        for server in (first, second):
            empty(server)
            assert ask_all(server, truth) == 0
            wait_until(lambda: DOWN in degraded(server), "the outage shows")  # noqa: B023
            empty(server)
            assert ask_all(server, truth) == 0
            assert str(redis.port) not in json.dumps(degraded(server))
        redis.start()
        for server in (first, second):
            wait_until(lambda: not degraded(server), "well again")  # noqa: B023
        store_all(first, truth)
        assert any(is_served_by_tier(second, truth) for _ in range(NUM_TRIES))

        second.stop(signal.SIGKILL)
        done = first.admin.post("/admin/v1/reset", json={"tiers": ["redis"]})
        assert done.status_code in (200, 202)
        wait_until(lambda: not tier(first)["open_resets"], "the reset")
        again = running.enter_context(serving(llama, config(redis), folders[1], env))
        assert ask_all(again, truth) == 0
        # What it stored itself is there for the other one.
        wait_until(lambda: tier(again)["stored"] > 0 and not tier(again)["open_jobs"], "stored in the tier")
        assert any(is_served_by_tier(first, truth) for _ in range(NUM_TRIES))
