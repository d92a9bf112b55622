"""Limit of a folder that engines share: its approximate size, and eviction by one engine at a time.

    shared/lease               the engine that measures and evicts; written again by it every second
    shared/size                what it found: blocks and bytes of each place, and how much of each engine's changes they
                               contain
    shared/engines/<engine>    what an engine has added to each place, and removed, since it opened the folder

A place is the folder of a namespace's epoch. The size is measured by a pass over all files when the lease changes
hands, from time to time, and when there are no candidates for eviction; in between it is the last measurement plus the
changes that engines report. Engines store nothing while it exceeds the limit.

The lease only avoids double work. An engine whose lease was taken over, because it hung for longer than that lasts,
evicts files that are among the oldest; it cannot make another engine read wrong bytes.
"""

from __future__ import annotations

import errno
import heapq
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.app.tiers.fs.folder import GONE_ERRORS, Folder, OnSkipped, is_of_whole
from kvferry.app.tiers.fs.index import DiskSpace

_log = logging.getLogger(__name__)

LEASE_S = 15.0
"""A lease that was not written for so long, by the clock of the engine that waits, is over."""
_PASS_S = 600.0
_EXPIRED_S = 86400.0
"""Age of reports of engines that are deleted."""
_UNFINISHED_S = 3600.0
"""Age of temporary files that are deleted."""
_MAX_CANDIDATES = 1 << 15
_SHARED_RESERVE = 20
"""While several engines store, this part of the limit is kept free, so that they need not wait for evictions."""
_WAIT_S = 1.0
_PLACE = re.compile(r"shared/[0-9a-f]{16}/[0-9a-f]{1,16}-[0-9a-f]{16}")
_MAX_SIZE = 1 << 62

Place = str


class _Candidate(NamedTuple):
    """A file that may be evicted unless it was used again since the pass."""

    used_ns: int
    num_bytes: int
    path: str
    place: Place


@dataclass(slots=True)
class _Sizes:
    """Blocks and bytes by place."""

    blocks: Counter[Place] = field(default_factory=Counter)
    bytes: Counter[Place] = field(default_factory=Counter)

    def add(self, place: Place, blocks: int, num_bytes: int) -> None:
        self.blocks[place] += blocks
        self.bytes[place] += num_bytes

    def plus(self, other: _Sizes, sign: int = 1) -> _Sizes:
        """Return the sum, or with `sign` -1 the difference."""
        sizes = _Sizes(self.blocks.copy(), self.bytes.copy())
        for place in other.blocks:
            sizes.add(place, sign * other.blocks[place], sign * other.bytes[place])
        return sizes

    def of(self, place: Place) -> tuple[int, int]:
        """Return blocks and bytes of a place."""
        return max(self.blocks[place], 0), max(self.bytes[place], 0)

    def as_json(self) -> dict[Place, list[int]]:
        return {place: [self.blocks[place], self.bytes[place]] for place in self.blocks}

    @classmethod
    def of_json(cls, value: dict[Place, list[int]]) -> _Sizes:
        """Return what `as_json` returned. Raises `ValueError` and others for what another program wrote."""
        sizes = cls()
        for place, (blocks, num_bytes) in value.items():
            numbers = blocks, num_bytes
            if not _PLACE.fullmatch(place) or any(type(one) is not int or abs(one) >= _MAX_SIZE for one in numbers):
                raise ValueError("no sizes")
            sizes.add(place, blocks, num_bytes)
        return sizes


_NOTHING = _Sizes()


class SharedLimit:
    """Keeps the files of a shared folder within a limit. Thread-safe; `tend` is called by one thread."""

    def __init__(self, name: str, folder: Folder, max_bytes: int, largest_bytes: int, skipped: OnSkipped) -> None:
        """`largest_bytes` is the length of the longest file. `skipped` is called with entries that are left out."""
        self.max_bytes = max_bytes
        self.evicted = 0
        self._name = name
        self._folder = folder
        self._largest_bytes = folder.size_on_disk(largest_bytes)
        self._on_skipped = skipped
        self._report = f"shared/engines/{folder.session}"
        self._lock = threading.Lock()
        """Of the numbers below, held briefly."""
        self._evicting = threading.Lock()
        """Held during a pass or an eviction."""
        self._own = _Sizes()
        """What this engine has added and removed since it opened the folder."""
        self._measured = _Sizes()
        """What the latest pass found, and what reports have added to it."""
        self._counted: dict[str, _Sizes] = {}
        """The part of each engine's changes that `_measured` contains."""
        self._reserved_bytes = 0
        self._written_report: str | None = None
        self._published_size: str | None = None
        """The text of `shared/size` as it was written or read last."""
        self._num_engines = 1
        self._has_lease = False
        self._is_measured = False
        """Whether `_measured` is that of a pass, of this engine or of another one."""
        self._seen_lease: tuple[bytes, int] | None = None
        self._seen_s = self._passed_s = self._leased_s = time.monotonic()
        self._space = DiskSpace(name, folder, max_bytes, self._largest_bytes)
        self._candidates: list[_Candidate] = []
        """In the order of eviction from the end."""

    @property
    def is_known(self) -> bool:
        """Whether the size of the folder is known."""
        return self._is_measured

    def size_of(self, place: Place) -> tuple[int, int]:
        """Return blocks and bytes of a place, estimated."""
        with self._lock:
            return self._estimate().of(place)

    def reserve(self, num_bytes: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Reserve space for a file, or return False if there is none; `release` must follow."""
        num_bytes = self._folder.size_on_disk(num_bytes)
        for attempt in range(2):
            with self._lock:
                excess_bytes = self._total_bytes() + self._reserved_bytes + num_bytes - self.max_bytes
                if excess_bytes <= 0:
                    self._reserved_bytes += num_bytes
                    return True
            if attempt or not self.make_room(excess_bytes, stop):
                return False
        return False

    def release(self, num_bytes: int) -> None:
        """End a reservation: the file was written and counted, or was not written."""
        with self._lock:
            self._reserved_bytes -= self._folder.size_on_disk(num_bytes)

    def count(self, place: Place, blocks: int, num_bytes: int) -> None:
        """Note that this engine added files, or removed them, if the numbers are negative; bytes are those on disk."""
        with self._lock:
            self._own.add(place, blocks, num_bytes)

    def make_room(self, num_bytes: int, stop: Callable[[], bool]) -> bool:
        """Evict files of this many bytes; return False if this engine may not, or there are too few."""
        if not self._has_lease or not self._evicting.acquire(timeout=_WAIT_S):
            return False
        try:
            freed_bytes = self._evict(num_bytes, stop)
            if freed_bytes < num_bytes:
                self._measure(stop)
                freed_bytes += self._evict(num_bytes - freed_bytes, stop)
            return freed_bytes >= num_bytes
        finally:
            self._evicting.release()

    def make_disk_space(self, num_bytes: int) -> bool:
        """Evict files of this many bytes as the disk is full; return False as `make_room` does."""
        has_evicted = self.make_room(num_bytes, lambda: False)
        if has_evicted:
            self._note_full_disk()
        return has_evicted

    def problems(self) -> list[str]:
        """Return what to report in `BlockStore.health`."""
        with self._lock:
            total_bytes = self._total_bytes()
        return self._space.problems(total_bytes)

    def _note_full_disk(self) -> None:
        with self._lock:
            total_bytes = self._total_bytes()
        self._space.note_full(total_bytes)

    def tend(self, stop: Callable[[], bool]) -> None:
        """Report this engine's changes; with the lease, measure, evict and publish. Raises `OSError`, `Interrupted`."""
        self._forget_gone()
        self._write_report()
        self._check_lease()
        self._space.update()
        if not self._has_lease:
            self._adopt_published()
            return
        self._read_reports()
        if not self._is_measured or time.monotonic() - self._passed_s > _PASS_S:
            with self._evicting:
                self._measure(stop)
            self._delete_old()
        with self._lock:
            total_bytes = self._total_bytes()
        self._space.check_limit(total_bytes)
        reserve_bytes = self.max_bytes // _SHARED_RESERVE if self._num_engines > 1 else 0
        free_bytes = self._folder.free_bytes()
        excess_bytes = total_bytes + reserve_bytes - self.max_bytes
        if free_bytes < self._largest_bytes:
            excess_bytes = max(excess_bytes, 2 * self._largest_bytes - free_bytes)
            if total_bytes:
                self._note_full_disk()
        if excess_bytes > 0:
            self.make_room(excess_bytes, stop)
        self._publish()

    def close(self) -> None:
        """Report the last changes, and give the lease to the next engine."""
        try:
            self._write_report()
            if self._has_lease and self._folder.read_small("shared/lease")[0] == self._folder.session.encode():
                self._folder.delete("shared/lease")
        except (OSError, BadBlock):
            _log.warning("tier %s: the lease was not returned, and ends after %.0f s", self._name, LEASE_S)

    # --- the lease ----------------------------------------------------------------------------------------------

    def _check_lease(self) -> None:
        """Take the lease, write it again, or note that another engine has it."""
        try:
            content, status = self._folder.read_small("shared/lease")
            seen = content, status.st_mtime_ns
        except (BadBlock, IsADirectoryError) as error:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "shared/lease") from error
        except OSError as error:
            if error.errno not in GONE_ERRORS:
                raise
            seen = b"", 0
        now_s = time.monotonic()
        if seen != self._seen_lease:
            self._seen_lease, self._seen_s = seen, now_s
        had, is_own = self._has_lease, seen[0] == self._folder.session.encode()
        if is_own or not seen[0] or now_s - self._seen_s > LEASE_S:
            self._folder.write_small("shared/lease", self._folder.session.encode())
            # Of several engines that take it at once the last one has it.
            is_own = self._folder.read_small("shared/lease")[0] == self._folder.session.encode()
        self._has_lease, self._leased_s = is_own, now_s
        if is_own and not had:
            self._adopt_published()
            self._candidates = []
            self._passed_s = now_s - _PASS_S
            _log.info("tier %s: this engine evicts from the shared folder", self._name)

    def _keep_lease(self) -> None:
        """Write the lease again during long work, or note that another engine has it."""
        if time.monotonic() - self._leased_s > LEASE_S / 8:
            self._check_lease()

    # --- sizes --------------------------------------------------------------------------------------------------

    def _estimate(self) -> _Sizes:
        """Return the size, with this engine's changes that are not counted yet. Requires: `_lock` held."""
        sizes = self._measured.plus(self._own)
        counted = self._counted.get(self._folder.session)
        return sizes if counted is None else sizes.plus(counted, -1)

    def _total_bytes(self) -> int:
        """Return the bytes of all places, as estimated. Requires: `_lock` held."""
        # Before each store, so that no estimate of each place is made for it.
        measured, own = self._measured.bytes, self._own.bytes
        counted = self._counted.get(self._folder.session, _NOTHING).bytes
        return sum(max(measured[place] + own[place] - counted[place], 0) for place in {*measured, *own})

    def _forget_gone(self, *reports: _Sizes) -> None:
        """Forget places whose folders are deleted, also in these reports: each whole reset makes a new place."""
        with self._lock:
            all_sizes = [self._own, self._measured, *self._counted.values(), *reports]
            places = {place for sizes in all_sizes for place in sizes.blocks}
        gone = {place for place in places if self._folder.status(place) is None}
        with self._lock:
            for sizes in (self._own, self._measured, *self._counted.values(), *reports):
                for place in gone & sizes.blocks.keys():
                    del sizes.blocks[place], sizes.bytes[place]

    def _write_report(self) -> None:
        with self._lock:
            text = json.dumps(self._own.as_json())
        if text != self._written_report:
            self._folder.write_small(self._report, text.encode())
            self._written_report = text

    def _read_reports(self) -> None:
        """Add what engines report to the measurement."""
        reports = {name: self._read_report(name) for name, _ in self._folder.list("shared/engines", self._on_skipped)}
        # Before they are added: engines that have ended leave reports that contain places which are gone.
        self._forget_gone(*(report for report in reports.values() if report is not None))
        with self._lock:
            reports[self._folder.session] = self._own.plus(_Sizes())
            for engine, report in reports.items():
                if report is not None:
                    new = report.plus(self._counted.get(engine, _Sizes()), -1)
                    self._measured = self._measured.plus(new)
                    self._counted[engine] = report
            self._counted = {engine: one for engine, one in self._counted.items() if engine in reports}
            self._num_engines = len(reports)

    def _read_report(self, engine: str) -> _Sizes | None:
        try:
            return _Sizes.of_json(json.loads(self._folder.read_small(f"shared/engines/{engine}")[0]))
        except (OSError, BadBlock, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def _adopt_published(self) -> None:
        """Use the size that the engine with the lease found, if there is one."""
        try:
            text = self._folder.read_small("shared/size")[0].decode()
            if text == self._published_size:
                return
            found = json.loads(text)
            measured = _Sizes.of_json(found["places"])
            counted = {str(engine): _Sizes.of_json(one) for engine, one in found["engines"].items()}
        except (OSError, BadBlock, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            # Without one nothing is stored until this engine has the lease.
            return
        with self._lock:
            self._measured, self._counted = measured, counted
        self._published_size = text
        self._is_measured = True

    def _publish(self) -> None:
        with self._lock:
            found = {
                "places": self._measured.as_json(),
                "engines": {engine: one.as_json() for engine, one in self._counted.items()},
            }
        text = json.dumps(found)
        if text != self._published_size:
            self._folder.write_small("shared/size", text.encode())
            self._published_size = text

    def _measure(self, stop: Callable[[], bool]) -> None:
        """Determine the size and the candidates by a pass over all files. Requires: `_evicting` held.

        Files that are written or deleted meanwhile may count twice, or not at all, until the next pass.
        """
        self._read_reports()
        with self._lock:
            counted = dict(self._counted)
        measured = _Sizes()
        # A heap, the newest first: sorting all of them at once would stop all threads.
        heap: list[tuple[int, _Candidate]] = []
        for namespace in self._folder.list_namespaces("shared", self._on_skipped):
            for epoch, _ in self._folder.list(f"shared/{namespace}", self._on_skipped):
                place = f"shared/{namespace}/{epoch}"
                if epoch == "epochs":
                    continue
                for path, files in self._folder.scan_place(place, stop, self._on_skipped):
                    for file, status in files:
                        num_bytes = self._folder.size_on_disk(status.st_size)
                        measured.add(place, 1, num_bytes)
                        one = _Candidate(status.st_mtime_ns, num_bytes, f"{path}/{file}", place)
                        if len(heap) < _MAX_CANDIDATES:
                            heapq.heappush(heap, (-one.used_ns, one))
                        elif -one.used_ns > heap[0][0]:
                            heapq.heapreplace(heap, (-one.used_ns, one))
                    self._keep_lease()
        self._candidates = [heapq.heappop(heap)[1] for _ in range(len(heap))]
        with self._lock:
            self._measured, self._counted = measured, counted
        self._is_measured = True
        self._passed_s = time.monotonic()

    # --- eviction -----------------------------------------------------------------------------------------------

    def _evict(self, num_bytes: int, stop: Callable[[], bool]) -> int:
        """Delete the candidates that were used least recently; return their bytes. Requires: `_evicting` held.

        Raises `Interrupted`.
        """
        freed_bytes = 0
        while freed_bytes < num_bytes and self._candidates and self._has_lease:
            interrupt_if(stop)
            one = self._candidates.pop()
            status = self._folder.status(one.path)
            if status is None or status.st_mtime_ns != one.used_ns:
                # Deleted, or used again since the pass.
                continue
            try:
                if not self._folder.delete(one.path):
                    continue
            except OSError as error:
                if is_of_whole(error):
                    raise
                self._on_skipped(one.path, error)
                continue
            freed_bytes += one.num_bytes
            with self._lock:
                self._measured.add(one.place, -1, -one.num_bytes)
                self.evicted += 1
            self._keep_lease()
        return freed_bytes

    def _delete_old(self) -> None:
        """Delete what engines left that ended long ago, by the clock of the file system."""
        now = self._folder.status("shared/lease")
        if now is None:
            return
        self._folder.sweep(self._on_skipped, now.st_mtime - _UNFINISHED_S)
        for name, status in self._folder.list("shared/engines", self._on_skipped):
            if status.st_mtime < now.st_mtime - _EXPIRED_S and name != self._folder.session:
                self._folder.delete(f"shared/engines/{name}")
