"""Marks: keys as 64-bit numbers, so that whole batches of keys are found, counted and remembered by native code.

A mark is a hash of all bytes of its key. It is no proof that two keys are equal: whoever goes by marks alone may err,
and whoever goes for bytes compares the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.compiled import compiled
from kvferry.core.keys import Key

Marks = NDArray[np.uint64]

_WORD_BYTES = 8
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: odd, so that no two words become one, and without a pattern in its bits."""
_FIRST_MIX, _SECOND_MIX = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
"""Of MurmurHash3's finalizer (Appleby, public domain): each bit of a mark depends on every bit before."""


def marks_of(keys: Sequence[Key]) -> Marks:
    """The marks of keys, most quickly of keys of one length.

    Of keys of three lengths or more in one call, which no engine has, they may be wrong; see `marks_of_any`.
    """
    # Joined first, since that waits for the memory of all at once. A library of hashes takes a call for each.
    joined, key_bytes = b"".join(keys), len(keys[0]) if keys else 0
    if len(joined) != key_bytes * len(keys):
        return marks_of_any(keys)
    marks: Marks = np.empty(len(keys), dtype=np.uint64)
    marker()(joined, key_bytes, marks)
    return marks


def marks_of_any(keys: Sequence[Key]) -> Marks:
    """The marks of keys of any lengths."""
    if len(set(map(len, keys))) <= 1:
        return marks_of(keys)
    marks: Marks = np.empty(len(keys), dtype=np.uint64)
    for i, key in enumerate(keys):
        marker()(key, len(key), marks[i : i + 1])
    return marks


@functools.cache
def marker() -> Callable[[bytes, int, Marks], None]:
    """A function that writes the marks of keys that lie one behind the other, each of so many bytes."""
    from numba import types

    text = types.Bytes(types.uint8, 1, "C", readonly=True)

    @compiled(types.void(text, types.int64, types.uint64[::1]))
    def mark_keys(joined: bytes, key_bytes: int, marks: Marks) -> None:
        spread, half = np.uint64(_SPREAD), np.uint64(32)
        for i in range(len(marks)):
            at = i * key_bytes
            end = at + key_bytes
            mark = np.uint64(key_bytes) * spread
            while at < end:
                word = np.uint64(0)
                if at + _WORD_BYTES <= end:
                    # In this order compilers make one load of it.
                    for byte in range(_WORD_BYTES):
                        word |= np.uint64(joined[at + byte]) << np.uint64(8 * byte)
                else:
                    for byte in range(end - at):
                        word |= np.uint64(joined[at + byte]) << np.uint64(8 * byte)
                mark = (mark ^ word) * spread
                mark ^= mark >> half
                at += _WORD_BYTES
            mark = (mark ^ mark >> np.uint64(33)) * np.uint64(_FIRST_MIX)
            mark = (mark ^ mark >> np.uint64(33)) * np.uint64(_SECOND_MIX)
            marks[i] = mark ^ mark >> np.uint64(33)

    return mark_keys
