"""Histograms: how often a quantity was how large, in buckets that never change, so that counting takes no memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.transfers import Direction

JOB_BYTES = tuple(float(1 << exponent) for exponent in range(14, 35, 2))
"""From one small block to all of a large pool's extents."""
JOB_SECONDS = tuple(power * factor for power in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for factor in (1.0, 2.5, 5.0))


@dataclass(slots=True)
class Histogram:
    """`counts[i]` is how many values were at most `bounds[i]` and above the bound before; the last count is of values
    above every bound."""

    bounds: tuple[float, ...]
    """They ascend."""
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """The counts of this moment."""
        copied = Histogram(self.bounds)
        copied.counts, copied.total = self.counts.copy(), self.total
        return copied


@dataclass(frozen=True, slots=True)
class JobHistograms:
    """Jobs of one direction that copied all they were asked to: bytes of all workers, and seconds of the slowest."""

    bytes: Histogram = field(default_factory=lambda: Histogram(JOB_BYTES))
    seconds: Histogram = field(default_factory=lambda: Histogram(JOB_SECONDS))

    def copy(self) -> JobHistograms:
        """The counts of this moment."""
        return JobHistograms(self.bytes.copy(), self.seconds.copy())


def by_direction() -> Mapping[Direction, JobHistograms]:
    """Nothing counted yet."""
    return {direction: JobHistograms() for direction in Direction}
