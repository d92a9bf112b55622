"""Where vLLM keeps the bytes of a block: groups as core knows them, and the stretches of memory a block is made of.

Everything here follows from vLLM's cache configuration alone, so that workers and scheduler, which share no memory,
come to the same numbers. What is not on the list of layouts that are understood is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.core.groups import GroupKind, GroupLayout, GroupSpec

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of layers (L), blocks (B), heads (H), tokens (N) and contents (C) in memory, as vLLM names them."""

NULL_BLOCK = 0
"""What vLLM writes into a block table where there is no block."""

_KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "MambaSpec": GroupKind.RECURRENT,
}
"""Exactly these classes: a subclass may mean something else by its blocks."""
_LATENT_KINDS = ("MLAAttentionSpec", "SlidingWindowMLASpec")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of every block: block b has `block_bytes` bytes at `offset + b * stride_bytes` of a layer's memory.

    `layer` names one whose tensor lies in that memory.
    """

    layer: str
    offset: int
    block_bytes: int
    stride_bytes: int
    num_blocks: int

    @property
    def end(self) -> int:
        """Bytes that the memory must have at least."""
        return self.offset + (self.num_blocks - 1) * self.stride_bytes + self.block_bytes


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """One of vLLM's cache groups. `by_offer`: its blocks come as hand-offs, not by their place in the block table."""

    spec: GroupSpec
    stretches: tuple[Stretch, ...]
    by_offer: bool = False


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """All groups of one rank. `device_bytes` is its whole cache.

    `replicas` consecutive ranks hold the same heads. In an MLA model (`is_latent`) their bytes are the same, too.
    """

    groups: tuple[VllmGroup, ...]
    num_blocks: int
    hash_block_size: int
    device_bytes: int
    replicas: int
    is_latent: bool = False

    @property
    def ranks_per_copy(self) -> int:
        """How many consecutive ranks share one copy of their blocks in the pool."""
        return self.replicas if self.is_latent else 1

    def of_core(self, blocks_per_slot: int, num_copies: int) -> GroupLayout:
        """The groups as core lays them out in slots. To core a block has the bytes of all `num_copies` ranks that hold
        bytes of their own."""
        specs = [replace(group.spec, block_bytes=group.spec.block_bytes * num_copies) for group in self.groups]
        return GroupLayout(specs, blocks_per_slot, self.hash_block_size)

    def slot_blocks(self, blocks_per_slot: int) -> list[int]:
        """How many blocks of each group a slot holds."""
        return [group.slot_blocks for group in self.of_core(blocks_per_slot, 1).groups]


def read_layout(cache: Any, hash_block_size: int | None = None) -> VllmLayout:
    """Read a `KVCacheConfig`, whose block hashes are for `hash_block_size` tokens each, by default what it says.

    Raises `ConnectorRefused` for what is not on the list.
    """
    groups = cache.kv_cache_groups
    if not groups or not cache.kv_cache_tensors:
        raise ConnectorRefused("this model has no KV cache: there is nothing to offload, so leave the connector out")
    _check_whole(cache)
    replicas = int(getattr(cache, "kv_tp_replicas", 1) or 1)
    found = tuple(_read_group(cache, index) for index in range(len(groups)))
    device_bytes = max(int(tensor.size) for tensor in cache.kv_cache_tensors)
    hash_block_size = hash_block_size or cache.hash_block_size or min(group.spec.block_size for group in found)
    is_latent = all(
        type(spec).__name__ in _LATENT_KINDS for group in groups for spec in _layer_specs(group.kv_cache_spec)
    )
    return VllmLayout(found, int(cache.num_blocks), int(hash_block_size), device_bytes, replicas, is_latent)


def _check_whole(cache: Any) -> None:
    """Refuse caches of which a part could not be restored: its tokens would be read as they are."""
    everything = tuple(range(len(cache.kv_cache_groups)))
    if tuple(cache.prefix_cacheable_group_ids) != everything:
        raise ConnectorRefused(
            f"groups {sorted(set(everything) - set(cache.prefix_cacheable_group_ids))} of this model's KV cache cannot "
            "be found by a prefix; kvferry does not support such models"
        )
    if cache.hisparse_host_num_blocks is not None or any(tensor.host_resident for tensor in cache.kv_cache_tensors):
        raise ConnectorRefused("this KV cache lies partly in host memory (HiSparse), which kvferry does not support")
    if cache.kv_cache_layout is not None and str(cache.kv_cache_layout) not in LAYOUTS:
        raise ConnectorRefused(
            f"KV cache layout {cache.kv_cache_layout} is not one that kvferry knows: {', '.join(LAYOUTS)}"
        )


def _read_group(cache: Any, index: int) -> VllmGroup:
    group = cache.kv_cache_groups[index]
    specs = list(_layer_specs(group.kv_cache_spec))
    kinds = {_kind(index, spec) for spec in specs}
    sizes = {int(spec.block_size) for spec in specs}
    windows = {int(spec.sliding_window) for spec in specs if _kind(index, spec) is GroupKind.SLIDING}
    if len(kinds) != 1 or len(sizes) != 1 or len(windows) > 1:
        raise ConnectorRefused(
            f"the layers of KV cache group {index} differ in kind, block size or window ({sorted(kinds)}, "
            f"{sorted(sizes)}, {sorted(windows)}), which kvferry does not support"
        )
    stretches = tuple(_stretches(cache, index, frozenset(group.layer_names)))
    kind = kinds.pop()
    spec = GroupSpec(
        block_size=sizes.pop(),
        block_bytes=sum(stretch.block_bytes for stretch in stretches),
        kind=kind,
        window_tokens=windows.pop() if windows else None,
    )
    return VllmGroup(spec, stretches, by_offer=kind is GroupKind.RECURRENT and specs[0].mamba_cache_mode == "align")


def _kind(index: int, spec: Any) -> GroupKind:
    name = type(spec).__name__
    kind = _KINDS.get(name)
    if kind is None:
        raise ConnectorRefused(f"KV cache group {index} is a {name}, which kvferry does not know: {', '.join(_KINDS)}")
    if getattr(spec, "prefix_replay_tokens", 0):
        raise ConnectorRefused(f"KV cache group {index} replays part of each hit, which kvferry does not support")
    if kind is GroupKind.RECURRENT and spec.mamba_cache_mode not in ("align", "all"):
        raise ConnectorRefused(
            f"KV cache group {index} holds recurrent state without checkpoints (mamba_cache_mode="
            f"{spec.mamba_cache_mode}): start vLLM with --enable-prefix-caching and --mamba-cache-mode align"
        )
    return kind


def _layer_specs(spec: Any) -> Iterable[Any]:
    """The specs of a group's layers. Workers may hold one for each layer where the scheduler holds one for all."""
    inner = getattr(spec, "kv_cache_specs", None)
    return (spec,) if inner is None else inner.values()


def _stretches(cache: Any, index: int, layer_names: frozenset[str]) -> Iterable[Stretch]:
    """Every stretch of memory that layers of a group have in each block, those that coincide once."""
    found: dict[tuple[int, int, int], Stretch] = {}
    for tensor in cache.kv_cache_tensors:
        layers: Sequence[str] = [name for name in tensor.layers if name in layer_names]
        if not layers:
            continue
        if len(layers) < len(tensor.layers):
            raise ConnectorRefused(
                f"layer {next(name for name in tensor.layers if name not in layer_names)} shares its KV cache tensor "
                f"with group {index}, to which it does not belong; kvferry does not know such a layout"
            )
        for stretch in _stretches_of(tensor, layers, int(cache.num_blocks)):
            found.setdefault((stretch.offset, stretch.block_bytes, stretch.stride_bytes), stretch)
    if not found:
        raise ConnectorRefused(f"KV cache group {index} has layers, but no memory; kvferry does not know such a layout")
    return found.values()


def _stretches_of(tensor: Any, layers: Sequence[str], num_blocks: int) -> Iterable[Stretch]:
    block_stride, layer_stride = int(tensor.block_stride), int(tensor.layer_stride)
    column = num_blocks * block_stride
    if layer_stride < column:
        # Blocks outermost: a block has all layers of all groups that lie in it, one behind the other.
        yield Stretch(layers[0], 0, block_stride, block_stride, num_blocks)
        return
    # Layers outermost, and within a layer maybe heads: every column has one piece of each block.
    columns, rest = divmod(layer_stride, column)
    if rest:
        raise ConnectorRefused(
            f"layers of {layer_stride:,} bytes are not made of whole columns of {num_blocks} blocks of "
            f"{block_stride:,} bytes; kvferry does not know such a layout"
        )
    for number in range(len(layers) * columns):
        yield Stretch(
            layers[number // columns], int(tensor.offset) + number * column, block_stride, block_stride, num_blocks
        )
