"""Tensor parallelism: two ranks, each with its part of every block, and one pool that both map."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from httpx_sse import connect_sse

from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import DEVICE_BLOCKS, InProcess, in_process, transfer_config
from tests.vllm.server import VllmServer, serving
from tests.vllm.test_server import ask, tokens_of
from tests.vllm.workload import Answer, assert_same, random_tokens, shared_prefixes

RANKS = 2
MIB = 1 << 20
PROMPTS = shared_prefixes(20, prefixes=10, seed=31)
TRANSFER = transfer_config(load_decision="always", pool_bytes="64MiB")
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM wants a NUMA node a rank, unless the CPUs of its threads are set."""


@pytest.fixture(scope="module")
def truth(llama: Path) -> list[Answer]:
    """What one rank answers without kvferry, in float32: two ranks add up in another order."""
    with in_process(llama) as engine:
        return engine.generate(PROMPTS)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with serving(llama, TRANSFER, tmp_path_factory.mktemp("two"), BIND, tensor_parallel_size=RANKS) as server:
        yield server


def pool_mappings(server: VllmServer) -> dict[int, set[tuple[str, bool]]]:
    """By process: the inodes of kvferry's memory that it has mapped, and whether their names are gone."""
    found: dict[int, set[tuple[str, bool]]] = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if f"{SHARED_MEMORY}/kvferry-" in line:
                found.setdefault(process.pid, set()).add((line.split()[4], line.endswith("(deleted)")))
    return found


def mapped_bytes(server: VllmServer) -> dict[int, int]:
    """By process: how much of kvferry's memory it has mapped."""
    found: dict[int, int] = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if f"{SHARED_MEMORY}/kvferry-" in line:
                start, end = (int(place, 16) for place in line.split()[0].split("-"))
                found[process.pid] = found.get(process.pid, 0) + end - start
    return found


def taken_bytes(server: VllmServer) -> int:
    """Memory behind the mapping, mapped or not."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            if f"{SHARED_MEMORY}/kvferry-" in os.readlink(file) and ".lock" not in os.readlink(file):
                return file.stat().st_blocks * 512
    return 0


def has_memory(server: VllmServer, num_bytes: int) -> bool:
    """Whether each rank has mapped so much, and no more is taken."""
    return list(mapped_bytes(server).values()) == [num_bytes] * RANKS and taken_bytes(server) == num_bytes


@contextmanager
def counted_demands(engine: InProcess) -> Iterator[list[int]]:
    """How many slots are stored because a request waits for them, by step."""
    demands, counts = engine.core._demands, []
    submit = demands.submit

    def counted(now_s: float) -> Iterator[None]:
        counts.append(sum(len(demand.slots) for demand in demands.open))
        return submit(now_s)

    demands.submit = counted  # type: ignore[method-assign]
    yield counts
    demands.submit = submit  # type: ignore[method-assign]


def worker_of(server: VllmServer, rank: int) -> psutil.Process:
    """The process of a rank, by the name that vLLM gives it."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = (process for process in children if f"Worker_TP{rank}" in " ".join(process.cmdline()))
    return found


def test_two_ranks_sharing_a_pool_find_and_answer_what_one_rank_does(
    server: VllmServer, llama: Path, truth: list[Answer]
) -> None:
    with in_process(llama, TRANSFER) as engine:
        for prompt in PROMPTS * 3:
            engine.generate([prompt])
            engine.settle()
        of_one = engine.snapshot().prompt_tokens
    for _ in range(3):
        answers = [tokens_of(ask(server, prompt)) for prompt in PROMPTS]
        assert_same([Answer(got.token_ids, (), 0) for got in answers], truth)
    stats = server.settled()
    store, load, tokens = stats["store"], stats["load"], stats["prompt_tokens"]
    assert stats["engine"]["workers"] == RANKS
    assert store["stored"] > DEVICE_BLOCKS
    assert of_one.host_hit > 0
    assert tokens["total"] == of_one.total
    assert tokens["recomputed"] == of_one.recomputed
    assert store["failed"] == load["failed"] == 0
    # Every rank reported every job, each with its part of the bytes.
    assert load["bytes"] == load["blocks"] * stats["pool"]["slot_bytes"]
    assert store["bytes"] == store["stored"] * stats["pool"]["slot_bytes"]
    assert stats["pool"]["pinned"] == stats["pool"]["loading"] == stats["pool"]["storing"] == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") == tokens["host_hit"]


def test_two_ranks_in_lazy_mode_give_the_same_answers(server: VllmServer, truth: list[Answer]) -> None:
    before = server.settled()
    try:
        server.admin.patch("/admin/v1/config", json={"store_mode": "lazy"}).raise_for_status()
        server.admin.post("/admin/v1/reset", json={}).raise_for_status()
        with ThreadPoolExecutor(6) as clients:
            for _ in range(2):
                answers = [tokens_of(answer) for answer in clients.map(lambda prompt: ask(server, prompt), PROMPTS)]
                assert_same([Answer(got.token_ids, (), 0) for got in answers], truth)
    finally:
        server.admin.patch("/admin/v1/config", json={"store_mode": "eager"}).raise_for_status()
    after = server.settled()
    assert after["store"]["failed"] == after["store"]["skipped"]["left_device"] == 0
    assert after["store"]["stored"] > before["store"]["stored"]
    assert after["prompt_tokens"]["host_hit"] > before["prompt_tokens"]["host_hit"]


def test_two_ranks_with_windows_in_lazy_mode_find_what_one_rank_does(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at once wait for blocks that only the device has; one after another, they find what the pool has."""
    for name, value in BIND.items():
        monkeypatch.setenv(name, value)
    rng = random.Random(11)
    heads = [random_tokens(rng, 400) for _ in range(8)]
    prompts = [rng.choice(heads) + random_tokens(rng, rng.randint(10, 80)) for _ in range(40)]
    options = {"num_gpu_blocks_override": 120, "max_model_len": 1024}
    with in_process(gemma, **options) as engine:
        alone = engine.generate(prompts)
    cached: list[list[int]] = []
    for num_ranks in (1, RANKS):
        transfer = transfer_config(load_decision="always", store_mode="lazy")
        with in_process(gemma, transfer, **options, tensor_parallel_size=num_ranks) as engine:
            with counted_demands(engine) as demanded:
                assert_same(engine.generate(prompts), alone)
            answers = []
            for prompt in prompts:
                answers += engine.generate([prompt])
                engine.settle()
            assert_same(answers, alone)
            after = engine.snapshot()
        assert sum(demanded) > 0
        assert after.store.failed == after.load.failed == after.store.skipped["left_device"] == 0
        assert after.load.bytes == after.load.blocks * after.pool.slot_bytes
        cached.append([answer.num_cached for answer in answers])
    assert cached[0] == cached[1]
    assert sum(cached[0]) > sum(answer.num_cached for answer in alone)


def test_pool_of_two_ranks_is_mapped_by_both_and_removed_with_them(server: VllmServer) -> None:
    mapped = pool_mappings(server)
    assert len(mapped) == RANKS
    (only,) = {frozenset(inodes) for inodes in mapped.values()}
    ((inode, is_deleted),) = only
    # Its name is gone, so that nothing is left when the ranks are killed.
    assert is_deleted
    assert inode not in {str(entry.inode()) for entry in os.scandir(SHARED_MEMORY)}


def test_two_ranks_resize_the_pool_under_load_and_idle(server: VllmServer, truth: list[Answer]) -> None:
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(ask, server, prompt) for prompt in PROMPTS * 3]
        for number, size in enumerate((8 * MIB, 256 * MIB, 32 * MIB, 64 * MIB, 8 * MIB), 1):
            wait_until(lambda: sum(map(Future.done, answers)) >= 9 * number, "requests go on", 60.0)  # noqa: B023
            server.resize(size)
        assert_same([tokens_of(answer.result(DEADLINE_S)) for answer in answers], truth * 3)
    for size in (8 * MIB, 192 * MIB, 48 * MIB):
        server.resize(size)
        pool = server.resized(size)
        with server.stepping():
            wait_until(lambda: has_memory(server, size), "all ranks have as much memory, and no more is taken", 60.0)  # noqa: B023
        assert pool["pinned"] == pool["loading"] == pool["storing"] == 0
    stats = server.settled()
    assert stats["evictions"]["by_reason"]["shrink"] > 0
    assert (stats["store"]["failed"], stats["load"]["failed"]) == (0, 0)
    assert_same([tokens_of(ask(server, prompt)) for prompt in PROMPTS], truth)


@pytest.mark.parametrize("rank", range(RANKS))
def test_resize_when_one_rank_cannot_map_more_is_rolled_back(
    server: VllmServer, truth: list[Answer], rank: int
) -> None:
    server.resize(64 * MIB)
    server.resized(64 * MIB)
    with server.stepping():
        wait_until(lambda: has_memory(server, 64 * MIB), "the size to begin with", 60.0)
    worker = worker_of(server, rank)
    # The first takes memory, by making a file longer; the other only maps it.
    what = resource.RLIMIT_FSIZE if rank == 0 else resource.RLIMIT_AS
    allowed = 64 * MIB if rank == 0 else worker.memory_info().vms + 32 * MIB
    before = worker.rlimit(what)
    with connect_sse(server.admin, "GET", "/admin/v1/events", params={"type": ["resized"]}) as source:
        events = (json.loads(event.data) for event in source.iter_sse())
        assert next(events)["type"] == "open"
        worker.rlimit(what, (allowed, before[1]))
        try:
            with server.stepping():
                server.resize(256 * MIB)
                event = next(events)
        finally:
            worker.rlimit(what, before)
    assert event["bytes"] == 64 * MIB
    assert f"rank {rank}: " in event["error"]
    stays = f"pool resize: failed, the pool keeps {event['slots']:,} slots: rank {rank}: "
    wait_until(lambda: stays in server.log.read_text(), "its line in the log", 60.0)
    assert server.resized(64 * MIB)["slots"] == event["slots"]
    shown = server.admin.get("/admin/v1/config").json()["pool_bytes"]
    assert shown["value"] == 64 * MIB
    assert f"was not applied: rank {rank}: " in shown["shortfall"]
    assert has_memory(server, 64 * MIB)
    server.resize(128 * MIB)
    server.resized(128 * MIB)
    assert has_memory(server, 128 * MIB)
    assert_same([tokens_of(ask(server, prompt)) for prompt in PROMPTS], truth)
