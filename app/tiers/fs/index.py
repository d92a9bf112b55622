"""What the folder holds, in memory: names of files in order of use, and the bytes that they take, within a limit.

A name is a key followed by its namespace. A file enters when it is wholly there and leaves before it is deleted; in
between its name is taken, so that no two threads are about one file.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.app.tiers.block_store import Outcome
from kvferry.core.pool.eviction.lru import RecencyQueue
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.native import KeyHashes, hash_any_keys

Name = bytes

MAX_FILES = 1 << 22
"""More are not kept, whatever their bytes: a name takes some 170 bytes of memory."""
_FIRST_FILES = 1 << 16
"""What there is room for at first, many times a batch. It grows once half is used, and has before the other half is."""
_MOVED_EACH = 8
_BATCH = 1000
"""Names that are worked on under the lock, or without a chance for other threads, at once."""


class FileIndex:
    """Names of files in order of last use, with their sizes. Thread-safe."""

    def __init__(self, max_bytes: int, smallest_bytes: int) -> None:
        """At most `max_bytes`, and no more files than of `smallest_bytes` would fit."""
        self.max_bytes = max_bytes
        self.evicted = 0
        self._lock = threading.Lock()
        self._capacity = max(min(MAX_FILES, max_bytes // smallest_bytes), 1)
        self._writing: dict[Name, int] = {}
        self._unwanted: set[Name] = set()
        # Names of files that are to be deleted, with the bytes that they count for until then.
        self._leaving: dict[Name, int] = {}
        self._debt_bytes = 0
        self._taken_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._names = np.empty(self._capacity, dtype=object)
        self._marks: KeyHashes = np.zeros(self._capacity, dtype=np.uint64)
        # One folder may have names of several lengths.
        self._entries = BlockIndex(min(self._capacity, _FIRST_FILES), self._names, self._marks, hash_any_keys)
        self._sizes = np.zeros(self._capacity, dtype=np.int64)
        self._order = RecencyQueue(*np.zeros((2, self._capacity), dtype=np.int32))
        self._returned: list[int] = []
        self._frontier = 0
        self._held_bytes = 0

    def __len__(self) -> int:
        return self._order.num_live

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that can be read."""
        return self._held_bytes

    def find(self, names: Sequence[Name]) -> list[bool]:
        """Return which files can be read."""
        with self._lock:
            return [entry >= 0 for entry in self._find(names).tolist()]

    def begin(self, name: Name, num_bytes: int) -> list[Name] | Outcome:
        """Reserve space for a file, after which `commit` or `abort` must follow. An existing file counts as used.

        Returns:
            The files to delete before the file is written, and to report with `deleted`; or `PRESENT`, or `DROPPED` if
            there is no room, or the name is being written or deleted.
        """
        with self._lock:
            if self._touch(name):
                return Outcome.PRESENT
            if name in self._writing or name in self._leaving:
                return Outcome.DROPPED
            excess_bytes = self._taken_bytes + num_bytes - self.max_bytes
            excess_files = self._order.num_live + len(self._writing) + 1 - self._capacity
            if excess_bytes > self._held_bytes or excess_files > self._order.num_live:
                return Outcome.DROPPED
            # They no longer count: the caller deletes them before it writes, so that the limit holds on the disk too.
            victims = self._evict(excess_bytes, excess_files)
            self._writing[name] = num_bytes
            self._taken_bytes += num_bytes
            return victims

    def commit(self, name: Name) -> bool:
        """Enter a file that was written. Returns False if it was dropped meanwhile: it must be deleted and reported."""
        self._make_room(1)
        with self._lock:
            num_bytes = self._writing.pop(name)
            if name in self._unwanted:
                self._unwanted.discard(name)
                self._leaving[name] = num_bytes
                return False
            self._enter([name], np.array([num_bytes]))
            return True

    def abort(self, name: Name) -> None:
        """Undo `begin`: the file was not written."""
        with self._lock:
            self._taken_bytes -= self._writing.pop(name)
            self._unwanted.discard(name)

    def touch(self, name: Name) -> None:
        """Record the use of a file."""
        with self._lock:
            self._touch(name)

    def evict(self, num_bytes: int) -> list[Name]:
        """Remove the least recently used files of this many bytes; they must be deleted and reported."""
        with self._lock:
            return self._evict(min(num_bytes, self._held_bytes), 0)

    def take(self, names: Sequence[Name]) -> list[Name]:
        """Remove files, and return those that existed; they must be deleted and reported.

        Files that are being written are not entered when that ends.
        """
        with self._lock:
            self._unwanted.update(name for name in names if name in self._writing)
            # Names may occur twice.
            entries = self._find(list(dict.fromkeys(names)))
            entries = entries[entries >= 0]
            self._order.remove(entries)
            return self._leave(entries)

    def deleted(self, names: Sequence[Name]) -> None:
        """Record that removed files are deleted from the disk."""
        with self._lock:
            for name in names:
                self._taken_bytes -= self._leaving.pop(name, 0)

    def fill(self, names: Sequence[Name], sizes: NDArray[np.int64], used_s: NDArray[np.float64]) -> list[Name]:
        """Enter files found on the disk, before any other call. Returns those that do not fit, the least recently used,
        which must be deleted and reported."""
        order = np.argsort(used_s, kind="stable")[::-1]
        with self._lock:
            room_bytes = max(self.max_bytes - self._taken_bytes, 0)
        fit = int(np.searchsorted(np.cumsum(sizes[order]), room_bytes, side="right"))
        fit = min(fit, self._capacity)
        for end in range(fit, 0, -_BATCH):
            batch = order[max(end - _BATCH, 0) : end]
            self._make_room(len(batch))
            with self._lock:
                self._taken_bytes += int(sizes[batch].sum())
                self._enter([names[i] for i in batch.tolist()], sizes[batch])
        victims = [names[i] for i in order[fit:].tolist()]
        with self._lock:
            self._leaving.update(zip(victims, sizes[order[fit:]].tolist(), strict=True))
            self._taken_bytes += int(sizes[order[fit:]].sum())
            self.evicted += len(victims)
        return victims

    def clear(self) -> tuple[int, int]:
        """Remove all files; return their number and bytes, which count against the limit until `pay`."""
        with self._lock:
            count, num_bytes = self._order.num_live, self._held_bytes
            self._debt_bytes += num_bytes + sum(self._leaving.values())
            replaced, old_names = (self._entries, self._marks), self._names
            self._leaving, self._unwanted = {}, set(self._writing)
            self._begin()
        del replaced
        # Freed in batches: freeing millions of names at once would stop all threads meanwhile.
        for start in range(0, len(old_names), _BATCH):
            old_names[start : start + _BATCH] = None
        return count, num_bytes

    def pay(self, num_bytes: int | None = None) -> None:
        """Record that bytes of cleared files are deleted from the disk; None is all of them."""
        with self._lock:
            paid = self._debt_bytes if num_bytes is None else min(num_bytes, self._debt_bytes)
            self._debt_bytes -= paid
            self._taken_bytes -= paid

    def _find(self, names: Sequence[Name]) -> NDArray[np.int64]:
        return self._entries.find(names)

    def _touch(self, name: Name) -> bool:
        entry = self._find([name])
        if entry[0] >= 0:
            self._order.touch(entry)
        return bool(entry[0] >= 0)

    def _enter(self, names: Sequence[Name], sizes: NDArray[np.int64]) -> None:
        """Enter files, the most recently used first. Requires: their bytes are counted as taken."""
        entries = self._returned[len(self._returned) - min(len(names), len(self._returned)) :]
        del self._returned[len(self._returned) - len(entries) :]
        fresh = len(names) - len(entries)
        entries += range(self._frontier, self._frontier + fresh)
        self._frontier += fresh
        self._names[entries] = names
        self._marks[entries] = hash_any_keys(names)
        self._entries.claim(np.array(entries, dtype=np.int64))
        self._sizes[entries] = sizes
        self._held_bytes += int(sizes.sum())
        self._order.append(np.array(entries, dtype=np.int64))

    def _make_room(self, num_names: int) -> None:
        """Grow the table in time for this many more names. Acquires the lock only briefly: look-ups wait for it."""
        entries = self._entries
        if entries.is_growing:
            with self._lock:
                replaced = entries.move(self._frontier, _MOVED_EACH * num_names)
            # Its memory goes with it.
            del replaced
        elif 2 * len(entries) > entries.size and entries.size < self._capacity:
            begin = entries.begin_growing(2 * entries.size)
            with self._lock:
                if not entries.is_growing:
                    begin()

    def _evict(self, num_bytes: int, num_files: int) -> list[Name]:
        """Remove the least recently used files until this many bytes and files are gone."""
        victims: list[Name] = []
        while num_bytes > 0 or num_files > 0:
            entry = self._order.take_oldest(1)
            num_bytes -= int(self._sizes[entry[0]])
            num_files -= 1
            self._taken_bytes -= int(self._sizes[entry[0]])
            victims += self._leave(entry)
        self._leaving.update(dict.fromkeys(victims, 0))
        self.evicted += len(victims)
        return victims

    def _leave(self, entries: NDArray[np.int64]) -> list[Name]:
        """Remove files that are no longer in the order of use."""
        names: list[Name] = self._names[entries].tolist()
        sizes = self._sizes[entries].tolist()
        self._entries.remove(entries)
        self._names[entries] = None
        self._leaving.update(zip(names, sizes, strict=True))
        self._held_bytes -= sum(sizes)
        self._returned += entries.tolist()
        return names
