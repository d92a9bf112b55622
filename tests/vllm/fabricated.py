"""Cache configurations that vLLM's CPU backend never makes, laid out by vLLM's own code for other devices."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from kvferry.core.transfers import BlockRun, Direction, TransferJob
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

BLOCK = 32
NUM_BLOCKS = 12

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
APART = FullAttentionSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, num_head_slots=4, state_content_bytes=32
)
"""K and V of each head in places of their own, as some backends want them."""
FP8 = FullAttentionSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
)
FP8_SCALES = FullAttentionSpec(
    block_size=BLOCK,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.uint8,
    kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
    state_content_bytes=40,
)
"""With the scales of each token and head beside their values."""
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=64)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)
MLA_FP8 = MLAAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", max_tp_shards=1
)
MLA_PADDED = MLAAttentionSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=584, dtype=torch.uint8, alignment=576, max_tp_shards=1
)
INDEXER = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
"""The small cache by which sparse attention finds its tokens: other pages than those of its model's layers."""
MLA_WINDOW = SlidingWindowMLASpec(
    block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=64, max_tp_shards=1
)
MAMBA = MambaSpec(
    block_size=BLOCK,
    shapes=((4, 24), (2, 8, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


def groups_of(*specs: KVCacheSpec, layers: int = 3) -> list[KVCacheGroupSpec]:
    """A group for each spec, of so many layers."""
    return [
        KVCacheGroupSpec([f"model.layers.{group + number * len(specs)}" for number in range(layers)], spec)
        for group, spec in enumerate(specs)
    ]


def mixed_group(*specs: KVCacheSpec, layers: int = 2) -> list[KVCacheGroupSpec]:
    """One group whose layers have pages of different sizes."""
    by_layer = {f"model.layers.{number}.{at}": spec for number in range(layers) for at, spec in enumerate(specs)}
    return [KVCacheGroupSpec(list(by_layer), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=by_layer))]


def cache_config(
    layout: KVCacheLayout,
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int = NUM_BLOCKS,
    tensor_parallel: int = 1,
    block_size: int = BLOCK,
    retention_interval: int | None = 0,
) -> KVCacheConfig:
    """What the engine core makes of these groups, for workers of this layout.

    With a `retention_interval` of 0 the device finds only the last blocks of a sliding window.
    """
    about = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=retention_interval,
        ),
    )
    found = planning.get_kv_cache_config_from_groups(about, list(groups), available_memory=1 << 30)
    found.kv_cache_layout = layout.name
    found.hash_block_size = block_size
    found.kv_tp_replicas = planning.kv_cache_groups_tp_replicas(list(groups), tensor_parallel)
    return found


def allocate(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The tensors that a worker registers."""
    return allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[str(config.kv_cache_layout)])


def job(number: int, direction: Direction, group: int, blocks: Sequence[int], slots: Sequence[int]) -> TransferJob:
    """A job of one run, between the first parts of slots and blocks of a group."""
    arrays = [np.array(values, dtype=np.int64) for values in (blocks, slots, [0] * len(blocks))]
    return TransferJob(number, direction, (BlockRun(group, *arrays),), f"request-{number}")


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    """Have different bytes everywhere."""
    memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(caches.values())).untyped_storage())
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def block_bytes(cache: torch.Tensor, block: int) -> bytes:
    """What vLLM reads as one block of a layer."""
    return cache[block].contiguous().view(torch.uint8).numpy().tobytes()
