"""Read-only inspection of a kept pool's file, without its lock.

The file is read, not mapped: the service that owns it may truncate it at any time, and accessing a truncated mapping
kills the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import Slots
from kvferry.cuda_ops.persistent.format import (
    SLOT_HEADER,
    Headers,
    PoolShape,
    payload_checksums,
)
from kvferry.cuda_ops.persistent.lock import lock_path
from kvferry.cuda_ops.persistent.pool_file import NotAPool, PoolHeader, read_boot_id, read_pool_header
from kvferry.cuda_ops.persistent.recovery import RecoveredSlots, read_slots

LOCKS = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class InspectedPool:
    """The contents of a pool's file. `recovered` is what a restart would recover, before payloads are verified.

    `holders` are the processes that use the pool, as far as they are visible to this one.
    """

    header: PoolHeader
    holders: list[int]
    recovered: RecoveredSlots
    other_boot: bool
    path: Path
    ranks: list[Headers]

    def verify(self, slots: Slots) -> Slots:
        """Return those of these slots whose bytes do not match the header of some rank."""
        shape = self.header.shape
        starts = (shape.row_offsets(slots) + shape.payload_offset).tolist()
        bad = np.zeros(len(slots), dtype=np.bool_)
        with self.path.open("rb", buffering=0) as file:
            for rank in range(len(self.ranks)):

                def read(i: int, length: int, offset: int = rank * shape.slot_bytes) -> NDArray[np.uint8]:
                    file.seek(starts[i] + offset)
                    return np.fromfile(file, np.uint8, length)

                mine = self.ranks[rank][slots]
                bad |= payload_checksums(mine, self.header.namespace, read) != mine["payload_checksum"]
        return slots[bad]


def inspect_pool(path: Path) -> InspectedPool:
    """Read a pool's headers. Raises `NotAPool` and `OSError`."""
    # Opening a named pipe must not block.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        header = read_pool_header(file)
        shape = header.shape
        file_bytes = os.fstat(file).st_size
        if file_bytes < shape.payload_offset:
            raise NotAPool(f"file truncated: {file_bytes:,} bytes, slot headers end at {shape.payload_offset:,}")
    finally:
        os.close(file)
    ranks = [_headers(path, shape, rank) for rank in range(shape.num_ranks)]
    recovered = read_slots(ranks, shape, header.min_epoch, 0 if shape.is_truncated(file_bytes) else shape.num_slots)
    return InspectedPool(header, holders_of(path), recovered, header.boot_id != read_boot_id(), path, ranks)


def holders_of(path: Path) -> list[int]:
    """Return the processes that hold the pool's lock, from the kernel's list.

    Trying to acquire it would block a service that is starting.
    """
    try:
        lock = lock_path(path).stat()
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return []
    place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    return sorted(int(words[4]) for words in map(str.split, lines) if words[1] == "FLOCK" and words[5] == place)


def _headers(path: Path, shape: PoolShape, rank: int) -> Headers:
    headers = np.fromfile(path, SLOT_HEADER, shape.num_slots, offset=shape.headers_offset(rank))
    if len(headers) < shape.num_slots:
        raise NotAPool("file truncated while being read: a service has started a new pool in it")
    return headers
