"""Parts of a benchmark that gets one go: each is tried while there is time, and what is known is written after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


class DeviceLost(RuntimeError):
    """Nothing more can be measured in this process."""


class Parts:
    """`failed` says of a part why it failed, `left_out` names those that there was no time or no device for."""

    def __init__(self, figures: Callable[[], dict[str, object]], file: Path | None, budget_s: float) -> None:
        """`figures` are what is known when it is called. No part begins after `budget_s`."""
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self._figures = figures
        self._file = file
        self._end_s = time.monotonic() + budget_s
        self._is_lost = False

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._end_s - time.monotonic()

    def run(self, name: str, part: Callable[[], object]) -> None:
        """Try a part, and write what is known."""
        if self._is_lost or self.left_s <= 0:
            self.left_out.append(name)
            return
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the other parts are worth having all the same
            self._is_lost |= isinstance(error, DeviceLost)
            self.failed[name] = f"{type(error).__name__}: {error}"
            print(f"FAILED: {name}: {error}", flush=True)
        self.write()

    def write(self) -> None:
        """Have the file hold all that is known, or what it held before."""
        if self._file is not None:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(json.dumps({**self._figures(), "failed": self.failed, "left_out": self.left_out}, indent=1))
            part.replace(self._file)

    def conclude(self) -> int:
        """Say what is missing, and write for the last time; the exit status."""
        for name, error in self.failed.items():
            print(f"failed: {name}: {error}")
        if self.left_out:
            print(f"no time, or no device any more, for: {', '.join(self.left_out)}")
        self.write()
        return 1 if self.failed else 0
