"""Limit of a folder: its size, and eviction by one engine at a time.

    blocks/ or shared/
        keeper     locked by the engine that measures and evicts, until it closes the folder or its process ends
        size       blocks and bytes of each epoch, as that engine knows them

The engine with the lock measures the folder by a pass over all files: at first, now and then, and when it has no
candidates for eviction. In between, each engine adds what it changes itself to the latest size. No engine stores
anything while the sum exceeds the limit: `max_bytes`, or what the disk has room for if that is less.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.app.tiers.fs.folder import Folder
from kvferry.app.tiers.shared_epoch import Epoch

_log = logging.getLogger(__name__)

_PASS_INTERVAL_S = 600.0
"""Time between passes over a folder that only this process changes."""
_PASS_SHARE = 50
"""The next pass begins when this multiple of the time that the last one took has passed."""
_UNFINISHED_S = 3600.0
"""Age of temporary files that are deleted in a folder that engines share."""
_CANDIDATE_SHARE = 16
"""A pass notes this part of all files for eviction, so that its cost is shared by as many evictions."""
_SHARED_RESERVE = 20
"""In a folder that engines share, this part of the limit is kept free, so that they need not wait for evictions."""
_WAIT_S = 1.0
_KEPT_BLOCKS = 2
"""Space for so many blocks is kept free on the disk, which is full if there is less."""
_ROOMY_BLOCKS = 8
"""Once there is space for so many blocks, a disk is not full any more."""
_MAX_SIZE_BYTES = 1 << 20

Sizes = dict[str, tuple[int, int]]
"""Blocks and bytes by name of their epoch; empty for files in none."""


class FolderLimit:
    """Keeps the files of a folder within a limit. Thread-safe; `maintain` is called by one thread.

    Bytes are those that files take on the disk.
    """

    min_candidates = 1 << 15
    """A pass finds at least so many of the files to evict."""

    def __init__(
        self, name: str, folder: Folder, max_bytes: int, largest_bytes: int, on_error: Callable[[OSError], object]
    ) -> None:
        """`largest_bytes` is the length of the longest file. `on_error` is called for entries that are left out."""
        self.max_bytes = max_bytes
        self.evicted = 0
        self.is_known = False
        """Whether the size was measured, or read from the engine that measures, at least once."""
        self._name = name
        self._folder = folder
        self._root = folder.root
        self._largest_bytes = folder.size_on_disk(largest_bytes)
        self._on_error = on_error
        self._limited_log = RateLimitedLogger(_log)
        self._keeper: int | None = None
        """The locked file, of the engine that measures and evicts."""
        self._lock = threading.Lock()
        """Of the sizes, held briefly."""
        self._sizes: Sizes = {}
        self._since: Sizes = {}
        """What this engine has changed since the latest pass began."""
        self._reserved_bytes = 0
        self._limit_bytes = max_bytes
        """`max_bytes`, or less on a full disk."""
        self._is_full = False
        self._evicting = threading.Lock()
        """Held during a pass or an eviction."""
        self._candidates: list[tuple[int, int, str, str]] = []
        """Files by `(time of last use in ns, bytes, path, epoch)`, in the order of eviction from the end."""
        self._last_pass_s: float | None = None
        self._pass_took_s = 0.0
        self._published = b""
        """What `size` had when it was read or written last."""

    # --- stores -------------------------------------------------------------------------------------------------

    def size_of(self, epoch: Epoch) -> tuple[int, int]:
        """Return blocks and bytes of an epoch."""
        with self._lock:
            blocks, num_bytes = self._sizes.get(epoch.name.decode(), (0, 0))
        return max(blocks, 0), max(num_bytes, 0)

    def reserve(self, num_bytes: int) -> bool:
        """Reserve space for a file, after evictions if need be; return False if there is none. `release` follows."""
        if not self.is_known:
            return False
        self._reserve(num_bytes)
        has_space = False
        try:
            has_space = self._excess_bytes() <= 0 or self._evict(0, lambda: False)
        finally:
            if not has_space:
                self._reserve(-num_bytes)
        return has_space

    def release(self, epoch: Epoch, num_bytes: int, *, is_stored: bool) -> None:
        """End a reservation: the file was written, or was not."""
        if is_stored:
            self._count(epoch.name.decode(), 1, num_bytes)
        self._reserve(-num_bytes)

    def remove(self, epoch: Epoch, num_bytes: int) -> None:
        """Count a file that was deleted."""
        self._count(epoch.name.decode(), -1, -num_bytes)

    def problems(self) -> list[str]:
        """Return what to report in `BlockStore.health`."""
        if not self.is_known:
            return [f"{self._folder.path} is being measured; new blocks are not kept"]
        return [self._full_disk()] if self._is_full else []

    def _full_disk(self) -> str:
        return (
            f"the disk of {self._folder.path} is full at {self._held_bytes():,} of max_bytes={self.max_bytes:,} bytes, "
            "and each new block evicts others; lower max_bytes, or free space"
        )

    # --- housekeeping -------------------------------------------------------------------------------------------

    def maintain(self, stop: Callable[[], bool], *, has_space: bool = True) -> None:
        """Measure, evict and publish, or read what was published. Raises `OSError`, `Interrupted`.

        `has_space` is False if a write found no space, also by a quota.
        """
        if self._keeper is None:
            # Another engine has the lock, or nothing can be written.
            with suppress(OSError):
                self._keeper = self._folder.lock(f"{self._root}/keeper", is_shared=False)
                self._last_pass_s = None
        if self._keeper is None or not self.is_known:
            self._adopt_published()
        if self._keeper is not None and self._needs_pass():
            with self._evicting:
                self._measure(stop)
            if self._folder.is_shared:
                self._folder.sweep(_UNFINISHED_S)
        self._measure_disk(self._folder.free_bytes() if has_space else 0)
        if self._keeper is None:
            return
        self._evict(self._limit_bytes // _SHARED_RESERVE if self._folder.is_shared else 0, stop)
        self.is_known = True
        if self._folder.is_shared:
            self._publish()

    def close(self) -> None:
        """Leave measuring and evicting to the next engine."""
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            os.close(keeper)

    def _measure_disk(self, free_bytes: int) -> None:
        """Lower the limit on a full disk: to what the files of the tier take, less what is kept free."""
        kept_bytes = _KEPT_BLOCKS * self._largest_bytes
        self._limit_bytes = min(self.max_bytes, self._held_bytes() + free_bytes - kept_bytes)
        was_full = self._is_full
        self._is_full = free_bytes < (_ROOMY_BLOCKS * self._largest_bytes if was_full else kept_bytes)
        if self._is_full and not was_full:
            self._limited_log.log(logging.WARNING, "full", "tier %s: %s", self._name, self._full_disk())

    def _adopt_published(self) -> None:
        """Use the size that the engine with the lock has published, if it is new."""
        try:
            # Opened, since NFS may answer from memory otherwise.
            with self._folder.open(f"{self._root}/size") as fd:
                content = os.read(fd, _MAX_SIZE_BYTES)
            if content == self._published:
                return
            sizes = {epoch: (int(blocks), int(size)) for epoch, (blocks, size) in json.loads(content).items()}
        except (OSError, BadBlock, ValueError, TypeError, AttributeError, RecursionError):
            # None, or not written by kvferry. Without a size nothing is stored until one is published.
            return
        with self._lock:
            self._sizes = sizes
        self._published = content
        self.is_known = True

    def _publish(self) -> None:
        with self._lock:
            content = json.dumps({epoch: size for epoch, size in self._sizes.items() if any(size)}).encode()
        if content != self._published:
            # On a disk that cannot be written no block is stored either.
            with suppress(OSError):
                self._folder.write(f"{self._root}/size", [content])
                self._published = content

    def _needs_pass(self) -> bool:
        if self._last_pass_s is None:
            return True
        interval_s = 0.0 if self._folder.is_shared else _PASS_INTERVAL_S
        return time.monotonic() - self._last_pass_s > max(interval_s, _PASS_SHARE * self._pass_took_s)

    def _measure(self, stop: Callable[[], bool]) -> None:
        """Determine the size and the candidates by a pass over all files. Requires: `_evicting` held.

        Files that are written or deleted meanwhile may count twice, or not at all, until the next pass.
        """
        began_s = time.monotonic()
        with self._lock:
            self._since = {}
            num_blocks = sum(blocks for blocks, _ in self._sizes.values())
        most = max(self.min_candidates, num_blocks // _CANDIDATE_SHARE)
        measured: Sizes = {}
        # A heap, the newest first: sorting all of them at once would stop all threads.
        heap: list[tuple[int, int, str, str]] = []
        for path, status in self._folder.scan(self._root, stop, self._on_error):
            epoch = next((part for part in path.split("/") if Epoch(part.encode(errors="replace")).number), "")
            num_bytes = self._folder.size_on_disk(status.st_size)
            _add(measured, epoch, 1, num_bytes)
            candidate = -status.st_mtime_ns, num_bytes, path, epoch
            if len(heap) < most:
                heapq.heappush(heap, candidate)
            elif candidate > heap[0]:
                heapq.heapreplace(heap, candidate)
        self._candidates = [heapq.heappop(heap) for _ in range(len(heap))]
        with self._lock:
            for epoch, size in self._since.items():
                _add(measured, epoch, *size)
            self._sizes = measured
        if self._last_pass_s is None:
            self._log_size()
        self._last_pass_s = time.monotonic()
        self._pass_took_s = self._last_pass_s - began_s

    def _evict(self, spare_bytes: int, stop: Callable[[], bool]) -> bool:
        """Delete files until so much of the limit is free; return False if this engine may not, or has too few."""
        if self._keeper is None or not self._evicting.acquire(timeout=_WAIT_S):
            return False
        try:
            self._evict_candidates(spare_bytes, stop)
            if self._excess_bytes() + spare_bytes > 0:
                self._measure(stop)
                self._evict_candidates(spare_bytes, stop)
            return self._excess_bytes() + spare_bytes <= 0
        finally:
            self._evicting.release()

    def _evict_candidates(self, spare_bytes: int, stop: Callable[[], bool]) -> None:
        """Delete the candidates that were used least recently. Requires: `_evicting` held. Raises `Interrupted`."""
        while self._candidates and self._excess_bytes() + spare_bytes > 0:
            interrupt_if(stop)
            used, num_bytes, path, epoch = self._candidates.pop()
            try:
                status = self._folder.status(path)
                # Deleted, or used again since the pass.
                if status is None or status.st_mtime_ns != -used or not self._folder.delete(path):
                    continue
            except OSError as error:
                self._on_error(error)
                continue
            self._count(epoch, -1, -num_bytes)
            self.evicted += 1

    def _log_size(self) -> None:
        with self._lock:
            num_blocks = sum(blocks for blocks, _ in self._sizes.values())
        held_bytes, free_bytes = self._held_bytes(), self._folder.free_bytes()
        _log.info(
            "tier %s: %s holds %s blocks, %s bytes%s",
            self._name,
            self._folder.path,
            f"{num_blocks:,}",
            f"{held_bytes:,}",
            "; the oldest go until they fit into max_bytes" if held_bytes > self.max_bytes else "",
        )
        if held_bytes + free_bytes < self.max_bytes:
            _log.warning(
                "tier %s: max_bytes=%s is more than its disk can hold: the tier has %s bytes, %s are free; lower "
                "max_bytes",
                self._name,
                f"{self.max_bytes:,}",
                f"{held_bytes:,}",
                f"{free_bytes:,}",
            )

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes += num_bytes

    def _count(self, epoch: str, blocks: int, num_bytes: int) -> None:
        with self._lock:
            for sizes in (self._sizes, self._since):
                _add(sizes, epoch, blocks, num_bytes)

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(max(num_bytes, 0) for _, num_bytes in self._sizes.values())

    def _excess_bytes(self) -> int:
        """Return by how many bytes the folder exceeds the limit, with files that are being written."""
        return self._held_bytes() + self._reserved_bytes - self._limit_bytes


def _add(sizes: Sizes, epoch: str, blocks: int, num_bytes: int) -> None:
    before = sizes.get(epoch, (0, 0))
    sizes[epoch] = before[0] + blocks, before[1] + num_bytes
