"""Slots to store from and load into, and blocks whose bytes follow from their key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestIdentity, make_keys
from kvferry.core.tiers.base import TierJob

SLOT_BYTES = 700_000
"""More than one piece of a copy."""
ORIGIN = RequestIdentity("r1", "0123456789abcdef", "sql", ("alias-1",))
OTHER = RequestIdentity("r2", "fedcba9876543210", None)


def key_of(number: int, group: int = 0) -> Key:
    return make_keys([number.to_bytes(16, "big") + b"\x00" * 15 + bytes([number % 251])], group)[0]


def keys_of(numbers: Sequence[int]) -> list[Key]:
    return [key_of(number) for number in numbers]


def length_of(key: Key) -> int:
    """Blocks have different lengths, most of them not whole pages."""
    return 1 + (int.from_bytes(key[8:16], "big") * 7919) % SLOT_BYTES


LARGE = [number for number in range(400) if length_of(key_of(number)) > 500_000]
"""Numbers of blocks of more than half a megabyte, in slots of 700,000 bytes."""


def content_of(key: Key) -> NDArray[np.uint8]:
    seed = np.random.default_rng(int.from_bytes(key, "big"))
    return seed.integers(0, 256, length_of(key), dtype=np.uint8)


def changed(value: bytes) -> bytes:
    """Return stored bytes with another one in their middle."""
    middle = len(value) // 2
    return value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]


class SlotArray:
    """A `SlotBytes` whose slots are rows; with several ranks, each has its own part of a slot."""

    def __init__(self, num_slots: int, num_ranks: int = 1) -> None:
        part_bytes = -(-SLOT_BYTES // num_ranks)
        self.parts = [np.zeros((num_slots, part_bytes), dtype=np.uint8) for _ in range(num_ranks)]

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        share = -(-num_bytes // len(self.parts))
        ends = [min((rank + 1) * share, num_bytes) - rank * share for rank in range(len(self.parts))]
        return [part[slot, :end] for part, end in zip(self.parts, ends, strict=True) if end > 0]

    def fill(self, slot: int, key: Key) -> None:
        content, start = content_of(key), 0
        for view in self.views(slot, len(content)):
            view[:] = content[start : start + len(view)]
            start += len(view)

    def wipe(self) -> None:
        for part in self.parts:
            part[:] = 0xAA

    def holds(self, slot: int, key: Key) -> bool:
        return bool(np.array_equal(np.concatenate(self.views(slot, length_of(key))), content_of(key)))

    def is_wiped(self, slot: int) -> bool:
        return all((part[slot] == 0xAA).all() for part in self.parts)


def job_of(
    number: int,
    keys: Sequence[Key],
    first_slot: int = 0,
    origins: Sequence[RequestIdentity] | None = None,
) -> TierJob:
    """A store of these keys, or without origins a load."""
    return TierJob(
        number,
        keys,
        np.arange(first_slot, first_slot + len(keys)),
        np.array([length_of(key) for key in keys], dtype=np.int64),
        () if origins is None else origins,
    )
