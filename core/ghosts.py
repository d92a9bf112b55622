"""Ghosts: a bounded memory of evicted keys, so that a key that is asked for again can be told from one never seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.keys import Key

_FINGERPRINT_BYTES = 8
_FLUSH_KEYS = 512
_MIN_BITS = 16
"""Half a megabyte, so that in a small pool hardly any two ghosts fall on one place."""


class Ghosts:
    """Fingerprints of the latest evicted keys, about twice as many as there are slots, in one flat array.

    A newer ghost overwrites an older one that falls on its place, so the memory is fixed and nothing is ever searched;
    what this costs is a few forgotten ghosts. Two keys share a fingerprint with a chance of 2**-64.
    """

    def __init__(self, num_slots: int) -> None:
        bits = max((2 * num_slots - 1).bit_length(), _MIN_BITS)
        self._mask = np.uint64((1 << bits) - 1)
        self._table = np.zeros(1 << bits, dtype=np.uint64)
        self._pending: list[Key] = []

    def add(self, keys: Sequence[Key]) -> None:
        """Remember keys that were evicted. They are entered in larger batches, which costs a third as much."""
        self._pending += keys
        if len(self._pending) >= _FLUSH_KEYS:
            self._flush()

    def take(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Which of these keys were evicted; each is forgotten, so that it is told once."""
        self._flush()
        marks = _fingerprints(keys)
        places = marks & self._mask
        known: NDArray[np.bool_] = self._table[places] == marks
        self._table[places[known]] = 0
        return known

    def _flush(self) -> None:
        if not self._pending:
            return
        marks = _fingerprints(self._pending)
        self._table[marks & self._mask] = marks
        self._pending.clear()


def _fingerprints(keys: Sequence[Key]) -> NDArray[np.uint64]:
    """Eight bytes of each key, told apart by group. Keys are hashes of one length, so any eight bytes will do."""
    rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), len(keys[0]))
    marks: NDArray[np.uint64] = np.ascontiguousarray(rows[:, :_FINGERPRINT_BYTES]).view(np.uint64)[:, 0]
    return marks + rows[:, -1]
