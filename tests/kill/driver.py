"""Lives and deaths of the small process, one after the other on the same pool and database.

Each life is a fork of this one, which has everything loaded and no thread, so that a life begins within milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.native import segment_copier
from tests.kill.small import Note, Notes, Small


@dataclass(frozen=True, slots=True)
class Life:
    """What one life found and did. `ready_before` is what was ready when the life before it ended."""

    number: int
    ready_before: int
    started: bool
    recovered: int
    known: int
    dropped: int
    corrupt: int
    hits: int


class Driver:
    """The lives in one folder. Raises `RuntimeError` when one ends by itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.notes = Notes(folder / "notes")
        self._number = 0
        segment_copier()

    @property
    def pool(self) -> Path:
        return self.folder / "killed.pool"

    def live(self, seed: int, life_s: float, start_s: float | None = None) -> Life:
        """One life of `life_s` from when it serves on; with `start_s` it may end so long after its birth instead."""
        self._number += 1
        ready_before = self.notes[Note.READY]
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            _serve(self.folder, seed, writable)
        os.close(writable)
        try:
            # It never closes its end but by its death.
            started = _wait(readable, start_s) and os.read(readable, 1) == b"s"
            if started:
                _wait(readable, life_s)
            os.kill(child, signal.SIGKILL)
        finally:
            os.close(readable)
            _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"life {self._number} with seed {seed} ended by itself, with status {status}")
        note = self.notes
        return Life(
            self._number,
            ready_before,
            started,
            note[Note.RECOVERED],
            note[Note.KNOWN],
            note[Note.DROPPED],
            note[Note.CORRUPT],
            note[Note.HITS],
        )


def _wait(file: int, timeout_s: float | None) -> bool:
    return bool(select.select([file], [], [], timeout_s)[0])


def _serve(folder: Path, seed: int, told: int) -> None:
    try:
        small = Small(folder, seed)
        os.write(told, b"s")
        while True:
            small.step()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)
