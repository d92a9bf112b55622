"""Folder of a file system tier: its layout, its locks, all disk access, and the meaning of its errors.

    lock                                          held while processes use the folder: one, or any number that share it
    tmp/                                          files that are being written
    blocks/<epoch>/<namespace>/<3 hex digits of the key>/<hex of the key>     of a folder that one process uses
    shared/<namespace>/<epoch>/<3 hex digits of the key>/<hex of the key>     of one that engines share
    blocks/epochs/, shared/<namespace>/epochs/    see `EpochFiles`
    blocks/ and shared/: keeper, size, changed    see `FolderLimit`

Everything is accessed relative to the folder as it was opened, not by path: when it is moved, deleted or covered by a
mount, nothing is written elsewhere. Files are not flushed to the medium; checksums find what a power cut damaged.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import interrupt_if
from kvferry.app.tiers.fs.format import write_pieces
from kvferry.core.keys import Key

_SHARD_DIGITS = 3
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a named pipe in the place of a file would hang.
_OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOCK_FILE = "lock"
_FOLDERS = {False: ("tmp", "blocks"), True: ("tmp", "shared")}
"""Folders in which files are deleted, by whether the folder is shared."""
DEFAULT_PAGE_BYTES = 4096
"""For file systems that do not report the size of their pages."""
_PER_FILE_BYTES = 512
"""Estimate for the inode and the directory entry of a file."""
MAX_SMALL_BYTES = 1 << 20
"""Limit of the files that describe the folder."""
_SAME_USE_S = 10.0
GONE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of an entry that another process has removed."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OF_WRITES = (*_NO_SPACE, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_OF_WHOLE = (*_NO_SPACE, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OTHER_KIND = (errno.ENOTDIR, errno.EISDIR)


def is_no_space(error: OSError) -> bool:
    """Return whether deleting files may help."""
    return error.errno in _NO_SPACE


def is_of_whole(error: OSError) -> bool:
    """Return whether an error concerns the whole folder; others may concern only the entry where they occurred."""
    return error.errno in _OF_WHOLE


def is_of_writes(error: OSError) -> bool:
    """Return whether existing files can be read in a folder with this error."""
    return error.errno in _OF_WRITES


def text_of(error: OSError) -> str:
    """Return what operators read of an error."""
    text = error.strerror or str(error)
    entry = error.filename if error.filename2 is None else error.filename2
    if error.errno in _OTHER_KIND and entry is not None:
        text += f": {os.fsdecode(entry)}; remove what is in its place"
    return text


Entries = list[tuple[str, os.stat_result]]
OnSkipped = Callable[[str, OSError], None]
"""Called with an entry that is skipped, and the reason."""


class UnusableFolder(OSError):
    """The folder is not for this process, or not now."""


class FolderInUse(UnusableFolder):
    """Another process has the folder open."""

    def __init__(self) -> None:
        super().__init__(errno.EWOULDBLOCK, "another process uses it")


class FolderMoved(UnusableFolder):
    """The path does not lead to the folder that was opened."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the folder was moved, deleted or unmounted")


class ForeignFolder(UnusableFolder):
    """The folder has contents that another program may have made."""


class FileLock:
    """A lock on a file, for this object alone or with others that share it; it ends with this process at the latest."""

    def __init__(self, root: int, path: str, *, is_shared: bool) -> None:
        """`path` is below the open folder `root`."""
        self.is_supported = True
        """Whether the file system had locks when this one was taken; without them it is held by everyone that tries."""
        self._root = root
        self._path = path
        self._is_shared = is_shared
        self._fd: int | None = None

    def is_held(self) -> bool:
        """Return whether the lock was taken, and its file was not deleted or replaced."""
        if self._fd is None:
            return False
        try:
            there, ours = os.stat(self._path, dir_fd=self._root, follow_symlinks=False), os.fstat(self._fd)
        except OSError as error:
            if error.errno not in GONE_ERRORS:
                raise
            return False
        return os.path.samestat(there, ours)

    def take(self) -> bool:
        """Create and lock the file, without waiting; return False if another one holds the lock."""
        self.release()
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        try:
            self.is_supported = _lock(fd, is_shared=self._is_shared)
        except OSError as error:
            os.close(fd)
            if isinstance(error, FolderInUse):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Unlock the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


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
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mount = _mount_of(path)
        # Not closed while a thread hangs in a call, which holds a reference to this object.
        self._closer = weakref.finalize(self, os.close, self._root)
        self._closer.atexit = False
        self._session = f"{os.getpid():x}-{os.urandom(8).hex()}"
        """Name of this opening of the folder, different from all others."""
        self._numbers = itertools.count()
        self._lock = self.lock(LOCK_FILE, is_shared=is_shared)
        self._is_open = True
        self._locking = threading.Lock()
        """Held while the lock file is made again."""
        self._page_bytes = os.fstatvfs(self._root).f_frsize or DEFAULT_PAGE_BYTES
        check_is_own(path, is_shared=is_shared)
        if not self._lock.take():
            raise FolderInUse
        try:
            # What engines share does not depend on locks.
            if not is_shared and not self._lock.is_supported:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            for folder in _FOLDERS[is_shared]:
                self.make(folder)
        except OSError:
            self.unlock()
            raise

    def lock(self, path: str, *, is_shared: bool) -> FileLock:
        """Return a lock on a file of the folder, not taken yet."""
        return FileLock(self._root, path, is_shared=is_shared)

    def keep_lock(self) -> bool:
        """Make and lock the lock file again if it was deleted; return False if another process did."""
        with self._locking:
            return self._is_open and (self._lock.is_held() or self._lock.take())

    def unlock(self) -> None:
        """Release the lock, so that another process or object can open the folder."""
        self._is_open = False
        self._lock.release()

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
        return os.path.samestat(there, ours)

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

    def write(self, path: str, pieces: Sequence[bytes | memoryview], *, is_final: bool = False) -> None:
        """Write a file under a temporary name and rename it, so that it exists completely or not at all.

        A file that `is_final` is durable. A shared folder keeps an earlier one: raises `FileExistsError`.
        """
        temporary = f"tmp/{self._session}-{next(self._numbers)}"
        fd = self._create(temporary)
        try:
            try:
                write_pieces(fd, pieces)
                if is_final:
                    os.fsync(fd)
                # Starts the write-back, so that the pages can soon be reclaimed.
                _forget_pages(fd)
            finally:
                os.close(fd)
            # Unlike a rename, a link fails if the name is taken, also on NFS. A private folder need not support links.
            self._move_into_place(os.link if is_final and self.is_shared else os.rename, temporary, path)
        except BaseException:
            self.delete(temporary)
            raise
        if is_final:
            self.delete(temporary)
            self._sync(path.rpartition("/")[0])

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
            with suppress(OSError):
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
        except FileNotFoundError:
            return False
        return True

    def sync_shards(self, paths: Iterable[str]) -> None:
        """Make deletions of these files durable."""
        for shard in sorted({path.rpartition("/")[0] for path in paths}):
            with suppress(FileNotFoundError, NotADirectoryError):
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
        path = f"tmp/{self._session}-{next(self._numbers)}"
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

    def scan(self, path: str, stop: Callable[[], bool], skipped: OnSkipped) -> Iterator[tuple[str, Entries]]:
        """Yield each folder below a folder in which there are files of blocks, and these. Raises `Interrupted`."""
        for folder, entries in self._walk(path, skipped):
            interrupt_if(stop)
            shard = folder.rpartition("/")[2]
            files = [one for one in entries if stat.S_ISREG(one[1].st_mode) and _is_block(one[0], shard)]
            if files:
                yield folder, files

    def empty(self, path: str, stop: Callable[[], bool], skipped: OnSkipped) -> Iterator[int]:
        """Delete a folder with everything below it, and yield the bytes of each file deleted. Raises `Interrupted`."""
        folders = []
        for folder, entries in self._walk(path, skipped):
            folders.append(folder)
            for name, status in entries:
                interrupt_if(stop)
                if stat.S_ISDIR(status.st_mode):
                    continue
                try:
                    if self.delete(f"{folder}/{name}"):
                        yield self.size_on_disk(status.st_size)
                except OSError as error:
                    _skip(f"{folder}/{name}", error, skipped)
        for folder in reversed(folders):
            try:
                os.rmdir(folder, dir_fd=self._root)
            except OSError as error:
                # Other engines that share the folder may delete the same, or still write to it.
                if error.errno not in (*GONE_ERRORS, errno.ENOTEMPTY, errno.EEXIST):
                    _skip(folder, error, skipped)

    def list(self, path: str, skipped: OnSkipped) -> Entries:
        """Return the entries of a folder; none if it does not exist or is no folder."""
        try:
            fd = os.open(path, _OPEN_DIR, dir_fd=self._root)
        except OSError as error:
            if error.errno not in (*GONE_ERRORS, errno.ELOOP):
                _skip(path, error, skipped)
            return []
        entries: Entries = []
        try:
            for name in os.listdir(fd):
                try:
                    entries.append((name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _skip(f"{path}/{name}", error, skipped)
        finally:
            os.close(fd)
        return entries

    # --- inside -------------------------------------------------------------------------------------------------

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _OPEN_NEW, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            self.make("tmp")
            return os.open(path, _OPEN_NEW, 0o600, dir_fd=self._root)

    def _move_into_place(self, move: Callable[..., None], temporary: str, path: str) -> None:
        try:
            move(temporary, path, src_dir_fd=self._root, dst_dir_fd=self._root)
        except FileNotFoundError:
            self.make(path.rpartition("/")[0])
            move(temporary, path, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _make_one(self, path: str) -> None:
        # Before the folder: without the lock file the next start would refuse it.
        if "/" not in path and not self.keep_lock():
            raise FolderInUse
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

    def _walk(self, path: str, skipped: OnSkipped) -> Iterator[tuple[str, Entries]]:
        """Yield a folder and all those below it, each with its entries and before those in it."""
        todo = [path]
        while todo:
            folder = todo.pop()
            entries = self.list(folder, skipped)
            yield folder, entries
            todo += [f"{folder}/{name}" for name, status in entries if stat.S_ISDIR(status.st_mode)]


def _mount_of(path: Path) -> Path:
    """Return the mount point of the file system that holds a folder."""
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path


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
        fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(fd, is_shared=is_shared)
        finally:
            os.close(fd)


def check_is_own(path: Path, *, is_shared: bool) -> None:
    """Raise `OSError` for a folder whose contents another program made: opening it would delete some; change nothing.

    The lock file is created before all folders, and made again by `keep_lock`.
    """
    folders = [name for name in _FOLDERS[is_shared] if os.path.lexists(path / name)]
    if folders and not (path / LOCK_FILE).is_file():
        raise ForeignFolder(
            f"it has {folders[0]}, but not the file lock with which kvferry marks its folders; name another folder, or "
            f"if kvferry made this one create an empty file {path / LOCK_FILE}"
        )


def _lock(fd: int, *, is_shared: bool) -> bool:
    """Lock an open file; return False if its file system has no locks. Raises `FolderInUse`."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            return False
        if error.errno in (errno.EACCES, errno.EWOULDBLOCK):
            raise FolderInUse from error
        raise
    return True


def path_of(place: str, key: Key) -> str:
    """Return the path of a block below the folder of a place."""
    digits = key.hex()
    return f"{place}/{digits[:_SHARD_DIGITS]}/{digits}"


def _is_block(name: str, shard: str) -> bool:
    """Return whether an entry of the folder `shard` has the name of a block: lower-case hex of whole bytes."""
    is_there = len(shard) == _SHARD_DIGITS and name.startswith(shard)
    return is_there and not len(name) % 2 and not name.strip("0123456789abcdef")
