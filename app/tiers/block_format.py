"""Format of one block in a store: header, bytes of the block, origin, with a checksum over all of them.

The seed of the checksum covers key, namespace and everything but the bytes, so that a block that was renamed or copied
from another model's namespace does not verify. All stores use this format, as a file, a value or an object.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from functools import lru_cache

import xxhash

from kvferry.core.keys import Key, RequestIdentity, read_identity

_HEADER = struct.Struct("<8sIIQQ")
"""Magic and version, reserved, length of the origin, length of the bytes, checksum."""
HEADER_BYTES = _HEADER.size
_MAGIC = b"kvferry\x01"
MAX_ORIGIN_BYTES = 1 << 16
NAMESPACE_BYTES = 8
SHARING_VERSION = 3
"""Version of names, epochs and values in shared stores; engines of other versions neither read nor change them."""
OVERHEAD_BYTES = HEADER_BYTES + MAX_ORIGIN_BYTES
"""The most that a stored block is longer than its bytes."""
_CACHED_ORIGINS = 256
"""All blocks of a request have one origin, and JSON takes as long as reading a block of 64 KiB."""


class BadBlock(Exception):
    """Stored bytes that are not the block that their name says; the message is constant text for the log."""


def namespace_of(fingerprint: Mapping[str, object]) -> bytes:
    """Return the namespace of a fingerprint, which separates its blocks from those of others."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()[:NAMESPACE_BYTES]


def shared_namespace_of(fingerprint: Mapping[str, object]) -> bytes:
    """Return the namespace of a fingerprint in a store that engines share, with the version of what they agree on."""
    return namespace_of({**fingerprint, "sharing": SHARING_VERSION})


def encode(namespace: bytes, key: Key, data: memoryview, origin: RequestIdentity) -> tuple[bytes, memoryview, bytes]:
    """Return the pieces to store, in order: header, `data` itself, and the packed origin."""
    packed = pack_origin(origin)
    checksum = _checksum(namespace, key, data, packed)
    return _HEADER.pack(_MAGIC, 0, len(packed), len(data), checksum), data, packed


def decode(
    namespace: bytes, key: Key, value: bytes | memoryview, num_bytes: int
) -> tuple[RequestIdentity | None, memoryview]:
    """Return the origin of a stored block of `num_bytes`, and its bytes, which are those of `value`.

    Raises `BadBlock`.
    """
    header, data, packed = split(value, HEADER_BYTES, num_bytes)
    return verify(namespace, key, header, data, packed), data


def split(value: bytes | memoryview, head_bytes: int, num_bytes: int) -> tuple[bytes, memoryview, bytes]:
    """Return the pieces of a stored block of `num_bytes`: head, bytes, packed origin. Raises `BadBlock`."""
    end = head_bytes + num_bytes
    if not end <= len(value) <= end + MAX_ORIGIN_BYTES:
        raise BadBlock("its length is wrong")
    view = memoryview(value)
    return bytes(view[:head_bytes]), view[head_bytes:end], bytes(view[end:])


def verify(
    namespace: bytes, key: Key, header: bytes | bytearray | memoryview, data: memoryview, packed: bytes
) -> RequestIdentity | None:
    """Check the pieces of a stored block against each other, its key and namespace; return its origin.

    Raises `BadBlock`.
    """
    magic, _, *lengths, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or lengths != [len(packed), len(data)]:
        raise BadBlock("its head is not that of such a block")
    if checksum != _checksum(namespace, key, data, packed):
        raise BadBlock("its bytes do not match their checksum")
    return unpack_origin(packed)


def origin_range(header: bytes | bytearray | memoryview, num_bytes: int | None) -> tuple[int, int]:
    """Return where the packed origin lies in a stored block of `num_bytes`: start and length. Raises `BadBlock`.

    None for a length that is not known.
    """
    magic, _, origin_bytes, data_bytes, _ = _HEADER.unpack(header)
    start = HEADER_BYTES + data_bytes
    is_whole = num_bytes is None or start + origin_bytes == num_bytes
    if magic != _MAGIC or not is_whole or origin_bytes > MAX_ORIGIN_BYTES:
        raise BadBlock("its head is not that of a block")
    return start, origin_bytes


@lru_cache(maxsize=_CACHED_ORIGINS)
def pack_origin(origin: RequestIdentity) -> bytes:
    """Return an origin as stored with a block; empty if `unpack_origin` would refuse it."""
    fields: list[object] = [origin.request_id, origin.tenant, origin.lora, list(origin.aliases)]
    if origin.session is not None:
        # Else as in versions without sessions, which can read no other form.
        fields.append(origin.session)
    try:
        read_identity(*fields)
    except ValueError:
        return b""
    packed = json.dumps(fields).encode()
    return packed if len(packed) <= MAX_ORIGIN_BYTES else b""


@lru_cache(maxsize=_CACHED_ORIGINS)
def unpack_origin(packed: bytes) -> RequestIdentity | None:
    """Return a packed origin; None if it was too long to be packed. Raises `BadBlock`."""
    if not packed:
        return None
    try:
        request_id, tenant, lora, aliases, *sessions = json.loads(packed)
        return read_identity(request_id, tenant, lora, aliases, *sessions)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadBlock("its origin cannot be read") from error


def _checksum(namespace: bytes, key: Key, data: memoryview, packed: bytes) -> int:
    seed = xxhash.xxh3_64_intdigest(b"".join((struct.pack("<HQ", len(key), len(data)), namespace, key, packed)))
    return xxhash.xxh3_64_intdigest(data, seed)
