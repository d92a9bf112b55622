"""A comparison within one steady run: short windows of each arm in turns, so that what drifts hits all arms alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence


class Windows:
    """Rounds of each arm twice: in an order that is drawn, and then backwards.

    What gets slower or quicker at a steady pace does so for all arms of a round alike. `readings` are counters that
    only grow, read at a step's end, given how many there were; `rounds` has what they grew by in each arm's turns.
    """

    def __init__(
        self,
        arms: Sequence[int],
        window_s: float,
        settle_s: float,
        switch: Callable[[int], None],
        readings: Callable[[int], tuple[float, ...]],
        seed: int,
    ) -> None:
        """`switch` gives an arm its turn; of each window's `window_s` seconds the first `settle_s` do not count."""
        self.rounds: list[dict[int, tuple[float, ...]]] = []
        self._arms = list(arms)
        self._window_s = window_s
        self._settle_s = settle_s
        self._switch = switch
        self._readings = readings
        self._rng = random.Random(seed)
        self._turns: list[int] = []
        self._taken: dict[int, tuple[float, ...]] = {}
        self._first: tuple[float, ...] | None = None
        self._began_s = 0.0

    def restart(self) -> None:
        """The run was interrupted: begin the round anew."""
        self._rng.shuffle(self._arms)
        self._turns = [*self._arms, *reversed(self._arms)]
        self._taken = {}
        self._begin()

    def step(self, steps: int) -> None:
        """A step of the run has ended, and there were so many."""
        elapsed_s = time.perf_counter() - self._began_s
        if self._first is None:
            if elapsed_s >= self._settle_s:
                self._first = self._readings(steps)
            return
        if elapsed_s < self._window_s:
            return
        grown = [after - before for before, after in zip(self._first, self._readings(steps), strict=True)]
        arm = self._turns.pop(0)
        before = self._taken.get(arm, (0.0,) * len(grown))
        self._taken[arm] = tuple(map(sum, zip(before, grown, strict=True)))
        if self._turns:
            self._begin()
        else:
            self.rounds.append(self._taken)
            self.restart()

    def _begin(self) -> None:
        self._switch(self._turns[0])
        self._first = None
        self._began_s = time.perf_counter()
