"""History of missing keys: which were evicted, were not stored, or are in flight, for causes of misses and for regret.

It takes bounded memory and is dropped by a reset: a key without an entry counts as new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import repeat
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.pool.events import EventSink, RegretBatch
from kvferry.core.pool.index import BlockIndex, hash_keys
from kvferry.core.pool.native import (
    AS_NOTED,
    GHOST_CODE_BITS,
    GHOST_EPOCHS,
    GHOST_NOTE_BITS,
    KeyHashes,
    find_entries,
    put_ghosts,
    resident_zeros,
)
from kvferry.core.pool.slots import SlotTable
from kvferry.core.stats import EvictionCounts, EvictionReason, MissCause, MissReason, NotStored

_SECONDS = (1 << 32) - 1
_ENTRY, _SECOND = np.dtype(np.uint64), np.dtype(np.uint32)
_NO_SECONDS: NDArray[np.uint32] = np.zeros(0, _SECOND)
_MIN_BITS = 16
"""Half a megabyte, so that a small pool loses hardly any ghosts."""
_REGRETTED = 1 << (GHOST_CODE_BITS - 1)
"""Set in the code of a ghost whose regret was counted."""
_NUM_CODES, _NO_CODE = np.uint64(1 << GHOST_CODE_BITS), np.uint64(0)
_NOTE = np.uint64((1 << GHOST_NOTE_BITS) - 1)
_MOVED = 1 << 16
"""Entries that move to a table of another size at once, so that other threads do not wait long for the interpreter."""

R = TypeVar("R", bound=Enum)


class Ghosts(Generic[R]):
    """Metadata of the latest missing keys: one of a few reasons for each, in a flat array.

    An entry is the hash of a key with the reason and the epoch in its low bits, at one of eight places in a cache line;
    if all are occupied, it displaces one. So memory is fixed and a lookup is O(1), and ghosts are lost once the
    table is nearly full. A reset begins an epoch, in which older entries are free. One key is taken for another with a
    chance of 2**-48.
    """

    def __init__(self, num_keys: int, reasons: type[R], *, is_dated: bool = False) -> None:
        """Make room for about `num_keys`, at least 65,536. With `is_dated` ghosts have the second of their creation.

        Raises:
            ValueError: There are more than 15 reasons.
        """
        members = list(reasons)
        if len(members) >= _REGRETTED:
            raise ValueError(f"{len(members)} reasons do not fit: there are codes for {_REGRETTED - 1}")
        self._reasons: list[R | None] = [None, *members]
        self._codes = {reason: code for code, reason in enumerate(members, start=1)}
        bits = _bits_for(num_keys)
        self._shift = 64 - bits
        self._table: KeyHashes = resident_zeros(1 << bits, _ENTRY)
        self._seconds: NDArray[np.uint32] = resident_zeros(1 << bits if is_dated else 0, _SECOND)
        self._epoch = 1
        self._put = put_ghosts()

    def add(self, hashes: KeyHashes, reason: R, now_s: float = 0.0) -> None:
        """Add keys that are missing."""
        note = self._epoch << GHOST_CODE_BITS | self._codes[reason]
        self._put(self._table, self._seconds, self._shift, hashes, note, _NO_SECONDS, int(now_s) & _SECONDS)

    def plan_size(self, num_keys: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`. Ghosts added meanwhile are lost."""
        bits = _bits_for(num_keys)
        shift, old, old_seconds = 64 - bits, self._table, self._seconds
        if len(old) == 1 << bits:
            return lambda: None
        table: KeyHashes = resident_zeros(1 << bits, _ENTRY)
        seconds: NDArray[np.uint32] = resident_zeros(1 << bits if len(old_seconds) else 0, _SECOND)
        for start in range(0, len(old), _MOVED):
            # A copy, as other threads write meanwhile, and NumPy raises if an array changes during `nonzero`.
            entries = old[start : start + _MOVED].copy()
            used = entries.nonzero()[0]
            # An entry has the high bits of its hash, which are its place in a table of any size.
            times = old_seconds[start + used] if len(seconds) else _NO_SECONDS
            self._put(table, seconds, shift, entries[used], AS_NOTED, times, 0)

        def apply() -> object:
            self._shift, self._table, self._seconds = shift, table, seconds
            return old, old_seconds

        return apply

    def reset(self) -> None:
        """Drop all ghosts. Clears a part of the old entries, and all of them before an epoch number is used again."""
        chunk = -(-len(self._table) // GHOST_EPOCHS)
        self._table[(self._epoch - 1) * chunk : self._epoch * chunk] = 0
        self._epoch = self._epoch % GHOST_EPOCHS + 1

    def reasons(self, hashes: KeyHashes) -> list[R | None]:
        """Return why each key is missing, None for keys without an entry."""
        _, codes = self._look_up(hashes)
        return self._named(codes)

    def regret(self, hashes: KeyHashes) -> tuple[list[R | None], NDArray[np.bool_], tuple[float, float] | None]:
        """Mark keys as regretted.

        Returns:
            Why each key is missing, None for keys without an entry; which are regretted for the first time; and the
            range of the whole Unix seconds when the known ones were evicted, None without known or dated ghosts.
        """
        places, codes = self._look_up(hashes)
        first: NDArray[np.bool_] = (codes > 0) & (codes < _REGRETTED)
        self._table[places[first]] |= np.uint64(_REGRETTED)
        known = places[codes > 0]
        between_s = None
        if len(self._seconds) and len(known):
            seconds = self._seconds[known]
            between_s = float(seconds.min()), float(seconds.max())
        return self._named(codes), first, between_s

    def _named(self, codes: NDArray[np.int64]) -> list[R | None]:
        if not codes.any():
            return [None] * len(codes)
        return [self._reasons[code] for code in (codes & (_REGRETTED - 1)).tolist()]

    def _look_up(self, hashes: KeyHashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the place of each hash and the code there, 0 where it has no entry."""
        wanted = hashes & ~_NOTE | np.uint64(self._epoch << GHOST_CODE_BITS)
        places, differences = find_entries(self._table, self._shift, wanted)
        ways = (differences < _NUM_CODES).argmax(axis=1)
        codes = differences[np.arange(len(hashes)), ways]
        return places + ways, np.where(codes < _NUM_CODES, codes, _NO_CODE).view(np.int64)


def _bits_for(num_keys: int) -> int:
    return max(num_keys.bit_length() - 1, _MIN_BITS)


class MissHistory:
    """Why keys are not in the pool. Requires: manager lock held.

    `plan_size` and `record_foreign` need no lock.
    """

    def __init__(self, table: SlotTable, index: BlockIndex, evictions: EvictionCounts, sink: EventSink | None) -> None:
        """Make room for twice as many evicted keys as there are slots, and once as many that were not stored."""
        self.evicted = Ghosts(2 * table.num_slots, EvictionReason, is_dated=True)
        self._table = table
        self._index = index
        self._evictions = evictions
        self._sink = sink
        self._not_stored = Ghosts(table.num_slots, NotStored)
        self._foreign: Ghosts[MissCause] | None = None

    def explain(self, keys: Sequence[Key], now_s: float) -> tuple[list[MissReason], tuple[float, float] | None]:
        """Return why each of these keys, behind a hit, cannot be loaded, and count evicted keys as regretted.

        The cause is that the key is being stored, else why it was evicted, else why it was not stored. Besides, returns
        the Unix seconds between which the evicted ones were evicted, None without any.
        """
        if not keys:
            return [], None
        hashes = hash_keys(keys)
        is_missing = self._index.find_hashed(keys, hashes)[0] < 0
        missing = hashes[is_missing]
        evicted, is_first, between_s = self.evicted.regret(missing)
        count = int(np.count_nonzero(is_first))
        if count:
            self._evictions.regretted += count
        if count and self._sink is not None:
            regretted = is_missing.nonzero()[0][is_first]
            self._sink(RegretBatch(now_s, [keys[i] for i in regretted.tolist()]))
        not_stored = self._not_stored.reasons(missing)
        foreign = repeat(None) if self._foreign is None else self._foreign.reasons(missing)
        in_flight = self._table.are_in_flight(missing).tolist()
        causes: list[MissReason] = [
            MissCause.IN_FLIGHT if storing else gone or never or other or MissCause.NEW
            for storing, gone, never, other in zip(in_flight, evicted, not_stored, foreign, strict=False)
        ]
        if len(causes) < len(keys):
            reasons = iter(causes)
            causes = [next(reasons) if missed else MissCause.GAP for missed in is_missing.tolist()]
        return causes, between_s

    def count_inner_blocks(self, keys: Sequence[Key]) -> int:
        """Count the leading keys, of inner blocks of one slot, that were computed without the rest of their slot."""
        reasons = self._not_stored.reasons(hash_keys(keys))
        return next((i for i, reason in enumerate(reasons) if reason is not NotStored.PART_OF_SLOT), len(keys))

    def record_not_stored(self, keys: Sequence[Key], reason: NotStored) -> None:
        """Record why these keys were not stored."""
        self._not_stored.add(hash_keys(keys), reason)

    def record_foreign(self, keys: Sequence[Key]) -> None:
        """Record keys that an earlier process had with bytes of another meaning."""
        foreign = Ghosts(len(keys), MissCause)
        foreign.add(hash_keys(keys), MissCause.OTHER_FINGERPRINT)
        self._foreign = foreign

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`."""
        plans = [self.evicted.plan_size(2 * num_slots), self._not_stored.plan_size(num_slots)]
        return lambda: [apply() for apply in plans]

    def reset(self) -> None:
        """Drop all entries, in O(1)."""
        self.evicted.reset()
        self._not_stored.reset()
        self._foreign = None
