"""Shared memory of several processes that does not outlive them: its name goes once all of them have mapped it.

A name is left behind if they all die before that. Whoever begins sweeps such away: nobody has their lock any more.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvferry.cuda_ops.backing import SHARED_MEMORY, SharedFile
from kvferry.cuda_ops.pool_lock import PoolLock, PoolRefused, lock_path

_log = logging.getLogger(__name__)

_SUFFIX = ".pinned"


class PassingFile(SharedFile):
    """A `Backing` in `/dev/shm`."""

    def __init__(self, name: str, *, is_ready: bool = False) -> None:
        """Open or create it; what `is_ready` another process has made and touched. Raises `OSError`."""
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
        """See `Backing`. The name is of no use to an engine that ends."""
        self.unlink()
        super().close()
        self._lock.close()


def sweep_names(folder: Path = SHARED_MEMORY) -> None:
    """Remove the names that engines left which died as they started, with the memory behind them."""
    for path in folder.glob(f"kvferry-*{_SUFFIX}"):
        try:
            lock = PoolLock(path)
        except (PoolRefused, OSError):
            continue
        path.unlink(missing_ok=True)
        lock_path(path).unlink(missing_ok=True)
        lock.close()
        _log.info("%s was left by an engine that died as it started, and is removed", path)
