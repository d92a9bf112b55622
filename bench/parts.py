"""Parts of a benchmark with a time budget: each runs while there is time, and results are written after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


class DeviceLost(RuntimeError):
    """The device is unusable: nothing more can be measured in this process."""


class Parts:
    """Runs parts. `failed` has the error of each failed part, `left_out` the names of parts that did not run."""

    def __init__(self, figures: Callable[[], dict[str, object]], file: Path | None, budget_s: float) -> None:
        """Start the budget.

        Args:
            figures: returns all results so far.
            file: where results are written; None for nowhere.
            budget_s: no part starts after this time.
        """
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self._figures = figures
        self._file = file
        self._end_s = time.monotonic() + budget_s
        self._is_lost = False

    @property
    def left_s(self) -> float:
        """Return the seconds left of the budget."""
        return self._end_s - time.monotonic()

    def run(self, name: str, part: Callable[[], object]) -> None:
        """Run a part and write the results."""
        if self._is_lost or self.left_s <= 0:
            self.left_out.append(name)
            return
        try:
            part()
        except Exception as error:  # # noqa: BLE001 - the other parts are still useful
            self._is_lost |= isinstance(error, DeviceLost)
            self.failed[name] = f"{type(error).__name__}: {error}"
            print(f"FAILED: {name}: {error}", flush=True)
        self.write()

    def write(self) -> None:
        """Write all results atomically."""
        if self._file is not None:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(json.dumps({**self._figures(), "failed": self.failed, "left_out": self.left_out}, indent=1))
            part.replace(self._file)

    def conclude(self) -> int:
        """Print what failed or did not run, write the results, and return the exit status."""
        for name, error in self.failed.items():
            print(f"failed: {name}: {error}")
        if self.left_out:
            print(f"no time, or no device any more, for: {', '.join(self.left_out)}")
        self.write()
        return 1 if self.failed else 0
