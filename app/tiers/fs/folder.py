"""Folder of a file system tier: its layout, its locks, and all disk access.

    lock                                          held while processes use the folder: one, or any number that share it
    tmp/                                          files that are being written
    blocks/<epoch>/<namespace>/<3 hex digits of the key>/<hex of the key>     of a folder that one process uses
    shared/<namespace>/<epoch>/<3 hex digits of the key>/<hex of the key>     of one that engines share
    blocks/epoch, shared/<namespace>/epoch        see `EpochFile`
    blocks/ and shared/: keeper, size             see `FolderLimit`

Everything is accessed relative to the folder as it was opened, not by path: when it is moved, deleted or covered by a
mount, nothing is written elsewhere. Files are not flushed to the medium; checksums find what a power cut damaged.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.app.tiers.fs.format import write_pieces
from kvferry.core.keys import Key

_SHARD_DIGITS = 3
# Without O_NONBLOCK, opening a named pipe in the place of a file would hang.
_ANY_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
LOCK_FILE = "lock"
_FOLDERS = {False: ("tmp", "blocks"), True: ("tmp", "shared")}
"""Folders in which files are deleted, by whether the folder is shared."""
DEFAULT_PAGE_BYTES = 4096
"""For file systems that do not report the size of their pages."""
_PER_FILE_BYTES = 512
"""Estimate for the inode and the directory entry of a file."""
_SAME_USE_S = 10.0
GONE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of an entry that another process has removed."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OTHER_KIND = (errno.ENOTDIR, errno.EISDIR)
T = TypeVar("T")


def is_no_space(error: OSError) -> bool:
    """Return whether the disk is full."""
    return error.errno in _NO_SPACE


def text_of(error: OSError) -> str:
    """Return what operators read of an error."""
    text = error.strerror or str(error)
    entry = error.filename if error.filename2 is None else error.filename2
    if error.errno in _OTHER_KIND and entry is not None:
        text += f": {os.fsdecode(entry)}; remove what is in its place"
    return text


class FolderInUse(OSError):
    """Another process has the folder open."""

    def __init__(self) -> None:
        super().__init__(errno.EWOULDBLOCK, "another process uses it")


class FolderMoved(OSError):
    """The path does not lead to the folder that was opened."""

    def __init__(self) -> None:
        super().__init__(
            errno.ESTALE,
            "the folder was moved, deleted or unmounted; bring it back, or detach the tier and attach it again",
        )


class ForeignFolder(OSError):
    """The folder has contents that another program may have made."""


class Folder:
    """An open folder. All methods may block on the disk, and raise `OSError`."""

    def __init__(self, path: Path, *, is_shared: bool = False) -> None:
        """Create and lock it, for this process alone or with others that share it.

        Raises `FolderInUse` if a process has it open that does not share it, or for that this one does not. Refuses one
        that has folders of these names and was not made by kvferry.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.is_shared = is_shared
        self.root = _FOLDERS[is_shared][1]
        """Folder of the blocks."""
        check_is_own(path, is_shared=is_shared)
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock: int | None = None
        self._session = f"{os.getpid():x}-{secrets.token_hex(8)}"
        """Name of this opening of the folder, different from all others."""
        self._numbers = itertools.count()
        self._page_bytes = os.fstatvfs(self._root).f_frsize or DEFAULT_PAGE_BYTES
        try:
            self._lock = self.lock(LOCK_FILE, is_shared=is_shared)
            for folder in _FOLDERS[is_shared]:
                self.make(folder)
        except OSError:
            self.close()
            raise

    def lock(self, path: str, *, is_shared: bool) -> int:
        """Create and lock a file, without waiting, until the result is closed. Raises `FolderInUse`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _ANY_FILE, 0o600, dir_fd=self._root)
        try:
            _lock(fd, is_shared=is_shared)
        except OSError:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Close everything. No other call runs or follows."""
        if self._lock is not None:
            os.close(self._lock)
        os.close(self._root)

    def check(self) -> None:
        """Raise `FolderMoved` if the path does not lead to the folder that was opened."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._root)
        except OSError as error:
            # With ESTALE the folder that was opened has gone from an NFS server, whatever the path leads to now.
            if error.errno not in GONE_ERRORS:
                raise
            raise FolderMoved from None
        if not os.path.samestat(there, ours):
            raise FolderMoved

    def keep_lock(self) -> None:
        """Make the lock file again if it was deleted: without it the next start would refuse the folder."""
        if self.status(LOCK_FILE) is None and self._lock is not None:
            earlier, self._lock = self._lock, self.lock(LOCK_FILE, is_shared=self.is_shared)
            os.close(earlier)

    def free_bytes(self) -> int:
        """Return the bytes that are free on the disk."""
        space = os.fstatvfs(self._root)
        return space.f_bavail * space.f_frsize

    def size_on_disk(self, num_bytes: int) -> int:
        """Return the bytes that a file of this length takes on the disk."""
        return size_on_disk(num_bytes, self._page_bytes)

    # --- files --------------------------------------------------------------------------------------------------

    def write(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file under a temporary name and rename it, so that it exists completely or not at all."""
        temporary, fd = self._create()
        try:
            try:
                write_pieces(fd, pieces)
                # Starts the write-back, so that the pages can soon be reclaimed.
                _forget_pages(fd)
            finally:
                os.close(fd)
            self._with_parents(path, lambda: os.rename(temporary, path, src_dir_fd=self._root, dst_dir_fd=self._root))
        except BaseException:
            self.delete(temporary)
            raise

    def probe(self, num_bytes: int, place: str) -> None:
        """Raise `OSError` if a block of this length cannot be written to a folder now, which is made."""
        self.make(place)
        if not os.access(place, os.W_OK | os.X_OK, dir_fd=self._root, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        temporary, fd = self._create()
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            os.pwrite(fd, b"kvferry", 0)
        finally:
            os.close(fd)
            self.delete(temporary)

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """Open a file for reading. Raises `FileNotFoundError`, and `BadBlock` for anything but a plain file."""
        try:
            fd = os.open(path, os.O_RDONLY | _ANY_FILE, dir_fd=self._root)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BadBlock("it is no plain file") from error
            raise
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def open_to_change(self, path: str) -> Iterator[int]:
        """Open a file for reading and writing in its place, and create it if it does not exist."""
        flags = os.O_RDWR | os.O_CREAT | _ANY_FILE
        fd = self._with_parents(path, lambda: os.open(path, flags, 0o600, dir_fd=self._root))
        try:
            yield fd
        finally:
            os.close(fd)

    def note_read(self, fd: int, used_s: float) -> None:
        """Record the use of a file, and drop it from the page cache: its block is in the pool now.

        `used_s` is when it was used last, on the clock of the file system.
        """
        _forget_pages(fd)
        # Only the order of eviction depends on it, so that the time of day is good enough.
        if abs(time.time() - used_s) > _SAME_USE_S:
            with suppress(OSError):
                os.utime(fd)

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of a file; None if it does not exist."""
        try:
            return os.stat(path, dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return None
            raise

    def has_file(self, path: str) -> bool:
        """Return whether there is a plain file at a path."""
        status = self.status(path)
        return status is not None and stat.S_ISREG(status.st_mode)

    def touch(self, path: str) -> None:
        """Record the use of a file, if it exists and its times can be changed."""
        with suppress(OSError):
            os.utime(path, dir_fd=self._root, follow_symlinks=False)

    def delete(self, path: str) -> bool:
        """Delete a file; return whether it existed."""
        try:
            os.unlink(path, dir_fd=self._root)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def sync(self, folders: Iterable[str]) -> None:
        """Make changes of the entries of these folders durable."""
        for folder in sorted(set(folders)):
            with suppress(FileNotFoundError, NotADirectoryError):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def make(self, path: str) -> None:
        """Create a folder and those above it, as far as they do not exist."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            with suppress(FileExistsError):
                os.mkdir("/".join(parts[:count]), 0o700, dir_fd=self._root)

    # --- all of it ----------------------------------------------------------------------------------------------

    def sweep(self, age_s: float = -1.0) -> int:
        """Delete temporary files older than this, or all of them, and return their number."""
        count = 0
        for name in self.names("tmp"):
            status = self.status(f"tmp/{name}")
            if status is not None and (age_s < 0 or time.time() - status.st_mtime > age_s):
                with suppress(OSError):
                    count += self.delete(f"tmp/{name}")
        return count

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return []
            raise
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def scan(
        self, place: str, stop: Callable[[], bool], on_error: Callable[[OSError], object]
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the paths of all blocks below a folder. `on_error` is called where one cannot be read.

        Raises `Interrupted`.
        """
        if self.status(place) is None:
            return
        for folder, _, names, fd in os.fwalk(place, onerror=on_error, dir_fd=self._root):
            interrupt_if(stop)
            shard = folder.rpartition("/")[2]
            for name in filter(lambda name: _is_block(name, shard), names):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    on_error(error)
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield f"{folder}/{name}", status

    def remove(self, place: str, stop: Callable[[], bool]) -> None:
        """Delete a folder with everything below it, as far as possible. Raises `Interrupted`."""
        with suppress(FileNotFoundError):
            for folder, _, names, fd in os.fwalk(place, topdown=False, dir_fd=self._root):
                interrupt_if(stop)
                for name in names:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=fd)
                # Other engines that share the folder may delete the same, or still write to it.
                with suppress(OSError):
                    os.rmdir(folder, dir_fd=self._root)

    # --- inside -------------------------------------------------------------------------------------------------

    def _create(self) -> tuple[str, int]:
        """Create a temporary file."""
        path = f"tmp/{self._session}-{next(self._numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return path, self._with_parents(path, lambda: os.open(path, flags, 0o600, dir_fd=self._root))

    def _with_parents(self, path: str, action: Callable[[], T]) -> T:
        """Do something with a path, again once its folder was made if that did not exist."""
        try:
            return action()
        except FileNotFoundError:
            self.make(path.rpartition("/")[0])
            return action()


def _forget_pages(fd: int) -> None:
    """Have the page cache drop a file, whose block is in the pool. Only advice, which a file system may refuse."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def size_on_disk(num_bytes: int, page_bytes: int) -> int:
    """Return the bytes that a file of this length takes on a disk with pages of this size."""
    return -(-num_bytes // page_bytes) * page_bytes + _PER_FILE_BYTES


def check_not_in_use(path: Path, *, is_shared: bool = False) -> None:
    """Raise `FolderInUse` if another process has the folder open in another way; change nothing."""
    with suppress(FileNotFoundError):
        fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(fd, is_shared=is_shared)
        finally:
            os.close(fd)


def check_is_own(path: Path, *, is_shared: bool) -> None:
    """Raise `OSError` for a folder whose contents another program made: opening it would delete some; change nothing.

    The lock file is created before all folders.
    """
    folders = [name for name in _FOLDERS[is_shared] if os.path.lexists(path / name)]
    if folders and not (path / LOCK_FILE).is_file():
        raise ForeignFolder(
            f"it has {folders[0]}, but not the file lock with which kvferry marks its folders; name another folder, or "
            f"if kvferry made this one create an empty file {path / LOCK_FILE}"
        )


def _lock(fd: int, *, is_shared: bool) -> None:
    """Lock an open file. Raises `FolderInUse`."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EWOULDBLOCK):
            raise FolderInUse from error
        raise


def path_of(place: str, key: Key) -> str:
    """Return the path of a block below the folder of a place."""
    digits = key.hex()
    return f"{place}/{digits[:_SHARD_DIGITS]}/{digits}"


def _is_block(name: str, shard: str) -> bool:
    """Return whether an entry of the folder `shard` has the name of a block: lower-case hex of whole bytes."""
    is_there = len(shard) == _SHARD_DIGITS and name.startswith(shard)
    return is_there and not len(name) % 2 and not name.strip("0123456789abcdef")
