"""File of a kept pool: locked by one engine, validated before use, and replaced if foreign, outdated or damaged.

If its size differs from the wanted one, as much of it as possible is kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.core.errors import StartError
from kvferry.core.keys import Key
from kvferry.cuda_ops.copy.native import Words, word_copies
from kvferry.cuda_ops.persistent.format import (
    FORMAT_VERSION,
    MAGIC,
    MAX_EPOCH,
    POOL_HEADER,
    POOL_HEADER_BYTES,
    SLOT_HEADER,
    Headers,
    PoolShape,
    epoch_checksum,
    namespace_of,
    pool_header,
    pool_header_checksum,
)
from kvferry.cuda_ops.persistent.lock import PoolLock, lock_open_file, lock_path
from kvferry.cuda_ops.persistent.recovery import DropReason, read_slots
from kvferry.cuda_ops.pool.backing import SharedFile, open_pool_file
from kvferry.cuda_ops.pool.limits import MemoryLimit, NotEnoughMemory
from kvferry.cuda_ops.pool.pages import flush, whole_pages

_log = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EPOCH_WORDS = np.array([POOL_HEADER.fields[n][1] // 8 for n in ("min_epoch", "epoch_checksum") if POOL_HEADER.fields])


class NotAPool(ValueError):
    """The file has no pool header that this version can read; the message names the field."""


class PoolTruncated(RuntimeError):
    """The pool's file is shorter than its mapping: accessing the missing part would kill the process."""


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """A pool's header as read from the file."""

    shape: PoolShape
    fingerprint: dict[str, object]
    namespace: bytes
    min_epoch: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class FoundPool:
    """State of the file when it was opened.

    `dropped` is the reason why its contents are not kept: None for a kept pool, and for a new one (`is_new`). It had
    `num_slots` (0 if its header cannot be read), of which the first `num_whole` are within the pool's new size. After
    another boot (`other_boot`) written bytes may be lost.
    """

    is_new: bool
    dropped: str | None
    num_whole: int
    other_boot: bool
    num_slots: int = 0

    @property
    def is_kept(self) -> bool:
        """Return whether the pool's slots may be recovered."""
        return not self.is_new and self.dropped is None


def read_boot_id() -> str:
    """Return the kernel's identifier of the current boot."""
    return BOOT_ID.read_text().strip()


def read_pool_header(file: int) -> PoolHeader:
    """Read the header of an open pool file. Raises `NotAPool` and `OSError`."""
    raw = os.pread(file, POOL_HEADER_BYTES, 0)
    if len(raw) < POOL_HEADER_BYTES:
        raise NotAPool(f"file has {len(raw):,} bytes: a pool's header takes {POOL_HEADER_BYTES:,}")
    header = np.frombuffer(raw[: POOL_HEADER.itemsize], dtype=POOL_HEADER)
    field = header[0]
    if bytes(field["magic"]) != MAGIC:
        raise NotAPool(f"magic={bytes(field['magic'])!r}: a pool has {MAGIC!r}")
    if int(field["format_version"]) != FORMAT_VERSION:
        raise NotAPool(f"format_version={field['format_version']}: this version reads {FORMAT_VERSION}")
    length = int(field["fingerprint_bytes"])
    fingerprint = raw[POOL_HEADER.itemsize : POOL_HEADER.itemsize + min(length, POOL_HEADER_BYTES)]
    if pool_header_checksum(header, fingerprint) != int(field["checksum"]):
        raise NotAPool("checksum mismatch: the pool's header is damaged")
    num_slots, max_slots, extent_slots = (int(field[name]) for name in ("num_slots", "max_slots", "extent_slots"))
    if num_slots > max_slots or not extent_slots or num_slots % extent_slots:
        raise NotAPool(f"num_slots={num_slots:,}: must be whole extents of {extent_slots:,}, at most {max_slots:,}")
    min_epoch, expected = int(field["min_epoch"]), epoch_checksum(int(field["min_epoch"]), int(field["checksum"]))
    if not 0 <= min_epoch <= MAX_EPOCH or int(field["epoch_checksum"]) not in (0, expected):
        raise NotAPool(f"min_epoch={min_epoch}: the pool's header is damaged, or an earlier version reset the pool")
    shape = PoolShape(num_slots, int(field["slot_bytes"]), int(field["num_ranks"]), extent_slots, max_slots)
    boot_id = bytes(field["boot_id"]).decode("ascii", "replace")
    try:
        fields = json.loads(fingerprint)
    except (ValueError, RecursionError) as error:
        raise NotAPool("the pool's fingerprint cannot be read") from error
    if not isinstance(fields, dict):
        raise NotAPool("the pool's fingerprint has no fields")
    return PoolHeader(shape, fields, namespace_of(fingerprint), min_epoch, boot_id)


class KeptFile:
    """A `Backing` that outlives its process. One engine at a time holds its lock, which the kernel releases at its
    death.

    One of the engine's processes prepares the file, the others `join` it.
    """

    def __init__(self, path: Path, shape: PoolShape, fingerprint: Mapping[str, object], *, join: bool = False) -> None:
        """Acquire the lock, validate the file, and start a new pool if its contents cannot be kept.

        The extent size and the maximum size of a kept file cannot change: `self.shape` is as close to `shape` as they
        allow.

        Args:
            path: the file.
            shape: the wanted sizes.
            fingerprint: all that determines the meaning of the bytes.
            join: another process of this engine has prepared the file; change nothing.

        Raises:
            StartError: another engine holds the lock, `open_pool_file` refuses the file, or `join` finds no prepared
                pool.
            NotEnoughMemory: no space for the headers.
            OSError: the file cannot be opened or mapped.
        """
        self.path = path
        self.shape = shape
        self.mapped_bytes = 0
        self.remove_if_new = False
        """Whether `close` removes a file created by this process: true until the pool is used."""
        self.num_dropped: Counter[DropReason] = Counter()
        """Slots dropped while the file was opened, whose headers a joining process does not see: those of a pool that
        was dropped as a whole, and for `share` those beyond the end of the pool."""
        self._foreign_keys: list[Key] = []
        text = json.dumps(fingerprint, sort_keys=True, default=str).encode()
        if POOL_HEADER.itemsize + len(text) > POOL_HEADER_BYTES:
            raise StartError(
                f"KVFERRY_POOL_KIND: the fingerprint of {len(text):,} bytes does not fit a pool's header; use pinned"
            )
        self.namespace = namespace_of(text)
        """Part of every payload checksum."""
        self.fault: str | None = None
        """The reason why no byte may be accessed any more, set by `check` when the file was truncated."""
        self._lock = PoolLock(path, shared=join)
        try:
            self._shared = SharedFile(path, is_ready=join)
        except BaseException:
            self._lock.close()
            raise
        try:
            self._lock.lock_file(self._shared.fileno())
            self.found = self._look(json.loads(text))
            if join and not self.found.is_kept:
                raise StartError(
                    f"the pool {path} is not the one prepared by the first process of this engine: "
                    f"{self.found.dropped or 'it is empty'}; restart the engine"
                )
            if self.found.dropped is not None:
                _log.warning("kept pool dropped, starting empty: %s: %s", path, self.found.dropped)
            if not self.found.is_kept:
                self._start_anew(text)
            self._map()
            if not join:
                # For a file of an earlier version, which has no checksum of it.
                self.write_min_epoch(self.min_epoch)
                self.free(self.shape.payload_bytes)
                self._fill_holes()
        except BaseException:
            self.close()
            raise

    # ---- Backing -----------------------------------------------------------------------------------------------------

    @property
    def must_touch(self) -> bool:
        """See `Backing`."""
        return self._shared.must_touch

    def limits(self) -> list[MemoryLimit]:
        """See `Backing`."""
        return self._shared.limits()

    def reserved_bytes(self) -> int:
        """See `Backing`."""
        # In memory, headers of slots that do not exist have none.
        headers = self._headers_bytes() if self._shared.in_memory else self.shape.payload_offset
        return max(self._shared.reserved_bytes() - headers, 0)

    def reserve(self, num_bytes: int) -> int | None:
        """See `Backing`. New slots count once their headers are emptied and memory is reserved: a crash is safe.

        Raises `PoolTruncated`: extending the file would replace lost blocks by zeros.
        """
        self.check()
        old, new = self.num_slots, self.shape.slots_within(num_bytes)
        if new > self.shape.max_slots:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES: {self.path} has room for the headers of {self.shape.max_slots:,} slots, and "
                f"{new:,} are wanted; remove the file to start with a larger one"
            )
        if new > old:
            self._empty_headers(old, new)
        had_bytes = self._shared.reserve(self.shape.payload_offset + num_bytes)
        self._pool_header["num_slots"] = max(old, new)
        return None if had_bytes is None else max(had_bytes - self.shape.payload_offset, 0)

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """See `Backing`."""
        return self._shared.map(self.shape.payload_offset + offset, num_bytes)

    def free(self, offset: int) -> None:
        """See `Backing`. The slot count is lowered first. Does nothing for a truncated file, and once closed: another
        engine may own it.
        """
        if self._shared.fileno() < 0 or self._is_truncated():
            return
        self._pool_header["num_slots"] = min(self.num_slots, self.shape.slots_within(offset))
        self._shared.free(self.shape.payload_offset + offset)

    def downgrade_lock(self) -> None:
        """Share the lock after all memory is reserved, so that the engine's other processes can join.

        Raises:
            StartError: another engine has taken the lock in between.
        """
        found = self.found
        if found.is_kept and found.num_whole < found.num_slots:
            lost = [self.headers(rank)[found.num_whole : found.num_slots] for rank in range(self.shape.num_ranks)]
            seen = read_slots(lost, self.shape, self.min_epoch, 0)
            self.num_dropped.update(seen.dropped)
            self._clear_headers(found.num_whole, found.num_slots)
        self._lock.downgrade()

    def close(self) -> None:
        """Refuse further mappings and release the lock. Existing mappings stay."""
        if self.remove_if_new and self.found.is_new and self._shared.fileno() >= 0:
            self._shared.unlink()
        self._shared.close()
        self._lock.close()

    # ---- the headers -------------------------------------------------------------------------------------------------

    def headers(self, rank: int) -> Headers:
        """Return a view of a rank's slot headers, `[max_slots]`. Headers of slots that do not exist are not valid."""
        start = self.shape.headers_offset(rank)
        return np.frombuffer(self._headers, dtype=SLOT_HEADER, count=self.shape.max_slots, offset=start)

    def header_words(self, rank: int) -> Words:
        """Return a view of a rank's slot headers as int64 words, `[max_slots, words of a header]`."""
        return self.headers(rank).view(np.int64).reshape(self.shape.max_slots, -1)

    @property
    def num_slots(self) -> int:
        """Return the pool's slots. Headers of later slots do not count, whatever they contain."""
        return int(self._pool_header["num_slots"][0])

    @property
    def min_epoch(self) -> int:
        """Return the only epoch whose slots are valid."""
        return int(self._pool_header["min_epoch"][0])

    def write_min_epoch(self, epoch: int) -> None:
        """Invalidate the slots of all other epochs. May block on the disk; releases the interpreter lock.

        A crash between the two words drops the whole pool at the next start, which the reset did, too.
        """
        words = np.frombuffer(self._headers, dtype=np.int64, count=POOL_HEADER.itemsize // 8)
        scatter, _, _ = word_copies()
        checksum = epoch_checksum(epoch, int(self._pool_header["checksum"][0]))
        scatter(words, _EPOCH_WORDS, np.array([epoch, checksum], dtype=np.uint64).view(np.int64))

    def flush_invalidations(self) -> None:
        """Wait until the headers with `min_epoch` and `dropped_generation` are on the disk. Raises `OSError`."""
        flush(self._headers[: self.shape.headers_offset(1)])

    def take_foreign_keys(self) -> list[Key]:
        """Return the keys in a pool that was dropped for its fingerprint or sizes, as read from its headers. Empties
        the list.
        """
        keys, self._foreign_keys = self._foreign_keys, []
        return keys

    def record_boot(self) -> None:
        """Record that all contents were verified since this boot; does nothing for a truncated file."""
        if not self._is_truncated():
            self._pool_header["boot_id"] = read_boot_id().encode()

    # ---- changes by other processes ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `PoolTruncated` if the file ends before its headers or the mapped slots do. Any thread."""
        # Shrinking lowers `mapped_bytes` before it truncates the file: only a second test excludes that race.
        if self.fault is None and self._is_short() and self._is_short():
            self.fault = f"pool file {self.path} was truncated to {self._size():,} bytes by another process"
        if self.fault is not None:
            raise PoolTruncated(self.fault)

    def moved(self) -> str | None:
        """Return why the file at the path is not the mapped one; None while it is. Any thread."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._shared.fileno())
        except FileNotFoundError:
            return f"pool file {self.path} was removed or renamed"
        except OSError as error:
            return f"pool file {self.path} cannot be inspected: {error.strerror or error}"
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return None
        return f"pool file {self.path} was replaced by another file"

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _is_truncated(self) -> bool:
        try:
            self.check()
        except PoolTruncated:
            return True
        return False

    def _is_short(self) -> bool:
        file, end = self._shared.fileno(), self.shape.payload_offset + self.mapped_bytes
        return file >= 0 and os.fstat(file).st_size < end

    def _size(self) -> int:
        return os.fstat(self._shared.fileno()).st_size

    def _look(self, fingerprint: dict[str, object]) -> FoundPool:
        size = self._size()
        if size == 0:
            return FoundPool(is_new=True, dropped=None, num_whole=0, other_boot=False)
        try:
            header = read_pool_header(self._shared.fileno())
        except NotAPool as error:
            return FoundPool(is_new=False, dropped=str(error), num_whole=0, other_boot=False)
        was = header.shape
        differs = _differences(header, self.shape, fingerprint)
        if differs is None and was.is_truncated(size):
            differs = f"file truncated: {size:,} bytes, slots end at {was.payload_offset + was.payload_bytes:,}"
        if differs is not None:
            num_slots = self._read_foreign(header, size)
            return FoundPool(is_new=False, dropped=differs, num_whole=0, other_boot=False, num_slots=num_slots)
        num_slots = self.shape.num_slots // was.extent_slots * was.extent_slots
        self.shape = replace(was, num_slots=num_slots)
        return FoundPool(False, None, min(num_slots, was.num_slots), header.boot_id != read_boot_id(), was.num_slots)

    def _read_foreign(self, header: PoolHeader, size: int) -> int:
        """Read what a pool of another fingerprint or size would recover, and return the number of its slots.

        Nothing is recovered from a truncated file.
        """
        shape, file = header.shape, self._shared.fileno()
        if size < shape.payload_offset:
            return 0
        ranges = [shape.headers_range(rank, 0, shape.num_slots) for rank in range(shape.num_ranks)]
        ranks = [np.frombuffer(os.pread(file, num_bytes, offset), SLOT_HEADER) for offset, num_bytes in ranges]
        recovered = read_slots(ranks, shape, header.min_epoch, 0 if shape.is_truncated(size) else shape.num_slots)
        self._foreign_keys = recovered.keys
        self.num_dropped.update(recovered.dropped)
        self.num_dropped[DropReason.FOREIGN] = len(recovered.keys)
        return shape.num_slots

    def _start_anew(self, fingerprint: bytes) -> None:
        """Empty the file and write a header. The magic is written last, so that a crash in between leaves no pool."""
        file = self._shared.fileno()
        self._shared.free(0)
        try:
            # The file is sparse: headers take space once their slots exist.
            os.ftruncate(file, self.shape.payload_offset)
            os.posix_fallocate(file, 0, POOL_HEADER_BYTES)
        except OSError as error:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES: reserving space for the pool's headers failed: {error}"
            ) from error
        header = pool_header(self.shape, fingerprint)
        header["boot_id"] = read_boot_id().encode()
        raw = header.tobytes()
        os.pwrite(file, raw[len(MAGIC) :] + fingerprint, len(MAGIC))
        os.pwrite(file, MAGIC, 0)

    def _map(self) -> None:
        self._headers = self._shared.map(0, self.shape.payload_offset)
        self._pool_header = np.frombuffer(self._headers, dtype=POOL_HEADER, count=1)

    def _fill_holes(self) -> None:
        """Reserve what a copy without zeros lacks: a page missing on a full disk would kill the process.

        Raises `NotEnoughMemory`.
        """
        if not self.num_slots:
            return
        parts = [(0, POOL_HEADER_BYTES)]
        parts += [self.shape.headers_range(rank, 0, self.num_slots) for rank in range(self.shape.num_ranks)]
        if not self._shared.in_memory:
            # Where all is allocated a disk may still refuse for want of space.
            if self._shared.allocated_bytes() >= self._headers_bytes() + self.reserved_bytes():
                return
            parts.append((self.shape.payload_offset, self.reserved_bytes()))
        try:
            for offset, num_bytes in parts:
                os.posix_fallocate(self._shared.fileno(), offset, num_bytes)
        except OSError as error:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES: reserving the missing parts of {self.path} failed: {error}"
            ) from error

    def _headers_bytes(self) -> int:
        """Return the bytes of the pool's header and those of existing slots, in whole pages."""
        return POOL_HEADER_BYTES + self.shape.num_ranks * whole_pages(self.num_slots * SLOT_HEADER.itemsize)

    def _empty_headers(self, start: int, end: int) -> None:
        """Allocate empty headers for slots that are about to exist. Raises `OSError` if there is no space."""
        for rank in range(self.shape.num_ranks):
            os.posix_fallocate(self._shared.fileno(), *self.shape.headers_range(rank, start, end))
        self._clear_headers(start, end)

    def _clear_headers(self, start: int, end: int) -> None:
        for rank in range(self.shape.num_ranks):
            self.headers(rank)[start:end] = np.zeros(1, dtype=SLOT_HEADER)


def _differences(header: PoolHeader, shape: PoolShape, fingerprint: dict[str, object]) -> str | None:
    """Describe how a kept pool differs from the wanted one; None if it does not.

    All differing fields of the fingerprint are listed, else the first differing size.
    """
    before, was = header.fingerprint, header.shape
    pairs = [(name, before.get(name), fingerprint.get(name)) for name in sorted(before.keys() | fingerprint.keys())]
    if differing := [f"{name} was {old!r}, now {new!r}" for name, old, new in pairs if old != new]:
        return "; ".join(differing)
    for name in ("slot_bytes", "num_ranks"):
        old, new = getattr(was, name), getattr(shape, name)
        if old != new:
            return f"{name} was {old:,}, now {new:,}"
    if not was.extent_slots <= shape.num_slots <= was.max_slots:
        return f"num_slots={shape.num_slots:,}: the file holds {was.extent_slots:,} to {was.max_slots:,}"
    return None


def check_pool_file(path: Path) -> None:
    """Raise for an existing pool file that this process could not use; change nothing.

    Raises:
        StartError: Another engine holds one of its locks, or `open_pool_file` refuses it.
        OSError: It cannot be opened.
    """
    if lock_path(path).exists():
        PoolLock(path, shared=True).close()
    file = open_pool_file(path)
    try:
        os.close(lock_open_file(file, path, shared=True))
    finally:
        os.close(file)
