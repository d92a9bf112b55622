"""Where a simulated world's decisions come from: a seeded generator, or hypothesis, which shrinks them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Picks(Protocol):
    """Decisions, one at a time."""

    def chance(self, probability: float) -> bool: ...
    def integer(self, low: int, high: int) -> int: ...
    def choice(self, options: Sequence[T]) -> T: ...


class SeededPicks:
    """The same decisions for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]


class DrawnPicks:
    """Decisions that hypothesis draws; the simplest is the first of everything, and no."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def chance(self, probability: float) -> bool:
        return self._draw(st.integers(0, 99)) >= 100 - 100 * probability

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]
