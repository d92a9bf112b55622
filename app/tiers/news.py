"""Word that tiers may have answered, for those who wait for what they say beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable


class TierNews:
    """Any thread may tell and wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How often there was any: to be read before the tiers are asked what they have, and given to `wait`."""
        return self._count

    def tell(self) -> None:
        """A tier has something new."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def telling(self, also: Callable[[], None]) -> Callable[[], None]:
        """What a tier is to call: it tells, and does something else."""

        def on_finished() -> None:
            also()
            self.tell()

        return on_finished

    def wait(self, count: int, timeout_s: float) -> None:
        """Return once there was more than `count`, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > count, timeout_s)
