"""Memory sources of a host pool: anonymous memory of one process, or a file mapped by several.

A shared file is one mapping per node: the first process extends it, the others find it large enough.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.limits import MemoryLimit, file_limits, memory_limits, shared_memory_limits
from kvferry.cuda_ops.pool.pages import can_populate, map_file

_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # files there get mode 0600


class Backing(Protocol):
    """Memory addressed by offset. Offsets and lengths are multiples of a page.

    Attributes:
        mapped_bytes: how much the host pool has mapped; set by the pool, before it frees what is beyond.
    """

    mapped_bytes: int

    @property
    def must_touch(self) -> bool:
        """Return whether memory must be touched before use, because a page missing later would kill the process."""

    def limits(self) -> list[MemoryLimit]:
        """Return the limits that new memory has to fit into."""

    def reserved_bytes(self) -> int:
        """Return the bytes that exist already and take no new memory when mapped."""

    def reserve(self, num_bytes: int) -> int | None:
        """Extend the memory to at least `num_bytes` in all; return the bytes before, or None if there were as many.

        Raises:
            OSError: the memory could not be extended, and none was added.
        """

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Map reserved memory until its last view is gone. Raises `OSError`."""

    def free(self, offset: int) -> None:
        """Free the memory from this offset on. Requires: no process has it mapped."""

    def close(self) -> None:
        """Refuse further mappings. Existing ones stay."""


class AnonymousMemory:
    """Memory of this process alone, freed at its end."""

    must_touch = False
    mapped_bytes = 0

    def limits(self) -> list[MemoryLimit]:
        """Return the limits of the machine's memory and of the cgroup."""
        return memory_limits()

    def reserved_bytes(self) -> int:
        """Return 0: nothing exists before it is mapped."""
        return 0

    def reserve(self, num_bytes: int) -> int | None:
        """Add nothing: `map` allocates."""
        return None

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Map new memory, filled with zeros."""
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)

    def free(self, offset: int) -> None:
        """Do nothing: unmapping has freed the memory."""

    def close(self) -> None:
        """Do nothing: no file is open."""


class SharedFile:
    """A file in `/dev/shm` or on a disk, readable by its owner only."""

    def __init__(self, path: Path, *, is_ready: bool = False) -> None:
        """Open or create the file. Raises as `open_pool_file`.

        Args:
            path: the file.
            is_ready: another process has created, extended and touched the file.
        """
        self.path = path
        self.mapped_bytes = 0
        self.in_memory = path.is_relative_to(SHARED_MEMORY)
        self._is_ready = is_ready
        self._file = open_pool_file(path, create=not is_ready)

    @property
    def must_touch(self) -> bool:
        """Return whether the file is in shared memory and was not touched by another process.

        Disk space is allocated by `reserve`; shared memory by touching it, which runs in parallel.
        """
        return self.in_memory and not self._is_ready

    def limits(self) -> list[MemoryLimit]:
        """Return the limits of the file system and of memory for shared memory, those of the disk for other files."""
        return shared_memory_limits(self.path.parent) if self.in_memory else file_limits(self.path.parent)

    def reserved_bytes(self) -> int:
        """Return the file's size on a disk, and the memory that it has in shared memory.

        There it has its full size before it is touched, also if its process was killed meanwhile.
        """
        size = os.fstat(self._file).st_size
        return min(size, self.allocated_bytes()) if self.in_memory else size

    def allocated_bytes(self) -> int:
        """Return what the file occupies."""
        return os.fstat(self._file).st_blocks * _BLOCK_BYTES

    def reserve(self, num_bytes: int) -> int | None:
        """See `Backing`."""
        with self._locked():
            size = os.fstat(self._file).st_size
            if size >= num_bytes:
                return None
            try:
                if self.in_memory and can_populate():
                    os.ftruncate(self._file, num_bytes)
                else:
                    os.posix_fallocate(self._file, size, num_bytes - size)
            except OSError:
                os.ftruncate(self._file, size)
                raise
            return size

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """See `Backing`."""
        return map_file(self._file, offset, num_bytes)

    def free(self, offset: int) -> None:
        """See `Backing`."""
        with self._locked():
            if os.fstat(self._file).st_size > offset:
                os.ftruncate(self._file, offset)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def unlink(self) -> None:
        """Remove the file's name after all processes have mapped it; the memory is freed when the last one ends."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """See `Backing`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialize size changes between processes. The kernel releases the lock of a process that dies."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class ForeignFile(OSError):
    """A file that another user may have planted; the message continues a sentence that names the file."""


def open_own_file(path: Path, flags: int) -> int:
    """Open a regular file of this user, and return its descriptor; a file that is created has mode 0600.

    Another user may have planted a file or a link of this name in a world-writable folder such as `/dev/shm`: a link
    would let that user choose which file of this one is overwritten. Links among the folders of the path are followed.

    Raises:
        ForeignFile: the name is a symbolic link or no regular file, or the file belongs to another user.
        OSError: the file cannot be opened.
    """
    try:
        # Opening a named pipe must not block.
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        # A loop of links among the folders has the same number.
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ForeignFile("is a symbolic link") from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFile("is not a regular file")
        if status.st_uid != os.geteuid():
            raise ForeignFile(f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}")
    except BaseException:
        os.close(file)
        raise
    return file


def open_pool_file(path: Path, *, create: bool = False) -> int:
    """Open a file of a pool for reading and writing; with `create`, create it if it is missing.

    Raises:
        StartError: `open_own_file` refuses it.
        OSError: it cannot be opened.
    """
    try:
        return open_own_file(path, os.O_RDWR | (os.O_CREAT if create else 0))
    except ForeignFile as error:
        raise StartError(
            f"KVFERRY_ENGINE_NAME: the pool's file {path} {error}; remove it, or set KVFERRY_POOL_PATH or "
            "KVFERRY_ENGINE_NAME to another one"
        ) from error
