"""Block store in a folder that several engines use at once, on a local disk or a network file system.

    shared/<namespace>/epochs/                                       see `EpochFiles`
    shared/<namespace>/<epoch>/<3 hex digits>/<hex of the key>       one block, in the format of `block_format`
    shared/lease, shared/size, shared/engines/                       see `SharedLimit`

There is no index: keys are looked up in the folder, and any file may vanish at any time, which is a miss. A file is
renamed into place once it is complete, so that concurrent stores of a key leave one of their files, which are equal.
Every call that finds or loads blocks reads the epoch after its last access to one, and discards its results if it has
changed: no block of an earlier epoch is served, and one that was stored under such an epoch is never found.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    OVERHEAD_BYTES,
    BadBlock,
    encode,
    shared_namespace_of,
    verify,
)
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable, TierContext
from kvferry.app.tiers.fs.epoch_files import EpochFiles
from kvferry.app.tiers.fs.folder import (
    GONE_ERRORS,
    READABLE,
    Folder,
    FolderInUse,
    diagnose,
    is_no_space,
    is_of_whole,
    path_of,
)
from kvferry.app.tiers.fs.format import read_block, write_pieces
from kvferry.app.tiers.fs.shared_limit import SharedLimit
from kvferry.app.tiers.shared_epoch import Epoch, sharing_problems
from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BLOCKS = 32
_WRITE_ATTEMPTS = 4
_MOVED = "the folder was moved, deleted or unmounted"


class SharedFileStore:
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    def __init__(self, folder: Folder, max_bytes: int, context: TierContext) -> None:
        """Blocks of up to `context.slot_bytes` in a folder that was opened to be shared. Raises `OSError`."""
        self.batch_blocks = max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // context.slot_bytes))
        self._name = context.name
        self._path = folder.path
        self._namespace = shared_namespace_of(context.fingerprint)
        self._place = f"shared/{self._namespace.hex()}"
        self._sharing_problems = sharing_problems(context.fingerprint)
        self._largest_bytes = context.slot_bytes + OVERHEAD_BYTES
        self._max_bytes = max_bytes
        self._failure: str | None = None
        """Why nothing is stored or found."""
        self._problem: str | None = None
        """Why nothing is stored."""
        self._seldom = RateLimitedLogger(_log)
        self._has_changed = False
        """Whether this engine has reset or dropped blocks."""
        self._use(folder, self._epochs_in(folder, Epoch()))
        try:
            folder.probe(self._largest_bytes, self._place)
        except OSError as error:
            if not is_no_space(error):
                raise
            self._problem = diagnose(error).text
        self._epochs.read()

    def _epochs_in(self, folder: Folder, earlier: Epoch) -> EpochFiles:
        return EpochFiles(folder, self._place, self._on_lost, earlier)

    def _use(self, folder: Folder, epochs: EpochFiles) -> None:
        self._folder = folder
        self._epochs = epochs
        self._limit = SharedLimit(self._name, folder, self._max_bytes, self._largest_bytes, self._skip)

    # --- what answers at once -----------------------------------------------------------------------------------

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        if self._failure is not None:
            return [f"{self._path}: {self._failure}; no block is kept or found"]
        texts = [] if self._limit.is_known else [f"{self._path} is being measured; new blocks are not kept"]
        if self._problem is None:
            texts += self._limit.problems()
        else:
            texts = [f"{self._path}: {self._problem}; new blocks are not kept"]
        return texts + self._sharing_problems

    def size(self) -> TierCounts:
        """See `BlockStore`. Blocks and bytes of all engines of the namespace, as last measured and reported."""
        blocks, num_bytes = self._limit.size_of(self._place_of(self._epochs.known))
        return TierCounts(blocks, num_bytes, self._max_bytes, evicted=self._limit.evicted)

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._epochs.known.name

    # --- what may take its time ---------------------------------------------------------------------------------

    def probe(self) -> None:
        """See `BlockStore`."""
        self._check_folder()
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        self._read_epoch()

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        begun = self._epochs.known
        found = [self._exists(path) for path in self._paths(begun, keys)]
        return found if self._read_epoch() == begun else [False] * len(keys)

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads the epoch before it writes, and not again: what is written in one that has ended is never found.
        """
        if self._problem is not None or not self._limit.is_known:
            return [Outcome.DROPPED] * len(keys)
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
        if None in [self._delete(epoch, path) for path in paths]:
            raise OSError("some files cannot be deleted")
        self._folder.sync_shards(paths)

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Returns the blocks and bytes of the epoch that ends, as far as they are known."""
        self._has_changed = True
        place = self._place_of(self._epochs.known)
        dropped = self._limit.size_of(place)
        try:
            try:
                self._epochs.begin()
            except OSError as error:
                if not is_no_space(error):
                    raise
                # A full disk has no room for the epoch before some blocks are deleted.
                self._empty(place, stop)
                self._epochs.begin()
        except OSError as error:
            raise self._unavailable(error) from None
        return dropped

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._check_folder()
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        try:
            self._delete_old_epochs(stop)
            self._limit.tend(stop)
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
            return self._folder.status(path) is not None
        except OSError as error:
            self._note(path, error)
            return False

    def _put(self, epoch: Epoch, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        place = self._place_of(epoch)
        path = path_of(place, key)
        pieces = encode(self._seed(epoch), key, data, origin)
        num_bytes = sum(map(len, pieces))
        try:
            if self._folder.status(path) is not None:
                self._folder.touch(path)
                return Outcome.PRESENT
            if not self._limit.reserve(num_bytes):
                return Outcome.DROPPED
            try:
                self._write(path, num_bytes, lambda fd: write_pieces(fd, pieces))
                self._limit.count(place, 1, self._folder.size_on_disk(num_bytes))
            finally:
                self._limit.release(num_bytes)
        except OSError as error:
            if not self._is_write_problem(error):
                self._note(path, error)
            return Outcome.FAILED
        return Outcome.STORED

    def _write(self, path: str, num_bytes: int, write: Callable[[int], None]) -> None:
        """Write a file, on a full disk after evictions if this engine may evict."""
        for attempt in range(1, _WRITE_ATTEMPTS + 1):
            try:
                self._folder.write(path, write)
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
                read = read_block(fd, HEADER_BYTES, into)
                origin = verify(self._seed(epoch), key, read.head, into, read.packed)
                self._folder.note_read(fd, read.used_s)
            finally:
                os.close(fd)
        except BadBlock as error:
            self._seldom.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return MISS
            self._note(path, error)
            return BlockResult(Outcome.FAILED)
        return BlockResult(Outcome.LOADED, origin, into)

    def _delete(self, epoch: Epoch, path: str) -> int | None:
        """Delete a block if it exists, and return the bytes that it took on the disk; None if that failed."""
        try:
            status = self._folder.status(path)
            if status is None or not self._folder.delete(path):
                return 0
        except OSError as error:
            self._note(path, error)
            return None
        num_bytes = self._folder.size_on_disk(status.st_size)
        self._limit.count(self._place_of(epoch), -1, -num_bytes)
        return num_bytes

    def _empty(self, place: str, stop: Callable[[], bool]) -> None:
        for num_bytes in self._folder.empty(place, stop, self._skip):
            self._limit.count(place, -1, -num_bytes)

    def _delete_old_epochs(self, stop: Callable[[], bool]) -> None:
        """Delete blocks of earlier epochs."""
        epochs = [name for name, _ in self._folder.list(self._place, self._skip) if _is_epoch(name)]
        # Read after the names: all that are of another epoch are of an earlier one.
        current = self._epochs.read().name.decode()
        for epoch in epochs:
            if epoch != current:
                place = f"{self._place}/{epoch}"
                self._empty(place, stop)
                self._folder.remove_folder(place)

    # --- inside -------------------------------------------------------------------------------------------------

    def _place_of(self, epoch: Epoch) -> str:
        return f"{self._place}/{epoch.name.decode()}"

    def _paths(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        place = self._place_of(epoch)
        return [path_of(place, key) for key in keys]

    def _seed(self, epoch: Epoch) -> bytes:
        return self._namespace + epoch.name

    def _read_epoch(self) -> Epoch:
        """Return the epoch in the folder. Raises `StoreUnavailable`."""
        if self._failure is not None:
            raise StoreUnavailable(self._failure, is_transient=False)
        try:
            return self._epochs.read()
        except OSError as error:
            raise self._unavailable(error) from None

    def _on_lost(self, reason: str) -> None:
        _log.warning("tier %s: starts empty: %s", self._name, reason)

    # --- failures -----------------------------------------------------------------------------------------------

    def _skip(self, entry: str, error: OSError) -> None:
        """Log that an entry is skipped."""
        reason = diagnose(error).text
        self._seldom.log(logging.WARNING, "entry", "tier %s: entry left out: %s: %s", self._name, entry, reason)

    def _note(self, path: str, error: OSError) -> None:
        """Log an error of one entry. Raises `StoreUnavailable` for one of the whole folder."""
        if is_of_whole(error):
            raise self._unavailable(error) from None
        self._skip(path, error)

    def _is_write_problem(self, error: OSError) -> bool:
        """Note an error with which blocks can still be loaded, and return whether it is one.

        A probe decides whether an error that may concern one entry only is one of the folder.
        """
        if not is_of_whole(error):
            try:
                self._folder.probe(self._largest_bytes, self._place)
                return False
            except OSError as found:
                error = found
        failure = diagnose(error)
        if failure.cause not in READABLE:
            return False
        if self._problem is None:
            self._seldom.log(logging.ERROR, "full", "tier %s: %s: %s", self._name, self._path, failure.text)
        self._problem = failure.text
        return True

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(diagnose(error).text, is_transient=False)

    def _check_folder(self) -> None:
        """Note whether the folder is in place, and whether it can be written again."""
        had = self._failure or self._problem
        try:
            if not self._folder.is_in_place():
                self._failure = _MOVED
                if not self._folder.is_replaced():
                    return
                self._reopen()
            elif not self._folder.keep_lock():
                self._reopen()
            if had is not None:
                self._folder.probe(self._largest_bytes, self._place)
        except FolderInUse:
            self._failure = "another process uses it alone"
        except OSError as error:
            if not self._is_write_problem(error):
                self._failure = diagnose(error).text
        else:
            self._failure = self._problem = None
            if had is not None:
                _log.warning("tier %s: %s serves again", self._name, self._path)

    def _reopen(self) -> None:
        """Open the folder that replaced the opened one. The epoch is remembered, since it may be the same."""
        folder = Folder(self._path, is_shared=True)
        try:
            epochs = self._epochs_in(folder, self._epochs.lasting)
            if self._has_changed and epochs.read() != self._epochs.known:
                # What was reset or dropped in another folder may be in this one.
                epochs.begin()
        except BaseException:
            folder.close()
            raise
        old = self._folder
        self._use(folder, epochs)
        old.unlock()


def _is_epoch(name: str) -> bool:
    return Epoch(name.encode(errors="replace")).number > 0
