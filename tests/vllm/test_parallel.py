"""Tensor parallelism: two ranks, each with its part of every block, and one pool that both map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cuda_ops.backing import SHARED_MEMORY
from tests.vllm.engines import DEVICE_BLOCKS, in_process, transfer_config
from tests.vllm.server import VllmServer, serving
from tests.vllm.test_server import ask, tokens_of
from tests.vllm.workload import Answer, assert_same, shared_prefixes

RANKS = 2
PROMPTS = shared_prefixes(20, prefixes=10, seed=31)
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM wants a NUMA node a rank, unless it is told where its threads go."""


@pytest.fixture(scope="module")
def truth(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What two ranks answer without kvferry. How sure the model is at each place, one rank says."""
    with in_process(llama) as engine:
        alone = engine.generate(PROMPTS)
    with serving(llama, None, tmp_path_factory.mktemp("alone"), BIND, tensor_parallel_size=RANKS) as server:
        answers = [tokens_of(ask(server, prompt)) for prompt in PROMPTS]
    return [Answer(answer.token_ids, one.gaps, 0) for answer, one in zip(answers, alone, strict=True)]


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    transfer = transfer_config(load_decision="always")
    with serving(llama, transfer, tmp_path_factory.mktemp("two"), BIND, tensor_parallel_size=RANKS) as server:
        yield server


def pool_mappings(server: VllmServer) -> dict[int, set[tuple[str, bool]]]:
    """By process: the inodes of kvferry's memory that it has mapped, and whether their names are gone."""
    found: dict[int, set[tuple[str, bool]]] = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if f"{SHARED_MEMORY}/kvferry-" in line:
                found.setdefault(process.pid, set()).add((line.split()[4], line.endswith("(deleted)")))
    return found


def test_two_ranks_answer_alike_from_a_pool_of_halves(server: VllmServer, truth: list[Answer]) -> None:
    for _ in range(3):
        answers = [tokens_of(ask(server, prompt)) for prompt in PROMPTS]
        assert_same([Answer(got.token_ids, (), 0) for got in answers], truth)
    stats = server.settled()
    store, load, tokens = stats["store"], stats["load"], stats["prompt_tokens"]
    assert stats["engine"]["workers"] == RANKS
    assert store["stored"] > DEVICE_BLOCKS
    assert tokens["host_hit"] > 0
    assert store["failed"] == load["failed"] == 0
    # Every rank reported every job, each with its part of the bytes.
    assert load["bytes"] == load["blocks"] * stats["pool"]["slot_bytes"]
    assert store["bytes"] == store["stored"] * stats["pool"]["slot_bytes"]
    assert stats["pool"]["pinned"] == stats["pool"]["loading"] == stats["pool"]["storing"] == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == tokens["host_hit"]


def test_both_ranks_map_one_pool_which_goes_with_them(server: VllmServer) -> None:
    mapped = pool_mappings(server)
    assert len(mapped) == RANKS
    (only,) = {frozenset(inodes) for inodes in mapped.values()}
    ((inode, is_deleted),) = only
    # Its name is gone, so that nothing is left when the ranks are killed.
    assert is_deleted
    assert inode not in {str(entry.inode()) for entry in os.scandir(SHARED_MEMORY)}
