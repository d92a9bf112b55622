"""Block store in a folder that several engines use at once, on a local disk or a network file system.

    shared/<namespace>/state/                                        see `StateFiles`
    shared/<namespace>/<epoch>/<3 hex digits>/<hex of the key>       one block, in the format of `shared_block`
    shared/lease, shared/size, shared/engines/                       see `SharedLimit`

There is no index: keys are looked up in the folder, and any file may vanish at any time, which is a miss. A file is
renamed into place once it is complete, so that concurrent stores of a key leave one of their files, which are equal.
Every call that finds or loads blocks reads the state after its last access to one, and discards its results if the
epoch has changed: no block of an earlier epoch is served, and one that was stored under such an epoch is never found.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import BadBlock, namespace_of, pack_origin, unpack_origin
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable, interrupt_if
from kvferry.app.tiers.dropped_keys import DroppedKeys
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
from kvferry.app.tiers.fs.format import read_block, read_head, read_part, write_pieces
from kvferry.app.tiers.fs.shared_limit import SharedLimit
from kvferry.app.tiers.fs.state_files import StateFiles
from kvferry.app.tiers.shared_block import HEAD_BYTES, OVERHEAD_BYTES, pack, verify_pieces
from kvferry.app.tiers.shared_block import read_head as parse_head
from kvferry.app.tiers.shared_state import SharedState, pack_filter, sharing_problems
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierContext, TierCounts

_log = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BLOCKS = 32
_DELETED_PER_STEP = 100
_WRITE_ATTEMPTS = 4
_MOVED = "the folder was moved, deleted or unmounted"


class SharedFileStore:
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    def __init__(self, folder: Folder, max_bytes: int, context: TierContext) -> None:
        """Blocks of up to `context.slot_bytes` in a folder that was opened to be shared. Raises `OSError`."""
        self.batch_blocks = max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // context.slot_bytes))
        self._name = context.name
        self._path = folder.path
        self._namespace = namespace_of(context.fingerprint)
        self._place = f"shared/{self._namespace.hex()}"
        self._sharing_problems = sharing_problems(context.fingerprint)
        self._largest_bytes = context.slot_bytes + OVERHEAD_BYTES
        self._max_bytes = max_bytes
        self._failure: str | None = None
        """Why nothing is stored or found."""
        self._problem: str | None = None
        """Why nothing is stored."""
        self._dropped = DroppedKeys()
        self._resetting: tuple[RequestFilter, SharedState] | None = None
        """A reset by match that is in the folder, and the state with it; its blocks are being removed."""
        self._seldom = RateLimitedLogger(_log)
        self._has_changed = False
        """Whether this engine has reset or dropped blocks."""
        self._use(folder, self._states_in(folder, SharedState()))
        try:
            folder.probe(self._largest_bytes, self._place)
        except OSError as error:
            if not is_no_space(error):
                raise
            self._problem = diagnose(error).text
        self._states.read()

    def _states_in(self, folder: Folder, earlier: SharedState) -> StateFiles:
        return StateFiles(folder, self._place, self._on_lost, earlier)

    def _use(self, folder: Folder, states: StateFiles) -> None:
        self._folder = folder
        self._states = states
        self._limit = SharedLimit(self._name, folder, self._max_bytes, self._largest_bytes, self._skip)

    # --- what answers at once -----------------------------------------------------------------------------------

    def find_in_memory(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""

    def is_writable(self) -> bool:
        """See `BlockStore`."""
        return self._problem is None and self._failure is None and self._limit.is_known

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`. Other engines find the blocks until `maintain` has deleted them."""
        self._has_changed = True
        self._dropped.add(keys)

    def is_dropping(self, keys: Sequence[Key]) -> bool:
        """See `BlockStore`."""
        return self._dropped.has_any(keys)

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
        blocks, num_bytes = self._limit.size_of(self._place_of(self._states.known))
        return TierCounts(blocks, num_bytes, self._max_bytes, evicted=self._limit.evicted)

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._states.known.epoch

    # --- what may take its time ---------------------------------------------------------------------------------

    def probe(self) -> None:
        """See `BlockStore`."""
        self._check_folder()
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        self._read_state()

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        begun = self._states.known
        found = [
            key not in self._dropped and self._exists(path)
            for key, path in zip(keys, self._paths(begun, keys), strict=True)
        ]
        return found if self._read_state().epoch == begun.epoch else [False] * len(keys)

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads the state before it writes, and not again: a reset by match that comes later concerns what is written with
        the number of this state, and a block that is written under an epoch that has ended is never found.
        """
        with self._dropped.storing(keys):
            state = self._read_state()
            outcomes = [self._put(state, *block) for block in zip(keys, data, origins, strict=True)]
            return [Outcome.DROPPED if key in self._dropped else one for key, one in zip(keys, outcomes, strict=True)]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`. Deletes files that do not verify, or that a reset by match concerns."""
        begun = self._states.known
        paths = self._paths(begun, keys)
        read = [self._get(begun, *block) for block in zip(keys, paths, into, strict=True)]
        state = self._read_state()
        if state.epoch != begun.epoch:
            return [MISS] * len(keys)
        results: list[BlockResult] = []
        for path, (result, num_resets) in zip(paths, read, strict=True):
            is_reset = result.outcome is Outcome.LOADED and state.is_reset(num_resets, result.origin)
            if is_reset or result.outcome is Outcome.CORRUPT:
                self._delete(begun, path)
            results.append(MISS if is_reset else result)
        return results

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Once it is in the folder, a reset holds for all engines."""
        self._has_changed = True
        try:
            if match is not None and (self._resetting is None or self._resetting[0] != match):
                self._resetting = self._record_reset(match)
            if match is None or self._resetting is None:
                return self._reset_all(stop)
            dropped = self._delete_reset(self._resetting[1], stop)
            self._resetting = None
            return dropped
        except OSError as error:
            raise self._unavailable(error) from None

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._check_folder()
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        try:
            with ExitStack() as remaining:
                for keys in self._dropped.removals(_DELETED_PER_STEP):
                    # Read after the drop: blocks of a later epoch were stored after it.
                    state = self._states.read()
                    paths = self._paths(state, keys)
                    failed = [key for key, path in zip(keys, paths, strict=True) if self._delete(state, path) is None]
                    remaining.enter_context(self._dropped.storing(failed))
                    self._folder.sync_shards(paths)
                    interrupt_if(stop)
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

    def _put(self, state: SharedState, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        place = self._place_of(state)
        path = path_of(place, key)
        if key in self._dropped:
            return Outcome.DROPPED
        num_bytes = HEAD_BYTES + len(data) + len(pack_origin(origin))
        try:
            if self._folder.status(path) is not None:
                if not (state.filters and self._is_reset(path, state)):
                    self._folder.touch(path)
                    return Outcome.PRESENT
                self._delete(state, path)
            if not self._limit.reserve(num_bytes):
                return Outcome.DROPPED
            try:
                pieces = pack(self._seed(state), key, data, origin, len(state.filters))
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

    def _get(self, state: SharedState, key: Key, path: str, into: memoryview) -> tuple[BlockResult, int]:
        """Read a block; return the result, and of a loaded one the number of resets by match before its store."""
        if key in self._dropped:
            return MISS, 0
        try:
            fd = self._folder.open(path)
            try:
                read = read_block(fd, HEAD_BYTES, into)
                num_resets, origin = verify_pieces(self._seed(state), key, read.head, into, read.packed)
                self._folder.note_read(fd, read.used_s)
            finally:
                os.close(fd)
        except BadBlock as error:
            self._seldom.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT), 0
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return MISS, 0
            self._note(path, error)
            return BlockResult(Outcome.FAILED), 0
        return BlockResult(Outcome.LOADED, origin, into), num_resets

    def _delete(self, state: SharedState, path: str) -> int | None:
        """Delete a block if it exists, and return the bytes that it took on the disk; None if that failed."""
        try:
            status = self._folder.status(path)
            if status is None or not self._folder.delete(path):
                return 0
        except OSError as error:
            self._note(path, error)
            return None
        num_bytes = self._folder.size_on_disk(status.st_size)
        self._limit.count(self._place_of(state), -1, -num_bytes)
        return num_bytes

    def _record_reset(self, match: RequestFilter) -> tuple[RequestFilter, SharedState] | None:
        """Append a filter to the state; return it and the state with it, or None if all blocks have to be dropped."""
        try:
            state = self._states.append_filter(pack_filter(match))
        except OSError as error:
            if not is_no_space(error):
                raise
            state = None
        if state is None:
            _log.warning("tier %s: a reset by match drops all blocks: no room for its filter", self._name)
            return None
        return match, state

    def _reset_all(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """Begin a new epoch; return the blocks and bytes of the old one, as far as they are known."""
        self._resetting = None
        place = self._place_of(self._states.known)
        dropped = self._limit.size_of(place)
        try:
            self._states.begin_epoch()
        except OSError as error:
            if not is_no_space(error):
                raise
            # A full disk has no room for the epoch before some blocks are deleted.
            self._empty(place, stop)
            self._states.begin_epoch()
        return dropped

    def _empty(self, place: str, stop: Callable[[], bool]) -> None:
        for num_bytes in self._folder.empty(place, stop, self._skip):
            self._limit.count(place, -1, -num_bytes)

    def _delete_reset(self, state: SharedState, stop: Callable[[], bool]) -> tuple[int, int]:
        """Delete the blocks that resets by match of a state concern; return their number and bytes."""
        count = num_bytes = 0
        for shard, files in self._folder.scan_place(self._place_of(state), stop, self._skip):
            for file, _ in files:
                path = f"{shard}/{file}"
                if self._is_reset(path, state):
                    freed_bytes = self._delete(state, path) or 0
                    count += freed_bytes > 0
                    num_bytes += freed_bytes
        return count, num_bytes

    def _is_reset(self, path: str, state: SharedState) -> bool:
        """Return whether a reset by match of a state concerns a block, or the block cannot be read."""
        try:
            fd = self._folder.open(path)
            try:
                number, start, origin_bytes = parse_head(*read_head(fd, HEAD_BYTES))
                origin = unpack_origin(read_part(fd, start, origin_bytes))
            finally:
                os.close(fd)
        except BadBlock:
            return True
        except OSError as error:
            if error.errno not in GONE_ERRORS and is_of_whole(error):
                raise
            return error.errno not in GONE_ERRORS
        # One with a higher number was stored under a later state.
        return number < len(state.filters) and state.is_reset(number, origin)

    def _delete_old_epochs(self, stop: Callable[[], bool]) -> None:
        """Delete blocks of earlier epochs."""
        epochs = [name for name, _ in self._folder.list(self._place, self._skip) if _is_epoch(name)]
        # The state is read after the names: all that are of another epoch are of an earlier one.
        current = self._states.read().epoch.decode()
        for epoch in epochs:
            if epoch != current:
                place = f"{self._place}/{epoch}"
                self._empty(place, stop)
                self._folder.remove_folder(place)

    # --- inside -------------------------------------------------------------------------------------------------

    def _place_of(self, state: SharedState) -> str:
        return f"{self._place}/{state.epoch.decode()}"

    def _paths(self, state: SharedState, keys: Sequence[Key]) -> list[str]:
        place = self._place_of(state)
        return [path_of(place, key) for key in keys]

    def _seed(self, state: SharedState) -> bytes:
        return self._namespace + state.epoch

    def _read_state(self) -> SharedState:
        """Return the state in the folder. Raises `StoreUnavailable`."""
        if self._failure is not None:
            raise StoreUnavailable(self._failure, is_transient=False)
        try:
            return self._states.read()
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
        """Open the folder that replaced the opened one. Earlier states are remembered, since it may be the same."""
        folder = Folder(self._path, is_shared=True)
        try:
            states = self._states_in(folder, self._states.lasting)
            if self._has_changed and states.read().epoch != self._states.known.epoch:
                # What was reset or dropped in another folder may be in this one.
                states.begin_epoch()
        except BaseException:
            folder.close()
            raise
        old = self._folder
        self._use(folder, states)
        old.unlock()


def _is_epoch(name: str) -> bool:
    return "-" in name and SharedState((name.encode(errors="replace"),)).number > 0
