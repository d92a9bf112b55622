"""What the folder holds, in memory: names of files in order of use, and the bytes that they take, within a limit.

A name is a key followed by its namespace. A file enters when it is wholly there and leaves before it is deleted; in
between its name is taken, so that no two threads are about one file.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_store import Outcome
from kvferry.app.tiers.fs.folder import Folder, Name

_log = logging.getLogger(__name__)

MAX_FILES = 1 << 22
"""More are not kept, whatever their bytes: a name takes some 300 bytes of memory."""
_SHARDS = 64
"""A dictionary that grows, or is freed, stops all threads for a time that depends on its size: a second for millions of
names, a few milliseconds for a shard of them."""
_BATCH = 1000
"""Names that are worked on under the lock at once."""
_EVICTED_AT_ONCE = 100
_FREE_BLOCKS = 8
"""A disk with space for so many blocks is not full: threads that evict for a block leave less."""


class DiskSpace:
    """Whether the disk is full before the tier is at its limit, so that each new block evicts others."""

    def __init__(self, name: str, folder: Folder, max_bytes: int, largest_bytes: int) -> None:
        """`largest_bytes` is what the longest file takes on the disk."""
        self._name = name
        self._folder = folder
        self._max_bytes = max_bytes
        self._largest_bytes = largest_bytes
        self._is_full = False
        self._is_checked = False
        self._seldom = RateLimitedLogger(_log)

    def check_limit(self, held_bytes: int) -> None:
        """Log a warning, at the first call, if `held_bytes` of the tier and the free ones are less than `max_bytes`."""
        if self._is_checked:
            return
        self._is_checked = True
        free_bytes = self._folder.free_bytes()
        if held_bytes + free_bytes < self._max_bytes:
            _log.warning(
                "tier %s: max_bytes=%s is more than its disk can hold: the tier has %s bytes, %s are free; lower "
                "max_bytes",
                self._name,
                f"{self._max_bytes:,}",
                f"{held_bytes:,}",
                f"{free_bytes:,}",
            )

    def note_full(self, held_bytes: int) -> None:
        """Record that files were evicted for space on the disk, and log it if that is new."""
        if not self._is_full:
            self._is_full = True
            self._seldom.log(logging.WARNING, "full", "tier %s: %s", self._name, self.problems(held_bytes)[0])

    def update(self) -> None:
        """Record whether the disk has space again."""
        if self._is_full:
            self._is_full = self._folder.free_bytes() < _FREE_BLOCKS * self._largest_bytes

    def problems(self, held_bytes: int) -> list[str]:
        """Return what to report in `BlockStore.health`."""
        if not self._is_full:
            return []
        return [
            f"the disk of {self._folder.path} is full at {held_bytes:,} of max_bytes={self._max_bytes:,} bytes, and "
            "each new block evicts others; lower max_bytes, or free space"
        ]


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
        self._num_uses = 0
        self._begin()

    def _begin(self) -> None:
        # The number of each file's last use, and its bytes; the least recently used file of a shard is the first.
        self._shards: list[OrderedDict[Name, tuple[int, int]]] = [OrderedDict() for _ in range(_SHARDS)]
        self._num_files = 0
        self._held_bytes = 0

    def __len__(self) -> int:
        return self._num_files

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that can be read."""
        return self._held_bytes

    def find(self, names: Sequence[Name]) -> list[bool]:
        """Return which files can be read."""
        with self._lock:
            return [name in self._shard_of(name) for name in names]

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
            excess_files = self._num_files + len(self._writing) + 1 - self._capacity
            if excess_bytes > self._held_bytes or excess_files > self._num_files:
                return Outcome.DROPPED
            # They no longer count: the caller deletes them before it writes, so that the limit holds on the disk too.
            victims = self._evict(excess_bytes, excess_files)
            self._writing[name] = num_bytes
            self._taken_bytes += num_bytes
            return victims

    def commit(self, name: Name) -> bool:
        """Enter a file that was written. Returns False if it was dropped meanwhile: it must be deleted and reported."""
        with self._lock:
            num_bytes = self._writing.pop(name)
            if name in self._unwanted:
                self._unwanted.discard(name)
                self._leaving[name] = num_bytes
                return False
            self._enter(name, num_bytes)
            return True

    def abort(self, name: Name) -> None:
        """Undo `begin`: the file was not written."""
        with self._lock:
            self._taken_bytes -= self._writing.pop(name)
            self._unwanted.discard(name)

    def touch(self, name: Name) -> bool:
        """Record the use of a file, and return whether it can be read."""
        with self._lock:
            return self._touch(name)

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
            found = [name for name in dict.fromkeys(names) if name in self._shard_of(name)]
            for name in found:
                self._leaving[name] = self._remove(name)
            return found

    def is_leaving(self, names: Sequence[Name]) -> bool:
        """Return whether one of these files was removed and not reported as deleted, or will be when it is written."""
        with self._lock:
            return any(name in self._leaving or name in self._unwanted for name in names)

    def deleted(self, names: Sequence[Name]) -> None:
        """Record that removed files are deleted from the disk."""
        with self._lock:
            for name in names:
                self._taken_bytes -= self._leaving.pop(name, 0)

    def fill(self, names: Sequence[Name], sizes: NDArray[np.int64], used_s: NDArray[np.float64]) -> None:
        """Enter files found on the disk, before any other call, also beyond the limit: see `evict_excess`."""
        order = np.argsort(used_s, kind="stable")
        for start in range(0, len(order), _BATCH):
            with self._lock:
                for i in order[start : start + _BATCH].tolist():
                    self._taken_bytes += int(sizes[i])
                    self._enter(names[i], int(sizes[i]))

    @property
    def has_excess(self) -> bool:
        """Whether the limit is exceeded, as it may be by files found on the disk."""
        return self._taken_bytes > self.max_bytes or self._num_files > self._capacity

    def evict_excess(self) -> list[Name]:
        """Remove some of the least recently used files beyond the limit; they must be deleted and reported."""
        with self._lock:
            excess_bytes = min(self._taken_bytes - self.max_bytes, self._held_bytes)
            return self._evict(excess_bytes, self._num_files - self._capacity, _EVICTED_AT_ONCE)

    def clear(self) -> tuple[int, int]:
        """Remove all files; return their number and bytes, which count against the limit until `pay`."""
        with self._lock:
            count, num_bytes, old = self._num_files, self._held_bytes, self._shards
            self._debt_bytes += num_bytes + sum(self._leaving.values())
            self._leaving, self._unwanted = {}, set(self._writing)
            self._begin()
        for shard in old:
            shard.clear()
        return count, num_bytes

    def pay(self, num_bytes: int | None = None) -> None:
        """Record that bytes of cleared files are deleted from the disk; None is all of them."""
        with self._lock:
            paid = self._debt_bytes if num_bytes is None else min(num_bytes, self._debt_bytes)
            self._debt_bytes -= paid
            self._taken_bytes -= paid

    def _shard_of(self, name: Name) -> OrderedDict[Name, tuple[int, int]]:
        return self._shards[hash(name) % _SHARDS]

    def _touch(self, name: Name) -> bool:
        shard = self._shard_of(name)
        found = shard.pop(name, None)
        if found is not None:
            self._insert(shard, name, found[1])
        return found is not None

    def _insert(self, shard: OrderedDict[Name, tuple[int, int]], name: Name, num_bytes: int) -> None:
        self._num_uses += 1
        shard[name] = (self._num_uses, num_bytes)

    def _enter(self, name: Name, num_bytes: int) -> None:
        """Enter a file as the most recently used. Requires: its bytes are counted as taken."""
        self._insert(self._shard_of(name), name, num_bytes)
        self._num_files += 1
        self._held_bytes += num_bytes

    def _remove(self, name: Name) -> int:
        """Remove a file, and return its bytes."""
        _, num_bytes = self._shard_of(name).pop(name)
        self._num_files -= 1
        self._held_bytes -= num_bytes
        return num_bytes

    def _evict(self, num_bytes: int, num_files: int, most: int = MAX_FILES) -> list[Name]:
        """Remove the least recently used files until this many bytes and files are gone, or `most` files are."""
        victims: list[Name] = []
        while (num_bytes > 0 or num_files > 0) and len(victims) < most:
            oldest = min(filter(None, self._shards), key=lambda shard: next(iter(shard.values())))
            name = next(iter(oldest))
            freed_bytes = self._remove(name)
            num_bytes -= freed_bytes
            num_files -= 1
            self._taken_bytes -= freed_bytes
            victims.append(name)
        self._leaving.update(dict.fromkeys(victims, 0))
        self.evicted += len(victims)
        return victims
