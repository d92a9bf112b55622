"""Lock file of a pool: one engine at a time uses the pool, with all of its processes.

The process that prepares the pool takes the lock exclusively, then shares it with the engine's other processes. Other
engines are refused until the last of them has ended. The kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.backing import open_pool_file

ENDING_S = 1.0
"""How long to wait for a process that may have been killed and does not end visibly."""
LONGEST_S = 60.0
"""How long to wait for a process that ends."""
_RETRY_S = 0.01
_PF_EXITING = 4


def take_when_ended(take: Callable[[], bool], holder: Callable[[], int | None]) -> bool:
    """Try to acquire a lock until the process that holds it has ended, if that is soon; return whether it was acquired.

    The kernel frees the memory of a killed process before it releases its locks: seconds, for a large pool.

    Args:
        take: Tries once.
        holder: Returns the id of the process that holds the lock; None if it is unknown.
    """
    if take():
        return True
    pid, start_s = holder(), time.monotonic()
    seen_s = start_s
    while True:
        time.sleep(_RETRY_S)
        if take():
            return True
        now_s = time.monotonic()
        if pid is not None and _is_ending(pid):
            seen_s = now_s
        if now_s > seen_s + ENDING_S or now_s > start_s + LONGEST_S:
            return False


def _is_ending(pid: int) -> bool:
    """Return whether the process is ending; False where the system does not show that."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return bool(int(state.rpartition(")")[2].split()[6]) & _PF_EXITING)


class PoolLock:
    """A lock held by one process."""

    def __init__(self, pool: Path, *, shared: bool = False, wait: bool = True) -> None:
        """Acquire the lock of the pool at this path, exclusively or `shared`.

        With `wait`, wait for a process that was killed to end.

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
            how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            if not (take_when_ended(lambda: self._flock(how), self._owner) if wait else self._flock(how)):
                raise self._in_use()
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
        if not self._flock(fcntl.LOCK_SH):
            raise self._in_use()

    def close(self) -> None:
        """Release the lock; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _owner(self) -> int | None:
        text = os.pread(self._file, 32, 0).strip()
        return int(text) if text.isdigit() else None

    def _in_use(self) -> StartError:
        owner = self._owner() or "unknown"
        return StartError(
            f"KVFERRY_ENGINE_NAME: the pool {self._pool} is in use by another process (pid {owner}); stop it, or set "
            "another KVFERRY_ENGINE_NAME here"
        )


def lock_path(pool: Path) -> Path:
    """Return the path of the lock file of the pool at this path."""
    return pool.with_name(pool.name + ".lock")
