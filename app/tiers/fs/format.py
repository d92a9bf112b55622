"""Reading and writing of one block's file: a head, the bytes, and the origin of the block."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from kvferry.app.tiers.block_format import HEADER_BYTES, MAX_ORIGIN_BYTES, BadBlock, origin_range, unpack_origin
from kvferry.core.keys import RequestIdentity


class ReadBlock(NamedTuple):
    """Head and packed origin of a block, unverified, and when its file was used last."""

    head: bytes
    packed: bytes
    used_s: float


def write_pieces(fd: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces of a block into an empty file. Raises `OSError`."""
    for piece in pieces:
        todo = memoryview(piece)
        while todo:
            todo = todo[os.write(fd, todo) :]


def read_block(fd: int, into: memoryview) -> ReadBlock:
    """Read a block of the length of `into`. Raises `BadBlock` and `OSError`."""
    status = _check_regular(fd)
    origin_bytes = status.st_size - HEADER_BYTES - len(into)
    if not 0 <= origin_bytes <= MAX_ORIGIN_BYTES:
        raise BadBlock("its length is wrong")
    head, packed = bytearray(HEADER_BYTES), bytearray(origin_bytes)
    for piece in (memoryview(head), into, memoryview(packed)):
        todo = piece
        while todo:
            num_bytes = os.readv(fd, [todo])
            if not num_bytes:
                raise BadBlock("it ends too early")
            todo = todo[num_bytes:]
    return ReadBlock(bytes(head), bytes(packed), status.st_mtime)


def read_origin(fd: int) -> RequestIdentity | None:
    """Return the origin of a block, unverified; None if it was too long. Raises `BadBlock` and `OSError`."""
    status = _check_regular(fd)
    head = os.pread(fd, HEADER_BYTES, 0)
    if len(head) < HEADER_BYTES:
        raise BadBlock("it ends too early")
    start, origin_bytes = origin_range(head, status.st_size)
    return unpack_origin(os.pread(fd, origin_bytes, start))


def _check_regular(fd: int) -> os.stat_result:
    """Return the status of a file. Raises `BadBlock` if it is no plain file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadBlock("it is no plain file")
    return status
