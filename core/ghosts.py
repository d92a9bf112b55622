"""Ghosts: a bounded memory of keys that left the pool, or never came in, and why: for misses and regrets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.core.arrays import touched_zeros
from kvferry.core.compiled import compiled
from kvferry.core.marks import Marks

_SECONDS = (1 << 32) - 1
_ENTRY, _SECOND = np.dtype(np.uint64), np.dtype(np.uint32)
_MIN_BITS = 16
"""Half a megabyte, so that a small pool forgets hardly any."""
_WAYS = 8
"""Places in a row that an entry may be at: a cache line, so that entries displace others only where a table is full."""

_CODE_BITS = 5
_CODE = (1 << _CODE_BITS) - 1
_TOLD = 1 << (_CODE_BITS - 1)
"""Set with the reason of a ghost whose regret was told."""
_EPOCH_BITS = 8
_NOTE_BITS = _CODE_BITS + _EPOCH_BITS
_NOTE = np.uint64((1 << _NOTE_BITS) - 1)
_MOVED = 1 << 16
"""Entries that move into a table of another size at once, so that no other thread waits long for the interpreter."""


R = TypeVar("R", bound=Enum)


class Regretted(NamedTuple, Generic[R]):
    """Why keys are missing, which of them are told for the first time, and between when and when the known ones left.

    Unix seconds, whole; None where no key is known, or ghosts are not dated.
    """

    reasons: list[R | None]
    is_first: NDArray[np.bool_]
    between_s: tuple[float, float] | None


class Ghosts(Generic[R]):
    """The latest keys that are missing, in one flat array, each with one of a few reasons.

    An entry is a key's mark with the reason and the epoch in its low bits. It is at one of eight places; where others
    have them all, it overwrites one. So the memory is fixed and a lookup is short; what this costs is forgotten ghosts
    once the table is rather full. A reset voids all, for what was in the pool then left by the reset. A key passes for
    another one with a chance of 2**-48.
    """

    def __init__(self, num_keys: int, reasons: type[R], *, is_dated: bool = False) -> None:
        """Room for about `num_keys`, and never for fewer than 65,536. Raises `ValueError` for more than 15 reasons.

        With `is_dated` ghosts know when they became such, to the second.
        """
        members = list(reasons)
        if len(members) >= _TOLD:
            raise ValueError(f"{len(members)} reasons do not fit: there are codes for {_TOLD - 1}")
        self._reasons: list[R | None] = [None, *members]
        self._codes = {reason: code for code, reason in enumerate(members, start=1)}
        bits = _bits_for(num_keys)
        self._shift = np.uint64(64 - bits)
        self._table: Marks = touched_zeros(1 << bits, _ENTRY)
        # Of no length if nobody wants to know.
        self._seconds: NDArray[np.uint32] = touched_zeros(1 << bits if is_dated else 0, _SECOND)
        self._epoch = 0
        self._put, self._find, self._drop = _putter(), _finder(), _dropper()
        self._no_seconds: NDArray[np.uint32] = np.zeros(0, _SECOND)

    def add(self, marks: Marks, reason: R, now_s: float = 0.0) -> None:
        """Remember keys that are missing."""
        entries = marks & ~_NOTE | np.uint64(self._epoch << _CODE_BITS | self._codes[reason])
        self._put(self._table, self._seconds, int(self._shift), entries, self._no_seconds, int(now_s) & _SECONDS)

    def remove(self, marks: Marks) -> None:
        """Forget the keys of these marks."""
        self._drop(self._table, int(self._shift), marks & ~_NOTE | np.uint64(self._epoch << _CODE_BITS))

    def plan_size(self, num_keys: int) -> Callable[[], object]:
        """See `kvferry.core.resize.plan_size`. Ghosts that come meanwhile are forgotten."""
        bits = _bits_for(num_keys)
        shift, old, old_seconds = np.uint64(64 - bits), self._table, self._seconds
        if len(old) == 1 << bits:
            return lambda: None
        table: Marks = touched_zeros(1 << bits, _ENTRY)
        seconds: NDArray[np.uint32] = touched_zeros(1 << bits if len(old_seconds) else 0, _SECOND)
        for start in range(0, len(old), _MOVED):
            # A copy, for others write meanwhile, and NumPy refuses to look for what changes under it.
            entries = old[start : start + _MOVED].copy()
            there = entries.nonzero()[0]
            # An entry has the high bits of its mark, which are its place in a table of any size.
            times = old_seconds[start + there] if len(seconds) else self._no_seconds
            self._put(table, seconds, int(shift), entries[there], times, 0)

        def put_in_force() -> object:
            self._shift, self._table, self._seconds = shift, table, seconds
            return old, old_seconds

        return put_in_force

    def begin_epoch(self) -> None:
        """Forget every ghost. A part of what is left behind is swept, all of it before its epoch's number returns."""
        chunk = len(self._table) >> _EPOCH_BITS
        self._table[self._epoch * chunk : (self._epoch + 1) * chunk] = 0
        self._epoch = (self._epoch + 1) % (1 << _EPOCH_BITS)

    def reasons(self, marks: Marks) -> list[R | None]:
        """Why the keys of these marks are not in the pool; None for those that are not, or no longer, known."""
        _, codes = self._look_up(marks)
        return self._named(codes)

    def regret(self, marks: Marks) -> Regretted[R]:
        """`reasons`, and more about those of the keys that are known."""
        places, codes = self._look_up(marks)
        first: NDArray[np.bool_] = (codes > 0) & (codes < _TOLD)
        self._table[places[first]] |= np.uint64(_TOLD)
        known = places[codes > 0]
        between_s = None
        if len(self._seconds) and len(known):
            seconds = self._seconds[known]
            between_s = float(seconds.min()), float(seconds.max())
        return Regretted(self._named(codes), first, between_s)

    def _named(self, codes: NDArray[np.int64]) -> list[R | None]:
        return [self._reasons[code] for code in (codes & (_TOLD - 1)).tolist()]

    def _look_up(self, marks: Marks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places of these marks, and the codes that stand there if they are theirs, else 0."""
        places = np.empty(len(marks), dtype=np.int64)
        codes = np.empty(len(marks), dtype=np.int64)
        wanted = marks & ~_NOTE | np.uint64(self._epoch << _CODE_BITS)
        self._find(self._table, int(self._shift), wanted, places, codes)
        return places, codes


@functools.cache
def _putter() -> Callable[..., None]:
    """Return a function that enters ghosts into a table, and their seconds into another one unless that is empty."""
    from numba import types

    given, given_seconds = types.Array(types.uint64, 1, "A", readonly=True), types.Array(types.uint32, 1, "A")

    @compiled(types.void(types.uint64[::1], types.uint32[::1], types.uint64, given, given_seconds, types.uint32))
    def put(
        table: Marks,
        seconds: NDArray[np.uint32],
        shift: np.uint64,
        entries: Marks,
        times: NDArray[np.uint32],
        now_s: np.uint32,
    ) -> None:
        of_key, of_epoch = ~np.uint64((1 << _NOTE_BITS) - 1), np.uint64(((1 << _EPOCH_BITS) - 1) << _CODE_BITS)
        for i in range(len(entries)):
            entry = entries[i]
            home = np.int64(entry >> shift)
            place, is_vacant = home, False
            for way in range(_WAYS):
                at = home // _WAYS * _WAYS + way
                if (table[at] ^ entry) & of_key == np.uint64(0):
                    place = at
                    break
                if not is_vacant and (table[at] == np.uint64(0) or (table[at] ^ entry) & of_epoch != np.uint64(0)):
                    place, is_vacant = at, True
            table[place] = entry
            if len(seconds):
                seconds[place] = times[i] if len(times) else now_s

    return put


@functools.cache
def _finder() -> Callable[..., None]:
    """Return a function that finds the places of ghosts in a table, and their codes: 0 where they are not."""
    from numba import types

    given = types.Array(types.uint64, 1, "A", readonly=True)

    @compiled(types.void(types.uint64[::1], types.uint64, given, types.int64[::1], types.int64[::1]))
    def find(
        table: Marks, shift: np.uint64, wanted: Marks, places: NDArray[np.int64], codes: NDArray[np.int64]
    ) -> None:
        for i in range(len(wanted)):
            home = np.int64(wanted[i] >> shift)
            places[i], codes[i] = home, 0
            for way in range(_WAYS):
                at = home // _WAYS * _WAYS + way
                code = table[at] ^ wanted[i]
                if code <= np.uint64(_CODE):
                    places[i], codes[i] = at, np.int64(code)
                    break

    return find


@functools.cache
def _dropper() -> Callable[..., None]:
    """Return a function that removes ghosts from a table."""
    from numba import types

    given = types.Array(types.uint64, 1, "A", readonly=True)

    @compiled(types.void(types.uint64[::1], types.uint64, given))
    def drop(table: Marks, shift: np.uint64, gone: Marks) -> None:
        for i in range(len(gone)):
            home = np.int64(gone[i] >> shift)
            for way in range(_WAYS):
                at = home // _WAYS * _WAYS + way
                if table[at] ^ gone[i] <= np.uint64(_CODE):
                    table[at] = np.uint64(0)
                    break

    return drop


def _bits_for(num_keys: int) -> int:
    return max(num_keys.bit_length() - 1, _MIN_BITS)
