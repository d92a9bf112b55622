"""Limit of a folder: its size, and eviction by one engine at a time.

    blocks/ or shared/
        keeper     locked by the engine that measures and evicts, until it closes the folder or its process ends
        size       blocks and bytes of each epoch, as that engine knows them
        changed    replaced by the other engines once a second while they add or remove blocks

The engine with the lock measures the folder by a pass over all files: at first, after others have changed it, now and
then, and when it has no candidates for eviction. In between, each engine adds what it changes itself to the latest
size. No engine stores anything while the sum exceeds the limit.

Where the file system has no locks, every engine measures and evicts. They then delete files that are among the oldest;
no engine relies on a file being there.
"""

from __future__ import annotations

import heapq
import json
import logging
import threading
import time
from collections.abc import Callable

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.app.tiers.fs.folder import Folder, OnSkipped, is_of_whole
from kvferry.app.tiers.shared_epoch import Epoch

_log = logging.getLogger(__name__)

_PASS_INTERVAL_S = 600.0
_PASS_SHARE = 50
"""After changes by others, the next pass begins when this multiple of the time that the last one took has passed."""
_UNFINISHED_S = 3600.0
"""Age of temporary files that are deleted in a folder that engines share."""
_CANDIDATE_SHARE = 16
"""A pass notes this part of all files for eviction, so that its cost is shared by as many evictions."""
_SHARED_RESERVE = 20
"""In a folder that engines share, this part of the limit is kept free, so that they need not wait for evictions."""
_WAIT_S = 1.0
_FREE_BLOCKS = 8
"""A disk with space for so many blocks is not full: threads that evict for a block leave less."""
_MAX_SIZE = 1 << 62

Sizes = dict[str, tuple[int, int]]
"""Blocks and bytes by name of their epoch; empty for files in none."""


class FolderLimit:
    """Keeps the files of a folder within a limit. Thread-safe; `maintain` is called by one thread."""

    min_candidates = 1 << 15
    """A pass finds at least so many of the files to evict."""

    def __init__(self, name: str, folder: Folder, max_bytes: int, largest_bytes: int, on_skipped: OnSkipped) -> None:
        """`largest_bytes` is the length of the longest file. `on_skipped` is called with entries that are left out."""
        self.max_bytes = max_bytes
        self.evicted = 0
        self._evicted_bytes = 0
        self.is_known = False
        """Whether the size was measured, or read from the engine that measures, at least once."""
        self._name = name
        self._folder = folder
        self._root = folder.root
        self._largest_bytes = folder.size_on_disk(largest_bytes)
        self._on_skipped = on_skipped
        self._limited_log = RateLimitedLogger(_log)
        self._keeper = folder.lock(f"{self._root}/keeper", is_shared=False)
        self._is_keeper = False
        self._lock = threading.Lock()
        """Of the sizes, held briefly."""
        self._sizes: Sizes = {}
        self._since: Sizes = {}
        """What this engine has changed since the latest pass began."""
        self._reserved_bytes = 0
        self._evicting = threading.Lock()
        """Held during a pass or an eviction."""
        self._candidates: list[tuple[int, int, str, str]] = []
        """Files by `(time of last use in ns, bytes, path, epoch)`, in the order of eviction from the end."""
        self._last_pass_s: float | None = None
        self._pass_took_s = 0.0
        self._has_changed = False
        """Whether this engine has changed the folder since its latest report to the others."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Identities of `size` and `changed` as they were read last."""
        self._published = ""
        self._is_full = False
        """Whether files were evicted for space on the disk, which has none yet."""

    # --- stores -------------------------------------------------------------------------------------------------

    def size_of(self, epoch: Epoch) -> tuple[int, int]:
        """Return blocks and bytes of an epoch."""
        with self._lock:
            blocks, num_bytes = self._sizes.get(epoch.name.decode(), (0, 0))
        return max(blocks, 0), max(num_bytes, 0)

    def reserve(self, num_bytes: int) -> bool:
        """Reserve space for a file, or return False if there is none; `release` must follow. Requires: `is_known`."""
        with self._lock:
            self._reserved_bytes += self._folder.size_on_disk(num_bytes)
        has_space = self._excess_bytes() <= 0 or self._evict_excess(self._excess_bytes, lambda: False)
        if not has_space:
            self.release(num_bytes)
        return has_space

    def release(self, num_bytes: int) -> None:
        """End a reservation: the file was written and counted, or was not written."""
        with self._lock:
            self._reserved_bytes -= self._folder.size_on_disk(num_bytes)

    def count(self, epoch: str, blocks: int, num_bytes: int) -> None:
        """Note that this engine added files, or removed them, if the numbers are negative; bytes are those on disk."""
        with self._lock:
            self._has_changed = True
            for sizes in (self._sizes, self._since):
                _add(sizes, epoch, blocks, num_bytes)

    def make_disk_space(self, num_bytes: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Evict files of this many bytes as the disk is full; return False if this engine may not, or has too few."""
        goal_bytes = self._evicted_bytes + num_bytes
        has_evicted = self._evict_excess(lambda: goal_bytes - self._evicted_bytes, stop)
        if has_evicted and not self._is_full:
            self._is_full = True
            self._limited_log.log(logging.WARNING, "full", "tier %s: %s", self._name, self._full_disk())
        return has_evicted

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

    def maintain(self, stop: Callable[[], bool]) -> None:
        """Measure, evict and publish, or tell the engine that does of changes. Raises `OSError`, `Interrupted`."""
        if self._is_full:
            self._is_full = self._folder.free_bytes() < _FREE_BLOCKS * self._largest_bytes
        was_held = self._keeper.is_held()
        self._is_keeper = was_held or self._keeper.take()
        if not self._is_keeper:
            self._report_change()
            self._adopt_published()
            return
        if not was_held:
            # Blocks can be stored during the first pass, if another engine has published the size.
            self._adopt_published()
            self._last_pass_s = None
        if self._needs_pass():
            with self._evicting:
                self._measure(stop)
        reserve_bytes = 0
        if self._folder.is_shared:
            reserve_bytes = self.max_bytes // _SHARED_RESERVE
            free_bytes = self._folder.free_bytes()
            if free_bytes < self._largest_bytes:
                # An engine that stores cannot evict, unless it is this one.
                self.make_disk_space(2 * self._largest_bytes - free_bytes, stop)
        if self._excess_bytes() + reserve_bytes > 0:
            self._evict_excess(lambda: self._excess_bytes() + reserve_bytes, stop)
        self.is_known = True
        if self._folder.is_shared:
            self._publish()

    def close(self) -> None:
        """Leave measuring and evicting to the next engine."""
        self._is_keeper = False
        self._keeper.release()

    def _report_change(self) -> None:
        """Tell the engine that measures that this one has changed the folder."""
        has_changed, self._has_changed = self._has_changed, False
        if has_changed:
            try:
                self._folder.write(f"{self._root}/changed", [b""])
            except OSError:
                self._has_changed = True
                raise

    def _read_new(self, file: str) -> bytes | None:
        """Return the content of a file if it was replaced since the last call for it."""
        try:
            # Opened, since NFS may answer from memory otherwise.
            content, status = self._folder.read_small(f"{self._root}/{file}")
        except (OSError, BadBlock):
            return None
        earlier, self._seen[file] = self._seen.get(file), (status.st_ino, status.st_mtime_ns)
        return None if earlier == self._seen[file] else content

    def _adopt_published(self) -> None:
        """Use the size that the engine with the lock has published, if it is new."""
        content = self._read_new("size")
        try:
            sizes = None if content is None else _read_sizes(content)
        except (ValueError, RecursionError):
            # Not written by kvferry. Without a size nothing is stored until another one is published.
            return
        if sizes is not None:
            with self._lock:
                self._sizes = sizes
            self.is_known = True

    def _publish(self) -> None:
        with self._lock:
            text = json.dumps({epoch: size for epoch, size in self._sizes.items() if any(size)})
        if text != self._published:
            self._folder.write(f"{self._root}/size", [text.encode()])
            self._published = text

    def _needs_pass(self) -> bool:
        if self._last_pass_s is None:
            return True
        age_s = time.monotonic() - self._last_pass_s
        if age_s <= _PASS_SHARE * self._pass_took_s:
            return False
        # Without locks the others do not report changes: each of them measures, too.
        return age_s > _PASS_INTERVAL_S or not self._keeper.is_supported or self._read_new("changed") is not None

    def _measure(self, stop: Callable[[], bool]) -> None:
        """Determine the size and the candidates by a pass over all files. Requires: `_evicting` held.

        Files that are written or deleted meanwhile may count twice, or not at all, until the next pass.
        """
        began_s = time.monotonic()
        is_first = self._last_pass_s is None
        # Published again, even if it is the same: the file may have been deleted.
        self._published = ""
        with self._lock:
            self._since = {}
            num_blocks = sum(blocks for blocks, _ in self._sizes.values())
        most = max(self.min_candidates, num_blocks // _CANDIDATE_SHARE)
        measured: Sizes = {}
        # A heap, the newest first: sorting all of them at once would stop all threads.
        heap: list[tuple[int, int, str, str]] = []
        for path, files in self._folder.scan(self._root, stop, self._on_skipped):
            epoch = next((part for part in path.split("/") if Epoch(part.encode(errors="replace")).number), "")
            for file, status in files:
                num_bytes = self._folder.size_on_disk(status.st_size)
                _add(measured, epoch, 1, num_bytes)
                candidate = -status.st_mtime_ns, num_bytes, f"{path}/{file}", epoch
                if len(heap) < most:
                    heapq.heappush(heap, candidate)
                elif candidate > heap[0]:
                    heapq.heapreplace(heap, candidate)
        self._candidates = [heapq.heappop(heap) for _ in range(len(heap))]
        with self._lock:
            for epoch, size in self._since.items():
                _add(measured, epoch, *size)
            self._sizes = measured
        self._last_pass_s = time.monotonic()
        self._pass_took_s = self._last_pass_s - began_s
        if is_first:
            self._log_size()
        if self._folder.is_shared:
            self._delete_unfinished()

    def _delete_unfinished(self) -> None:
        """Delete what engines were writing that ended long ago, by the clock of the file system."""
        self._folder.touch(f"{self._root}/keeper")
        now = self._folder.status(f"{self._root}/keeper")
        if now is not None:
            self._folder.sweep(self._on_skipped, now.st_mtime - _UNFINISHED_S)

    def _evict_excess(self, find_excess: Callable[[], int], stop: Callable[[], bool]) -> bool:
        """Evict until there is no excess, in bytes; return False if this engine may not, or has too few files."""
        if not self._is_keeper or not self._evicting.acquire(timeout=_WAIT_S):
            return False
        try:
            self._evict(find_excess, stop)
            if find_excess() > 0:
                self._measure(stop)
                self._evict(find_excess, stop)
            return find_excess() <= 0
        finally:
            self._evicting.release()

    def _evict(self, find_excess: Callable[[], int], stop: Callable[[], bool]) -> None:
        """Delete the candidates that were used least recently. Requires: `_evicting` held. Raises `Interrupted`."""
        while self._candidates and self._is_keeper and find_excess() > 0:
            interrupt_if(stop)
            used, num_bytes, path, epoch = self._candidates.pop()
            try:
                status = self._folder.status(path)
                # Deleted, or used again since the pass.
                if status is None or status.st_mtime_ns != -used or not self._folder.delete(path):
                    continue
            except OSError as error:
                if is_of_whole(error):
                    raise
                self._on_skipped(path, error)
                continue
            self.count(epoch, -1, -num_bytes)
            self.evicted += 1
            self._evicted_bytes += num_bytes

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

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(max(num_bytes, 0) for _, num_bytes in self._sizes.values())

    def _excess_bytes(self) -> int:
        """Return by how many bytes the folder exceeds the limit, with files that are being written."""
        return self._held_bytes() + self._reserved_bytes - self.max_bytes


def _add(sizes: Sizes, epoch: str, blocks: int, num_bytes: int) -> None:
    before = sizes.get(epoch, (0, 0))
    sizes[epoch] = before[0] + blocks, before[1] + num_bytes


def _read_sizes(content: bytes) -> Sizes:
    """Return what `json.dumps` made of sizes. Raises `ValueError` and `RecursionError` for anything else."""
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise ValueError("no sizes")
    sizes: Sizes = {}
    for epoch, size in parsed.items():
        is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and abs(n) < _MAX_SIZE for n in size)
        if not is_size:
            raise ValueError("no sizes")
        sizes[epoch] = size[0], size[1]
    return sizes
