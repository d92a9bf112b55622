"""Histograms: how often a quantity was how large, in buckets that never change, so that counting takes no memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvferry.core.transfers import Direction

JOB_BYTES = tuple(float(1 << exponent) for exponent in range(14, 35, 2))
"""From one small block to all of a large pool's extents."""
JOB_SECONDS = tuple(power * factor for power in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for factor in (1.0, 2.5, 5.0))


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` is how many values were at most `bounds[i]` and above the bound before; the last count is of values
    above every bound.

    Counting makes another one, so that a snapshot is the one that there is.
    """

    bounds: tuple[float, ...]
    """They ascend."""
    counts: tuple[int, ...]
    total: float = 0.0

    def counting(self, value: float) -> Histogram:
        """This one and another value."""
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.total + value)


def empty(bounds: tuple[float, ...]) -> Histogram:
    """No value yet."""
    return Histogram(bounds, (0,) * (len(bounds) + 1))


NO_BYTES, NO_SECONDS = empty(JOB_BYTES), empty(JOB_SECONDS)


@dataclass(frozen=True, slots=True)
class JobHistograms:
    """Jobs of one direction that copied all they were asked to: bytes of all workers, and seconds of the slowest."""

    bytes: Histogram = NO_BYTES
    seconds: Histogram = NO_SECONDS

    def counting(self, num_bytes: int, seconds: float) -> JobHistograms:
        """These and another job."""
        return JobHistograms(self.bytes.counting(num_bytes), self.seconds.counting(seconds))


def by_direction() -> dict[Direction, JobHistograms]:
    """Nothing counted yet."""
    return {direction: JobHistograms() for direction in Direction}
