"""Epoch of a folder, or of a namespace in it: files that are numbered in the order in which epochs began.

    epochs/<8 hex digits>    one epoch

An engine begins an epoch by linking a complete, flushed file to the next number, which fails if another engine was
first. A file is never changed. Files before an epoch are deleted, oldest first, once the epoch is there.

To find out whether the epoch has changed, an engine looks for the number after the last one that it knows, and for
that one: if only the latter exists, none has begun. Both are looked up in the folder as it was just opened by its
path, upon which NFS reads the folder's attributes from the server ("close-to-open") and drops what it knew of its
entries if they have changed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.fs.folder import GONE_ERRORS, Folder, FolderMoved
from kvferry.app.tiers.shared_epoch import Epoch

_MAX_ATTEMPTS = 100
_MAX_DIGITS = 15
_LAST = 16**_MAX_DIGITS - 1
"""The last number of a listing, which only another program reaches. Its file stays, since later ones follow it."""


class _Mark(NamedTuple):
    """Identity of a file that is never changed."""

    inode: int
    num_bytes: int
    changed_ns: int


class _Found(NamedTuple):
    """An epoch, the number of the last file in its row, and the identity of that."""

    epoch: Epoch
    number: int
    mark: _Mark | None


class EpochFiles:
    """The epoch of the blocks below one place. Thread-safe. All methods may block, and raise `OSError`."""

    def __init__(self, folder: Folder, place: str, on_lost: Callable[[str], None], known: Epoch) -> None:
        """`place` is the folder of all epochs; `known` is the `lasting` epoch of an earlier folder, if any.

        `on_lost` is called with the reason for an epoch that begins without a reset.
        """
        self._folder = folder
        self._path = f"{place}/epochs"
        self._whole_path = str(folder.path / self._path)
        self._on_lost = on_lost
        self._changing = threading.Lock()
        self._epoch = known
        self.lasting = known
        """Epoch that a folder in the place of this one must not fall behind: not one that began in an empty folder."""
        self._was_empty = False
        self._number = 0
        self._mark: _Mark | None = None
        """Identity of the file of this number, the last one; None if the epoch was never read."""

    @property
    def known(self) -> Epoch:
        """The epoch that was read last."""
        return self._epoch

    def read(self) -> Epoch:
        """Return the epoch at some time after the call began. Begins one if there is none, or if it was lost."""
        with self._changing:
            if not self._is_current():
                self._follow()
            return self._epoch

    def begin(self) -> Epoch:
        """Begin a new epoch, durably, and return it."""
        with self._changing:
            for _ in range(_MAX_ATTEMPTS):
                self._follow()
                first = self._number + 1
                if not self._append(first, self._epoch.next()):
                    continue
                self._follow()
                # Otherwise it is not the last one, as while others begin epochs, or after numbers of another program.
                if self._number >= first:
                    self._delete_before(first)
                    return self._epoch
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _is_current(self) -> bool:
        """Return whether nothing has changed since the epoch was read. Requires: `_changing` held."""
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
        """Read the epoch; begin one if there is none, or if it was lost. Requires: `_changing` held."""
        if not self._folder.is_in_place():
            raise FolderMoved
        self._folder.make(self._path)
        for _ in range(_MAX_ATTEMPTS):
            latest = self._read_latest()
            epoch, known = latest.epoch, self._epoch
            reason = epoch.find_loss(known, "the folder")
            if reason is None:
                self._epoch, self._number, self._mark = latest
                if not self._was_empty:
                    self.lasting = epoch
                return
            self._was_empty |= self._mark is None and not epoch.number
            number = max(latest.number, self._number) + 1
            if number > _LAST and not latest.number:
                # The file that it would follow is gone.
                number = 1
            # If another engine appends first, its epoch is read.
            if self._append(number, known.next()) and known.name:
                self._on_lost(reason)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _read_latest(self) -> _Found:
        """Return the latest epoch, with the last file of its row: files of consecutive numbers."""
        best = _Found(Epoch(), 0, None)
        end = 0
        for first in self._list_numbers():
            if first < end:
                continue
            end, latest, mark = first, Epoch(), None
            # Listings are not atomic, so that the next number is looked for until it is missing.
            while (epoch_file := self._read(end)) is not None:
                epoch, mark = epoch_file
                latest = epoch if epoch.number else latest
                end += 1
            if latest.number:
                best = _Found(latest, end - 1, mark)
        # Without any epoch, one can begin behind all files.
        return best if best.epoch.number else _Found(Epoch(), max(end - 1, 0), None)

    def _read(self, number: int) -> tuple[Epoch, _Mark] | None:
        """Return the epoch of a number, and the identity of its file; None if there is none."""
        path = self._path_of(number)
        try:
            content, status = self._folder.read_small(path)
        except (BadBlock, IsADirectoryError):
            odd = self._folder.status(path)
            return None if odd is None else (Epoch(), _mark(odd))
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return None
            raise
        return Epoch(content), _mark(status)

    def _append(self, number: int, epoch: Epoch) -> bool:
        """Write the file of a number; return False if another engine was first."""
        try:
            self._folder.write(self._path_of(number), [epoch.name], is_final=True)
        except FileExistsError:
            return False
        return True

    def _delete_before(self, first: int) -> None:
        """Delete the files before a number, up to one that cannot be deleted, such as a folder.

        Those behind it show engines that know this one that its epoch has ended.
        """
        with suppress(OSError):
            for number in self._list_numbers():
                if number < min(first, _LAST):
                    self._folder.delete(self._path_of(number))

    def _list_numbers(self) -> list[int]:
        """Return all numbers in ascending order."""
        fd = self._folder.open_folder(self._path)
        try:
            names = os.listdir(fd)
        finally:
            os.close(fd)
        names = [name for name in names if 8 <= len(name) <= _MAX_DIGITS]
        return sorted(int(name, 16) for name in names if not name.strip("0123456789abcdef"))

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
