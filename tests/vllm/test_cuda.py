"""A worker whose KV cache is in a CUDA device's memory: the same bytes, behind the compute and before it.

The device is a driver over this process's memory; docs/vllm-tested.md says what was run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.app.engines.cuda import CudaDevice
from kvferry.app.engines.vllm import wiring
from kvferry.app.engines.vllm.copies import RankCopies, check_caches, cuda_device, pool_preparation
from kvferry.app.engines.vllm.layout import VllmLayout, read_layout
from kvferry.app.engines.vllm.metadata import ResizeCommand, ResizeResult, StepMetadata, WorkerReports
from kvferry.app.engines.vllm.pool import MappedPool
from kvferry.app.engines.vllm.worker import ConnectorWorker
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from kvferry.core.transfers import Direction
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.fake_cuda import ILLEGAL_ADDRESS, FakeCuda
from tests.harness.waiting import wait_until
from tests.vllm import fabricated as fake
from tests.vllm.engines import DEVICE_BLOCKS, in_process, transfer_config
from tests.vllm.fabricated import NUM_BLOCKS, allocate, block_bytes, cache_config, fill, groups_of, job
from tests.vllm.memory import Moving
from tests.vllm.workload import assert_same, shared_prefixes
from vllm.v1.kv_cache_layout import KVCacheLayout

PINNED_WAIT_S = 30.0
LAYOUTS = [pytest.param(layout, id=layout.name) for layout in KVCacheLayout]


class Rig:
    """A `ConnectorWorker` with a fake device: a full-attention group beside a window, four slots."""

    def __init__(self, layout: KVCacheLayout, folder: Path, seed: int = 1) -> None:
        self.cuda = FakeCuda(seed)
        self.config = cache_config(layout, groups_of(fake.WINDOW, fake.FULL))
        found = read_layout(self.config)
        self.caches = allocate(self.config)
        check_caches(found, self.caches)
        side = CudaDevice(torch.device("cuda", 0), CudaDriver(self.cuda.resolve), lambda: self.cuda.compute)
        slot_bytes = found.group_layout(1, 1).slot_bytes
        self.pool = HostPool(4, slot_bytes, 4 * slot_bytes, preparation=pool_preparation(side))
        assert self.pool.is_page_locked
        settings = Settings(_env_file=None, state_dir=folder, kernel_below_bytes=1)
        self.worker = ConnectorWorker(0)
        self.worker.attach(
            lambda on_finished: RankCopies(found, settings, self.caches, MappedPool(self.pool), on_finished, side)
        )

    def seen(self, group: int, block: int) -> list[bytes]:
        """What vLLM sees of a block in each of its group's layers."""
        return [block_bytes(self.caches[name], block) for name in self.config.kv_cache_groups[group].layer_names]

    def collect(self, *, is_idle: bool = False) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those whose load failed, as the connector takes them."""
        self.worker.collect(StepMetadata(is_idle=is_idle))
        taken = self.worker.finished_recving, self.worker.failed_recving
        self.worker.finished_recving, self.worker.failed_recving = set(), set()
        return taken

    def take_reports(self) -> WorkerReports:
        """What the connector sends to the scheduler."""
        self.worker.collect_reports()
        reports, self.worker.reports = self.worker.reports, WorkerReports()
        return reports

    def collect_all(self, count: int) -> list[str | None]:
        """Steps without work until so many jobs have ended; their errors."""
        errors: list[str | None] = []

        def step() -> bool:
            self.collect()
            errors.extend(result.error for result in self.take_reports().results)
            return len(errors) >= count

        wait_until(step, "the jobs have ended", PINNED_WAIT_S)
        return errors


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(KVCacheLayout.LBNHC, tmp_path)
    yield made
    made.worker.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_when_stored_and_loaded_has_the_same_bytes(layout: KVCacheLayout, tmp_path: Path) -> None:
    rig = Rig(layout, tmp_path)
    for group in range(2):
        fill(rig.caches, seed=group)
        before = {block: rig.seen(group, block) for block in range(NUM_BLOCKS)}
        rig.worker.start_stores(StepMetadata(stores=[job(2 * group, Direction.STORE, group, [3, 7], [2, 0])]))
        assert rig.collect_all(1) == [None]
        rig.worker.start_loads(StepMetadata(loads=[job(2 * group + 1, Direction.LOAD, group, [5, 11], [2, 0])]))
        assert rig.collect_all(1) == [None]
        expected = {**before, 5: before[3], 11: before[7]}
        assert {block: rig.seen(group, block) for block in range(NUM_BLOCKS)} == expected
    rig.worker.close()
    cuda = rig.cuda
    assert (cuda.registered, cuda.copy_streams, cuda.num_events, cuda.allocated, cuda.retained) == ({}, [], 0, {}, 0)


def test_copies_wait_for_the_compute_queued_before_them(rig: Rig) -> None:
    fill(rig.caches, seed=1)
    before = [rig.seen(1, block) for block in range(NUM_BLOCKS)]
    seen: list[list[bytes]] = []
    with rig.cuda.held():
        rig.cuda.launch(lambda: fill(rig.caches, seed=2))
        rig.cuda.launch(lambda: seen.append(rig.seen(1, 7)))
        rig.worker.start_stores(StepMetadata(stores=[job(1, Direction.STORE, 1, [7], [0])]))
        rig.worker.start_loads(StepMetadata(loads=[job(2, Direction.LOAD, 1, [5], [3])]))
        assert rig.collect(is_idle=True) == (set(), set())
        assert not rig.take_reports()
        assert not rig.pool.slot(0).any()
        assert [rig.seen(1, block) for block in range(NUM_BLOCKS)] == before
    assert rig.collect_all(2) == [None, None]
    # Compute after the report of a load is queued behind the load on the device, too.
    waits = rig.cuda.calls["cuStreamWaitEvent"]
    assert waits >= 3
    rig.worker.start_loads(StepMetadata(loads=[job(3, Direction.LOAD, 1, [9], [0])]))
    assert rig.collect_all(1) == [None]
    assert rig.cuda.calls["cuStreamWaitEvent"] == waits + 2
    assert rig.seen(1, 9) == seen[0]


def test_resize_registers_and_unregisters_memory_with_the_device(rig: Rig) -> None:
    def come_to(number: int, num_slots: int) -> None:
        rig.worker.start_loads(StepMetadata(resizes=[ResizeCommand(number, num_slots, (0,), free=True)]))
        results: list[ResizeResult] = []

        def step() -> bool:
            rig.collect(is_idle=True)
            results.extend(rig.take_reports().resizes)
            return bool(results)

        wait_until(step, "the result is reported", PINNED_WAIT_S)
        assert results == [ResizeResult(number, 0)]
        assert (rig.pool.num_slots, rig.pool.is_page_locked) == (num_slots, True)

    fill(rig.caches, seed=1)
    before = rig.seen(1, 7)
    registered = sum(rig.cuda.registered.values())
    # An order for another rank is none.
    rig.worker.start_loads(StepMetadata(resizes=[ResizeCommand(1, 8, (1,))]))
    come_to(2, 12)
    assert sum(rig.cuda.registered.values()) == 3 * registered
    rig.worker.start_stores(StepMetadata(stores=[job(1, Direction.STORE, 1, [7], [11])]))
    assert rig.collect_all(1) == [None]
    fill(rig.caches, seed=2)
    rig.worker.start_loads(StepMetadata(loads=[job(2, Direction.LOAD, 1, [5], [11])]))
    assert rig.collect_all(1) == [None]
    assert rig.seen(1, 5) == before
    come_to(3, 4)
    assert sum(rig.cuda.registered.values()) == registered


def test_loads_when_device_is_lost_are_reported_as_failed(rig: Rig) -> None:
    rig.cuda.poison(ILLEGAL_ADDRESS)
    rig.worker.start_loads(
        StepMetadata(loads=[job(1, Direction.LOAD, 1, [5], [3]), job(2, Direction.LOAD, 0, [4], [2])])
    )
    received: set[str] = set()
    failed: set[str] = set()

    def step() -> bool:
        ended, lost = rig.collect()
        received.update(ended)
        failed.update(lost)
        return len(received) == 2

    wait_until(step, "both loads are reported", PINNED_WAIT_S)
    assert received == failed == {"request-1", "request-2"}


def test_caches_when_released_and_restored_elsewhere_are_copied_there(rig: Rig) -> None:
    """As in sleep mode; the pool stays registered with the device all the time."""
    fill(rig.caches, seed=1)
    memory, before, registered = Moving(rig.caches), rig.seen(1, 7), dict(rig.cuda.registered)
    rig.worker.start_stores(StepMetadata(stores=[job(1, Direction.STORE, 1, [7], [2])]))
    for _ in range(2):
        rig.worker.release_caches()
        assert rig.cuda.num_queued_copies() == 0
        assert rig.cuda.registered == registered
    memory.free()
    # What is asked for meanwhile fails, and touches nothing.
    rig.worker.start_loads(StepMetadata(loads=[job(2, Direction.LOAD, 1, [5], [2])]))
    memory.allocate()
    for _ in range(2):
        rig.worker.restore_caches()
    assert sorted(map(str, rig.collect_all(2))) == ["None", "the copy engine is closed"]
    rig.worker.start_loads(StepMetadata(loads=[job(3, Direction.LOAD, 1, [5], [2])]))
    assert rig.collect_all(1) == [None]
    assert rig.seen(1, 5) == before
    assert rig.cuda.registered == registered


def test_close_when_copies_are_open_leaves_none_running(rig: Rig) -> None:
    fill(rig.caches, seed=1)
    rig.worker.start_stores(StepMetadata(stores=[job(1, Direction.STORE, 1, list(range(4)), list(range(4)))]))
    rig.worker.close()
    assert rig.cuda.num_queued_copies() == 0
    assert rig.cuda.registered == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_device_without_driver_is_refused_with_advice() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout = read_layout(config)
    elsewhere = {
        name: SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=cache.untyped_storage)
        for name, cache in allocate(config).items()
    }
    check_caches(layout, elsewhere)
    with pytest.raises(StartError, match=re.escape("cuda:0 cannot be used for copies")) as refused:
        cuda_device(layout, elsewhere)
    assert str(refused.value).endswith("run vLLM's CPU backend, or vLLM without kvferry")


def test_device_without_streams_is_refused_and_closed(tmp_path: Path) -> None:
    cuda, config = FakeCuda(), cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout = read_layout(config)
    side = CudaDevice(torch.device("cuda", 0), CudaDriver(cuda.resolve), lambda: cuda.compute)
    pool = HostPool(4, layout.group_layout(1, 1).slot_bytes, preparation=pool_preparation(side))
    cuda.fail("cuStreamCreateWithPriority", ILLEGAL_ADDRESS)
    settings = Settings(_env_file=None, state_dir=tmp_path, kernel_below_bytes=1)
    with pytest.raises(StartError, match="cuda:0 gives no copy engine"):
        RankCopies(layout, settings, allocate(config), MappedPool(pool), lambda: None, side)
    assert (cuda.registered, cuda.copy_streams, cuda.retained) == ({}, [], 0)


def test_caches_when_on_two_devices_are_refused() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout, caches = read_layout(config), dict(allocate(config))
    name = config.kv_cache_groups[0].layer_names[1]
    storage = caches[name].untyped_storage
    caches[name] = SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=storage)  # type: ignore[assignment]
    with pytest.raises(StartError, match="is on cpu, cuda:0"):
        check_caches(layout, caches)


def test_vllm_with_full_device_cache_gives_the_same_answers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM computes on the CPU, and its blocks are copied as if they were on a device."""
    prompts = shared_prefixes(60)
    with in_process(llama) as engine:
        truth = engine.generate(prompts)
    cuda = FakeCuda(7)

    def on_a_device(_layout: VllmLayout, _caches: object) -> CudaDevice:
        return CudaDevice(torch.device("cuda", 0), CudaDriver(cuda.resolve), lambda: cuda.compute)

    monkeypatch.setattr(wiring, "cuda_device", on_a_device)
    transfer = transfer_config(kernel_below_bytes=1, load_decision="always")
    with in_process(llama, transfer) as engine:
        for _ in range(2):
            assert_same(engine.generate(prompts), truth)
        after = engine.settle()
        assert after.store.failed == after.load.failed == 0
        assert after.load.blocks > DEVICE_BLOCKS
        assert sum(after.transfers[Direction.LOAD].seconds.counts) > 0
        assert {stream for stream, _ in cuda.batches} != set()
        assert sum(cuda.registered.values()) > 0
    assert (cuda.registered, cuda.copy_streams, cuda.num_events, cuda.retained) == ({}, [], 0, 0)
