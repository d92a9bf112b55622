"""Folder of a file system tier: its layout, its lock, all disk access, and the meaning of its errors.

    lock              held while processes use the folder: one process, or any number that share it
    tmp/              files that are being written; those that a dead process left are deleted
    blocks/           <namespace>/<3 hex digits of the key>/<hex of the key>, complete files only
    trash/            what resets dropped, while it is being deleted
    shared/           what engines that share the folder have instead of blocks/ and trash/, see `shared_store`

Everything is accessed relative to the folder as it was opened, not by path: when it is moved, deleted or covered by a
mount, nothing is written elsewhere. Files are not flushed to the medium; checksums find what a power cut damaged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.app.tiers.block_format import NAMESPACE_BYTES, BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.keys import Key

Name = bytes
"""Key of a block, and behind it the namespace."""

_SHARD_DIGITS = 3
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a named pipe in the place of a file would hang.
_OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOCK_FILE = "lock"
_FOLDERS = {False: ("tmp", "blocks", "trash"), True: ("tmp", "shared")}
"""Folders that are made, by whether the folder is shared. Others' files in them would be deleted."""
DEFAULT_PAGE_BYTES = 4096
"""For file systems that do not report the size of their pages."""
_PER_FILE_BYTES = 512
"""Estimate for the inode and the directory entry of a file."""
MAX_SMALL_BYTES = 1 << 20
"""Limit of the files that describe the folder."""
_SAME_USE_S = 10.0
GONE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of an entry that another process has removed."""

READABLE = (FailureCause.FULL, FailureCause.DENIED)
"""Causes with which existing files can be read."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OF_WHOLE = frozenset(
    (*_NO_SPACE, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
_CAUSES = dict.fromkeys((*_NO_SPACE, errno.EFBIG), FailureCause.FULL)
_CAUSES |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), FailureCause.DENIED)
_CAUSES |= dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV), FailureCause.GONE)


_OTHER_KIND = (errno.ENOTDIR, errno.EISDIR)


def is_no_space(error: OSError) -> bool:
    """Return whether deleting files may help."""
    return error.errno in _NO_SPACE


def is_of_whole(error: OSError) -> bool:
    """Return whether an error concerns the whole folder; others may concern only the entry where they occurred."""
    return error.errno in _OF_WHOLE


def diagnose(error: OSError) -> Failure:
    """Return the failure that an error of the whole folder means."""
    text = os.strerror(error.errno) if error.errno else str(error)
    entry = error.filename if error.filename2 is None else error.filename2
    if error.errno in _OTHER_KIND and entry is not None:
        text += f": {os.fsdecode(entry)}; remove what is in its place"
    return Failure(_CAUSES.get(error.errno or 0, FailureCause.BROKEN), text)


OnSkipped = Callable[[str, OSError], None]
"""Called with an entry that is skipped, and the reason."""


class FolderInUse(OSError):
    """Another process has the folder open."""


class ForeignFolder(OSError):
    """The folder has contents that another program may have made."""


class FoundFile(NamedTuple):
    """A file found in the folder. `used_s` is when it was written or read last.

    An entry that is not `is_plain` has the name of a block's file, and holds no block.
    """

    name: Name
    num_bytes: int
    used_s: float
    is_plain: bool


class Folder:
    """An open folder. All methods may block on the disk, and raise `OSError`."""

    def __init__(self, path: Path, *, is_shared: bool = False, is_read_only: bool = False) -> None:
        """Create and lock it, for this process alone or with others that share it; or change nothing, to read files.

        Raises `FolderInUse` if a process has it open that does not share it, or for that this one does not. Refuses one
        that has folders of these names and was not made by kvferry.
        """
        if not is_read_only:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        status = os.fstat(self._root)
        self.identity = status.st_dev, status.st_ino
        self._mount = _mount_of(path)
        # Not closed while a thread hangs in a call, which holds a reference to this object.
        self._closer = weakref.finalize(self, os.close, self._root)
        self._closer.atexit = False
        self.session = f"{os.getpid():x}-{os.urandom(8).hex()}"
        """Name of this opening of the folder, different from all others."""
        self._numbers = itertools.count()
        self._is_shared = is_shared
        self._lock: int | None = None
        self._locking = threading.Lock()
        """Held while the lock file is made again."""
        self._page_bytes = os.fstatvfs(self._root).f_frsize or DEFAULT_PAGE_BYTES
        if is_read_only:
            return
        check_is_own(path, is_shared=is_shared)
        self._lock = _lock(self._root, is_shared)
        try:
            for folder in _FOLDERS[is_shared]:
                self.make(folder)
        except OSError:
            self.unlock()
            raise

    def keep_lock(self) -> bool:
        """Make and lock the lock file again if it was deleted; return False, from then on, if another process did."""
        with self._locking:
            if self._lock is not None and not self._is_ours(self._lock):
                self.unlock()
                with suppress(FolderInUse):
                    self._lock = _lock(self._root, self._is_shared)
            return self._lock is not None

    def _is_ours(self, lock: int) -> bool:
        there = self.status(LOCK_FILE)
        ours = os.fstat(lock)
        return there is not None and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def unlock(self) -> None:
        """Release the lock, so that another process or object can open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Close everything. No other call runs or follows."""
        self.unlock()
        self._closer()

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the folder that was opened."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._root)
        except OSError as error:
            # With ESTALE the folder that was opened has gone from an NFS server, whatever the path leads to now.
            if error.errno not in GONE_ERRORS:
                raise
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def is_replaced(self) -> bool:
        """Return whether the path leads to a folder that may be opened in place of this one.

        None is created, and none below a mount point is used while its file system is unmounted: the disk below must
        not be filled, and a reset there would not hold when the file system is back.
        """
        return self.path.is_dir() and self._mount.is_mount()

    def free_bytes(self) -> int:
        """Return the bytes that are free on the disk."""
        space = os.fstatvfs(self._root)
        return space.f_bavail * space.f_frsize

    def size_on_disk(self, num_bytes: int) -> int:
        """Return the bytes that a file of this length takes on the disk."""
        return size_on_disk(num_bytes, self._page_bytes)

    # --- files --------------------------------------------------------------------------------------------------

    def write(self, path: str, write: Callable[[int], None]) -> None:
        """Write a file under a temporary name and rename it, so that it exists completely or not at all."""
        temporary = self._temporary()
        fd = self._create(temporary)
        try:
            try:
                write(fd)
                # Starts the write-back, so that the pages can soon be reclaimed.
                _forget_pages(fd)
            finally:
                os.close(fd)
            self._move_into_place(os.rename, temporary, path)
        except BaseException:
            self.delete(temporary)
            raise

    def write_once(self, path: str, content: bytes) -> None:
        """Write a file durably, completely or not at all. Raises `FileExistsError` if there is one."""
        temporary = self._temporary()
        fd = self._create(temporary)
        try:
            try:
                write_all(fd, content)
                os.fsync(fd)
            finally:
                os.close(fd)
            # Unlike a rename, a link fails if the name is taken, also on NFS.
            self._move_into_place(os.link, temporary, path)
        finally:
            self.delete(temporary)
        self._sync(path.rpartition("/")[0])

    def write_small(self, path: str, content: bytes) -> None:
        """Write a file that describes the folder, in place of an earlier one."""
        self.write(path, lambda fd: write_all(fd, content))

    def open(self, path: str) -> int:
        """Open a file for reading. Raises `FileNotFoundError`, and `BadBlock` for anything but a plain file."""
        try:
            return os.open(path, _OPEN_FILE, dir_fd=self._root)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BadBlock("it is no plain file") from error
            raise

    def note_read(self, fd: int, used_s: float) -> None:
        """Record the use of a file, and drop it from the page cache: its block is in the pool now.

        `used_s` is when it was used last, on the clock of the file system.
        """
        _forget_pages(fd)
        # Only the order of eviction depends on it, so that the time of day is good enough.
        if abs(time.time() - used_s) > _SAME_USE_S:
            with contextlib.suppress(OSError):
                os.utime(fd)

    def read_small(self, path: str) -> tuple[bytes, os.stat_result]:
        """Return up to `MAX_SMALL_BYTES` of a file, and its status."""
        fd = self.open(path)
        try:
            return os.read(fd, MAX_SMALL_BYTES), os.fstat(fd)
        finally:
            os.close(fd)

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of a file; None if it does not exist."""
        try:
            return os.stat(path, dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                return None
            raise

    def touch(self, path: str) -> None:
        """Record the use of a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, dir_fd=self._root, follow_symlinks=False)

    def delete(self, path: str) -> bool:
        """Delete a file; return whether it existed."""
        try:
            os.unlink(path, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def sync_shards(self, paths: Iterable[str]) -> None:
        """Make deletions of these files durable."""
        for shard in sorted({path.rpartition("/")[0] for path in paths}):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._sync(shard)

    def make(self, path: str) -> None:
        """Create a folder and those above it, as far as they do not exist."""
        try:
            self._make_one(path)
        except FileNotFoundError:
            parent = path.rpartition("/")[0]
            if not parent:
                raise
            self.make(parent)
            self._make_one(path)

    def open_folder(self, path: str) -> int:
        """Open a folder. On NFS this reads its attributes from the server, and so makes new entries visible."""
        return os.open(path, _OPEN_DIR, dir_fd=self._root)

    def probe(self, num_bytes: int, place: str) -> None:
        """Raise `OSError` if a block of this length cannot be written to a folder now, which is made."""
        self.make(place)
        if not os.access(place, os.W_OK | os.X_OK, dir_fd=self._root, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        path = self._temporary()
        fd = self._create(path)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            os.pwrite(fd, b"kvferry", 0)
        finally:
            os.close(fd)
            self.delete(path)

    # --- all of it ----------------------------------------------------------------------------------------------

    def sweep(self, skipped: OnSkipped, before_s: float = math.inf) -> int:
        """Delete temporary files written before some time on the file system's clock, and return their number."""
        count = 0
        for name, status in self.list("tmp", skipped):
            if status.st_mtime >= before_s:
                continue
            try:
                self.delete(f"tmp/{name}")
                count += 1
            except OSError as error:
                _skip(f"tmp/{name}", error, skipped)
        return count

    def scan(self, stop: Callable[[], bool], skipped: OnSkipped) -> Iterator[list[FoundFile]]:
        """Yield all files of blocks, one folder at a time. Raises `Interrupted`."""
        for namespace in self.list_namespaces("blocks", skipped):
            for _, files in self.scan_place(f"blocks/{namespace}", stop, skipped):
                yield [
                    FoundFile(
                        bytes.fromhex(file) + bytes.fromhex(namespace),
                        self.size_on_disk(status.st_size),
                        status.st_mtime,
                        stat.S_ISREG(status.st_mode),
                    )
                    for file, status in files
                ]

    def list_namespaces(self, path: str, skipped: OnSkipped) -> list[str]:
        """Return the folders of namespaces below a folder."""
        return [name for name, _ in self.list(path, skipped) if _is_hex(name, 2 * NAMESPACE_BYTES)]

    def scan_place(
        self, place: str, stop: Callable[[], bool], skipped: OnSkipped
    ) -> Iterator[tuple[str, list[tuple[str, os.stat_result]]]]:
        """Yield the folders below a place in which there are blocks, and the entries with names of blocks in each.

        Raises `Interrupted`.
        """
        for shard, _ in self.list(place, skipped):
            interrupt_if(stop)
            path = f"{place}/{shard}"
            yield path, [one for one in self.list(path, skipped) if _is_hex(one[0], None) and one[0].startswith(shard)]

    def discard_all(self) -> None:
        """Move all blocks to the trash, durably and in one step."""
        self.make("trash")
        try:
            os.rename("blocks", f"trash/{self.session}-{next(self._numbers)}", **self._here)
        except FileNotFoundError:
            # The folder was deleted from outside.
            pass
        # Before the reset is answered: a power cut must not bring the blocks back.
        os.fsync(self._root)
        self.make("blocks")

    def empty(self, path: str, stop: Callable[[], bool], skipped: OnSkipped) -> Iterator[int]:
        """Delete everything below a folder, and yield the bytes of each file deleted. Raises `Interrupted`."""
        for below, status in self._walk(path, skipped):
            interrupt_if(stop)
            try:
                if stat.S_ISDIR(status.st_mode):
                    os.rmdir(below, dir_fd=self._root)
                elif self.delete(below):
                    yield self.size_on_disk(status.st_size)
            except OSError as error:
                # Other engines that share the folder may delete the same, or still write to it.
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    _skip(below, error, skipped)

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(path, dir_fd=self._root)

    def list(self, path: str, skipped: OnSkipped) -> list[tuple[str, os.stat_result]]:
        """Return the entries of a folder; none if it does not exist or is no folder."""
        try:
            fd = os.open(path, _OPEN_DIR, dir_fd=self._root)
        except OSError as error:
            if error.errno not in (*GONE_ERRORS, errno.ELOOP):
                _skip(path, error, skipped)
            return []
        found: list[tuple[str, os.stat_result]] = []
        try:
            for name in os.listdir(fd):
                try:
                    found.append((name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _skip(f"{path}/{name}", error, skipped)
        finally:
            os.close(fd)
        return found

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _here(self) -> dict[str, int]:
        return {"src_dir_fd": self._root, "dst_dir_fd": self._root}

    def _temporary(self) -> str:
        return f"tmp/{self.session}-{next(self._numbers)}"

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _OPEN_NEW, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            self.make("tmp")
            return os.open(path, _OPEN_NEW, 0o600, dir_fd=self._root)

    def _move_into_place(self, move: Callable[..., None], temporary: str, path: str) -> None:
        try:
            move(temporary, path, **self._here)
        except FileNotFoundError:
            self.make(path.rpartition("/")[0])
            move(temporary, path, **self._here)

    def _make_one(self, path: str) -> None:
        # Before the folder: without the lock file the next start would refuse it.
        if "/" not in path and not self.keep_lock():
            raise FolderInUse(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        try:
            os.mkdir(path, 0o700, dir_fd=self._root)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def _sync(self, path: str) -> None:
        fd = self.open_folder(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _walk(self, path: str, skipped: OnSkipped) -> Iterator[tuple[str, os.stat_result]]:
        """Yield everything below a folder, the content of a folder before the folder itself."""
        todo = [(f"{path}/{name}", status, False) for name, status in self.list(path, skipped)]
        while todo:
            below, status, is_listed = todo.pop()
            if is_listed or not stat.S_ISDIR(status.st_mode):
                yield below, status
                continue
            todo.append((below, status, True))
            todo += [(f"{below}/{name}", inner, False) for name, inner in self.list(below, skipped)]


def _mount_of(path: Path) -> Path:
    """Return the mount point of the file system that holds a folder."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all bytes, which one call does unless the disk is full."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _forget_pages(fd: int) -> None:
    """Have the page cache drop a file, whose block is in the pool. Only advice, which a file system may refuse."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass


def _skip(path: str, error: OSError, skipped: OnSkipped) -> None:
    """Leave out one entry. Raises an error that is not of this entry alone."""
    if is_of_whole(error):
        raise error
    skipped(path, error)


def size_on_disk(num_bytes: int, page_bytes: int) -> int:
    """Return the bytes that a file of this length takes on a disk with pages of this size."""
    return -(-num_bytes // page_bytes) * page_bytes + _PER_FILE_BYTES


def check_not_in_use(path: Path, *, is_shared: bool = False) -> None:
    """Raise `FolderInUse` if another process has the folder open in another way; change nothing."""
    with suppress(FileNotFoundError):
        file = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take(file, is_shared)
        finally:
            os.close(file)


def check_is_own(path: Path, *, is_shared: bool) -> None:
    """Raise `OSError` for a folder whose contents another program made: opening it would delete some; change nothing.

    The lock file is created before all folders, and made again by `keep_lock`.
    """
    found = [name for name in _FOLDERS[is_shared] if os.path.lexists(path / name)]
    if found and not (path / LOCK_FILE).is_file():
        raise ForeignFolder(
            f"it has {found[0]}, but not the file lock with which kvferry marks its folders; name another folder, or "
            f"if kvferry made this one create an empty file {path / LOCK_FILE}"
        )


def _lock(root: int, is_shared: bool) -> int:
    """Lock the folder for as long as the returned number is open, which is no longer than this process lives."""
    fd = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root)
    try:
        _take(fd, is_shared)
    except OSError:
        os.close(fd)
        raise
    return fd


def _take(fd: int, is_shared: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if is_shared and error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            # A network file system without locks. What engines share does not depend on them.
            return
        if error.errno in (errno.EACCES, errno.EWOULDBLOCK):
            raise FolderInUse(error.errno, os.strerror(error.errno)) from error
        raise


def path_of(place: str, key: Key) -> str:
    """Return the path of a block below the folder of a place."""
    digits = key.hex()
    return f"{place}/{digits[:_SHARD_DIGITS]}/{digits}"


def _is_hex(text: str, num_digits: int | None) -> bool:
    """Return whether a name is lower-case hex of whole bytes, with `num_digits` unless that is None."""
    if len(text) % 2 or (num_digits is not None and len(text) != num_digits):
        return False
    return bool(text) and not text.strip("0123456789abcdef")
