"""Reading and writing of one block's file, in the format of `kvferry.app.tiers.block_format`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    MAX_ORIGIN_BYTES,
    BadBlock,
    origin_range,
    unpack_origin,
    verify,
)
from kvferry.core.keys import Key, RequestIdentity


def write_pieces(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces of a block into an empty file. Raises `OSError`."""
    with open(fd, "wb", closefd=False) as file:
        for piece in pieces:
            file.write(piece)


def read_block(fd: int, namespace: bytes, key: Key, into: memoryview) -> RequestIdentity | None:
    """Read a block of the length of `into`, and return its origin. Raises `BadBlock` and `OSError`."""
    origin_bytes = _check_regular(fd) - HEADER_BYTES - len(into)
    if not 0 <= origin_bytes <= MAX_ORIGIN_BYTES:
        raise BadBlock("its length is wrong")
    header, packed = bytearray(HEADER_BYTES), bytearray(origin_bytes)
    _read_all(fd, 0, header, into, packed)
    return verify(namespace, key, header, into, bytes(packed))


def read_origin(fd: int) -> RequestIdentity | None:
    """Read the origin of a block without its bytes. Raises `BadBlock` and `OSError`."""
    num_bytes = _check_regular(fd)
    header = bytearray(HEADER_BYTES)
    _read_all(fd, 0, header)
    start, origin_bytes = origin_range(header, num_bytes)
    packed = bytearray(origin_bytes)
    _read_all(fd, start, packed)
    return unpack_origin(bytes(packed))


def _check_regular(fd: int) -> int:
    """Return the length of a file. Raises `BadBlock` if it is no plain file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadBlock("it is no plain file")
    return status.st_size


def _read_all(fd: int, start: int, *pieces: bytearray | memoryview) -> None:
    """Fill all pieces in order, from offset `start` on."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(start)
        for piece in pieces:
            if file.readinto(piece) != len(piece):
                raise BadBlock("it ends too early")
