"""Lock file of a pool: one engine at a time uses the pool, with all of its processes.

The process that prepares the pool takes the lock exclusively, then shares it with the engine's other processes. Other
engines are refused until the last of them has ended. The kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.backing import open_pool_file


class PoolLock:
    """A lock held by one process."""

    def __init__(self, pool: Path, *, shared: bool = False) -> None:
        """Acquire the lock of the pool at this path, exclusively or `shared`.

        Raises:
            StartError: another engine holds it, or `open_pool_file` refuses the lock file.
            OSError: the lock file cannot be opened.
        """
        self._pool = pool
        self._file = -1
        path = lock_path(pool)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = open_pool_file(path, create=True)
        try:
            self._flock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if not shared:
                # On a full disk the lock holds without the process id in it.
                with suppress(OSError):
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Downgrade the lock to shared. Raises `StartError` if another engine has taken it in between."""
        self._flock(fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _flock(self, how: int) -> None:
        try:
            fcntl.flock(self._file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StartError(
                f"KVFERRY_ENGINE_NAME: the pool {self._pool} is in use by another process (pid {owner}); stop it, or "
                "set another KVFERRY_ENGINE_NAME here"
            ) from None


def lock_path(pool: Path) -> Path:
    """Return the path of the lock file of the pool at this path."""
    return pool.with_name(pool.name + ".lock")
