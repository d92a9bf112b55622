"""A worker whose KV cache is in a CUDA device's memory: the same bytes, behind the compute and before it.

The device is a driver over this process's memory. vLLM has not been run on a GPU with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.app.engines.cuda import CudaSide
from kvferry.app.engines.vllm import connector
from kvferry.app.engines.vllm.copies import Copies, check_caches, device_side, preparation_for
from kvferry.app.engines.vllm.layout import VllmLayout, read_layout
from kvferry.app.engines.vllm.metadata import SizeOrder, SizeReport, StepOrders, StepReports
from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.app.engines.vllm.pool import MappedPool
from kvferry.app.engines.vllm.worker import ConnectorWorker
from kvferry.app.settings import Settings
from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.fake_cuda import ILLEGAL_ADDRESS, FakeCuda
from tests.harness.waiting import wait_until
from tests.vllm import fabricated as fake
from tests.vllm.engines import DEVICE_BLOCKS, in_process, transfer_config
from tests.vllm.fabricated import NUM_BLOCKS, allocate, block_bytes, cache_config, fill, groups_of
from tests.vllm.memory import Moving
from tests.vllm.workload import assert_same, shared_prefixes

PINNED_WAIT_S = 30.0
LAYOUTS = [pytest.param(layout, id=layout.name) for layout in KVCacheLayout]


class Rig:
    """A worker's half over a fake device: a full-attention group beside a window, four slots."""

    def __init__(self, layout: KVCacheLayout, folder: Path, seed: int = 1) -> None:
        self.cuda = FakeCuda(seed)
        self.config = cache_config(layout, groups_of(fake.WINDOW, fake.FULL))
        found = read_layout(self.config)
        self.caches = allocate(self.config)
        check_caches(found, self.caches)
        side = CudaSide(torch.device("cuda", 0), CudaDriver(self.cuda.resolve), lambda: self.cuda.compute)
        slot_bytes = found.of_core(1, 1).slot_bytes
        self.pool = HostPool(4, slot_bytes, 4 * slot_bytes, preparation=preparation_for(side))
        assert self.pool.is_pinned
        settings = Settings(_env_file=None, state_dir=folder, kernel_below_bytes=1)
        self.worker = ConnectorWorker(0)
        self.worker.attach(
            lambda on_finished: Copies(found, settings, self.caches, MappedPool(self.pool), on_finished, side)
        )

    def seen(self, group: int, block: int) -> list[bytes]:
        """What vLLM sees of a block in each of its group's layers."""
        return [block_bytes(self.caches[name], block) for name in self.config.kv_cache_groups[group].layer_names]

    def collect(self, *, is_idle: bool = False) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those whose load failed, as the connector takes them."""
        self.worker.collect(StepOrders(is_idle=is_idle))
        taken = self.worker.received, self.worker.failed
        self.worker.received, self.worker.failed = set(), set()
        return taken

    def take_reports(self) -> StepReports:
        """What the connector sends to the scheduler."""
        self.worker.collect_reports()
        reports, self.worker.reports = self.worker.reports, StepReports()
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


def job(number: int, direction: Direction, group: int, blocks: list[int], slots: list[int]) -> TransferJob:
    arrays = [np.array(values, dtype=np.int64) for values in (blocks, slots, [0] * len(blocks))]
    return TransferJob(number, direction, (BlockRun(group, *arrays),), f"request-{number}")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(KVCacheLayout.LBNHC, tmp_path)
    yield made
    made.worker.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_a_block_goes_to_the_pool_and_back(layout: KVCacheLayout, tmp_path: Path) -> None:
    rig = Rig(layout, tmp_path)
    for group in range(2):
        fill(rig.caches, seed=group)
        before = {block: rig.seen(group, block) for block in range(NUM_BLOCKS)}
        rig.worker.start_stores(StepOrders(stores=[job(2 * group, Direction.STORE, group, [3, 7], [2, 0])]))
        assert rig.collect_all(1) == [None]
        rig.worker.start_loads(StepOrders(loads=[job(2 * group + 1, Direction.LOAD, group, [5, 11], [2, 0])]))
        assert rig.collect_all(1) == [None]
        expected = {**before, 5: before[3], 11: before[7]}
        assert {block: rig.seen(group, block) for block in range(NUM_BLOCKS)} == expected
    rig.worker.close()
    cuda = rig.cuda
    assert (cuda.registered, cuda.copy_streams, cuda.num_events, cuda.allocated, cuda.retained) == ({}, [], 0, {}, 0)


def test_a_store_waits_for_the_steps_compute_and_a_load_for_what_was_queued_before_it(rig: Rig) -> None:
    fill(rig.caches, seed=1)
    before = [rig.seen(1, block) for block in range(NUM_BLOCKS)]
    seen: list[list[bytes]] = []
    with rig.cuda.held():
        rig.cuda.launch(lambda: fill(rig.caches, seed=2))
        rig.cuda.launch(lambda: seen.append(rig.seen(1, 7)))
        rig.worker.start_stores(StepOrders(stores=[job(1, Direction.STORE, 1, [7], [0])]))
        rig.worker.start_loads(StepOrders(loads=[job(2, Direction.LOAD, 1, [5], [3])]))
        assert rig.collect(is_idle=True) == (set(), set())
        assert not rig.take_reports()
        assert not rig.pool.slot(0).any()
        assert [rig.seen(1, block) for block in range(NUM_BLOCKS)] == before
    assert rig.collect_all(2) == [None, None]
    # What a step computes after a load was told is behind it on the device, too.
    waits = rig.cuda.calls["cuStreamWaitEvent"]
    assert waits >= 3
    rig.worker.start_loads(StepOrders(loads=[job(3, Direction.LOAD, 1, [9], [0])]))
    assert rig.collect_all(1) == [None]
    assert rig.cuda.calls["cuStreamWaitEvent"] == waits + 2
    assert rig.seen(1, 9) == seen[0]


def test_another_size_is_known_to_the_device_when_it_is_told_of_and_forgotten_when_it_goes(rig: Rig) -> None:
    def come_to(number: int, num_slots: int) -> None:
        rig.worker.start_loads(StepOrders(sizes=[SizeOrder(number, num_slots, (0,), free=True)]))
        told: list[SizeReport] = []

        def step() -> bool:
            rig.collect(is_idle=True)
            told.extend(rig.take_reports().sizes)
            return bool(told)

        wait_until(step, "it is told of", PINNED_WAIT_S)
        assert told == [SizeReport(number, 0)]
        assert (rig.pool.num_slots, rig.pool.is_pinned) == (num_slots, True)

    fill(rig.caches, seed=1)
    before = rig.seen(1, 7)
    registered = sum(rig.cuda.registered.values())
    # An order for another rank is none.
    rig.worker.start_loads(StepOrders(sizes=[SizeOrder(1, 8, (1,))]))
    come_to(2, 12)
    assert sum(rig.cuda.registered.values()) == 3 * registered
    rig.worker.start_stores(StepOrders(stores=[job(1, Direction.STORE, 1, [7], [11])]))
    assert rig.collect_all(1) == [None]
    fill(rig.caches, seed=2)
    rig.worker.start_loads(StepOrders(loads=[job(2, Direction.LOAD, 1, [5], [11])]))
    assert rig.collect_all(1) == [None]
    assert rig.seen(1, 5) == before
    come_to(3, 4)
    assert sum(rig.cuda.registered.values()) == registered


def test_a_lost_device_fails_its_loads_and_vllm_is_told_of_each(rig: Rig) -> None:
    rig.cuda.poison(ILLEGAL_ADDRESS)
    rig.worker.start_loads(StepOrders(loads=[job(1, Direction.LOAD, 1, [5], [3]), job(2, Direction.LOAD, 0, [4], [2])]))
    received: set[str] = set()
    failed: set[str] = set()

    def step() -> bool:
        told, lost = rig.collect()
        received.update(told)
        failed.update(lost)
        return len(received) == 2

    wait_until(step, "both loads are told of", PINNED_WAIT_S)
    assert received == failed == {"request-1", "request-2"}


def test_caches_when_released_and_restored_elsewhere_are_copied_there(rig: Rig) -> None:
    """As in sleep mode; the pool stays registered with the device all the time."""
    fill(rig.caches, seed=1)
    memory, before, registered = Moving(rig.caches), rig.seen(1, 7), dict(rig.cuda.registered)
    rig.worker.start_stores(StepOrders(stores=[job(1, Direction.STORE, 1, [7], [2])]))
    for _ in range(2):
        rig.worker.release_caches()
        assert rig.cuda.num_queued_copies() == 0
        assert rig.cuda.registered == registered
    memory.free()
    # What is asked for meanwhile fails, and touches nothing.
    rig.worker.start_loads(StepOrders(loads=[job(2, Direction.LOAD, 1, [5], [2])]))
    memory.allocate()
    for _ in range(2):
        rig.worker.restore_caches()
    assert sorted(map(str, rig.collect_all(2))) == ["None", "the copy engine is closed"]
    rig.worker.start_loads(StepOrders(loads=[job(3, Direction.LOAD, 1, [5], [2])]))
    assert rig.collect_all(1) == [None]
    assert rig.seen(1, 5) == before
    assert rig.cuda.registered == registered


def test_closing_leaves_no_copy_over_memory_that_vllm_frees_next(rig: Rig) -> None:
    fill(rig.caches, seed=1)
    rig.worker.start_stores(StepOrders(stores=[job(1, Direction.STORE, 1, list(range(4)), list(range(4)))]))
    rig.worker.close()
    assert rig.cuda.num_queued_copies() == 0
    assert rig.cuda.registered == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_without_a_driver_is_refused_with_what_to_do() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout = read_layout(config)
    elsewhere = {
        name: SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=cache.untyped_storage)
        for name, cache in allocate(config).items()
    }
    check_caches(layout, elsewhere)
    with pytest.raises(ConnectorRefused, match=re.escape("cuda:0 cannot be used for copies")) as refused:
        device_side(layout, elsewhere)
    assert str(refused.value).endswith("run vLLM's CPU backend, or vLLM without kvferry")


def test_a_device_that_gives_no_stream_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    cuda, config = FakeCuda(), cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout = read_layout(config)
    side = CudaSide(torch.device("cuda", 0), CudaDriver(cuda.resolve), lambda: cuda.compute)
    pool = HostPool(4, layout.of_core(1, 1).slot_bytes, preparation=preparation_for(side))
    cuda.fail("cuStreamCreateWithPriority", ILLEGAL_ADDRESS)
    settings = Settings(_env_file=None, state_dir=tmp_path, kernel_below_bytes=1)
    with pytest.raises(ConnectorRefused, match="cuda:0 gives no copy engine"):
        Copies(layout, settings, allocate(config), MappedPool(pool), lambda: None, side)
    assert (cuda.registered, cuda.copy_streams, cuda.retained) == ({}, [], 0)


def test_caches_on_two_devices_are_refused() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout, caches = read_layout(config), dict(allocate(config))
    name = config.kv_cache_groups[0].layer_names[1]
    storage = caches[name].untyped_storage
    caches[name] = SimpleNamespace(device=torch.device("cuda", 0), untyped_storage=storage)  # type: ignore[assignment]
    with pytest.raises(ConnectorRefused, match="is on cpu, cuda:0"):
        check_caches(layout, caches)


def test_vllm_answers_alike_over_a_device_cache_that_turns_over(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM computes on the CPU, and its blocks are copied as if they were on a device."""
    prompts = shared_prefixes(60)
    with in_process(llama) as engine:
        truth = engine.generate(prompts)
    cuda = FakeCuda(7)

    def on_a_device(_layout: VllmLayout, _caches: object) -> CudaSide:
        return CudaSide(torch.device("cuda", 0), CudaDriver(cuda.resolve), lambda: cuda.compute)

    monkeypatch.setattr(connector, "device_side", on_a_device)
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
