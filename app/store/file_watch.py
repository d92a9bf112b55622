"""Whether the file under a database's path is still the one that was opened, told by its inode."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.app.store.errors import DatabaseReplaced

_Identity = tuple[int, int]


class FileWatch:
    """Remembers the identity of a SQLite file and of its write-ahead log.

    Connections keep writing to a file that was moved or deleted, so nothing but its inode tells. A log that the old
    file left behind is worse: SQLite would replay it into the new file and ruin that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._index_path = path.with_name(path.name + "-shm")
        self._file: _Identity | None = None
        self._log: _Identity | None = None

    def remember(self) -> None:
        """Take what lies there now as ours."""
        self._file = _identity(self.path)
        self._log = _identity(self._log_path)

    def verify(self) -> None:
        """Raise `DatabaseReplaced` if the file is gone or another one."""
        found = _identity(self.path)
        if found is not None and found == self._file:
            self._log = _identity(self._log_path) or self._log
            return
        what = "was deleted" if found is None else "was replaced by another file"
        raise DatabaseReplaced(f"the database file {self.path} {what} while in use")

    def remove_orphaned_log(self) -> bool:
        """Delete the log of the file that is gone, with our connections to it closed. True if there was one."""
        if self._log is None or _identity(self._log_path) != self._log:
            return False
        self._log_path.unlink(missing_ok=True)
        self._index_path.unlink(missing_ok=True)
        self._log = None
        return True


def _identity(path: Path) -> _Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        # Out of reach is as good as gone.
        return None
    return status.st_dev, status.st_ino
