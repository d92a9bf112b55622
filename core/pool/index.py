"""Tables by the hashes of keys: the index from block key to slot, and ghosts; the keys of a request's prefix.

The index finds 64-bit hashes, confirmed by comparing keys: on a hash collision the second key is not indexed (a miss);
another key's slot is never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.pool.native import (
    AS_NOTED,
    GHOST_CODE_BITS,
    GHOST_EPOCHS,
    GHOST_NOTE_BITS,
    NUMBER_BITS,
    WAYS,
    KeyHashes,
    key_hasher,
    put_ghosts,
    resident_zeros,
    table_functions,
)

Numbers = NDArray[np.int64]

_CELL = np.dtype([("hash", np.uint64), ("entry", np.uint64)])
_EPOCHS = 1 << 64 - NUMBER_BITS
_MIN_BITS = 4
_FIRST_CHUNK, _LAST_CHUNK = 64, 1024


def hash_keys(keys: Sequence[bytes]) -> KeyHashes:
    """Hash keys, in one native call where they have one length.

    Keys of three lengths or more in one call, which no engine has, may get wrong hashes.
    """
    # Joined first, which waits for the memory of all keys at once. A hashing library takes one call for each key.
    joined, key_bytes = b"".join(keys), len(keys[0]) if keys else 0
    if len(joined) != key_bytes * len(keys):
        return np.concatenate([hash_keys([key]) for key in keys])
    hashes: KeyHashes = np.empty(len(keys), dtype=np.uint64)
    key_hasher()(joined, key_bytes, hashes)
    return hashes


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys of a request's first slots in each group, compared by position, without a lookup in the pool.

    `groups` has, by group index (the last byte of a key), the keys of the request's slots, and how many of them are
    part of the prefix. `others` are part of it at any position.
    """

    groups: Mapping[int, tuple[Sequence[Key], int]]
    others: Collection[Key] = ()

    def holds(self, keys: Sequence[Key], positions: Sequence[int]) -> list[bool]:
        """Return which of these keys, at these positions within their request's group, are part of the prefix."""
        others = self.others
        if len(self.groups) == 1:
            # Keys of other groups are equal to none of this one.
            ((known, count),) = self.groups.values()
            return [
                (position < count and known[position] == key) or key in others
                for key, position in zip(keys, positions, strict=True)
            ]
        are_held = []
        for key, position in zip(keys, positions, strict=True):
            known, count = self.groups.get(key[-1], ((), 0))
            are_held.append((position < count and known[position] == key) or key in others)
        return are_held


NO_PREFIX = Prefix({})


class HashTable:
    """A table of fixed size from hashes to numbers (0 to 2**32 - 1), with linear probing, at most one number a hash.

    It never grows and holds no keys. A removal leaves no tombstone; a reset begins a new epoch, in which the cells of
    older epochs are free.
    """

    def __init__(self, size: int, hashes: KeyHashes) -> None:
        """Allocate cells for `size` numbers or more, at a load factor of 2/3 at most.

        Args:
            size: Numbers to make room for.
            hashes: The hash of each number, a column that the caller sets before a number is claimed and keeps until
                the number is removed.
        """
        bits = max((max(size, 1) * 3 // 2).bit_length(), _MIN_BITS)
        self.size = (1 << bits) * 2 // 3
        """Numbers that the table has room for."""
        self._hashes = hashes
        self._cells: NDArray[np.uint64] = resident_zeros(1 << bits, _CELL).view(np.uint64).reshape(-1, 2)
        self._shift = 64 - bits
        self._epoch = 1
        self._num_held = 0
        self._find, self._claim, self._remove = table_functions()

    def __len__(self) -> int:
        return self._num_held

    def find_hashes(self, hashes: KeyHashes) -> Numbers:
        """Return the number of each hash, -1 where there is none."""
        numbers: Numbers = np.empty(len(hashes), dtype=np.int64)
        self._find(self._cells, self._shift, self._epoch, hashes, numbers)
        return numbers

    def claim(self, numbers: Numbers) -> Numbers:
        """Enter numbers by their hashes, unless a hash has a number already.

        Returns:
            The number that holds each hash afterwards: of equal hashes the first one, -1 where the table is full.
        """
        holders: Numbers = np.empty(len(numbers), dtype=np.int64)
        num_free = self.size - self._num_held
        self._num_held += self._claim(self._cells, self._shift, self._epoch, self._hashes, numbers, num_free, holders)
        return holders

    def remove(self, numbers: Numbers) -> None:
        """Remove those of these numbers that hold their hash."""
        self._num_held -= self._remove(self._cells, self._shift, self._epoch, self._hashes, numbers)

    def reset(self) -> None:
        """Remove all numbers, in O(1)."""
        self._epoch += 1
        self._num_held = 0
        if self._epoch == _EPOCHS:
            self._cells[:] = 0
            self._epoch = 1


class BlockIndex(HashTable):
    """Numbers below `size`, such as slots, by their keys. It can grow."""

    def __init__(self, size: int, keys: NDArray[np.object_], hashes: KeyHashes) -> None:
        """Make an empty index.

        Args:
            size: Numbers to make room for.
            keys: The key of each number, a column of the caller, as `hashes`.
            hashes: See `HashTable`.
        """
        super().__init__(size, hashes)
        self._keys = keys
        # Compiled here instead of in the first lookup.
        key_hasher()
        # While it is filled, each claim and removal is done in both tables.
        self._larger: HashTable | None = None
        self._next = 0

    @property
    def is_growing(self) -> bool:
        """Whether entries are being moved to a larger table."""
        return self._larger is not None

    def get(self, key: Key) -> int | None:
        """Return the number of one key, None if absent."""
        number = int(self.find([key])[0])
        return None if number < 0 else number

    def find(self, keys: Sequence[Key]) -> Numbers:
        """Return the number of each key, -1 where there is none."""
        return self.find_hashed(keys, hash_keys(keys))[0]

    def find_hashed(self, keys: Sequence[Key], hashes: KeyHashes) -> tuple[Numbers, int]:
        """Return the number of each key, -1 where there is none, and how many were found; `hashes` are of the keys."""
        numbers: Numbers = np.empty(len(hashes), dtype=np.int64)
        num_found = self._find(self._cells, self._shift, self._epoch, hashes, numbers)
        if not num_found:
            return numbers, 0
        if num_found == len(numbers):
            wanted, held = keys, self._keys[numbers]
        else:
            found_at = (numbers >= 0).nonzero()[0]
            wanted, held = [keys[i] for i in found_at.tolist()], self._keys[numbers[found_at]]
        if held.tolist() != (wanted if isinstance(wanted, list) else list(wanted)):
            for i in (numbers >= 0).nonzero()[0].tolist():
                if self._keys[numbers[i]] != keys[i]:
                    numbers[i] = -1
                    num_found -= 1
        return numbers, num_found

    def find_some(self, keys: Sequence[Key]) -> Numbers:
        """Return the numbers of the keys that are present."""
        numbers = self.find(keys)
        return numbers[numbers >= 0]

    def find_prefix(self, keys: Sequence[Key]) -> Numbers:
        """Return the numbers of the leading keys, up to the first absent one, in time proportional to the result."""
        parts: list[Numbers] = []
        start, chunk = 0, _FIRST_CHUNK
        while start < len(keys) or not parts:
            part = keys[start : start + chunk]
            numbers, num_found = self.find_hashed(part, hash_keys(part))
            if num_found < len(numbers):
                parts.append(numbers[: (numbers < 0).argmax()])
                break
            parts.append(numbers)
            start += chunk
            chunk = min(2 * chunk, _LAST_CHUNK)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def claim(self, numbers: Numbers) -> Numbers:
        """See `HashTable`."""
        holders = super().claim(numbers)
        if self._larger is not None:
            self._larger.claim(numbers[holders == numbers])
        return holders

    def remove(self, numbers: Numbers) -> None:
        """See `HashTable`."""
        super().remove(numbers)
        if self._larger is not None:
            self._larger.remove(numbers)

    def reset(self) -> None:
        """See `HashTable`."""
        super().reset()
        if self._larger is not None:
            self._larger.reset()

    def begin_growing(self, size: int) -> Callable[[], None]:
        """Allocate room for `size` numbers. The function returned makes `move` move the entries there."""
        larger = HashTable(size, self._hashes)

        def begin() -> None:
            self._larger, self._next = larger, 0

        return begin

    def move(self, end: int, limit: int) -> object | None:
        """Move the entries of up to `limit` of the numbers below `end` to the larger table.

        Returns:
            The cells of the smaller table once all entries were moved, to be freed by the caller without a lock; None
            before.
        """
        larger = self._larger
        if larger is None:
            return None
        numbers = np.arange(self._next, min(self._next + limit, end))
        self._next += len(numbers)
        larger.claim(numbers[self.find_hashes(self._hashes[numbers]) == numbers])
        if self._next < end:
            return None
        replaced, self._larger = self._cells, None
        self.size, self._cells, self._shift = larger.size, larger._cells, larger._shift
        self._epoch, self._num_held = larger._epoch, larger._num_held
        return replaced


_ENTRY, _TIME = np.dtype(np.uint64), np.dtype(np.float64)
_NO_TIMES: NDArray[np.float64] = np.zeros(0, _TIME)
_MIN_GHOST_BITS = 16
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
        """Make room for about `num_keys`, at least 65,536. With `is_dated` ghosts have the time of their creation.

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
        self._times: NDArray[np.float64] = resident_zeros(1 << bits if is_dated else 0, _TIME)
        self._epoch = 1
        self._put = put_ghosts()

    def add(self, hashes: KeyHashes, reason: R, now_s: float = 0.0) -> None:
        """Add keys that are missing."""
        note = self._epoch << GHOST_CODE_BITS | self._codes[reason]
        self._put(self._table, self._times, self._shift, hashes, note, _NO_TIMES, now_s)

    def plan_size(self, num_keys: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`. Ghosts added meanwhile are lost."""
        bits = _bits_for(num_keys)
        shift, old, old_times = 64 - bits, self._table, self._times
        if len(old) == 1 << bits:
            return lambda: None
        table: KeyHashes = resident_zeros(1 << bits, _ENTRY)
        times: NDArray[np.float64] = resident_zeros(1 << bits if len(old_times) else 0, _TIME)
        for start in range(0, len(old), _MOVED):
            # A copy, as other threads write meanwhile, and NumPy raises if an array changes during `nonzero`.
            entries = old[start : start + _MOVED].copy()
            used = entries.nonzero()[0]
            # An entry has the high bits of its hash, which are its place in a table of any size.
            of_used = old_times[start + used] if len(times) else _NO_TIMES
            self._put(table, times, shift, entries[used], AS_NOTED, of_used, 0.0)

        def apply() -> object:
            self._shift, self._table, self._times = shift, table, times
            return old, old_times

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

    def regret(self, hashes: KeyHashes) -> tuple[list[R | None], NDArray[np.bool_], NDArray[np.float64]]:
        """Mark keys as regretted. Requires: dated ghosts.

        Returns:
            Why each key is missing, None for keys without an entry; which are regretted for the first time; and when
            each was evicted in Unix seconds, NaN for keys without an entry.
        """
        places, codes = self._look_up(hashes)
        first: NDArray[np.bool_] = (codes > 0) & (codes < _REGRETTED)
        self._table[places[first]] |= np.uint64(_REGRETTED)
        return self._named(codes), first, np.where(codes > 0, self._times[places], np.nan)

    def _named(self, codes: NDArray[np.int64]) -> list[R | None]:
        if not codes.any():
            return [None] * len(codes)
        return [self._reasons[code] for code in (codes & (_REGRETTED - 1)).tolist()]

    def _look_up(self, hashes: KeyHashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the place of each hash and the code there, 0 where it has no entry."""
        wanted = hashes & ~_NOTE | np.uint64(self._epoch << GHOST_CODE_BITS)
        lines = (wanted >> np.uint64(self._shift)).view(np.int64) // WAYS
        # By hash and place of its line, the bits in which the entry there differs.
        differences = self._table.reshape(-1, WAYS)[lines] ^ wanted[:, None]
        ways = (differences < _NUM_CODES).argmax(axis=1)
        codes = differences[np.arange(len(hashes)), ways]
        return lines * WAYS + ways, np.where(codes < _NUM_CODES, codes, _NO_CODE).view(np.int64)


def _bits_for(num_keys: int) -> int:
    return max(num_keys.bit_length() - 1, _MIN_GHOST_BITS)
