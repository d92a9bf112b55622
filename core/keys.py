"""Keys: the content address of a block, `block hash + group index`, as bytes.

Equal keys mean equal bytes. The hash comes from the engine and is chained over the prefix; the group index keeps the
groups of one model apart. The digest of a tenant lives here too, since a cache salt must never be shown or stored.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

Key = bytes

GROUP_BYTES = 1
MAX_GROUPS = 256
MIN_HASH_BYTES = 8
TENANT_HEX_DIGITS = 16


def make_keys(block_hashes: Iterable[bytes], group: int) -> list[Key]:
    """Keys of one group's blocks, in the order of their hashes."""
    suffix = group.to_bytes(GROUP_BYTES, "little")
    return [block_hash + suffix for block_hash in block_hashes]


def hash_of(key: Key) -> bytes:
    """The block hash in a key."""
    return key[:-GROUP_BYTES]


def group_of(key: Key) -> int:
    """Index of the group that a key belongs to."""
    return key[-1]


def tenant_digest(cache_salt: str | None) -> str | None:
    """The name a tenant goes by everywhere outside the engine: 16 hex digits of the SHA-256 of its cache salt."""
    if cache_salt is None:
        return None
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:TENANT_HEX_DIGITS]


class Prefix:
    """Keys of a request's first slots in each group, checked by position, so that no key is looked up in the pool."""

    def __init__(self, groups: Mapping[int, tuple[Sequence[Key], int]], others: Collection[Key] = ()) -> None:
        """`groups` has the keys of each group by its index, and how many of them belong; `others` are keys besides.

        The sequences are not copied.
        """
        self._groups = groups
        self._others = others
        self._count = sum(count for _, count in groups.values()) + len(others)

    def __len__(self) -> int:
        return self._count

    def holds(self, keys: Sequence[Key], positions: Sequence[int]) -> list[bool]:
        """Which of these keys, at these positions within their request's group, belong to it."""
        found = []
        for key, position in zip(keys, positions, strict=True):
            known, count = self._groups.get(group_of(key), ((), 0))
            found.append((position < count and known[position] == key) or key in self._others)
        return found


NO_PREFIX = Prefix({})
