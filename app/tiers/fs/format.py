"""Reading and writing of one block's file: a head, the bytes, and the origin of the block."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.app.tiers.block_format import HEADER_BYTES, MAX_ORIGIN_BYTES, BadBlock, origin_range, unpack_origin
from kvferry.core.keys import RequestIdentity


class ReadBlock(NamedTuple):
    """Head and packed origin of a block, unverified, and when its file was used last."""

    head: bytes
    packed: bytes
    used_s: float


def write_pieces(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces of a block into an empty file. Raises `OSError`."""
    todo: Sequence[bytes | memoryview] = pieces
    while todo:
        # One call writes everything unless the disk is full or the block longer than 2 GiB.
        todo = _rest(todo, os.writev(fd, todo))


def read_block(fd: int, into: memoryview) -> ReadBlock:
    """Read a block of the length of `into`. Raises `BadBlock` and `OSError`."""
    status = _check_regular(fd)
    origin_bytes = status.st_size - HEADER_BYTES - len(into)
    if not 0 <= origin_bytes <= MAX_ORIGIN_BYTES:
        raise BadBlock("its length is wrong")
    head, packed = bytearray(HEADER_BYTES), bytearray(origin_bytes)
    _read_all(fd, 0, head, into, packed)
    return ReadBlock(bytes(head), bytes(packed), status.st_mtime)


def read_origin(fd: int) -> RequestIdentity | None:
    """Return the origin of a block, unverified; None if it was too long. Raises `BadBlock` and `OSError`."""
    status = _check_regular(fd)
    head = bytearray(HEADER_BYTES)
    _read_all(fd, 0, head)
    start, origin_bytes = origin_range(head, status.st_size)
    packed = bytearray(origin_bytes)
    _read_all(fd, start, packed)
    return unpack_origin(bytes(packed))


def _check_regular(fd: int) -> os.stat_result:
    """Return the status of a file. Raises `BadBlock` if it is no plain file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadBlock("it is no plain file")
    return status


def _read_all(fd: int, start: int, *pieces: bytearray | memoryview) -> None:
    """Fill all pieces in order, from offset `start` on."""
    todo: Sequence[bytearray | memoryview] = pieces
    while todo:
        num_bytes = os.preadv(fd, todo, start)
        start += num_bytes
        rest = _rest(todo, num_bytes)
        if rest and not num_bytes:
            raise BadBlock("it ends too early")
        todo = rest


def _rest(pieces: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of some pieces after their first bytes."""
    if num_bytes == sum(map(len, pieces)):
        return []
    rest = [memoryview(piece) for piece in pieces]
    while rest and num_bytes >= len(rest[0]):
        num_bytes -= len(rest.pop(0))
    if rest:
        rest[0] = rest[0][num_bytes:]
    return rest
