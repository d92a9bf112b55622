"""Exceptions in kvferry's own code inside vLLM: EngineCore goes on, answers stay the same, nothing leaks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.requests import VllmRequest
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler, LoadEnds
from kvferry.app.engines.vllm.worker import ConnectorWorker
from kvferry.app.guard import MAX_ERRORS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.scheduler.stores import StoreJobs
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from tests.harness.faults import Faults
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.workload import Answer, assert_same, shared_prefixes

PROMPTS = shared_prefixes(60, seed=21)
SEED = int(os.environ.get("FAULT_SEED", "1"))
NUM_FAULTS = int(os.environ.get("FAULTS", "40"))
HANDLERS = {"commit_failed", "finish_failed", "plan_failed", "process_output_failed", "fail_jobs", "record_error"}
ADAPTER = [
    (ConnectorScheduler, name) for name in ("on_new_request", "match", "commit", "finish", "plan", "process_output",
                                       "has_open_work", "_detect_preemption")
] + [
    (LoadEnds, "process"),
] + [
    (ConnectorWorker, name)
    for name in ("start_loads", "start_stores", "collect", "collect_reports", "_poll", "_submit")
] + [
    (CpuCopyEngine, "submit"), (CpuCopyEngine, "poll"), (EngineExtents, "take_commands"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(llama: Path, truth: list[Answer]) -> Iterator[InProcess]:
    # After `truth`: its engine must have ended before another starts in this process.
    with in_process(llama, transfer_config(load_decision="always")) as engine:
        yield engine


@pytest.fixture
def engine(shared: InProcess) -> Iterator[InProcess]:
    """One engine for all tests here, which each leave it with offloading on and nothing held."""
    yield shared
    shared.scheduler.reset()
    assert shared.scheduler.offload.status.is_on
    assert_nothing_left(shared)


@pytest.mark.parametrize(("cls", "name"), ADAPTER, ids=[f"{cls.__name__}.{name}" for cls, name in ADAPTER])
def test_vllm_when_a_connector_method_raises_gives_the_same_answers(
    cls: type, name: str, engine: InProcess, truth: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.scheduler.offload.status.num_errors
    faults = Faults(monkeypatch, SEED, probability=0.2, most=MAX_ERRORS - 2)
    faults.patch(cls, [name], after=cls is not CpuCopyEngine)
    for _ in range(2):
        with faults.on():
            assert_same(engine.generate(PROMPTS), truth)
        engine.forget_device()
    assert faults.raised.total() > 0 or name in ("_detect_preemption", "has_open_work")
    engine.settle()
    assert engine.scheduler.offload.status.num_errors - before >= min(faults.raised.total(), 1)


def test_offloading_after_repeated_errors_is_off_until_a_reset(
    engine: InProcess, truth: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: OffloadScheduler, *args: object) -> None:
        raise RuntimeError("no match, says the test")

    monkeypatch.setattr(OffloadScheduler, "match", fail)
    assert_same(engine.generate(PROMPTS), truth)
    assert not engine.scheduler.offload.status.is_on
    monkeypatch.undo()
    engine.forget_device()
    before = engine.snapshot().load.blocks
    assert_same(engine.generate(PROMPTS), truth)
    assert engine.snapshot().load.blocks == before
    assert engine.connector.reset_cache()
    engine.generate(PROMPTS)
    engine.forget_device()
    assert_same(engine.generate(PROMPTS), truth)
    assert engine.snapshot().load.blocks > before


def test_vllm_when_any_method_raises_gives_the_same_answers(
    engine: InProcess, truth: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, SEED, probability=0.01, most=NUM_FAULTS)
    for cls in (ConnectorScheduler, ConnectorWorker, VllmRequest, OffloadManager, OffloadScheduler, StoreJobs):
        # What handles a failure may not fail itself.
        names = [name for name, method in vars(cls).items() if inspect.isfunction(method) and name not in HANDLERS]
        faults.patch(cls, [name for name in names if not name.startswith("__")])
    faults.patch(CpuCopyEngine, ["submit", "poll", "wait", "_plan"])
    faults.patch(VllmDevice, ["hold", "release"], after=False)
    while faults.left:
        with faults.on():
            assert_same(engine.generate(PROMPTS), truth)
        engine.scheduler.reset()
        engine.forget_device()
