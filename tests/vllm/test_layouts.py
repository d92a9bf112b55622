"""Layouts of the KV cache that vLLM's CPU backend does not have: every byte of a block goes to the pool and back.

The configurations are fabricated; the code that lays them out and views them is vLLM's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.app.engines.vllm.copies import RankCopies, check_caches
from kvferry.app.engines.vllm.layout import VllmLayout, read_layout
from kvferry.app.engines.vllm.metadata import StepMetadata, WorkerReports
from kvferry.app.engines.vllm.pool import MappedPool, check_pool_memory, pool_geometry
from kvferry.app.engines.vllm.worker import ConnectorWorker
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from kvferry.core.groups import GroupKind
from kvferry.core.transfers import Direction, TransferResult
from kvferry.cuda_ops.persistent.transient_file import TransientFile
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm import fabricated as fake
from tests.vllm.fabricated import NUM_BLOCKS, allocate, block_bytes, cache_config, fill, groups_of, job, mixed_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

ALL = tuple(KVCacheLayout)
WHOLE_PAGES = tuple(layout for layout in ALL if layout.is_block_compact)

CASES: dict[str, tuple[tuple[KVCacheLayout, ...], list[KVCacheGroupSpec]]] = {
    "full": (ALL, groups_of(fake.FULL)),
    "keys-and-values-apart": (ALL, groups_of(fake.APART)),
    "fp8": (ALL, groups_of(fake.FP8)),
    "fp8-with-scales": (ALL, groups_of(fake.FP8_SCALES)),
    "sliding-windows": (ALL, groups_of(fake.WINDOW, fake.WINDOW, fake.FULL)),
    "mla": (ALL, groups_of(fake.MLA)),
    "mla-fp8": (ALL, groups_of(fake.MLA_FP8)),
    "mla-padded": (WHOLE_PAGES, groups_of(fake.MLA_PADDED)),
    "mla-and-indexer": (WHOLE_PAGES, mixed_group(fake.MLA_FP8, fake.INDEXER)),
    "mla-windows": (ALL, groups_of(fake.MLA_WINDOW, fake.MLA)),
    "mamba": (WHOLE_PAGES, groups_of(fake.MAMBA, fake.MAMBA, fake.FULL)),
}


def every_case() -> list[Any]:
    return [
        pytest.param(layout, groups, id=f"{name}-{layout.name}")
        for name, (layouts, groups) in CASES.items()
        for layout in layouts
    ]


@dataclass
class Bench:
    """A cache, and a pool beside it."""

    config: KVCacheConfig
    caches: dict[str, torch.Tensor]
    copies: RankCopies
    number: int = 0

    def copy(self, direction: Direction, group: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.number += 1
        self.copies.submit(job(self.number, direction, group, blocks, slots))
        assert self.copies.wait([self.number], DEADLINE_S)
        assert [result.error for result in self.copies.poll()] == [None]

    def seen(self, group: int, block: int) -> list[bytes]:
        """What vLLM sees of a block in each of its group's layers."""
        return [block_bytes(self.caches[name], block) for name in self.config.kv_cache_groups[group].layer_names]


def make_bench(layout: KVCacheLayout, groups: list[KVCacheGroupSpec], slots: int = 4) -> tuple[VllmLayout, Bench]:
    config = cache_config(layout, groups)
    found, caches = read_layout(config), allocate(config)
    check_caches(found, caches)
    pool = HostPool(slots, found.group_layout(1, 1).slot_bytes)
    copies = RankCopies(found, Settings(_env_file=None), caches, MappedPool(pool), lambda: None)
    return found, Bench(config, caches, copies)


@pytest.mark.parametrize(("layout", "groups"), every_case())
def test_block_when_stored_and_loaded_has_the_same_bytes(layout: KVCacheLayout, groups: list[KVCacheGroupSpec]) -> None:
    found, bench = make_bench(layout, groups)
    try:
        for group in range(len(groups)):
            fill(bench.caches, seed=group)
            before = {block: bench.seen(group, block) for block in range(NUM_BLOCKS)}
            assert len({tuple(seen) for seen in before.values()}) == NUM_BLOCKS
            bench.copy(Direction.STORE, group, [3, 7], [2, 0])
            bench.copy(Direction.LOAD, group, [5, 11], [2, 0])
            expected = {**before, 5: before[3], 11: before[7]}
            assert {block: bench.seen(group, block) for block in range(NUM_BLOCKS)} == expected
            # No byte is carried that vLLM does not count as the block's own.
            page = sum(len(seen) for seen in before[0])
            assert page <= found.groups[group].spec.block_bytes <= found.device_bytes // NUM_BLOCKS
    finally:
        bench.copies.close()


@pytest.mark.parametrize(("layout", "groups"), every_case())
def test_groups_when_read_have_the_fields_of_vllms_specs(layout: KVCacheLayout, groups: list[KVCacheGroupSpec]) -> None:
    found = read_layout(cache_config(layout, groups))
    for ours, theirs in zip(found.groups, groups, strict=True):
        spec = theirs.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        assert (ours.spec.block_size, ours.spec.window_tokens) == (spec.block_size, window)
        assert ours.has_boundary_states == isinstance(spec, MambaSpec)
        kind = GroupKind.RECURRENT if isinstance(spec, MambaSpec) else GroupKind.SLIDING if window else GroupKind.FULL
        assert ours.spec.kind is kind


def test_pool_when_ranks_hold_identical_kv_has_one_copy(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(_env_file=None, pool_bytes="64MiB")
    mla = read_layout(cache_config(KVCacheLayout.LBNHC, groups_of(fake.MLA), tensor_parallel=4))
    own = read_layout(cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL), tensor_parallel=4))
    assert (mla.replicas, own.replicas) == (4, 1)
    caplog.set_level(logging.INFO)
    for layout, stages, copies in ((mla, 1, 1), (mla, 2, 2), (own, 1, 4)):
        caplog.clear()
        size = pool_geometry(settings, layout, SimpleNamespace(world_size=4 * stages))
        check_pool_memory(size, settings, layout)
        assert sum("stored once for 4 ranks" in line for line in caplog.messages) == (layout is mla)
        block_bytes = layout.groups[0].spec.block_bytes
        assert size.slots.slot_bytes == copies * block_bytes
        assert (size.num_ranks, size.num_columns, size.rank_slot_bytes) == (4 * stages, copies, block_bytes)
        # One rank stores to each column, and all ranks have one.
        ranks = range(size.num_ranks)
        assert sorted(size.column(rank) for rank in ranks if size.stores(rank)) == list(range(copies))
        assert {size.column(rank) for rank in ranks} == set(range(copies))


@pytest.mark.parametrize("when", ["stores", "stores_ahead"])
def test_ranks_with_identical_kv_when_one_stores_all_load(when: str) -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.MLA), tensor_parallel=2)
    layout, settings = read_layout(config), Settings(_env_file=None, pool_bytes="64MiB")
    size = pool_geometry(settings, layout, SimpleNamespace(world_size=2))
    ranks: list[tuple[ConnectorWorker, Bench]] = []
    name = f"test-{os.getpid()}"
    for rank in range(2):
        caches = allocate(config)
        fill(caches, seed=1 + rank)
        pool = HostPool(
            4,
            size.rank_slot_bytes,
            backing=TransientFile(name, is_ready=rank > 0),
            num_ranks=size.num_columns,
            rank=size.column(rank),
        )
        worker = ConnectorWorker(rank, stores=size.stores(rank))
        mapped = MappedPool(pool, rank=rank)
        worker.attach(lambda on_finished: RankCopies(layout, settings, caches, mapped, on_finished))  # noqa: B023
        assert isinstance(worker._copies, RankCopies)
        ranks.append((worker, Bench(config, caches, worker._copies)))

    def run(orders: StepMetadata) -> None:
        (copied,) = (*orders.stores_ahead, *orders.loads, *orders.stores)
        for rank, (worker, _) in enumerate(ranks):
            worker.copy_ahead(orders)
            worker.start_loads(orders)
            worker.start_stores(orders)
            results: list[TransferResult] = []

            def has_ended() -> bool:
                worker.collect(orders)  # noqa: B023
                results[:] = worker.reports.results  # noqa: B023
                return bool(results)  # noqa: B023

            wait_until(has_ended, "the job has ended", DEADLINE_S)
            assert [(result.job_id, result.worker, result.error) for result in results] == [(copied.job_id, rank, None)]
            # The bytes of the one copy count once.
            assert (results[0].num_bytes > 0) == (rank == 0)
            worker.reports = WorkerReports()

    try:
        wanted = ranks[0][1].seen(0, 3)
        run(StepMetadata(**{when: [job(1, Direction.STORE, 0, [3], [2])]}))
        for seed, (_, bench) in enumerate(ranks, 5):
            fill(bench.caches, seed=seed)
        run(StepMetadata(loads=[job(2, Direction.LOAD, 0, [7], [2])]))
        assert [bench.seen(0, 7) for _, bench in ranks] == [wanted, wanted]
        assert ranks[1][1].copies.slot(2).tobytes() == ranks[0][1].copies.slot(2).tobytes()
    finally:
        for worker, _ in ranks:
            worker.close()


@pytest.mark.parametrize(
    ("pool", "mode", "warned"), [("4KiB", "eager", True), ("4KiB", "lazy", False), ("64MiB", "eager", False)]
)
def test_pool_when_smaller_than_device_cache_warns_in_eager_mode(
    pool: str, mode: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(_env_file=None, pool_bytes=pool, store_mode=mode, blocks_per_slot=1)
    layout = read_layout(cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL, layers=1)))
    size = pool_geometry(settings, layout, SimpleNamespace(world_size=1))
    caplog.set_level(logging.INFO)
    check_pool_memory(size, settings, layout)
    first, *others = caplog.messages
    assert first == (
        f"host pool: {size.num_slots:,} slots of 4,096 bytes; {size.num_bytes:,} bytes on each of 1 ranks, "
        f"{size.num_bytes:,} in all, {size.num_bytes / layout.device_bytes:.2f} times the device's KV cache"
    )
    assert bool(others) == warned
    assert all("mostly holds blocks that the device still has" in line for line in others)


REFUSED: dict[str, tuple[list[KVCacheGroupSpec], str]] = {
    "chunked": (
        groups_of(
            ChunkedLocalAttentionSpec(
                block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, attention_chunk_size=64
            )
        ),
        "ChunkedLocalAttentionSpec",
    ),
    "cross": (
        groups_of(CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)),
        "CrossAttentionSpec",
    ),
    "mamba-without-checkpoints": (groups_of(replace(fake.MAMBA, mamba_cache_mode="none")), "mamba-cache-mode align"),
    "replay": (
        groups_of(
            SlidingWindowMLASpec(
                block_size=32,
                num_kv_heads=1,
                head_size=576,
                dtype=torch.bfloat16,
                sliding_window=64,
                bounded_replay=True,
            )
        ),
        "found by a prefix",
    ),
    "unlike-windows": (mixed_group(fake.WINDOW, replace(fake.WINDOW, sliding_window=128)), "differ in kind"),
    "a-subclass": (
        groups_of(RSWASpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, rswa_window=64)),
        "RSWASpec",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_group_spec_when_not_supported_is_refused_and_named(name: str) -> None:
    groups, words = REFUSED[name]
    with pytest.raises(StartError, match=words):
        read_layout(cache_config(KVCacheLayout.LBNHC, groups))


def test_memory_layout_when_not_supported_is_refused() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    config.kv_cache_layout = "CNHBL"
    with pytest.raises(StartError, match=r"CNHBL is not supported; kvferry supports LBHNC"):
        read_layout(config)


def test_model_without_kv_cache_is_refused() -> None:
    with pytest.raises(StartError, match="no KV cache"):
        read_layout(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))


def test_block_hashes_that_do_not_divide_blocks_are_refused() -> None:
    layout = replace(read_layout(cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))), hash_block_size=7)
    with pytest.raises(StartError, match=r"hash_block_size=7 does not divide .*; kvferry does not support this"):
        layout.group_layout(1, 1)


def test_tensors_when_unlike_the_configuration_are_refused() -> None:
    config = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
    layout, caches = read_layout(config), allocate(config)
    name = config.kv_cache_groups[0].layer_names[1]
    with pytest.raises(StartError, match="several separate allocations"):
        check_caches(layout, {**caches, name: [caches[name], caches[name].clone()]})
    with pytest.raises(StartError, match="has blocks up to byte"):
        check_caches(layout, {**caches, name: caches[name].clone()})
    with pytest.raises(StartError, match=f"no KV cache for layer {name}"):
        check_caches(layout, {other: cache for other, cache in caches.items() if other != name})
    with pytest.raises(StartError, match=r"is on cpu, meta; .* one CUDA device per rank, or CPU memory"):
        check_caches(layout, {**caches, name: caches[name].to("meta")})
