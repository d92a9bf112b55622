"""Shared memory of several processes that does not outlive them: its name is removed once all have mapped it.

If all of them die before that, the name stays; the next engine to start removes names whose lock is free.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvferry.core.errors import StartError
from kvferry.cuda_ops.persistent.lock import PoolLock, lock_path
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY, SharedFile

_log = logging.getLogger(__name__)

_SUFFIX = ".pinned"


class TransientFile(SharedFile):
    """A `Backing` in `/dev/shm`."""

    def __init__(self, name: str, *, is_ready: bool = False) -> None:
        """Open or create the file. Raises as `open_pool_file`.

        Args:
            name: unique name of the engine.
            is_ready: another process has created, extended and touched the file.
        """
        path = SHARED_MEMORY / f"kvferry-{name}{_SUFFIX}"
        self._lock = PoolLock(path, shared=True)
        try:
            super().__init__(path, is_ready=is_ready)
        except BaseException:
            lock_path(path).unlink(missing_ok=True)
            self._lock.close()
            raise

    def unlink(self) -> None:
        """See `SharedFile`."""
        super().unlink()
        lock_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Backing`. Also removes the name, which no later process needs."""
        self.unlink()
        super().close()
        self._lock.close()


def sweep_names(folder: Path = SHARED_MEMORY) -> None:
    """Remove names, and their memory, that engines of this user left when they died while starting."""
    for path in folder.glob(f"kvferry-*{_SUFFIX}"):
        try:
            if path.lstat().st_uid != os.geteuid():
                continue
            lock = PoolLock(path, wait=False)
        except (StartError, OSError):
            continue
        path.unlink(missing_ok=True)
        lock_path(path).unlink(missing_ok=True)
        lock.close()
        _log.info("removed shared memory of an engine that died while starting: %s", path)
