"""Paged KV cache, and paged attention as a transformers attention function.

Attention writes a step's KV into blocks and reads through block tables. The tokens of all sequences of a step are
concatenated in one row. transformers makes no mask for an unknown attention function and passes the keyword `paged`
down to it, so that no global state is needed. A copy engine moves whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.limits import check_fits, memory_limits

ATTENTION_NAME = "kvferry_paged"
REFUSED_FEATURES = {"softcap": "attention soft-capping", "s_aux": "attention sinks", "position_bias": "position biases"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's KV, equal in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens: all layers, keys and values."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """KV cache on the device: a tensor `[blocks, layers, 2, block_size, kv_heads, head_dim]`, each block contiguous.

    `block_bytes[i]` is block i as bytes, sharing memory with `tensor[i]`.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tensor = torch.zeros(
            (num_blocks, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.blocks: Tensor = self.tensor.view(num_blocks, -1).view(torch.uint8)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Write token i's key and value (`[tokens, kv_heads, head_dim]`) at `offsets[i]` of block `blocks[i]`."""
        of_layer = self.tensor[:, layer]
        of_layer[blocks, 0, offsets] = key
        of_layer[blocks, 1, offsets] = value

    def read(self, layer: int, blocks: Tensor, skipped: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each `[kv_heads, tokens, head_dim]`, of a run of blocks after `skipped` tokens."""
        of_layer = self.tensor[:, layer]
        key, value = (
            of_layer[:, part].index_select(0, blocks).flatten(0, 1)[skipped : skipped + num_tokens].transpose(0, 1)
            for part in (0, 1)
        )
        return key, value


def check_memory(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
    """Raise `StartError` if the device has less memory than the cache needs; the message has both sizes."""
    on_cuda = device.type == "cuda"
    limits = [(f"memory free on {device}", torch.cuda.mem_get_info(device)[0])] if on_cuda else memory_limits()
    check_fits("KVFERRY_DEVICE_BLOCKS", num_blocks * shape.block_bytes(block_size), limits)


Attend = Callable[[int, Tensor, Tensor, Tensor, float | None, int | None], Tensor]
"""Type of the keyword `paged`: computes the attention of one layer from layer, query, key, value, scale and window.

The query is `[heads, tokens, head_dim]`, key and value are `[tokens, kv_heads, head_dim]`; the result is `[tokens,
heads, head_dim]`. The window is the number of tokens that a token attends to, itself included.
"""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    paged: Attend | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers, once per layer."""
    if paged is None:
        raise StartError(f"{type(module).__name__} does not pass keyword arguments to its attention function")
    for name, description in REFUSED_FEATURES.items():
        if features.get(name) is not None:
            raise StartError(f"{type(module).__name__} uses {description}, which this engine does not support")
    output = paged(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a step: its tokens are rows `start` to `start + num_new` and the last of its `num_tokens`."""

    start: int
    num_new: int
    num_tokens: int
    blocks: Tensor


@dataclass(slots=True)
class PagedBatch:
    """The sequences of one step, and the block and offset for the KV of each token."""

    cache: PagedKVCache
    spans: Sequence[Span]
    write_blocks: Tensor
    write_offsets: Tensor
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Write the new tokens of every sequence, then compute its attention over its own blocks."""
        self.cache.write(layer, self.write_blocks, self.write_offsets, key, value)
        output = torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format)
        for index, span in enumerate(self.spans):
            rows = slice(span.start, span.start + span.num_new)
            output[rows] = self._attend_span(index, span, layer, query[:, rows], scale, window).transpose(0, 1)
        return output

    def _attend_span(
        self, index: int, span: Span, layer: int, query: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        first_seen = 0 if window is None else max(0, span.num_tokens - span.num_new - window + 1)
        first_block, skipped = divmod(first_seen, self.cache.block_size)
        num_keys = span.num_tokens - first_seen
        key, value = self.cache.read(layer, span.blocks[first_block:], skipped, num_keys)
        if span.num_new == 1:
            return _sdpa(query, key, value, scale)
        if span.num_new == num_keys and (window is None or window >= num_keys):
            return _sdpa(query, key, value, scale, causal=True)
        mask = self._masks.get((index, window))
        if mask is None:
            mask = _causal_mask(span.num_new, num_keys, window, query.device)
            self._masks[index, window] = mask
        return _sdpa(query, key, value, scale, mask)


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask that is True where a query attends to a key; the last query is aligned with the last key."""
    query_at = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_at = torch.arange(num_keys, device=device)[None, :]
    mask = key_at <= query_at
    return mask if window is None else mask & (key_at > query_at - window)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute attention of `[heads, tokens, head_dim]` queries over `[kv_heads, tokens, head_dim]` keys and values."""
    groups = query.shape[0] // key.shape[0]
    if mask is not None and groups > 1:  # no fast kernel takes both a mask and grouped heads
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        groups = 1
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )[0]
