"""Pools that outlive their engine, inside vLLM: the next engine begins warm with right blocks, or with none."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvferry.core.errors import StartError
from kvferry.core.stats import MissCause
from kvferry.cuda_ops.persistent.lock import PoolLock
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.server import VllmServer, serving
from tests.vllm.test_server import ask, assert_equal_tokens
from tests.vllm.workload import BLOCK, Answer, assert_same, shared_prefixes

PROMPTS = shared_prefixes(40, prefixes=10, seed=51)
FEW = PROMPTS[:6]
DROPPED = shared_prefixes(4, prefixes=2, seed=52)


def kept_config(folder: Path, **extra: object) -> dict[str, Any]:
    where = {"pool_kind": "file", "pool_path": str(folder / "pool"), "engine_name": "kept"}
    return transfer_config(load_decision="always", **(where | extra))


def recovered(engine: InProcess) -> int:
    """Blocks of an earlier engine that this one began with."""
    started = engine.connector._the_core().context(lambda: False).warm_start
    assert started is not None
    return started.recovered


def hits(server: VllmServer) -> int:
    """Prompt tokens that came from the host pool, on which vLLM and kvferry agree."""
    stats = server.settled()
    found = int(stats["prompt_tokens"]["host_hit"])
    if stats["requests"]["preempted"] == 0 and stats["load"]["failed"] == 0:
        assert server.metric("vllm:external_prefix_cache_hits_total") == found
    return found


def ask_all(server: VllmServer, truth: list[Answer], prompts: list[list[int]] = PROMPTS) -> None:
    assert_equal_tokens([ask(server, prompt) for prompt in prompts], truth[: len(prompts)])


def kill_under_load(server: VllmServer) -> None:
    """End it from one moment to the next, while it computes, stores and loads, and its pool comes to another size."""
    before = server.stats()["requests"]["finished"]

    def go_on() -> None:
        while True:
            for prompt in PROMPTS:
                try:
                    ask(server, prompt)
                except httpx.HTTPError:
                    return

    with ThreadPoolExecutor(3) as clients:
        for _ in range(3):
            clients.submit(go_on)
        for number, size in enumerate(("48MiB", "256MiB", "32MiB", "512MiB", "64MiB"), 1):
            wait_until(lambda: server.stats()["requests"]["finished"] > before + 6 * number, "it works", 60.0)  # noqa: B023
            server.resize(size)
        server.stop(signal.SIGKILL)


def ask_mixed(engine: InProcess, is_token: list[bool]) -> list[int]:
    """Answer a prompt of the same tokens and the same vectors; the mask says which of them count."""
    prompt = {
        "prompt_token_ids": [0] * 2 * BLOCK + FEW[0][: 4 * BLOCK + 5],
        "prompt_embeds": torch.zeros(6 * BLOCK + 5, 128),
        "prompt_is_token_ids": is_token,
    }
    (output,) = engine.llm.generate([prompt], engine.sampling(8), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_prompt_with_embeddings_after_a_restart_is_computed(llama: Path, tmp_path: Path) -> None:
    """vLLM's hashes leave out which tokens are embeddings (vllm#56655)."""
    text, vectors = [True] * (6 * BLOCK + 5), [False] * 2 * BLOCK + [True] * (4 * BLOCK + 5)
    options = {"enable_prompt_embeds": True}
    with in_process(llama, **options) as engine:
        truth = ask_mixed(engine, vectors)
    with in_process(llama, kept_config(tmp_path), **options) as engine:
        assert ask_mixed(engine, text) != truth
        assert engine.settle().store.stored == 0
    with in_process(llama, kept_config(tmp_path), **options) as engine:
        assert ask_mixed(engine, vectors) == truth
        shown = engine.core.requests.find("0", time.time())
        assert shown is not None
        assert shown.missed_tokens.causes["load_disabled"] == 6 * BLOCK
        assert shown.policy.sources["load"] == shown.policy.sources["store"] == "engine:prompt_embeds"


def test_server_when_killed_under_load_recovers_all_but_reset_blocks(
    llama: Path, tmp_path: Path, truth: list[Answer]
) -> None:
    transfer = kept_config(tmp_path)
    with serving(llama, transfer, tmp_path) as server:
        for prompt in DROPPED:
            ask(server, prompt)
        assert server.settled()["pool"]["ready"] > 0
        dropped = server.admin.post("/admin/v1/reset", json={}).raise_for_status().json()
        assert dropped["dropped_blocks"] > 0
        ask_all(server, truth)
        kill_under_load(server)
    with serving(llama, transfer, tmp_path) as server:
        pool = server.stats()["pool"]
        assert pool["ready"] == pool["unverified"] > 0
        assert server.admin.get("/readyz").json() == {"ready": True, "reasons": [], "degraded": []}
        for prompt in DROPPED:
            ask(server, prompt)
        assert hits(server) == 0
        ask_all(server, truth)
        assert hits(server) > 0
        after = server.settled()
        assert (after["load"]["failed"], after["load"]["corrupt"]) == (0, 0)
        assert after["pool"]["unverified"] < pool["unverified"]
        file = tmp_path / "pool" / "kept.pool"
        for size_mib in (32, 192):
            server.resize(size_mib << 20)
            server.resized(size_mib << 20)
            ask_all(server, truth)
            # Behind the headers.
            payload = range(size_mib << 20, (size_mib + 16) << 20)
            wait_until(lambda: file.stat().st_size in payload, "the file has the size", 30.0)  # noqa: B023
        assert server.settled()["load"]["corrupt"] == 0


def test_pool_when_weights_differ_is_dropped_and_field_named(
    llama: Path, tmp_path: Path, truth: list[Answer], capfd: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    with in_process(model, kept_config(tmp_path)) as engine:
        engine.generate(FEW)
        stored = engine.settle().store.stored
    with in_process(model, kept_config(tmp_path)) as engine:
        assert recovered(engine) == stored > 0
        assert_same(engine.generate(FEW), truth[: len(FEW)])
        assert engine.settle().prompt_tokens.host_hit > 0
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    # The last bit of a fraction, which changes no answer.
    data[len(data) // 8 * 4] ^= 1
    weights.write_bytes(data)
    capfd.readouterr()
    with in_process(model, kept_config(tmp_path)) as engine:
        assert recovered(engine) == 0
        assert_same(engine.generate(FEW[:1]), truth[:1])
        after = engine.settle()
        assert after.prompt_tokens.host_hit == 0
        assert after.missed_tokens.causes[MissCause.OTHER_FINGERPRINT] == len(FEW[0]) // BLOCK * BLOCK
        stats = httpx.get(f"{engine.connector._the_core().admin_url}/admin/v1/stats", timeout=DEADLINE_S).json()
        shown = stats["recovery"]
        assert shown["dropped"] == {"foreign": stored}
        assert shown["foreign"].startswith("revision was 'files-")
    said = capfd.readouterr().err
    assert re.search(r"WARNING .*pool dropped, starting empty: .*: revision was 'files-\w+', now 'files-\w+'", said)


def test_pool_when_in_use_by_another_engine_is_refused(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = tmp_path / "pool" / "kept.pool"
    with in_process(llama, kept_config(tmp_path)) as engine:
        engine.generate(FEW[:1])
        with pytest.raises(StartError, match=rf"in use by another process \(pid {os.getpid()}\)"):
            PoolLock(pool)
    lock = PoolLock(pool)
    try:
        words = rf"the pool {pool} is in use by another process \(pid {os.getpid()}\); stop it, or set another "
        with pytest.raises(Exception, match=words), in_process(llama, kept_config(tmp_path)):
            pytest.fail("the engine has started")
    finally:
        lock.close()
    assert re.search("kvferry does not start: .*" + words, capfd.readouterr().err)
    with in_process(llama, kept_config(tmp_path)) as engine:
        assert recovered(engine) == len(FEW[0]) // BLOCK


def test_hash_seed_when_random_warns_and_when_set_recovers_blocks(
    llama: Path, tmp_path: Path, truth: list[Answer], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "WARNING .*PYTHONHASHSEED is not set and .* set PYTHONHASHSEED, or prefix_caching_hash_algo=sha256"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with in_process(llama, kept_config(tmp_path), prefix_caching_hash_algo="xxhash") as engine:
        engine.generate(FEW[:1])
        assert engine.settle().store.stored > 0
    assert len(re.findall(warning, capfd.readouterr().err)) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with in_process(llama, kept_config(tmp_path), prefix_caching_hash_algo="xxhash") as engine:
        assert recovered(engine) == 0
        engine.generate(FEW)
        stored = engine.settle().store.stored
    said = capfd.readouterr().err
    assert re.search(r"kept pool dropped, starting empty: .*: hash_seed was 'random-\w+'", said)
    assert not re.search(warning, said)
    with in_process(llama, kept_config(tmp_path), prefix_caching_hash_algo="xxhash") as engine:
        assert recovered(engine) == stored > 0
        assert_same(engine.generate(FEW), truth[: len(FEW)])
        assert engine.settle().prompt_tokens.host_hit > 0
