"""Where a host pool's memory comes from: this process's own, or a file that several processes map.

A shared file is one mapping a node: whoever comes first makes it larger, the others find it large enough.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.cuda_ops.limits import MemoryLimit, file_limits, memory_limits, shared_memory_limits
from kvferry.cuda_ops.pages import can_populate, map_file

SHARED_MEMORY = Path("/dev/shm")


class Backing(Protocol):
    """Memory by offset. Offsets and lengths are multiples of a page."""

    @property
    def must_touch(self) -> bool:
        """Whether memory that is first used later could be missing then, which would end the process."""

    def limits(self) -> list[MemoryLimit]:
        """What new memory has to fit into."""

    def reserved_bytes(self) -> int:
        """What is there already, and takes no new memory when it is mapped."""

    def reserve(self, num_bytes: int) -> bool:
        """Have at least so many bytes in all; whether this call added some. On `OSError` it has added none."""

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Map a stretch of what was reserved, until the last view of it is gone. Raises `OSError`."""

    def free(self, offset: int) -> None:
        """Give back everything from this offset on, which nobody may have mapped any more."""

    def close(self) -> None:
        """Map no more. What is mapped stays."""


class AnonymousMemory:
    """Memory of this process alone, which goes with it."""

    must_touch = False

    def limits(self) -> list[MemoryLimit]:
        """The machine's memory and the cgroup's."""
        return memory_limits()

    def reserved_bytes(self) -> int:
        """None before it is mapped."""
        return 0

    def reserve(self, num_bytes: int) -> bool:
        """Mapping takes it."""
        return False

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """New memory, of zeros."""
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)

    def free(self, offset: int) -> None:
        """Unmapping has freed it."""

    def close(self) -> None:
        """Nothing is open."""


class SharedFile:
    """A file in `/dev/shm` or on a disk, readable by its owner only."""

    def __init__(self, path: Path, *, is_ready: bool = False) -> None:
        """Open or create it; what `is_ready` another process has made and touched. Raises `OSError`."""
        self.path = path
        self._in_memory = path.is_relative_to(SHARED_MEMORY)
        self._is_ready = is_ready
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if is_ready else os.O_CREAT), 0o600)

    @property
    def must_touch(self) -> bool:
        """A disk's room is allocated here; that of shared memory by whoever touches it, in parallel."""
        return self._in_memory and not self._is_ready

    def limits(self) -> list[MemoryLimit]:
        """Shared memory has to fit into the file system and into memory; a file on a disk into the disk."""
        return shared_memory_limits(self.path.parent) if self._in_memory else file_limits(self.path.parent)

    def reserved_bytes(self) -> int:
        """The file's size."""
        return os.fstat(self._file).st_size

    def reserve(self, num_bytes: int) -> bool:
        """See `Backing`."""
        with self._locked():
            size = self.reserved_bytes()
            if size >= num_bytes:
                return False
            try:
                if self._in_memory and can_populate():
                    os.ftruncate(self._file, num_bytes)
                else:
                    os.posix_fallocate(self._file, size, num_bytes - size)
            except OSError:
                os.ftruncate(self._file, size)
                raise
            return True

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """See `Backing`."""
        return map_file(self._file, offset, num_bytes)

    def free(self, offset: int) -> None:
        """See `Backing`."""
        with self._locked():
            if self.reserved_bytes() > offset:
                os.ftruncate(self._file, offset)

    def fileno(self) -> int:
        """The open file's number."""
        return self._file

    def unlink(self) -> None:
        """Remove its name, once everybody who is to map it has: the memory then goes with the last of them."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """See `Backing`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time makes it longer or shorter; the lock of a process that dies is gone."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
