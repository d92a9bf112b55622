"""Supervision of a kept pool: its file, and the thread of its header writer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.pool_file import PoolTruncated

_log = logging.getLogger(__name__)


class PoolWatch:
    """Checks of the file of a kept pool. Thread: `check` on the supervisor's, the rest on any."""

    def __init__(self, writer: HeaderWriter, on_truncated: Callable[[str], None]) -> None:
        """`on_truncated` is called once, with the reason, when no byte of the pool may be accessed any more."""
        self._writer = writer
        self._on_truncated = on_truncated
        self._truncation: str | None = None
        self._moved: str | None = None

    def check(self) -> None:
        """Compare the file's size and the path's inode with what is mapped, and start a dead thread of the writer."""
        file = self._writer.file
        try:
            file.check()
        except PoolTruncated as error:
            if self._truncation is None:
                self._truncation = (
                    f"{error}: offloading is off, and the process may end with SIGBUS; restart the engine, which "
                    "empties the pool"
                )
                _log.error("pool: %s", self._truncation)
                self._on_truncated(self._truncation)
            return
        moved = file.moved()
        if moved is not None and self._moved is None:
            _log.error("pool: %s: blocks stored from now on do not survive a restart", moved)
        self._moved = moved
        self._writer.start()

    def reasons(self) -> list[str]:
        """Return why the process is not ready because of the writer; empty if it is."""
        problem = self._writer.problem()
        return [] if problem is None else [problem]

    def degraded(self) -> list[str]:
        """Return what is wrong with the file, and what to do."""
        if self._truncation is not None:
            return [self._truncation]
        if self._moved is not None:
            return [
                f"{self._moved}: blocks stored from now on do not survive a restart; restart the engine, and stop it "
                "before its file is moved"
            ]
        return []
