"""Sleep mode: vLLM takes the memory of the KV caches away, and brings it back, maybe at other addresses.

The CPU backend has no sleep mode, and vLLM's allocator for it needs a GPU. Here the workers have the methods of vLLM's
GPU worker, over an allocator that is made up; the engine, its pause and the order of the hooks are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.harness.waiting import DEADLINE_S
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.memory import Moving
from tests.vllm.workload import assert_same, shared_prefixes
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

HAS_HOOKS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""Before 0.33 vLLM says nothing to connectors, and its memory comes back at the same addresses."""


class Allocator(SleepModeBackend):
    """Takes the memory of the KV caches away; the weights stay."""

    memory: Moving

    def suspend(self, level: int = 1) -> None:
        self.memory.free() if HAS_HOOKS else self.memory.clear()

    def discard(self, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",)
        self.suspend()

    def resume(self, tags: list[str] | None = None) -> None:
        if HAS_HOOKS and (tags is None or "kv_cache" in tags):
            self.memory.allocate()


@pytest.fixture
def engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    monkeypatch.setattr(SleepModeBackendFactory, "_registry", {"made-up": lambda: Allocator})
    for name in ("sleep", "wake_up", "discard"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    with in_process(llama, transfer_config(load_decision="always")) as engine:
        engine.engine.vllm_config.model_config.sleep_mode_backend = "made-up"
        Allocator.memory = Moving(engine.copies._caches)
        yield engine


def nap(engine: InProcess, how: str) -> None:
    """Sleep and wake up."""
    core = engine.engine.engine_core.engine_core
    if how == "kv cache only":
        core.pause_scheduler("abort", clear_cache=False)
        core.release_kv_cache_memory()
        core.wake_up(["kv_cache"])
        return
    engine.llm.sleep(level=int(how.removeprefix("level ")))
    if how == "level 0":
        engine.llm.wake_up(["scheduling"])
        return
    # What an idle engine is asked for meanwhile finds no memory, and must not look for it.
    engine.step()
    engine.llm.wake_up(["weights"])
    engine.llm.wake_up(["kv_cache"])


def test_engine_after_sleep_gives_the_same_answers(engine: InProcess) -> None:
    prompts, admin_url = shared_prefixes(24), engine.connector._the_core().admin_url
    truth = engine.generate(prompts)
    pool = engine.settle().pool
    # To pause alone leaves all as it is.
    engine.forget_device()
    nap(engine, "level 0")
    assert_same(engine.generate(prompts), truth)
    counts = engine.settle()
    assert counts.pool.ready >= pool.ready > 0
    assert counts.load.blocks > 0
    for how in ("level 1", "level 2", "kv cache only"):
        addresses = Allocator.memory.addresses()
        nap(engine, how)
        assert addresses.isdisjoint(Allocator.memory.addresses()) == HAS_HOOKS
        # vLLM has its connectors forget their blocks before its memory goes; the pool's own memory stays.
        after = engine.snapshot().pool
        assert (after.ready, after.pinned, after.slots) == (0, 0, pool.slots)
        assert_same(engine.generate(prompts), truth)
        engine.forget_device()
        before = engine.snapshot().load.blocks
        assert_same(engine.generate(prompts), truth)
        counts = engine.settle()
        assert counts.load.blocks > before
        assert (counts.load.failed, counts.store.failed) == (0, 0)
    # The hand-shake that vLLM repeats after each wake-up leaves the admin API as it was.
    assert httpx.get(f"{admin_url}/readyz", timeout=DEADLINE_S).status_code == 200
