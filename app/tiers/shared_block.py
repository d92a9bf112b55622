"""Format of a block in a store that engines share: how many resets by match preceded its store, and the block."""

from __future__ import annotations

import struct

from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    MAX_ORIGIN_BYTES,
    BadBlock,
    encode,
    origin_range,
    verify,
)
from kvferry.core.keys import Key, RequestIdentity

_NUMBER = struct.Struct("<Q")
HEAD_BYTES = _NUMBER.size + HEADER_BYTES
OVERHEAD_BYTES = HEAD_BYTES + MAX_ORIGIN_BYTES
"""The most that a stored block is longer than its bytes."""


def pack(
    namespace: bytes, key: Key, data: memoryview, origin: RequestIdentity, num_resets: int
) -> tuple[bytes | memoryview, ...]:
    """Return what is stored for a block, in pieces, one of which is `data` itself."""
    number = _NUMBER.pack(num_resets)
    header, data, packed_origin = encode(namespace + number, key, data, origin)
    return number + header, data, packed_origin


def verify_pieces(
    namespace: bytes, key: Key, head: bytes, data: memoryview, packed: bytes
) -> tuple[int, RequestIdentity | None]:
    """Check the pieces of a stored block; return the number of resets and the origin. Raises `BadBlock`."""
    number = head[: _NUMBER.size]
    return _NUMBER.unpack(number)[0], verify(namespace + number, key, head[_NUMBER.size :], data, packed)


def read_head(head: object, num_bytes: int | None) -> tuple[int, int, int]:
    """Return the number of resets of a stored block, and start and length of its origin. Raises `BadBlock`.

    `num_bytes` is the length of what is stored, or None if it is not known.
    """
    if not isinstance(head, bytes) or len(head) < HEAD_BYTES:
        raise BadBlock("it is no string of that length")
    rest = None if num_bytes is None else num_bytes - _NUMBER.size
    start, length = origin_range(head[_NUMBER.size :], rest)
    return _NUMBER.unpack_from(head)[0], _NUMBER.size + start, length
