"""Locks of a pool: one engine at a time uses the pool, with all of its processes.

The lock file beside the pool locks its name. It has the process id of its owner, and exists before the pool does. The
lock on the pool's open file keeps out engines that find the same file under another name, or with another lock file.

The process that prepares the pool takes both exclusively, then shares them with the engine's other processes. Other
engines are refused until the last of them has ended. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.backing import open_pool_file

_log = logging.getLogger(__name__)

LONGEST_S = 60.0
"""How long to wait for a process that ends."""
_RETRY_S = 0.01
_PF_EXITING = 4
_UNSUPPORTED = (errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def take_when_ended(take: Callable[[], bool], holder: Callable[[], int | None], ending_s: float = 1.0) -> bool:
    """Try to acquire a lock until the process that holds it has ended, if that is soon; return whether it was acquired.

    The kernel frees the memory of a killed process before it releases its locks: seconds, for a large pool.

    Args:
        take: Tries once.
        holder: Returns the id of the process that holds the lock; None if it is unknown.
        ending_s: How long to wait for a process that may have been killed and does not end visibly.
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
        if pid is not None and is_ending(pid):
            seen_s = now_s
        if now_s > seen_s + ending_s or now_s > start_s + LONGEST_S:
            return False


def is_ending(pid: int) -> bool:
    """Return whether the process is ending; False where the system does not show that."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return bool(int(state.rpartition(")")[2].split()[6]) & _PF_EXITING)


class PoolLock:
    """The locks of a pool, held by one process."""

    def __init__(self, pool: Path, *, shared: bool = False, wait: bool = True) -> None:
        """Acquire the lock of the pool's name, exclusively or `shared`.

        With `wait`, wait for a process that was killed to end.

        Raises:
            StartError: another engine holds it, or `open_pool_file` refuses the lock file.
            OSError: the lock file cannot be opened.
        """
        self._pool = pool
        self._is_shared = shared
        self._file = self._pool_file = -1
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

    def lock_file(self, file: int) -> None:
        """Lock the pool's open file, too. Raises as `lock_open_file`."""
        self._pool_file = lock_open_file(file, self._pool, shared=self._is_shared)

    def downgrade(self) -> None:
        """Make the locks shared. Raises `StartError` if another engine has taken the name in between."""
        if not self._flock(fcntl.LOCK_SH):
            raise self._in_use()
        if self._pool_file >= 0:
            # Fails only where the file system did not support the first one.
            with suppress(OSError):
                _set_lock(self._pool_file, fcntl.F_RDLCK)

    def close(self) -> None:
        """Release the locks; may be called again."""
        for file in (self._pool_file, self._file):
            if file >= 0:
                os.close(file)
        self._file = self._pool_file = -1

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


def lock_open_file(file: int, pool: Path, *, shared: bool) -> int:
    """Lock the open file of the pool at this path, and return the descriptor whose `close` releases the lock.

    Raises:
        StartError: another engine has the file, under any name.
        OSError: the file cannot be opened again.
    """
    # Opened again: a lock lasts as long as the mappings of its descriptor, which outlive the use of the pool.
    locked = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        if not take_when_ended(lambda: _set_lock(locked, kind), lambda: None):
            raise StartError(
                f"KVFERRY_ENGINE_NAME: the pool {pool} is in use by another process, which opened the file under "
                "another name or whose lock file was removed; stop it, or set another KVFERRY_ENGINE_NAME here"
            )
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            _log.warning("pool file not locked, the system does not support it: %s: %s", pool, error)
            return locked
        os.close(locked)
        raise
    except BaseException:
        os.close(locked)
        raise
    return locked


def _set_lock(file: int, kind: int) -> bool:
    """Set a lock that belongs to the open file, like that of `flock`, which `SharedFile` uses when sizes change."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def lock_path(pool: Path) -> Path:
    """Return the path of the lock file of the pool at this path."""
    return pool.with_name(pool.name + ".lock")
