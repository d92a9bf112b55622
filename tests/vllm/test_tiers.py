"""Tiers inside vLLM: they work in the engine's own process, on the memory that its workers copy from and to."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.engines.vllm.versions import cache_source
from kvferry.cuda_ops.persistent.inspection import inspect_pool
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.waiting import wait_until
from tests.vllm.engines import DEVICE_BLOCKS, InProcess, in_process, transfer_config
from tests.vllm.server import VllmServer, serving
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.test_parallel import BIND, RANKS, mapped_bytes, pool_mappings
from tests.vllm.test_server import ask, assert_equal_tokens
from tests.vllm.workload import Answer, assert_same, shared_prefixes
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

PROMPTS = shared_prefixes(40, prefixes=14, seed=61)
FEW, FEW_TOKENS = 16, 3
SMALL_POOL = "6MiB"
"""48 slots: less than the device, and less than half of what the prompts take."""


@pytest.fixture
def shm_name() -> Iterator[str]:
    """The name of an engine whose pool lies in shared memory for as long as the test runs."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    for path in SHARED_MEMORY.glob(f"kvferry-{name}*"):
        path.unlink()


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
        # Not in vLLM 0.31.
        if cache_source("DISK") is not None:
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


@pytest.mark.parametrize(
    ("has_tier", "trusts", "source"),
    [(False, False, "default"), (True, False, "engine:multimodal"), (True, True, "default")],
)
def test_request_with_an_image_where_there_is_a_tier_is_not_offloaded(
    has_tier: bool, trusts: bool, source: str, llama: Path, tmp_path: Path
) -> None:
    """A client may have given another image the same id, in another engine or before a restart."""
    image = MultiModalFeatureSpec(None, "image", "photo", PlaceholderRange(0, 8), "photo")
    transfer = tiered(tmp_path, trust_mm_uuids=trusts) if has_tier else transfer_config(trust_mm_uuids=trusts)
    with in_process(llama, transfer) as engine:
        for features, expected in (([image], source), ([], "default")):
            live = Request("r", [0] * 40, SamplingParams(max_tokens=1), None, mm_features=features)
            engine.connector.on_new_request(live)
            shown = engine.core.requests.find("r", time.time())
            engine.connector.request_finished(live, [])
            assert shown is not None
            assert {shown.policy.sources["store"], shown.policy.sources["load"]} == {expected}


def test_two_ranks_with_file_tier_when_restarted_recover_blocks(
    llama: Path, tmp_path: Path, truth: list[Answer], shm_name: str
) -> None:
    """A tier reads and writes the memory that the ranks share, and its blocks belong to the pool like others."""
    kept = {"pool_kind": "shm", "engine_name": shm_name}
    file = SHARED_MEMORY / f"kvferry-{shm_name}.pool"
    with serving(llama, tiered(tmp_path, **kept), tmp_path, BIND, tensor_parallel_size=RANKS) as server:
        assert server.stats()["pool"]["ready"] == 0
        mapped = pool_mappings(server)
        assert len(mapped) == RANKS + 1
        assert len(set(map(frozenset, mapped.values()))) == 1
        # Headers are mapped too.
        headers = {process: num_bytes - (6 << 20) for process, num_bytes in mapped_bytes(server).items()}
        ask_some(server, truth)
        for size in (3 << 20, 6 << 20):
            server.resize(size)
            server.resized(size)
            ask_some(server, truth)
            wanted = {process: size + num_bytes for process, num_bytes in headers.items()}
            with server.stepping():
                wait_until(lambda: mapped_bytes(server) == wanted, "all map the size", 60.0)  # noqa: B023
        server.settled()
        wait_until(lambda: not server.stats()["tiers"]["disk"]["open_jobs"], "the tier has it", 30.0)
        server.admin.post("/admin/v1/reset", json={"tiers": ["host"]}).raise_for_status()
        server.client.post("/reset_prefix_cache").raise_for_status()
        ask_some(server, truth)
        stats = server.settled()
        assert stats["prompt_tokens"]["tier_hit"]["disk"] > 0
        assert stats["tiers"]["disk"]["promoted"] > 0
        assert stats["load"]["failed"] == stats["tiers"]["disk"]["corrupt"] == 0
        assert stats["engine"]["workers"] == RANKS
        ready = stats["pool"]["ready"]
        wait_until(lambda: len(inspect_pool(file).recovered.slots) == ready, "all blocks are sealed", 30.0)
        # In the midst of coming to other sizes, of which the next start knows nothing.
        server.resize("256MiB")
        server.resize("16MiB")
        # vLLM kills its engine-core process then, whose connector is not called.
        server.stop(signal.SIGTERM)
    plain = transfer_config(pool_bytes=SMALL_POOL, load_decision="always", **kept)
    with serving(llama, plain, tmp_path, BIND, tensor_parallel_size=RANKS) as server:
        stats = server.stats()
        assert stats["recovery"]["recovered"] == stats["pool"]["ready"] == stats["pool"]["unverified"] == ready
        ask_some(server, truth)
        after = server.settled()
        assert after["prompt_tokens"]["host_hit"] > 0
        assert after["load"]["failed"] == after["load"]["corrupt"] == 0
        # Each rank looked at its part of each block that it had not written itself, and all bytes came back.
        assert after["load"]["bytes"] == after["load"]["blocks"] * after["pool"]["slot_bytes"]
        assert after["pool"]["unverified"] < ready


def ask_some(server: VllmServer, truth: list[Answer]) -> None:
    """Ask for few tokens of a few prompts, since the steps of two ranks take long where there are few cores."""
    few = [replace(answer, token_ids=answer.token_ids[:FEW_TOKENS]) for answer in truth[:FEW]]
    assert_equal_tokens([ask(server, prompt, max_tokens=FEW_TOKENS) for prompt in PROMPTS[:FEW]], few)
