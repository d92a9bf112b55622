"""Block store in a folder, on a local disk or a network file system, of one process or of engines that share it.

There is no index: keys are looked up in the folder, and any file may vanish at any time, which is a miss. A file is
renamed into place once it is complete, so that concurrent stores of a key leave one of their files, which are equal.
Every call that finds or loads blocks reads the epoch after its last access to one, and discards its results if it has
changed: no block of an earlier epoch is served, and one that was stored under such an epoch is never found.

An error with which blocks can still be loaded, such as a full disk, stops stores until a probe, made every second,
succeeds. An odd entry, such as a folder in place of a file, costs its own block only: the same probe distinguishes the
cases. Other errors of the whole folder raise `StoreUnavailable`.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import OVERHEAD_BYTES, BadBlock, encode, shared_namespace_of, verify
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable, TierContext
from kvferry.app.tiers.fs.epoch_files import EpochFiles
from kvferry.app.tiers.fs.folder import (
    GONE_ERRORS,
    Folder,
    FolderInUse,
    FolderMoved,
    UnusableFolder,
    is_no_space,
    is_of_whole,
    is_of_writes,
    path_of,
    text_of,
)
from kvferry.app.tiers.fs.format import read_block, read_origin
from kvferry.app.tiers.fs.limit import FolderLimit
from kvferry.app.tiers.shared_epoch import Epoch, sharing_problems
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BLOCKS = 32
_WRITE_ATTEMPTS = 4
"""On a full disk, space that was freed for a block may be taken by other processes or threads."""


class FileStore:
    """An `kvferry.app.tiers.block_store.BlockStore`, but for what depends on whether engines share the folder."""

    def __init__(self, folder: Folder, max_bytes: int, context: TierContext) -> None:
        """Blocks of up to `context.slot_bytes` in an open folder; its disk may be full. Raises `OSError`."""
        # Reading the epoch may be a round trip, which blocks of one call share.
        self.batch_blocks = max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // context.slot_bytes))
        self._name = context.name
        self._path = folder.path
        self._namespace = shared_namespace_of(context.fingerprint)
        namespace = self._namespace.hex()
        # A reset is of the whole folder, or of the namespace of the engines that share blocks.
        self._home = f"{folder.root}/{namespace}" if folder.is_shared else folder.root
        self._below_epoch = "" if folder.is_shared else f"/{namespace}"
        self._largest_bytes = context.slot_bytes + OVERHEAD_BYTES
        self._max_bytes = max_bytes
        self._problem: str | None = None
        """Why nothing is stored."""
        self._limited_log = RateLimitedLogger(_log)
        self._has_changed = False
        """Whether this engine has reset or dropped blocks."""
        self._use(folder, self._epochs_in(folder, Epoch()))
        try:
            self._probe_folder()
        except OSError as error:
            if not is_no_space(error):
                raise
            self._problem = text_of(error)

    def _epochs_in(self, folder: Folder, earlier: Epoch) -> EpochFiles:
        return EpochFiles(folder, self._home, self._on_lost, earlier)

    def _use(self, folder: Folder, epochs: EpochFiles) -> None:
        self._folder = folder
        self._epochs = epochs
        self._limit = FolderLimit(self._name, folder, self._max_bytes, self._largest_bytes, self._skip)
        num_unfinished = 0 if folder.is_shared else folder.sweep(self._skip)
        if num_unfinished:
            _log.info("tier %s: %d half-written files of an earlier process were deleted", self._name, num_unfinished)

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        if self._problem is not None:
            return [f"{self._path}: {self._problem}; new blocks are not kept"]
        return self._limit.problems()

    def size(self) -> TierCounts:
        """See `BlockStore`. Blocks and bytes of all engines, as last measured and reported."""
        blocks, num_bytes = self._limit.size_of(self._epochs.known)
        return TierCounts(blocks, num_bytes, self._max_bytes, evicted=self._limit.evicted)

    def probe(self) -> None:
        """See `BlockStore`."""
        self._check_folder()
        self._read_epoch()
        try:
            self._probe_folder()
        except OSError as error:
            self._is_write_problem(error)

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        begun = self._epochs.known
        exist = [self._exists(path) for path in self._paths(begun, keys)]
        return exist if self._read_epoch() == begun else [False] * len(keys)

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads the epoch before it writes, and not again: what is written in one that has ended is never found.
        """
        epoch = self._read_epoch()
        return [self._put(epoch, *block) for block in zip(keys, data, origins, strict=True)]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        begun = self._epochs.known
        paths = self._paths(begun, keys)
        results = [self._get(begun, *block) for block in zip(keys, paths, into, strict=True)]
        return results if self._read_epoch() == begun else [MISS] * len(keys)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`. Raises `OSError`."""
        self._has_changed = True
        # Read after the drop: blocks of a later epoch were stored after it.
        epoch = self._read_epoch()
        paths = self._paths(epoch, keys)
        # All of them, also after one that fails.
        if sum(self._delete(epoch, path) for path in paths) < len(paths):
            raise OSError("some files cannot be deleted")
        self._folder.sync_shards(paths)

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Returns the blocks and bytes of the epoch that ends, as far as they are known."""
        self._has_changed = True
        ending = self._epochs.known
        dropped = self._limit.size_of(ending)
        try:
            try:
                self._epochs.begin()
            except OSError as error:
                if not is_no_space(error):
                    raise
                # A full disk has no room for the epoch before some blocks are deleted.
                self._empty(self._place_of(ending), stop)
                self._epochs.begin()
        except OSError as error:
            raise self._unavailable(error) from None
        return dropped

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._check_folder()
        try:
            self._delete_old_epochs(stop)
            self._limit.maintain(stop)
        except OSError as error:
            if not self._is_write_problem(error):
                raise self._unavailable(error) from None

    def close(self) -> None:
        """See `BlockStore`."""
        self._limit.close()
        self._folder.close()

    # --- blocks -------------------------------------------------------------------------------------------------

    def _exists(self, path: str) -> bool:
        try:
            return self._folder.has_file(path)
        except OSError as error:
            self._note(path, error)
            return False

    def _put(self, epoch: Epoch, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        (path,) = self._paths(epoch, [key])
        try:
            if self._folder.has_file(path):
                self._folder.touch(path)
                return Outcome.PRESENT
            if self._problem is not None or not self._limit.is_known:
                return Outcome.DROPPED
            pieces = encode(self._seed(epoch), key, data, origin)
            num_bytes = sum(map(len, pieces))
            if not self._limit.reserve(num_bytes):
                return Outcome.DROPPED
            try:
                self._write(path, pieces, num_bytes)
                self._limit.count(epoch.name.decode(), 1, self._folder.size_on_disk(num_bytes))
            finally:
                self._limit.release(num_bytes)
        except OSError as error:
            if not self._is_write_problem(error):
                self._note(path, error)
            return Outcome.FAILED
        return Outcome.STORED

    def _write(self, path: str, pieces: Sequence[bytes | memoryview], num_bytes: int) -> None:
        """Write a file, on a full disk after evictions if this engine may evict."""
        for attempt in range(1, _WRITE_ATTEMPTS + 1):
            try:
                self._folder.write(path, pieces)
                return
            except OSError as error:
                may_evict = is_no_space(error) and attempt < _WRITE_ATTEMPTS
                if not may_evict or not self._limit.make_disk_space(num_bytes):
                    raise

    def _get(self, epoch: Epoch, key: Key, path: str, into: memoryview) -> BlockResult:
        """Read a block."""
        try:
            fd = self._folder.open(path)
            try:
                read = read_block(fd, into)
                origin = verify(self._seed(epoch), key, read.head, into, read.packed)
                self._folder.note_read(fd, read.used_s)
            finally:
                os.close(fd)
        except BadBlock as error:
            self._limited_log.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return MISS
            self._note(path, error)
            return BlockResult(Outcome.FAILED)
        return BlockResult(Outcome.LOADED, origin, into)

    def _delete(self, epoch: Epoch, path: str) -> bool:
        """Delete a block if it exists; return False if that failed."""
        try:
            self._remove(epoch, path)
        except OSError as error:
            self._note(path, error)
            return False
        return True

    def _remove(self, epoch: Epoch, path: str) -> int:
        """Delete a block if it exists, and return the bytes that it took on the disk. Raises `OSError`."""
        status = self._folder.status(path)
        if status is None or stat.S_ISDIR(status.st_mode) or not self._folder.delete(path):
            return 0
        num_bytes = self._folder.size_on_disk(status.st_size)
        self._limit.count(epoch.name.decode(), -1, -num_bytes)
        return num_bytes

    def _empty(self, place: str, stop: Callable[[], bool]) -> None:
        """Delete a folder that no engine reads."""
        name = place.rpartition("/")[2]
        epoch = name if _is_epoch(name) else ""
        for num_bytes in self._folder.empty(place, stop, self._skip):
            self._limit.count(epoch, -1, -num_bytes)

    def _delete_old_epochs(self, stop: Callable[[], bool]) -> None:
        """Delete blocks of earlier epochs."""
        names = [name for name, _ in self._folder.list(self._home, self._skip) if _is_epoch(name)]
        # Read after the names: all that are of another epoch are of an earlier one.
        current = self._epochs.read().name.decode()
        for name in names:
            if name != current:
                self._empty(f"{self._home}/{name}", stop)

    # --- inside -------------------------------------------------------------------------------------------------

    def _place_of(self, epoch: Epoch) -> str:
        return f"{self._home}/{epoch.name.decode()}".rstrip("/")

    def _paths(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        place = self._place_of(epoch) + self._below_epoch
        return [path_of(place, key) for key in keys]

    def _seed(self, epoch: Epoch) -> bytes:
        return self._namespace + epoch.name

    def _read_epoch(self) -> Epoch:
        """Return the epoch in the folder. Raises `StoreUnavailable`."""
        try:
            return self._epochs.read()
        except OSError as error:
            raise self._unavailable(error) from None

    def _on_lost(self, reason: str) -> None:
        _log.warning("tier %s: starts empty: %s", self._name, reason)

    # --- failures -----------------------------------------------------------------------------------------------

    def _skip(self, entry: str, error: OSError) -> None:
        """Log that an entry is skipped."""
        self._limited_log.log(
            logging.WARNING, "entry", "tier %s: entry left out: %s: %s", self._name, entry, text_of(error)
        )

    def _note(self, path: str, error: OSError) -> None:
        """Log an error of one entry. Raises `StoreUnavailable` for one of the whole folder."""
        if is_of_whole(error):
            raise self._unavailable(error) from None
        self._skip(path, error)

    def _is_write_problem(self, error: OSError) -> bool:
        """Note an error with which blocks can still be loaded; return False for one of one entry only.

        A probe distinguishes the cases. Raises `StoreUnavailable` for an error with which no block can be loaded.
        """
        was_probed = not is_of_whole(error)
        if was_probed:
            try:
                self._probe_folder()
                return False
            except OSError as cause:
                error = cause
        if not is_of_writes(error):
            raise self._unavailable(error, needs_probe=was_probed)
        text = text_of(error)
        if self._problem is None:
            self._limited_log.log(logging.ERROR, "full", "tier %s: %s: %s", self._name, self._path, text)
        self._problem = text
        return True

    def _unavailable(self, error: OSError, *, needs_probe: bool = False) -> StoreUnavailable:
        needs_probe |= isinstance(error, UnusableFolder)
        return StoreUnavailable(text_of(error), is_transient=False, needs_probe=needs_probe)

    def _probe_folder(self) -> None:
        """Raise `OSError` if no block can be written now."""
        self._folder.probe(self._largest_bytes, self._place_of(self._epochs.known) + self._below_epoch)

    def _check_folder(self) -> None:
        """Open the folder again if another is in its place, and note whether it can be written.

        Raises `StoreUnavailable` for one that is away, or that is another process's now.
        """
        try:
            if not self._folder.is_in_place():
                if not self._folder.is_replaced():
                    raise FolderMoved
                self._reopen()
            elif not self._folder.keep_lock():
                raise FolderInUse
            if self._problem is not None:
                self._probe_folder()
                self._problem = None
                _log.warning("tier %s: %s serves again", self._name, self._path)
        except UnusableFolder as error:
            # Other engines may still reach what was opened.
            self._limit.close()
            raise self._unavailable(error) from None
        except OSError as error:
            if not self._is_write_problem(error):
                raise self._unavailable(error) from None

    def _reopen(self) -> None:
        """Open the folder that replaced the opened one. The epoch is remembered, since it may be the same."""
        folder = Folder(self._path, is_shared=self._folder.is_shared)
        try:
            epochs = self._epochs_in(folder, self._epochs.lasting)
            if self._has_changed and epochs.read() != self._epochs.known:
                # What was reset or dropped in another folder may be in this one.
                epochs.begin()
        except BaseException:
            folder.close()
            raise
        old, old_limit = self._folder, self._limit
        self._use(folder, epochs)
        old_limit.close()
        old.unlock()


class SharedFileStore(FileStore):
    """A store in a folder that engines share."""

    def __init__(self, folder: Folder, max_bytes: int, context: TierContext) -> None:
        """See `FileStore`."""
        super().__init__(folder, max_bytes, context)
        self._sharing_problems = sharing_problems(context.fingerprint)

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        return [*super().health(), *self._sharing_problems]

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._epochs.known.name


class PrivateFileStore(FileStore):
    """A store in a folder that one process uses, which can also reset by match."""

    def drop_matching(self, match: RequestFilter, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `FilteringStore`."""
        self._has_changed = True
        count = num_bytes = 0
        try:
            epoch = self._epochs.read()
            for folder, files in self._folder.scan(self._place_of(epoch), stop, _refuse):
                paths = [f"{folder}/{name}" for name, _ in files]
                deleted = [self._remove(epoch, path) for path in paths if self._is_meant(path, match)]
                if deleted:
                    # Before `stop` is checked: a reset that is repeated does not find these files.
                    self._folder.sync_shards(paths)
                count += len(deleted)
                num_bytes += sum(deleted)
        except OSError as error:
            if is_of_whole(error):
                raise self._unavailable(error) from None
            # Blocks in entries that cannot be read or deleted could come back.
            _log.warning("tier %s: a reset by match drops every block: %s", self._name, error.strerror)
            left, left_bytes = self.reset(stop)
            return count + left, num_bytes + left_bytes
        return count, num_bytes

    def _is_meant(self, path: str, match: RequestFilter) -> bool:
        """Return whether a file was stored by a matching request, or has no readable origin."""
        try:
            fd = self._folder.open(path)
            try:
                origin = read_origin(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except BadBlock:
            return True
        except OSError as error:
            if is_of_whole(error):
                raise
            return True
        return origin is None or match.matches(origin)


def _is_epoch(name: str) -> bool:
    return Epoch(name.encode(errors="replace")).number > 0


def _refuse(_: str, error: OSError) -> None:
    raise error
