"""Memory layout of vLLM's KV cache: its groups as core's `GroupSpec`, and the memory regions that make up a block.

Everything is derived from vLLM's cache configuration, so that the worker ranks and the scheduler process compute the
same numbers. Unknown layouts are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.core.errors import StartError
from kvferry.core.groups import GroupKind, GroupLayout, GroupSpec

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of layers (L), blocks (B), heads (H), tokens (N) and contents (C) in memory, as vLLM names them."""

NULL_BLOCK = 0
"""Entry of a block table that refers to no block."""

_KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "MambaSpec": GroupKind.RECURRENT,
}
"""Exactly these classes; a subclass may give its blocks another meaning."""
_MLA_SPECS = ("MLAAttentionSpec", "SlidingWindowMLASpec")


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """Part of every block: block b has `block_bytes` bytes at `offset + b * stride_bytes` of a layer's memory.

    `layer` is a layer whose tensor lies in that memory.
    """

    layer: str
    offset: int
    block_bytes: int
    stride_bytes: int
    num_blocks: int

    @property
    def end(self) -> int:
        """Smallest size of the memory, in bytes."""
        return self.offset + (self.num_blocks - 1) * self.stride_bytes + self.block_bytes


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """One KV cache group of vLLM.

    If `has_boundary_states`, vLLM gives the group's blocks to the connector as boundary states, not in block tables.
    """

    spec: GroupSpec
    regions: tuple[BlockRegion, ...]
    has_boundary_states: bool = False


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """All KV cache groups of one rank, with `device_bytes` in total.

    `replicas` consecutive ranks hold the same heads; in an MLA model their bytes are identical, too. For
    `skips_last_block`, `window_interval_tokens` and `unsettled_tokens` see `GroupLayout`.
    """

    groups: tuple[VllmGroup, ...]
    num_blocks: int
    hash_block_size: int
    device_bytes: int
    replicas: int
    is_mla: bool = False
    skips_last_block: bool = False
    window_interval_tokens: int | None = 0
    unsettled_tokens: int = 0

    @property
    def ranks_per_copy(self) -> int:
        """Number of consecutive ranks that share one copy of their blocks in the pool."""
        return self.replicas if self.is_mla else 1

    def group_layout(self, blocks_per_slot: int, num_copies: int) -> GroupLayout:
        """Return core's layout of slots, in which a block has the bytes of all `num_copies` ranks that differ.

        Raises `StartError` for sizes that do not fit together.
        """
        specs = [replace(group.spec, block_bytes=group.spec.block_bytes * num_copies) for group in self.groups]
        try:
            return GroupLayout(
                specs,
                blocks_per_slot,
                self.hash_block_size,
                NULL_BLOCK,
                skips_last_block=self.skips_last_block,
                window_interval_tokens=self.window_interval_tokens,
                unsettled_tokens=self.unsettled_tokens,
            )
        except ValueError as error:
            raise StartError(f"{error}; kvferry does not support this") from error


def read_layout(
    cache: Any, hash_block_size: int | None = None, *, skips_last_block: bool = False, unsettled_tokens: int = 0
) -> VllmLayout:
    """Read a `KVCacheConfig`.

    Args:
        cache: vLLM's `KVCacheConfig`.
        hash_block_size: Tokens per block hash; the value in `cache` by default.
        skips_last_block: See `GroupLayout`.
        unsettled_tokens: See `GroupLayout`.

    Raises:
        StartError: The layout is not supported.
    """
    groups = cache.kv_cache_groups
    if not groups or not cache.kv_cache_tensors:
        raise StartError("this model has no KV cache, so nothing can be offloaded; remove the connector")
    _check_supported(cache)
    read = tuple(_read_group(cache, index) for index in range(len(groups)))
    hash_block_size = hash_block_size or cache.hash_block_size or min(group.spec.block_size for group in read)
    specs = [spec for group in groups for spec in _layer_specs(group.kv_cache_spec)]
    return VllmLayout(
        read,
        num_blocks=int(cache.num_blocks),
        hash_block_size=int(hash_block_size),
        device_bytes=max(int(tensor.size) for tensor in cache.kv_cache_tensors),
        replicas=int(getattr(cache, "kv_tp_replicas", 1) or 1),
        is_mla=all(type(spec).__name__ in _MLA_SPECS for spec in specs),
        skips_last_block=skips_last_block,
        window_interval_tokens=cache.prefix_cache_retention_interval,
        unsettled_tokens=unsettled_tokens,
    )


def _check_supported(cache: Any) -> None:
    """Refuse caches of which a part cannot be restored."""
    uncacheable = set(range(len(cache.kv_cache_groups))) - set(cache.prefix_cacheable_group_ids)
    if uncacheable:
        raise StartError(
            f"KV cache groups {sorted(uncacheable)} cannot be found by a prefix; kvferry does not support this model"
        )
    if cache.hisparse_host_num_blocks is not None or any(tensor.host_resident for tensor in cache.kv_cache_tensors):
        raise StartError("part of the KV cache is in host memory (HiSparse); kvferry does not support this")
    if cache.kv_cache_layout is not None and str(cache.kv_cache_layout) not in LAYOUTS:
        raise StartError(
            f"KV cache layout {cache.kv_cache_layout} is not supported; kvferry supports {', '.join(LAYOUTS)}"
        )


def _read_group(cache: Any, index: int) -> VllmGroup:
    group = cache.kv_cache_groups[index]
    specs = list(_layer_specs(group.kv_cache_spec))
    kinds = {_kind(index, spec) for spec in specs}
    sizes = {int(spec.block_size) for spec in specs}
    windows = {int(spec.sliding_window) for spec in specs if _kind(index, spec) is GroupKind.SLIDING}
    if len(kinds) != 1 or len(sizes) != 1 or len(windows) > 1:
        raise StartError(
            f"the layers of KV cache group {index} differ in kind, block size or window ({sorted(kinds)}, "
            f"{sorted(sizes)}, {sorted(windows)}); kvferry does not support this"
        )
    regions = tuple(_regions(cache, index, frozenset(group.layer_names)))
    kind = kinds.pop()
    spec = GroupSpec(
        block_size=sizes.pop(),
        block_bytes=sum(region.block_bytes for region in regions),
        kind=kind,
        window_tokens=windows.pop() if windows else None,
    )
    return VllmGroup(spec, regions, kind is GroupKind.RECURRENT and specs[0].mamba_cache_mode == "align")


def _kind(index: int, spec: Any) -> GroupKind:
    name = type(spec).__name__
    kind = _KINDS.get(name)
    if kind is None:
        raise StartError(
            f"KV cache group {index} is of type {name}, which is not supported; kvferry supports {', '.join(_KINDS)}"
        )
    if getattr(spec, "prefix_replay_tokens", 0):
        raise StartError(f"KV cache group {index} replays part of each hit; kvferry does not support this")
    if kind is GroupKind.RECURRENT and spec.mamba_cache_mode not in ("align", "all"):
        raise StartError(
            f"mamba_cache_mode={spec.mamba_cache_mode}: KV cache group {index} has recurrent states without "
            "checkpoints; start vLLM with --enable-prefix-caching and --mamba-cache-mode align"
        )
    return kind


def _layer_specs(spec: Any) -> Iterable[Any]:
    """Return the specs of a group's layers; workers may have one for each layer where the scheduler has one for all."""
    inner = getattr(spec, "kv_cache_specs", None)
    return (spec,) if inner is None else inner.values()


def _regions(cache: Any, index: int, layer_names: frozenset[str]) -> Iterable[BlockRegion]:
    """Return the distinct memory regions of a group's layers."""
    regions: dict[tuple[int, int, int], BlockRegion] = {}
    for tensor in cache.kv_cache_tensors:
        layers: Sequence[str] = [name for name in tensor.layers if name in layer_names]
        if not layers:
            continue
        if len(layers) < len(tensor.layers):
            raise StartError(
                f"layer {next(name for name in tensor.layers if name not in layer_names)} shares its KV cache tensor "
                f"with group {index}, to which it does not belong; kvferry does not support this"
            )
        for region in _regions_of(tensor, layers, int(cache.num_blocks)):
            regions.setdefault((region.offset, region.block_bytes, region.stride_bytes), region)
    if not regions:
        raise StartError(f"KV cache group {index} has layers but no memory; kvferry does not support this")
    return regions.values()


def _regions_of(tensor: Any, layers: Sequence[str], num_blocks: int) -> Iterable[BlockRegion]:
    block_stride, layer_stride = int(tensor.block_stride), int(tensor.layer_stride)
    column_bytes = num_blocks * block_stride
    if layer_stride < column_bytes:
        # Blocks are the outermost dimension: each contains all layers of all groups.
        yield BlockRegion(layers[0], 0, block_stride, block_stride, num_blocks)
        return
    # Layers are the outermost dimension, possibly followed by heads: each column has one part of every block.
    columns, rest = divmod(layer_stride, column_bytes)
    if rest:
        raise StartError(
            f"a layer of {layer_stride:,} bytes is not a multiple of {num_blocks} blocks of {block_stride:,} bytes; "
            "kvferry does not support this"
        )
    for number in range(len(layers) * columns):
        offset = int(tensor.offset) + number * column_bytes
        yield BlockRegion(layers[number // columns], offset, block_stride, block_stride, num_blocks)
