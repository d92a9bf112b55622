"""Ghosts: a bounded memory of keys that left the pool, and why: for the reasons of misses, and evictions we regret."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.events import EvictionReason
from core.keys import Key
from core.marks import Marks, marks_of

_FLUSH_KEYS = 1000
_MIN_BITS = 16
"""Half a megabyte, so that in a small pool hardly any two ghosts fall on one place."""

_CODES = {reason: code for code, reason in enumerate(EvictionReason, start=1)}
_REASONS = [None, *EvictionReason]
_CODE_BITS = 4
_CODE = (1 << _CODE_BITS) - 1
_TOLD = 1 << (_CODE_BITS - 1)
"""Set with the reason of a ghost whose regret was told."""
_EPOCH_BITS = 8
_NOTE_BITS = _CODE_BITS + _EPOCH_BITS
_NOTE = np.uint64((1 << _NOTE_BITS) - 1)


class Ghosts:
    """The latest keys that left, at most about twice as many as there are slots, in one flat array.

    An entry is a key's mark with the reason and the epoch in its low bits. A newer ghost overwrites an older one that
    falls on its place, so the memory is fixed and nothing is ever searched; what this costs is a few forgotten ghosts.
    A reset voids all, for what was in the pool then left by the reset. A key passes for another one with a chance of
    2**-52.
    """

    def __init__(self, num_slots: int) -> None:
        bits = max((2 * num_slots).bit_length() - 1, _MIN_BITS)
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=np.uint64)
        self._epoch = 0
        self._pending: list[Key] = []
        self._pending_reason = EvictionReason.CAPACITY

    def add(self, keys: Sequence[Key], reason: EvictionReason) -> None:
        """Remember keys that left. They are entered in larger batches, which costs a third as much."""
        if reason is not self._pending_reason:
            self._flush()
            self._pending_reason = reason
        self._pending += keys
        if len(self._pending) >= _FLUSH_KEYS:
            self._flush()

    def begin_epoch(self) -> None:
        """Forget every ghost, in O(1)."""
        self._pending.clear()
        self._epoch = (self._epoch + 1) % (1 << _EPOCH_BITS)

    def reasons(self, keys: Sequence[Key]) -> list[EvictionReason | None]:
        """Why these keys, which are not in the pool, left it; None for those it never had, or that are forgotten."""
        _, codes = self._look_up(keys)
        return [_REASONS[code] for code in (codes & (_TOLD - 1)).tolist()]

    def regret(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Which of these keys, which are not in the pool, were in it once; each is told once."""
        places, codes = self._look_up(keys)
        known: NDArray[np.bool_] = (codes > 0) & (codes < _TOLD)
        self._table[places[known]] |= np.uint64(_TOLD)
        return known

    def _look_up(self, keys: Sequence[Key]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places of these keys, and the codes that stand there if they are theirs, else 0."""
        self._flush()
        marks = marks_of(keys)
        places = (marks >> self._shift).view(np.int64)
        differences = self._table[places] ^ self._entries(marks, 0)
        codes = np.where(differences <= _CODE, differences, 0).astype(np.int64)
        return places, codes

    def _flush(self) -> None:
        if self._pending:
            marks = marks_of(self._pending)
            self._table[(marks >> self._shift).view(np.int64)] = self._entries(marks, _CODES[self._pending_reason])
            self._pending.clear()

    def _entries(self, marks: Marks, code: int) -> Marks:
        return (marks & ~_NOTE) | np.uint64(self._epoch << _CODE_BITS | code)
