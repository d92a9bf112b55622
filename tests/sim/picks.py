"""Where a simulated world's decisions come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Picks:
    """The same decisions for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]
