"""The lock beside a pool's file: one engine at a time has the pool, with all of its processes.

The process that makes the pool ready takes the lock for itself, then shares it with the others of its engine. Whoever
else wants it is refused until the last of them is gone; the lock of a process that dies is gone with it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class PoolRefused(ValueError):
    """A pool that this process may not use; the message says why, and what to do."""


class PoolLock:
    """One process's hold of a lock."""

    def __init__(self, pool: Path, *, shared: bool = False) -> None:
        """Take the lock of the pool at this path alone, or `shared`. Raises `PoolRefused` when others have it, and
        `OSError`.
        """
        self._pool = pool
        self._file = -1
        path = lock_path(pool)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._flock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if not shared:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Let other processes share it. Raises `PoolRefused` if another engine has come in between."""
        self._flock(fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _flock(self, how: int) -> None:
        try:
            fcntl.flock(self._file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise PoolRefused(
                f"KVFERRY_ENGINE_NAME: the pool {self._pool} is in use by another process (pid {owner}); stop it, or "
                "give this "
                "one another KVFERRY_ENGINE_NAME"
            ) from None


def lock_path(pool: Path) -> Path:
    """Where the lock of the pool at this path is."""
    return pool.with_name(pool.name + ".lock")
