"""State of a namespace in a shared folder: a list of items, each a file that is named by its place in the list.

    shared/<namespace>/state/<8 hex digits>   one item of a `SharedState`: an epoch, or a filter of the epoch before it

An engine appends an item by linking a complete, flushed file to the next number, which fails if another engine was
first. A file is never changed. Files before an epoch are deleted, oldest first, once the epoch is there.

To find out whether the state has changed, an engine looks for the number after the last one that it knows, and for
that one: if only the latter exists, nothing was appended. Both are looked up in the folder as it was just opened by its
path, upon which NFS reads the folder's attributes from the server ("close-to-open") and drops what it knew of its
entries if they have changed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.fs.folder import GONE_ERRORS, Folder
from kvferry.app.tiers.shared_state import MAX_RESETS_BY_MATCH, SharedState

_MAX_ATTEMPTS = 100
_UNREADABLE = b""
"""Item of a file that cannot be read: no epoch, and as a filter it matches everything."""


class _Mark(NamedTuple):
    """Identity of a file that is never changed."""

    inode: int
    num_bytes: int
    changed_ns: int


class _Found(NamedTuple):
    """A state, the number of its last file, and the identity of that."""

    state: SharedState
    number: int
    mark: _Mark | None


class StateFiles:
    """The state of one namespace. Thread-safe. All methods may block, and raise `OSError`."""

    def __init__(self, folder: Folder, place: str, on_lost: Callable[[str], None], known: SharedState) -> None:
        """`place` is the folder of the namespace; `known` is the `lasting` state of an earlier folder, if any.

        `on_lost` is called with the reason for an epoch that begins without a reset.
        """
        self._folder = folder
        self._path = f"{place}/state"
        self._whole_path = str(folder.path / self._path)
        self._on_lost = on_lost
        self._changing = threading.Lock()
        self._state = known
        self.lasting = known
        """State that a folder in the place of this one must not fall behind: not an epoch begun in an empty folder."""
        self._was_empty = False
        self._number = 0
        self._mark: _Mark | None = None
        """Identity of the file of this number, the last one; None if the state was never read."""

    @property
    def known(self) -> SharedState:
        """The state that was read last."""
        return self._state

    def read(self) -> SharedState:
        """Return the state at some time after the call began. Begins an epoch if there is none, or if it was lost."""
        with self._changing:
            if not self._is_current():
                self._follow()
            return self._state

    def begin_epoch(self) -> SharedState:
        """Append a new epoch, durably, and return the state with it."""
        with self._changing:
            self._follow()
            while not self._append(self._number + 1, self._state.next_epoch().epoch):
                self._follow()
            first = self._number + 1
            self._follow()
            self._check_listed(first)
            for number in self._list_numbers():
                if number < first:
                    self._folder.delete(self._path_of(number))
            return self._state

    def append_filter(self, packed: bytes) -> SharedState | None:
        """Append a filter, durably, and return the state with it; None if the epoch has too many filters."""
        with self._changing:
            self._follow()
            while len(self._state.filters) < MAX_RESETS_BY_MATCH:
                number = self._number + 1
                is_appended = self._append(number, packed)
                self._follow()
                if is_appended:
                    self._check_listed(number)
                    return self._state
            return None

    def _check_listed(self, number: int) -> None:
        """Raise `OSError` if an item is not in the list, as after numbers that another program chose."""
        if self._number < number:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _is_current(self) -> bool:
        """Return whether nothing has changed since the state was read. Requires: `_changing` held."""
        if self._mark is None:
            return False
        try:
            # By its whole path: the folder that was opened may have been moved, and another put in its place.
            fd = os.open(self._whole_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return False
            raise
        try:
            # In this order, since files are deleted from the oldest on.
            is_last = _mark_of(fd, _name_of(self._number + 1)) is None
            return is_last and _mark_of(fd, _name_of(self._number)) == self._mark
        finally:
            os.close(fd)

    def _follow(self) -> None:
        """Read the state; begin an epoch if it has none, or if it was lost. Requires: `_changing` held."""
        if not self._folder.is_in_place():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._folder.make(self._path)
        for _ in range(_MAX_ATTEMPTS):
            found = self._read_list()
            state, known = found.state, self._state
            reason = state.find_loss(known, "the folder")
            if reason is None:
                self._state, self._number, self._mark = found
                if not self._was_empty:
                    self.lasting = state
                return
            self._was_empty |= self._mark is None and not state.number
            newest = max(known, state, key=lambda one: one.number)
            # If another engine appends first, its item is read.
            if self._append(max(found.number, self._number) + 1, newest.next_epoch().epoch) and known.items:
                self._on_lost(reason)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _read_list(self) -> _Found:
        """Return the list with the latest epoch: items of consecutive numbers. Other files do not belong to it."""
        best = _Found(SharedState(), 0, None)
        end = 0
        for first in self._list_numbers():
            if first < end:
                continue
            end, items, mark = first, list[bytes](), None
            # Listings are not atomic, so that the next number is looked for until it is missing.
            while (found := self._read_item(end)) is not None:
                item, mark = found
                if SharedState((item,)).number:
                    items = [item]
                elif items:
                    items.append(item)
                end += 1
            state = SharedState.of(items)
            if state.number and state.number >= best.state.number:
                best = _Found(state, end - 1, mark)
        return best

    def _read_item(self, number: int) -> tuple[bytes, _Mark] | None:
        """Return the item of a number, and the identity of its file; None if there is none."""
        path = self._path_of(number)
        try:
            content, status = self._folder.read_small(path)
        except (BadBlock, IsADirectoryError):
            odd = self._folder.status(path)
            return None if odd is None else (_UNREADABLE, _mark(odd))
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return None
            raise
        return content, _mark(status)

    def _append(self, number: int, item: bytes) -> bool:
        """Write the file of a number; return False if another engine was first."""
        try:
            self._folder.write_once(self._path_of(number), item)
        except FileExistsError:
            return False
        return True

    def _list_numbers(self) -> list[int]:
        """Return all numbers in ascending order."""
        fd = self._folder.open_folder(self._path)
        try:
            names = os.listdir(fd)
        finally:
            os.close(fd)
        return sorted(int(name, 16) for name in names if 8 <= len(name) < 16 and not name.strip("0123456789abcdef"))

    def _path_of(self, number: int) -> str:
        return f"{self._path}/{_name_of(number)}"


def _name_of(number: int) -> str:
    return f"{number:08x}"


def _mark(status: os.stat_result) -> _Mark:
    return _Mark(status.st_ino, status.st_size, status.st_mtime_ns)


def _mark_of(fd: int, name: str) -> _Mark | None:
    try:
        return _mark(os.stat(name, dir_fd=fd, follow_symlinks=False))
    except OSError as error:
        if error.errno in GONE_ERRORS:
            return None
        raise
