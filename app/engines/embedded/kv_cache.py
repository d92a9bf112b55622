"""Paged KV cache in one tensor: `[blocks, layers, 2, block_size, kv_heads, head_dim]`, each block contiguous.

A copy engine moves whole blocks (`block_bytes`); the model reads and writes them layer by layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvferry.app.engines.embedded.config import EngineStartError
from kvferry.cuda_ops.pool.limits import MemoryLimit, memory_limits

HASH_BYTES = 32
HASH_SEED = b"kvferry/blocks/1"


def chain_root(cache_salt: str | None, lora: str | None) -> bytes:
    """Return the parent hash of a request's first block. Parts are length-prefixed, so that no two pairs have equal
    roots.
    """
    root = hashlib.blake2b(HASH_SEED, digest_size=HASH_BYTES)
    for part in (cache_salt, lora):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        root.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
        root.update(data)
    return root.digest()


def extend_chain(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, first_token: int = 0
) -> None:
    """Append the hashes of full blocks that `hashes` lacks; `token_ids[0]` is token `first_token`."""
    num_full = (first_token + len(token_ids)) // block_size
    start = len(hashes) * block_size - first_token
    if num_full <= len(hashes):
        return
    data = np.asarray(token_ids[start : num_full * block_size - first_token], dtype="<u4").tobytes()
    parent = hashes[-1] if hashes else root
    step = block_size * 4
    for offset in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


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
    """KV cache on the device. `block_bytes[i]` is block i as bytes, sharing memory with `tensor[i]`."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tensor = torch.zeros(
            (num_blocks, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.block_bytes: Tensor = self.tensor.view(num_blocks, -1).view(torch.uint8)

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


def check_fits(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> int:
    """Return the bytes of the cache.

    Raises:
        EngineStartError: the device has less memory; the message has both sizes.
    """
    needed_bytes = num_blocks * shape.block_bytes(block_size)
    on_cuda = device.type == "cuda"
    limits = (
        [MemoryLimit(f"memory free on {device}", torch.cuda.mem_get_info(device)[0])] if on_cuda else memory_limits()
    )
    tightest = min(limits, key=lambda limit: limit.available_bytes)
    if needed_bytes > tightest.available_bytes:
        most = tightest.available_bytes // shape.block_bytes(block_size)
        raise EngineStartError(
            f"KVFERRY_DEVICE_BLOCKS={num_blocks} of {shape.block_bytes(block_size):,} bytes need {needed_bytes:,} "
            "bytes, but "
            f"{tightest.name} is {tightest.available_bytes:,}: set KVFERRY_DEVICE_BLOCKS to {most} or less"
        )
    return needed_bytes
