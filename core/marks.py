"""Marks: keys as 64-bit numbers, so that whole batches of keys are counted and remembered by NumPy.

Keys are hashes of one length with their group behind, so eight bytes of the hash and the group tell them apart. A mark
is no proof that two keys are equal: it is for what may err, never for finding bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from core.keys import GROUP_BYTES, MIN_HASH_BYTES, Key

Marks = NDArray[np.uint64]

_MIN_KEY_BYTES = MIN_HASH_BYTES + GROUP_BYTES
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no two words become one; it spreads what differs in a few bits only over the high bits."""


def marks_of(keys: Sequence[Key]) -> Marks:
    """The marks of keys, which are all of one length. Joined first, since that waits for the memory of all at once."""
    if not keys:
        return np.empty(0, dtype=np.uint64)
    key_bytes = max(len(keys[0]), _MIN_KEY_BYTES)
    joined = b"".join(keys)
    if len(joined) != key_bytes * len(keys):
        key_bytes = max(_MIN_KEY_BYTES, *map(len, keys))
        joined = b"".join([key.rjust(key_bytes, b"\0") for key in keys])
    words = np.frombuffer(joined, dtype=_layout(key_bytes))
    marks: Marks = (words["hash"] + words["group"]) * _SPREAD
    return marks


@lru_cache(maxsize=16)
def _layout(key_bytes: int) -> np.dtype[np.void]:
    """Where a key of this length has the last eight bytes of its hash, and its group."""
    offsets = [key_bytes - _MIN_KEY_BYTES, key_bytes - GROUP_BYTES]
    return np.dtype({"names": ["hash", "group"], "formats": ["<u8", "u1"], "offsets": offsets, "itemsize": key_bytes})
