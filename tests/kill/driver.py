"""Lives and deaths of the small process, one after the other on the same pool and database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.kill.small import Note, Notes

_ROOT = Path(__file__).parents[2]


class Life(SimpleNamespace):
    """One life: the notes of `_NOTED` by their names in lower case, and three fields.

    `served` is whether it came to serve, `ready_before` the slots that were ready when the life before it ended, and
    `resizing_before` whether that one died in the middle of a resize, which may have evicted more than was noted.
    """


_NOTED = (Note.RECOVERED, Note.KNOWN, Note.DROPPED, Note.CORRUPT, Note.HITS, Note.CUT, Note.UNSEALED)


def _environment() -> dict[str, str]:
    """Whoever runs this may have settings of their own, and a database."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVFERRY_")}
    return kept | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}


class Driver:
    """The lives in one folder. Raises `RuntimeError` when one ends by itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pool = folder / "killed.pool"
        self.notes = Notes(folder / "notes")
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.zygote", str(folder)],
            cwd=_ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: Any) -> None:
        self._zygote.communicate()

    def live(self, seed: int, life_s: float, start_s: float | None = None, calm: bool = False) -> Life:
        """One life, killed after it has served for `life_s`, or `start_s` after its birth where that comes first."""
        ready_before, resizing_before = self.notes[Note.READY], bool(self.notes[Note.RESIZING])
        if self._zygote.stdin is None or self._zygote.stdout is None:
            raise RuntimeError("the zygote has no pipes")
        self._zygote.stdin.write(f"{seed} {life_s} {start_s or '-'} {'calm' if calm else 'wild'}\n")
        self._zygote.stdin.flush()
        outcome = self._zygote.stdout.readline().strip()
        if outcome not in ("served", "started"):
            raise RuntimeError(f"a life with seed {seed} {outcome or 'took its zygote with it'}")
        noted = {note.name.lower(): self.notes[note] for note in _NOTED}
        is_served = outcome == "served"
        return Life(ready_before=ready_before, resizing_before=resizing_before, served=is_served, **noted)
