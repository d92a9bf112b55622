"""Block store in a folder: writing, reading and evicting files, and handling of disk errors.

Keys are looked up in memory only. The index is filled from the folder at start, in the background; until then nothing
is found or stored. A disk error stops writing, or reading too, until a probe, made every second, succeeds. It is logged
when it begins and when it ends, and shows in `health` in between. An odd entry, such as a folder in place of a file or
a file that cannot be opened or deleted, costs its own block only: the same probe distinguishes the cases.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    NAMESPACE_BYTES,
    BadBlock,
    encode,
    origin_range,
    unpack_origin,
    verify,
)
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome
from kvferry.app.tiers.fs.folder import (
    READABLE,
    Folder,
    FolderInUse,
    FoundFile,
    Name,
    diagnose,
    is_no_space,
    is_of_whole,
    path_of,
)
from kvferry.app.tiers.fs.format import read_block, read_head, read_part, write_pieces
from kvferry.app.tiers.fs.index import DiskSpace, FileIndex
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)

_WRITE_ATTEMPTS = 4
"""On a full disk, space that was freed for a block may be taken by other processes or threads."""
_MOVED = Failure(FailureCause.GONE, "the folder was moved, deleted or unmounted")
_IN_USE = Failure(FailureCause.GONE, "another process uses it")
_DELETE_FILES = 1000
"""Files that housekeeping deletes between two checks of `stop`."""


class FileStore:
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    batch_blocks = 1
    """Files are read and written one by one: the threads share the blocks of a job."""

    def __init__(self, name: str, folder: Folder, namespace: bytes, max_bytes: int, slot_bytes: int) -> None:
        """Blocks of up to `slot_bytes` in an open folder; it may be full. Raises `OSError` if it cannot be written."""
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
        self._name = name
        self._folder = folder
        self._path = folder.path
        self._namespace = namespace
        self._place = f"blocks/{namespace.hex()}"
        self._largest_bytes = HEADER_BYTES + slot_bytes
        self._index = FileIndex(max_bytes, folder.size_on_disk(1))
        self._space = DiskSpace(name, folder, max_bytes, folder.size_on_disk(self._largest_bytes))
        self._failure: Failure | None = None
        self._is_scanned = False
        self._num_found = 0
        self._to_delete: deque[Name] = deque()
        # Could not be deleted: tried again now and then. Until then their blocks cannot be stored.
        self._stuck: deque[Name] = deque()
        self._has_trash = True
        self._changed: tuple[int, int] | None = None
        """Identity of the folder in which blocks were reset or dropped last."""
        self._seldom = RateLimitedLogger(_log)
        num_temporary = folder.sweep(self._skip)
        if num_temporary:
            _log.info("tier %s: %d half-written files of an earlier process were deleted", name, num_temporary)
        try:
            folder.probe(self._largest_bytes, self._place)
        except OSError as error:
            if not is_no_space(error):
                raise
            self._record_failure(diagnose(error))

    def probe(self) -> None:
        """See `BlockStore`. Nothing to do: the folder was probed when it was opened, and is by `maintain`."""

    # --- what answers at once -----------------------------------------------------------------------------------

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        if not self._is_readable():
            return [False] * len(keys)
        return self._index.find([key + self._namespace for key in keys])

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        failure = self._failure
        if failure is not None:
            what = "new blocks are not kept" if failure.cause in READABLE else "no block is kept or found"
            return [f"{self._path}: {failure.text}; {what}"]
        if not self._is_scanned:
            return [f"{self._path} is being read, {self._num_found:,} blocks so far"]
        if self._index.has_excess:
            return [f"{self._path} holds more than max_bytes: the oldest blocks are deleted before new ones are kept"]
        return self._space.problems(self._index.num_bytes)

    def size(self) -> TierCounts:
        """See `BlockStore`."""
        index = self._index
        return TierCounts(len(index), index.num_bytes, index.max_bytes, evicted=index.evicted)

    # --- what may take its time ---------------------------------------------------------------------------------

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`."""
        return [self._put(*block) for block in zip(keys, data, origins, strict=True)]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`. Deletes files that cannot be read or do not verify."""
        return [self._get(*block) for block in zip(keys, into, strict=True)]

    def _put(self, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        name, folder = key + self._namespace, self._folder
        if not self._is_scanned or self._failure is not None or self._index.has_excess:
            return Outcome.PRESENT if self.find_many([key])[0] else Outcome.DROPPED
        pieces = encode(self._namespace, key, data, origin)
        num_bytes = folder.size_on_disk(sum(map(len, pieces)))
        victims = self._index.begin(name, num_bytes)
        if isinstance(victims, Outcome):
            return victims
        try:
            self._delete(folder, victims)
            for attempt in range(1, _WRITE_ATTEMPTS + 1):
                try:
                    folder.write(path_of(self._place, key), lambda fd: write_pieces(fd, pieces))
                    break
                except OSError as error:
                    # Other processes fill the disk too: evict the oldest files for the space they took.
                    may_evict = is_no_space(error) and attempt < _WRITE_ATTEMPTS
                    victims = self._index.evict(num_bytes) if may_evict else []
                    if not victims:
                        raise
                    self._space.note_full(self._index.num_bytes)
                    self._delete(folder, victims)
        except BaseException as error:
            self._index.abort(name)
            if not isinstance(error, OSError):
                raise
            self._record_error(key.hex(), error)
            return Outcome.FAILED
        if not self._index.commit(name):
            self._to_delete.append(name)
            return Outcome.DROPPED
        return Outcome.STORED

    def _get(self, key: Key, into: memoryview) -> BlockResult:
        name, folder = key + self._namespace, self._folder
        if not self._is_readable() or not self._index.touch(name):
            return MISS
        try:
            fd = folder.open(path_of(self._place, key))
            try:
                read = read_block(fd, HEADER_BYTES, into)
                origin = verify(self._namespace, key, read.head, into, read.packed)
                folder.note_read(fd, read.used_s)
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            self._index.deleted(self._index.take([name]))
            return MISS
        except BadBlock as error:
            self._seldom.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            self._to_delete += self._index.take([name])
            return BlockResult(Outcome.CORRUPT)
        except OSError as error:
            self._to_delete += self._index.take([name])
            if diagnose(error).cause not in READABLE or not is_of_whole(error):
                self._record_error(key.hex(), error)
            return BlockResult(Outcome.FAILED)
        return BlockResult(Outcome.LOADED, origin, into)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`. Raises `OSError`."""
        names = [key + self._namespace for key in keys]
        self._changed = self._folder.identity
        self._index.take(names)
        for name in names:
            self._folder.delete(_path_of(name))
        self._folder.sync_shards(map(_path_of, names))
        self._index.deleted(names)

    def drop_matching(self, match: RequestFilter, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `FilteringStore`. Searches the folder, not the index."""
        count = num_bytes = 0
        self._changed = self._folder.identity
        try:
            for files in self._folder.scan(stop, _refuse):
                found = count
                for file in files:
                    if not file.is_plain:
                        self._delete(self._folder, self._index.take([file.name]))
                    elif self._is_meant(file, match):
                        self._index.take([file.name])
                        self._folder.delete(_path_of(file.name))
                        self._index.deleted([file.name])
                        count += 1
                        num_bytes += file.num_bytes
                if count > found:
                    # Before `stop` is checked: a reset that is repeated does not find these files.
                    self._folder.sync_shards(_path_of(file.name) for file in files)
        except OSError as error:
            if is_of_whole(error):
                raise
            # Blocks in entries that cannot be read or deleted could come back.
            _log.warning("tier %s: a reset by match drops every block: %s", self._name, error.strerror)
            left, left_bytes = self.reset(stop)
            return count + left, num_bytes + left_bytes
        return count, num_bytes

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`."""
        self._changed = self._folder.identity
        self._folder.discard_all()
        self._has_trash = True
        self._to_delete.clear()
        self._stuck.clear()
        return self._index.clear()

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._check_folder()
        if self._failure is not None and self._failure.cause not in READABLE:
            return
        try:
            if not self._is_scanned:
                self._scan(stop)
            while self._to_delete and not stop():
                self._delete(self._folder, _pop(self._to_delete))
            while not stop() and (excess := self._index.evict_excess()):
                self._delete(self._folder, excess)
            self._delete(self._folder, _pop(self._stuck), is_retry=True)
            if self._has_trash:
                self._empty_trash(stop)
            self._space.update()
        except OSError as error:
            self._record_failure(diagnose(error))

    def close(self) -> None:
        """See `BlockStore`."""
        self._folder.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _is_readable(self) -> bool:
        failure = self._failure
        return self._is_scanned and (failure is None or failure.cause in READABLE)

    def _delete(self, folder: Folder, names: Sequence[Name], *, is_retry: bool = False) -> None:
        """Delete files that were removed from the index; failed deletions are repeated later."""
        for index, name in enumerate(names):
            try:
                folder.delete(_path_of(name))
            except OSError as error:
                if is_of_whole(error):
                    self._to_delete += names[index:]
                    raise
                self._stuck.append(name)
                if not is_retry:
                    self._record_error(name[:-NAMESPACE_BYTES].hex(), error)
                continue
            self._index.deleted([name])

    def _is_meant(self, file: FoundFile, match: RequestFilter) -> bool:
        """Return whether a file was stored by a matching request, or has no readable origin."""
        try:
            fd = self._folder.open(_path_of(file.name))
            try:
                origin = unpack_origin(read_part(fd, *origin_range(*read_head(fd, HEADER_BYTES))))
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

    def _scan(self, stop: Callable[[], bool]) -> None:
        """Fill the index from the folder. Deletes an earlier process's trash first: it counts against the limit."""
        self._empty_trash(stop)
        # Not as objects of one file each: the garbage collector would stop all threads to look at them.
        names, sizes, used_s = list[Name](), array("q"), array("d")
        self._num_found = 0
        for files in self._folder.scan(stop, self._skip):
            for file in files:
                if file.is_plain:
                    names.append(file.name)
                    sizes.append(file.num_bytes)
                    used_s.append(file.used_s)
            self._num_found = len(names)
        self._index.fill(names, np.array(sizes), np.array(used_s))
        self._is_scanned = True
        _log.info(
            "tier %s: %s holds %s blocks, %s bytes%s",
            self._name,
            self._path,
            f"{len(self._index):,}",
            f"{self._index.num_bytes:,}",
            "; the oldest go until they fit into max_bytes" if self._index.has_excess else "",
        )
        self._space.check_limit(self._index.num_bytes)

    def _empty_trash(self, stop: Callable[[], bool]) -> None:
        for num_bytes in self._folder.empty("trash", stop, self._skip):
            self._index.pay(num_bytes)
        self._index.pay()
        self._has_trash = False

    # --- failures -----------------------------------------------------------------------------------------------

    def _skip(self, entry: str, error: OSError) -> None:
        """Log that an entry is skipped."""
        reason = diagnose(error).text
        self._seldom.log(logging.WARNING, "entry", "tier %s: entry left out: %s: %s", self._name, entry, reason)

    def _record_error(self, entry: str, error: OSError) -> None:
        """Log an error of one entry, or note an error of the whole folder."""
        if is_of_whole(error):
            self._record_failure(diagnose(error))
            return
        try:
            if not self._folder.is_in_place():
                self._record_failure(_MOVED)
                return
            self._folder.probe(self._largest_bytes, self._place)
        except OSError as probe_error:
            self._record_failure(diagnose(probe_error))
        else:
            self._skip(entry, error)

    def _record_failure(self, failure: Failure) -> None:
        """Record what is wrong, and log it if it is new."""
        news = self._failure is None or self._failure.cause is not failure.cause
        self._failure = failure
        if news:
            key = failure.cause
            self._seldom.log(logging.ERROR, key, "tier %s: %s", self._name, "; ".join(self.health()))

    def _check_folder(self) -> None:
        """Check whether the folder is still in place, and whether the recorded error is over."""
        try:
            if not self._folder.is_in_place():
                self._record_failure(_MOVED)
                if not self._folder.is_replaced():
                    return
                self._reopen()
            elif not self._folder.keep_lock():
                self._record_failure(_IN_USE)
                self._reopen()
            if self._failure is None:
                return
            self._folder.probe(self._largest_bytes, self._place)
        except FolderInUse:
            self._record_failure(_IN_USE)
        except OSError as error:
            self._record_failure(diagnose(error))
        else:
            self._failure = None
            self._seldom.log(logging.WARNING, "mended", "tier %s: %s serves again", self._name, self._path)

    def _reopen(self) -> None:
        """Open the folder that replaced the opened one, with its content."""
        folder = Folder(self._path)
        try:
            if self._changed not in (None, folder.identity):
                # What was reset or dropped in another folder may be in this one.
                folder.discard_all()
        except BaseException:
            folder.close()
            raise
        self._is_scanned = False
        self._has_trash = True
        old, self._folder = self._folder, folder
        self._space = DiskSpace(self._name, folder, self._index.max_bytes, folder.size_on_disk(self._largest_bytes))
        old.unlock()
        self._to_delete.clear()
        self._stuck.clear()
        self._index.clear()
        self._index.pay()
        folder.sweep(self._skip)


def _path_of(name: Name) -> str:
    return path_of(f"blocks/{name[-NAMESPACE_BYTES:].hex()}", name[:-NAMESPACE_BYTES])


def _pop(names: deque[Name]) -> list[Name]:
    """Remove and return the first names, of as many files as housekeeping deletes between two checks of `stop`."""
    return [names.popleft() for _ in range(min(len(names), _DELETE_FILES))]


def _refuse(_: str, error: OSError) -> None:
    raise error
