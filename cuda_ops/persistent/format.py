"""Binary format of a kept pool's file; docs/pool-format.md says what a crash and a recovery do.

The file holds the pool header, then for each rank an array with one header per slot, then the slots' bytes in extents.
Every part starts on a page. Numbers are little-endian. The arrays have space for `max_slots` headers, of which only
those of existing slots take disk space or memory: the pool grows and shrinks at its end, and no part ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvferry.core.keys import Key
from kvferry.core.transfers import Slots
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.pages import whole_pages

MAGIC = b"kvferry\n"
FORMAT_VERSION = 3
POOL_HEADER_BYTES = 1 << 16
MAX_KEY_BYTES = 72
MAX_EPOCH = 1 << 30
"""More resets than a pool can have; the pool in memory counts up to 2**31."""

POOL_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("slot_header_bytes", "<u4"),
        ("max_slots", "<u8"),
        ("slot_bytes", "<u8"),
        ("num_ranks", "<u8"),
        ("extent_slots", "<u8"),
        ("headers_offset", "<u8"),
        ("rank_stride", "<u8"),
        ("payload_offset", "<u8"),
        ("fingerprint_bytes", "<u8"),
        ("checksum", "<u8"),
        ("min_epoch", "<i8"),
        ("boot_id", "S48"),
        ("num_slots", "<u8"),
        ("epoch_checksum", "<u8"),
        ("unused", "V96"),
    ]
)
"""The first 256 bytes, followed by the fingerprint as JSON.

`checksum` covers everything before it, and the fingerprint. The fields after it change while the pool is in use, each
by an atomic write of one word: only slots of `min_epoch` are valid, and all are verified unless `boot_id` is the
current boot's. `num_slots` is raised after an extent is added and lowered before one is removed. `epoch_checksum` is
written after `min_epoch`, whose checksum it is, or 0 in a file of an earlier version.
"""

SLOT_HEADER = np.dtype(
    [
        ("generation", "<i8"),
        ("epoch", "<i8"),
        ("length", "<u8"),
        ("payload_checksum", "<u8"),
        ("key", "V72"),
        ("key_length", "<u2"),
        ("state", "u1"),
        ("unused", "V5"),
        ("checksum", "<u8"),
        ("dropped_generation", "<i8"),
    ]
)
"""128 bytes per slot. `checksum` covers everything before it.

`dropped_generation` is written by the scheduler only, in the array of rank 0: generations up to it, which count
from 1, have left the pool.
"""

_CHECKED_BYTES = SLOT_HEADER.fields["checksum"][1] if SLOT_HEADER.fields else 0
_HEADER_CHECKED_BYTES = POOL_HEADER.fields["checksum"][1] if POOL_HEADER.fields else 0

Headers = NDArray[Any]
"""An array of `SLOT_HEADER`."""


class HeaderState(IntEnum):
    """State byte of a slot header, written first and last."""

    EMPTY = 0
    WRITING = 1
    VALID = 2


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes that determine the offset of every part. `slot_bytes` is one rank's part of a slot.

    `num_slots` make whole extents; there is space for the headers of `max_slots` (0: as many as `num_slots`).
    """

    num_slots: int
    slot_bytes: int
    num_ranks: int
    extent_slots: int
    max_slots: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_slots", max(self.max_slots, self.num_slots))
        if self.num_slots % self.extent_slots:
            raise ValueError(f"num_slots={self.num_slots}: must be a multiple of extent_slots={self.extent_slots}")

    @property
    def plan(self) -> PoolPlan:
        """Return the pool's division into extents and its maximum size."""
        return PoolPlan(self.num_slots, self.extent_slots, self.max_slots)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a slot, all ranks together."""
        return self.num_ranks * self.slot_bytes

    @property
    def rank_stride(self) -> int:
        """Return the bytes from one rank's slot headers to the next rank's."""
        return whole_pages(self.max_slots * SLOT_HEADER.itemsize)

    def headers_offset(self, rank: int) -> int:
        """Return the offset of a rank's slot headers."""
        return POOL_HEADER_BYTES + rank * self.rank_stride

    def headers_range(self, rank: int, start: int, end: int) -> tuple[int, int]:
        """Return offset and size of a rank's headers of the slots from `start` to `end`."""
        return self.headers_offset(rank) + start * SLOT_HEADER.itemsize, (end - start) * SLOT_HEADER.itemsize

    @property
    def payload_offset(self) -> int:
        """Return the offset of the first extent."""
        return self.headers_offset(self.num_ranks)

    @property
    def extent_stride(self) -> int:
        """Return the bytes from one extent to the next."""
        return whole_pages(self.extent_slots * self.row_bytes)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of all extents, each of which starts on a page."""
        return self.num_slots // self.extent_slots * self.extent_stride

    def slots_within(self, payload_bytes: int) -> int:
        """Return the number of slots of the whole extents in `payload_bytes`."""
        return payload_bytes // self.extent_stride * self.extent_slots

    def row_offsets(self, slots: Slots) -> NDArray[np.int64]:
        """Return the offsets of the slots' rows, relative to `payload_offset`."""
        extents, within = np.divmod(slots, self.extent_slots)
        offsets: NDArray[np.int64] = extents * self.extent_stride
        offsets += within * self.row_bytes
        return offsets

    def is_truncated(self, file_bytes: int) -> bool:
        """Return whether a file of `file_bytes` ends before its slots do. Then none of them is recovered.

        A file is truncated by another program only, and resets may not have reached its headers since.
        """
        return file_bytes < self.payload_offset + self.payload_bytes


def pool_header(shape: PoolShape, fingerprint: bytes) -> Headers:
    """Return the header of a new pool, which has no slots yet: one `POOL_HEADER`, without boot id."""
    header = np.zeros(1, dtype=POOL_HEADER)
    for name, value in {
        "magic": MAGIC,
        "format_version": FORMAT_VERSION,
        "slot_header_bytes": SLOT_HEADER.itemsize,
        "max_slots": shape.max_slots,
        "slot_bytes": shape.slot_bytes,
        "num_ranks": shape.num_ranks,
        "extent_slots": shape.extent_slots,
        "headers_offset": POOL_HEADER_BYTES,
        "rank_stride": shape.rank_stride,
        "payload_offset": shape.payload_offset,
        "fingerprint_bytes": len(fingerprint),
    }.items():
        header[name] = value
    header["checksum"] = pool_header_checksum(header, fingerprint)
    header["epoch_checksum"] = epoch_checksum(0, int(header["checksum"][0]))
    return header


def pool_header_checksum(header: Headers, fingerprint: bytes) -> int:
    """Return the XXH3 hash of the fixed part of a pool's header, followed by the fingerprint."""
    return xxh3_64_intdigest(header.tobytes()[:_HEADER_CHECKED_BYTES] + fingerprint)


def epoch_checksum(min_epoch: int, checksum: int) -> int:
    """Return the XXH3 hash of an epoch, seeded with the `checksum` of the pool's header; never 0."""
    return xxh3_64_intdigest(min_epoch.to_bytes(8, "little", signed=True), seed=checksum) or 1


def header_checksums(headers: Headers) -> NDArray[np.uint64]:
    """Return the XXH3 hash of each of these slot headers, up to its `checksum`."""
    rows = np.ascontiguousarray(headers).view(np.uint8).reshape(len(headers), SLOT_HEADER.itemsize)
    texts = np.ascontiguousarray(rows[:, :_CHECKED_BYTES]).view(f"V{_CHECKED_BYTES}").ravel().tolist()
    return np.fromiter(map(xxh3_64_intdigest, texts), dtype=np.uint64, count=len(texts))


def are_sound(headers: Headers, slot_bytes: int) -> NDArray[np.bool_]:
    """Return which of these slot headers are valid and undamaged."""
    sound: NDArray[np.bool_] = (
        (headers["state"] == HeaderState.VALID)
        & (headers["key_length"] > 0)
        & (headers["key_length"] <= MAX_KEY_BYTES)
        & (headers["length"] <= slot_bytes)
        & (header_checksums(headers) == headers["checksum"])
    )
    return sound


def namespace_of(fingerprint: bytes) -> bytes:
    """Return the 16 bytes of a pool's fingerprint that every payload checksum covers."""
    return xxh3_128_digest(fingerprint)


def payload_checksums(
    headers: Headers, namespace: bytes, read: Callable[[int, int], NDArray[np.uint8]]
) -> NDArray[np.uint64]:
    """Return the XXH3 hash of each payload, seeded with that of namespace, key, epoch and length (8 bytes each).

    `read` returns the payload of a header by its index and length.
    """
    columns = zip(keys_of(headers), headers["epoch"].tolist(), headers["length"].tolist(), strict=True)
    checksums: list[int] = []
    for i, (key, epoch, length) in enumerate(columns):
        about = namespace + key + epoch.to_bytes(8, "little", signed=True) + length.to_bytes(8, "little")
        checksums.append(xxh3_64_intdigest(read(i, length).data, seed=xxh3_64_intdigest(about)))
    return np.array(checksums, dtype=np.uint64)


def keys_of(headers: Headers) -> list[Key]:
    """Return the key of each header. Requires: valid key lengths."""
    lengths = headers["key_length"]
    if not len(headers):
        return []
    texts = np.ascontiguousarray(headers["key"]).view(np.uint8).reshape(len(headers), MAX_KEY_BYTES)
    first = int(lengths[0])
    if bool((lengths == first).all()):
        keys: list[Key] = np.ascontiguousarray(texts[:, :first]).view(f"V{first}").ravel().tolist()
        return keys
    return [row[:length].tobytes() for row, length in zip(texts, lengths.tolist(), strict=True)]


def padded_keys(keys: Sequence[Key]) -> NDArray[Any]:
    """Return keys as headers store them, padded with zeros."""
    return np.array(keys, dtype=f"S{MAX_KEY_BYTES}").view(f"V{MAX_KEY_BYTES}")
