"""Epoch of a folder, or of a namespace in it: one file, changed in its place under a lock.

On NFS a file that is opened has what was written before another client closed it ("close-to-open").
"""

from __future__ import annotations

import fcntl
import os

from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.fs.folder import Folder
from kvferry.app.tiers.shared_epoch import MAX_NAME_BYTES


class EpochFile:
    """An `EpochStore`; a version is the content that was read. All methods raise `OSError`."""

    def __init__(self, folder: Folder, place: str) -> None:
        """`place` is the folder of all epochs."""
        self._folder = folder
        self._place = place
        self._path = f"{place}/epoch"

    def peek(self) -> bytes:
        """Return the content, in part old and in part new while it is being changed; empty if there is none.

        Raises `FolderMoved`.
        """
        content = self._read(is_locked=False)
        # Blocks were read from the folder that was opened. Its epoch is not known if the path leads to another one.
        self._folder.check()
        return content

    def read_epoch(self) -> tuple[bytes, bytes]:
        """See `EpochStore`."""
        self._folder.check()
        content = self._read(is_locked=True)
        return content, content

    def replace_epoch(self, version: bytes, name: bytes) -> bool:
        """See `EpochStore`."""
        with self._folder.open_to_change(self._path) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.pread(fd, MAX_NAME_BYTES + 1, 0) != version:
                return False
            os.pwrite(fd, name, 0)
            os.ftruncate(fd, len(name))
            os.fsync(fd)
        self._folder.sync([self._place])
        return True

    def _read(self, *, is_locked: bool) -> bytes:
        try:
            with self._folder.open(self._path) as fd:
                if is_locked:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                return os.read(fd, MAX_NAME_BYTES + 1)
        except (FileNotFoundError, BadBlock):
            return b""
