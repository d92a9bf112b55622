"""A toy engine's device with real bytes: what a block holds follows from its key, so that any wrong byte is seen."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_TOKENS = 4
BLOCK_BYTES = 8192
NUM_TENANTS = 4
_NAME = struct.Struct(">BIHB")
_COUNTING = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def hash_of(tenant: int, era: int, family: int, index: int) -> bytes:
    name = _NAME.pack(tenant, era, family, index)
    return name + hashlib.sha256(name).digest()[: 32 - _NAME.size]


def tenant_and_era(key: bytes) -> tuple[int, int]:
    tenant, era, _, _ = _NAME.unpack_from(key)
    return tenant, era


def family_of(key: bytes) -> int:
    _, _, family, _ = _NAME.unpack_from(key)
    return int(family)


def number_of(key: bytes) -> int:
    """A key as a positive number, of which `number_of_family` knows the family."""
    return 1 + int.from_bytes(key[: _NAME.size][1:], "big")


def number_of_family(number: int) -> int:
    """-1 for 0, which is the number of no key."""
    return (number - 1 >> 8) & 0xFFFF if number else -1


def content_of(block_hash: bytes) -> np.ndarray:
    """The bytes that belong to a key; no two pieces of any two keys are alike."""
    start = np.frombuffer(hashlib.sha256(block_hash[:32]).digest()[:8], dtype=np.uint64)
    return (_COUNTING ^ start).view(np.uint8)


class Device:
    """A `DeviceView`: blocks `[num_blocks, BLOCK_BYTES]`, those that are free, and those that transfers hold."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))

    def take(self, count: int) -> list[int] | None:
        if len(self._free) < count:
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self.hold(taken)
        return taken

    def hold(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        for block_id in block_ids:
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self.blocks[block_id] = 0xEE
                self._free.append(block_id)

    def free_blocks(self) -> Iterator[int]:
        return iter(self._free)

    def contents(self, block_ids: Sequence[int]) -> Sequence[bytes | None]:
        return [None] * len(block_ids)

    def resident(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def take_allocated(self, among: object) -> dict[int, bytes | None]:
        return {}


@dataclass(eq=False)
class ToyRequest:
    """An `EngineRequest` whose prompt is whole blocks and one token more."""

    request_id: str
    tenant_index: int
    block_hashes: list[bytes]
    table: list[int]
    num_computed: int = 0
    is_loading: bool = False
    aliases: Sequence[str] = ()
    lora: str | None = None
    kv_transfer_params: None = None

    @property
    def tenant(self) -> str:
        return f"tenant{self.tenant_index}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS + 1

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens
