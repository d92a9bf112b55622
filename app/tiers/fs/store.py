"""Block store in a folder, on a local disk or a network file system, of one process or of engines that share it.

There is no index: keys are looked up in the folder, and any file may vanish at any time, which is a miss. A file is
renamed into place once it is complete, so that concurrent stores of a key leave one of their files, which are equal.
Every call that finds or loads blocks reads the epoch after its last access to one, and discards its results if it has
changed: no block of an earlier epoch is served, and one that was stored under such an epoch is never found.

An error of one block costs that block. A failed write is followed by a probe: if that fails too, as on a full disk,
nothing is stored until a probe, made every second, succeeds. Where the epoch cannot be read, nothing is served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import OVERHEAD_BYTES, BadBlock, encode, shared_namespace_of, verify
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable, TierContext
from kvferry.app.tiers.fs.epoch_file import EpochFile
from kvferry.app.tiers.fs.folder import GONE_ERRORS, Folder, FolderMoved, is_no_space, path_of, text_of
from kvferry.app.tiers.fs.format import read_block, read_origin
from kvferry.app.tiers.fs.limit import FolderLimit
from kvferry.app.tiers.shared_epoch import Epoch, SharedEpoch, sharing_problems
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BLOCKS = 32


class FileStore:
    """An `kvferry.app.tiers.block_store.BlockStore`, but for what depends on whether engines share the folder."""

    def __init__(self, folder: Folder, max_bytes: int, context: TierContext) -> None:
        """Blocks of up to `context.slot_bytes` in an open folder; its disk may be full. Raises `OSError`."""
        # Reading the epoch may be a round trip, which blocks of one call share.
        self.batch_blocks = max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // context.slot_bytes))
        self._name = context.name
        self._folder = folder
        self._namespace = shared_namespace_of(context.fingerprint)
        namespace = self._namespace.hex()
        # A reset is of the whole folder, or of the namespace of the engines that share blocks.
        self._home = f"{folder.root}/{namespace}" if folder.is_shared else folder.root
        self._below_epoch = "" if folder.is_shared else f"/{namespace}"
        self._largest_bytes = context.slot_bytes + OVERHEAD_BYTES
        self._problem: str | None = None
        """Why nothing is stored."""
        self._has_space = True
        """Whether the problem is not a full disk or a quota."""
        self._limited_log = RateLimitedLogger(_log)
        self._epoch = SharedEpoch(self._name, lambda: None, "the folder")
        self._epoch_file = EpochFile(folder, self._home)
        self._limit = FolderLimit(self._name, folder, max_bytes, self._largest_bytes, self._note)
        num_unfinished = 0 if folder.is_shared else folder.sweep()
        if num_unfinished:
            _log.info("tier %s: %d half-written files of an earlier process were deleted", self._name, num_unfinished)
        try:
            self._probe_folder()
        except OSError as error:
            if not is_no_space(error):
                raise
            self._problem, self._has_space = text_of(error), False

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        if self._problem is not None:
            return [f"{self._folder.path}: {self._problem}; new blocks are not kept"]
        return self._limit.problems()

    def size(self) -> TierCounts:
        """See `BlockStore`. Blocks and bytes of all engines, as last measured and reported."""
        blocks, num_bytes = self._limit.size_of(self._epoch.latest)
        return TierCounts(blocks, num_bytes, self._limit.max_bytes, evicted=self._limit.evicted)

    def probe(self) -> None:
        """See `BlockStore`."""
        self._read_epoch()
        self._check_writable()

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        begun = self._epoch.latest
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
        begun = self._epoch.latest
        paths = self._paths(begun, keys)
        results = [self._get(begun, *block) for block in zip(keys, paths, into, strict=True)]
        return results if self._read_epoch() == begun else [MISS] * len(keys)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`. Raises `OSError`."""
        # Read after the drop: blocks of a later epoch were stored after it.
        epoch = self._read_epoch()
        paths = self._paths(epoch, keys)
        errors = [error for path in paths if (error := self._delete(epoch, path)) is not None]
        self._folder.sync(path.rpartition("/")[0] for path in paths)
        if errors:
            raise errors[0]

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Returns the blocks and bytes of the epoch that ends, as far as they are known."""
        dropped = self._limit.size_of(self._epoch.latest)
        try:
            self._epoch.begin(self._epoch_file)
        except OSError as error:
            raise self._unavailable(error) from None
        return dropped

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        try:
            self._folder.check()
            self._folder.keep_lock()
            names = [name for name in self._folder.names(self._home) if Epoch(name.encode(errors="replace")).number]
            # Read after the names: all that are of another epoch are of an earlier one.
            epoch = self._read_epoch().name.decode()
            for name in names:
                if name != epoch:
                    self._delete_epoch(name, stop)
            if self._problem is not None:
                self._check_writable()
            self._limit.maintain(stop, has_space=self._has_space)
        except OSError as error:
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
            self._note(error)
            return False

    def _put(self, epoch: Epoch, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        (path,) = self._paths(epoch, [key])
        if self._exists(path):
            self._folder.touch(path)
            return Outcome.PRESENT
        pieces = encode(self._namespace + epoch.name, key, data, origin)
        num_bytes = self._folder.size_on_disk(sum(map(len, pieces)))
        outcome = Outcome.DROPPED
        try:
            if self._problem is None and self._limit.reserve(num_bytes):
                outcome = Outcome.FAILED
                try:
                    self._folder.write(path, pieces)
                    outcome = Outcome.STORED
                finally:
                    self._limit.release(epoch, num_bytes, is_stored=outcome is Outcome.STORED)
        except OSError as error:
            self._check_writable()
            if self._problem is None:
                self._note(error)
            return Outcome.FAILED
        return outcome

    def _get(self, epoch: Epoch, key: Key, path: str, into: memoryview) -> BlockResult:
        """Read a block."""
        try:
            with self._folder.open(path) as fd:
                read = read_block(fd, into)
                origin = verify(self._namespace + epoch.name, key, read.head, into, read.packed)
                self._folder.note_read(fd, read.used_s)
        except BadBlock as error:
            self._limited_log.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return MISS
            self._note(error)
            return BlockResult(Outcome.FAILED)
        return BlockResult(Outcome.LOADED, origin, into)

    def _delete(self, epoch: Epoch, path: str) -> OSError | None:
        """Delete a block if it exists; return the error if that failed."""
        try:
            status = self._folder.status(path)
            if status is not None and self._folder.delete(path):
                self._limit.remove(epoch, self._folder.size_on_disk(status.st_size))
        except OSError as error:
            self._note(error)
            return error
        return None

    def _delete_epoch(self, name: str, stop: Callable[[], bool]) -> None:
        """Delete the folder of an epoch that has ended."""
        place = f"{self._home}/{name}"
        for path, _ in self._folder.scan(place, stop, self._note):
            self._delete(Epoch(name.encode()), path)
        self._folder.remove(place, stop)

    # --- inside -------------------------------------------------------------------------------------------------

    def _place_of(self, epoch: Epoch) -> str:
        return f"{self._home}/{epoch.name.decode()}".rstrip("/") + self._below_epoch

    def _paths(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        place = self._place_of(epoch)
        return [path_of(place, key) for key in keys]

    def _read_epoch(self) -> Epoch:
        """Return the epoch in the folder at some time after the call. Raises `StoreUnavailable`."""
        try:
            return self._epoch.confirm(self._epoch_file.peek(), self._epoch_file)
        except OSError as error:
            raise self._unavailable(error) from None

    # --- failures -----------------------------------------------------------------------------------------------

    def _note(self, error: OSError) -> None:
        """Log an error of one entry, unless that is gone."""
        if error.errno not in GONE_ERRORS:
            self._limited_log.log(
                logging.WARNING, "entry", "tier %s: entry left out: %s: %s", self._name, error.filename, text_of(error)
            )

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        if isinstance(error, FolderMoved):
            # Other engines may still reach what was opened.
            self._limit.close()
        return StoreUnavailable(text_of(error), is_transient=False, needs_probe=isinstance(error, FolderMoved))

    def _probe_folder(self) -> None:
        """Raise `OSError` if no block can be written now."""
        self._folder.probe(self._largest_bytes, self._place_of(self._epoch.latest))

    def _check_writable(self) -> None:
        """Note whether blocks can be written; otherwise those that are there are loaded all the same."""
        earlier, path = self._problem, self._folder.path
        try:
            self._probe_folder()
            self._problem, self._has_space = None, True
        except OSError as error:
            self._problem, self._has_space = text_of(error), not is_no_space(error)
            if earlier is None:
                self._limited_log.log(logging.ERROR, "full", "tier %s: %s: %s", self._name, path, self._problem)
        if earlier is not None and self._problem is None:
            _log.warning("tier %s: %s serves again", self._name, path)


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
        return self._epoch.latest.name


class PrivateFileStore(FileStore):
    """A store in a folder that one process uses, which can also reset by match."""

    def drop_matching(self, match: RequestFilter, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `FilteringStore`."""
        count = num_bytes = 0
        epoch = self._read_epoch()
        changed: set[str] = set()
        try:
            try:
                for path, status in self._folder.scan(f"{self._home}/{epoch.name.decode()}", stop, _raise):
                    if self._is_meant(path, match) and self._folder.delete(path):
                        size = self._folder.size_on_disk(status.st_size)
                        self._limit.remove(epoch, size)
                        changed.add(path.rpartition("/")[0])
                        count, num_bytes = count + 1, num_bytes + size
            finally:
                # Also when interrupted: a reset that is repeated does not find these files.
                self._folder.sync(changed)
        except OSError as error:
            # Blocks in entries that cannot be read or deleted could come back.
            _log.warning("tier %s: a reset by match drops every block: %s", self._name, text_of(error))
            left, left_bytes = self.reset(stop)
            return count + left, num_bytes + left_bytes
        return count, num_bytes

    def _is_meant(self, path: str, match: RequestFilter) -> bool:
        """Return whether a file was stored by a matching request, or has no readable origin."""
        try:
            with self._folder.open(path) as fd:
                origin = read_origin(fd)
        except FileNotFoundError:
            return False
        except (BadBlock, OSError):
            return True
        return origin is None or match.matches(origin)


def _raise(error: OSError) -> None:
    raise error
