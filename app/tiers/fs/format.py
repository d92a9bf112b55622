"""File format of one block: header, bytes of the block, origin, with a checksum over all of them.

The seed of the checksum covers key, namespace and everything but the bytes, so that a file that was renamed or copied
from another model's folder does not verify.
"""

from __future__ import annotations

import json
import os
import stat
import struct

import xxhash

from kvferry.core.keys import Key, RequestIdentity

_HEAD = struct.Struct("<8sIIQQ")
"""Magic and version, reserved, length of the origin, length of the bytes, checksum."""
_MAGIC = b"kvferry\x01"
_MAX_ORIGIN_BYTES = 1 << 16


class BadFile(Exception):
    """A file that does not hold the block that its name says."""


def file_bytes(num_bytes: int, origin: bytes) -> int:
    """Return the length of a block's file."""
    return _HEAD.size + num_bytes + len(origin)


def pack_origin(origin: RequestIdentity) -> bytes:
    """Return an origin as stored in a file; empty if it would be too long."""
    packed = json.dumps([origin.request_id, origin.tenant, origin.lora, list(origin.aliases)]).encode()
    return packed if len(packed) <= _MAX_ORIGIN_BYTES else b""


def write_block(fd: int, namespace: bytes, key: Key, data: memoryview, origin: bytes) -> None:
    """Write a block into an empty file. Raises `OSError`."""
    head = _HEAD.pack(_MAGIC, 0, len(origin), len(data), _checksum(namespace, key, data, origin))
    with open(fd, "wb", closefd=False) as file:
        for piece in (head, data, origin):
            file.write(piece)


def read_block(fd: int, namespace: bytes, key: Key, into: memoryview) -> RequestIdentity | None:
    """Read a block of the length of `into`, and return its origin. Raises `BadFile` and `OSError`."""
    origin_bytes = _check_regular(fd) - _HEAD.size - len(into)
    if not 0 <= origin_bytes <= _MAX_ORIGIN_BYTES:
        raise BadFile("its length is wrong")
    head, origin = bytearray(_HEAD.size), bytearray(origin_bytes)
    _read_all(fd, 0, head, into, origin)
    magic, _, *lengths, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or lengths != [origin_bytes, len(into)]:
        raise BadFile("its head is not that of such a block")
    if checksum != _checksum(namespace, key, into, bytes(origin)):
        raise BadFile("its bytes do not match their checksum")
    return _unpack_origin(bytes(origin))


def read_origin(fd: int) -> RequestIdentity | None:
    """Read the origin of a block without its bytes. Raises `BadFile` and `OSError`."""
    length = _check_regular(fd)
    head = bytearray(_HEAD.size)
    _read_all(fd, 0, head)
    magic, _, origin_bytes, data_bytes, _ = _HEAD.unpack(head)
    start = _HEAD.size + data_bytes
    if magic != _MAGIC or start + origin_bytes != length or origin_bytes > _MAX_ORIGIN_BYTES:
        raise BadFile("its head is not that of a block")
    origin = bytearray(origin_bytes)
    _read_all(fd, start, origin)
    return _unpack_origin(bytes(origin))


def _checksum(namespace: bytes, key: Key, data: memoryview, origin: bytes) -> int:
    seed = xxhash.xxh3_64_intdigest(b"".join((struct.pack("<HQ", len(key), len(data)), namespace, key, origin)))
    return xxhash.xxh3_64_intdigest(data, seed)


def _check_regular(fd: int) -> int:
    """Return the length of a file. Raises `BadFile` if it is no plain file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadFile("it is no plain file")
    return status.st_size


def _read_all(fd: int, start: int, *pieces: bytearray | memoryview) -> None:
    """Fill all pieces in order, from offset `start` on."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(start)
        for piece in pieces:
            if file.readinto(piece) != len(piece):
                raise BadFile("it ends too early")


def _unpack_origin(packed: bytes) -> RequestIdentity | None:
    if not packed:
        return None
    try:
        request_id, tenant, lora, aliases = json.loads(packed)
        return RequestIdentity(request_id, tenant, lora, tuple(aliases))
    except (ValueError, TypeError) as error:
        raise BadFile("its origin cannot be read") from error
