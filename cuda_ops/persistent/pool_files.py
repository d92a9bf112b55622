"""Files of kept pools in a folder, of all engines of this user: listed, and removed while no engine uses them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import StartError
from kvferry.cuda_ops.persistent.format import MAGIC
from kvferry.cuda_ops.persistent.inspection import holders_of
from kvferry.cuda_ops.persistent.lock import PoolLock, lock_path
from kvferry.cuda_ops.persistent.pool_file import NotAPool
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY, open_own_file

SUFFIX = ".pool"
_PREFIX = "kvferry-"
"""Begins the names of pools in shared memory, which other programs use too."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The file of a kept pool. `num_bytes` is the space that it takes, `used_s` the time of the last start with it.

    `holders` are the processes that use it, as far as they are visible to this one.
    """

    path: Path
    name: str
    num_bytes: int
    used_s: float
    holders: list[int]


class PoolInUse(Exception):
    """An engine uses the pool; the message names it."""


def pool_path(folder: Path, name: str) -> Path:
    """Return the path of the pool with this name in a folder."""
    prefix = _PREFIX if folder == SHARED_MEMORY else ""
    return folder / f"{prefix}{name}{SUFFIX}"


def find_pools(folder: Path) -> Iterator[PoolFile]:
    """Yield this user's pools in a folder, by name, of any version of their format. Links are not followed."""
    prefix = _PREFIX if folder == SHARED_MEMORY else ""
    for path in sorted(folder.glob(f"{prefix}*{SUFFIX}")):
        with suppress(OSError, NotAPool):
            file = _open(path)
            try:
                status = os.fstat(file)
            finally:
                os.close(file)
            used_s = status.st_mtime
            with suppress(OSError):
                used_s = max(used_s, lock_path(path).lstat().st_mtime)
            name = path.name.removeprefix(prefix).removesuffix(SUFFIX)
            yield PoolFile(path, name, status.st_blocks * _BLOCK_BYTES, used_s, holders_of(path))


def remove_pool(path: Path) -> None:
    """Remove a pool's file while its locks are held, so that no engine can open it. Its lock file stays.

    Raises:
        PoolInUse: An engine uses the pool.
        NotAPool: kvferry did not make the file.
        OSError: The file cannot be opened or removed, or belongs to another user.
    """
    file = _open(path)
    try:
        with closing(PoolLock(path, wait=False)) as lock:
            lock.lock_file(file)
            # Another file may have got the name before the lock was held.
            if os.path.samestat(path.lstat(), os.fstat(file)):
                path.unlink()
    except StartError as error:
        raise PoolInUse(str(error)) from error
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """Open a file of this user that begins as pools do. Raises `NotAPool` and `OSError`."""
    file = open_own_file(path, os.O_RDWR)
    if os.pread(file, len(MAGIC), 0) != MAGIC:
        os.close(file)
        raise NotAPool("kvferry did not make this file")
    return file
