"""Tiers inside vLLM: they work in the engine's own process, on the memory that its workers copy from and to."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.cuda_ops.persistent.inspection import inspect_pool
from tests.harness.waiting import wait_until
from tests.vllm.engines import DEVICE_BLOCKS, InProcess, in_process, transfer_config
from tests.vllm.server import serving
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.test_parallel import BIND, RANKS, mapped_bytes, pool_mappings
from tests.vllm.test_server import ask, assert_equal_tokens
from tests.vllm.workload import Answer, assert_same, shared_prefixes

PROMPTS = shared_prefixes(40, prefixes=14, seed=61)
SMALL_POOL = "6MiB"
"""48 slots: less than the device, and less than half of what the prompts take."""


def tiered(folder: Path, **extra: object) -> dict[str, Any]:
    tiers = [{"type": "fs", "name": "disk", "path": str(folder / "tier"), "max_bytes": "256MiB"}]
    return transfer_config(pool_bytes=SMALL_POOL, load_decision="always", tiers=tiers, **extra)


def drain(engine: InProcess) -> None:
    """Have everything that was stored reach the tier."""
    engine.settle()

    def is_done() -> bool:
        engine.core.expire(time.time())
        engine.settle()
        return not any(link.open_jobs for link in engine.core.tiers.clients)

    wait_until(is_done, "the tier has what it was given", 30.0)


def tier_hits(tokens: Mapping[str, int]) -> int:
    return sum(tokens.values())


def test_file_tier_when_pool_has_evicted_blocks_returns_them(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    with in_process(llama, tiered(tmp_path)) as engine:
        for prompt, wanted in zip(PROMPTS, truth, strict=True):
            assert_same(engine.generate([prompt]), [wanted])
            drain(engine)
        first = engine.snapshot()
        assert first.pool.slots < DEVICE_BLOCKS < first.store.stored
        assert first.evictions.total > 0
        engine.forget_device()
        for prompt, wanted in zip(PROMPTS, truth, strict=True):
            assert_same(engine.generate([prompt]), [wanted])
        drain(engine)
        after = engine.snapshot()
        assert tier_hits(after.prompt_tokens.tier_hit) > tier_hits(first.prompt_tokens.tier_hit)
        assert after.tiers["disk"].counts.corrupt == after.load.failed == 0
        assert engine.metric("vllm:external_prefix_cache_hits") == (
            after.prompt_tokens.host_hit + tier_hits(after.prompt_tokens.tier_hit)
        )
        by_source = {
            metric.labels["source"]: metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == "vllm:prompt_tokens_cached_by_source"
        }
        assert by_source["disk"] == tier_hits(after.prompt_tokens.tier_hit) > 0
        assert by_source["host"] == after.prompt_tokens.host_hit
        assert_nothing_left(engine)
    with in_process(llama, tiered(tmp_path)) as engine:
        wait_until(lambda: not engine.core.tiers.health(), "the tier has read its folder", 30.0)
        # One at a time: no request waits for a tier for long, and a burst would compute most of it.
        for prompt, wanted in zip(PROMPTS, truth, strict=True):
            assert_same(engine.generate([prompt]), [wanted])
        again = engine.settle()
        assert again.prompt_tokens.tier_hit["disk"] > 0
        assert_nothing_left(engine)


def test_file_tier_with_two_ranks_uses_their_shared_memory(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    with serving(llama, tiered(tmp_path), tmp_path, BIND, tensor_parallel_size=RANKS) as server:
        mapped = pool_mappings(server)
        assert len(mapped) == RANKS + 1
        (only,) = {frozenset(inodes) for inodes in mapped.values()}
        # Nothing is left of it when they are killed.
        assert [is_deleted for _, is_deleted in only] == [True]
        for _ in range(2):
            assert_equal_tokens([ask(server, prompt) for prompt in PROMPTS], truth)
        stats = server.settled()
        assert stats["prompt_tokens"]["tier_hit"]["disk"] > 0
        assert stats["load"]["failed"] == stats["tiers"]["disk"]["corrupt"] == 0
        assert stats["engine"]["workers"] == RANKS
        for size in (3 << 20, 12 << 20):
            server.resize(size)
            server.resized(size)
            assert_equal_tokens([ask(server, prompt) for prompt in PROMPTS], truth)
            everywhere = [size] * (RANKS + 1)
            wait_until(lambda: list(mapped_bytes(server).values()) == everywhere, "all map the size", 30.0)  # noqa: B023
        stats = server.settled()
        assert stats["load"]["failed"] == stats["tiers"]["disk"]["corrupt"] == 0


def test_promoted_blocks_when_engine_is_killed_are_recovered(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    few = PROMPTS[:8]
    kept = {"pool_kind": "file", "pool_path": str(tmp_path / "pool"), "engine_name": "promoted"}
    with serving(llama, tiered(tmp_path, **kept), tmp_path, BIND, tensor_parallel_size=RANKS) as server:
        assert_equal_tokens([ask(server, prompt) for prompt in few], truth[: len(few)])
        server.settled()
        wait_until(lambda: not server.stats()["tiers"]["disk"]["open_jobs"], "the tier has it", 30.0)
        server.admin.post("/admin/v1/reset", json={"tiers": ["host"]}).raise_for_status()
        server.client.post("/reset_prefix_cache").raise_for_status()
        assert_equal_tokens([ask(server, prompt) for prompt in few], truth[: len(few)])
        stats = server.settled()
        promoted = stats["tiers"]["disk"]["promoted"]
        ready = stats["pool"]["ready"]
        assert promoted > 0
        file = tmp_path / "pool" / "promoted.pool"
        wait_until(lambda: len(inspect_pool(file).kept.slots) == ready, "all blocks are sealed", 30.0)
        server.stop(signal.SIGKILL)
    plain = transfer_config(pool_bytes=SMALL_POOL, load_decision="always", **kept)
    with serving(llama, plain, tmp_path, BIND, tensor_parallel_size=RANKS) as server:
        assert server.stats()["recovery"]["recovered"] == ready
        assert_equal_tokens([ask(server, prompt) for prompt in few], truth[: len(few)])
        stats = server.settled()
        assert stats["prompt_tokens"]["host_hit"] > 0
        assert stats["load"]["failed"] == stats["load"]["corrupt"] == 0
