"""What is said of figures: an interval that so few of them do not give is none, and nothing follows from it."""

from __future__ import annotations

from itertools import product
from math import inf
from statistics import median

import pytest

from bench.report import median_interval, verdict


@pytest.mark.parametrize("count", range(1, 6))
def test_fewer_than_six_figures_have_no_interval_and_no_verdict(count: int) -> None:
    """All of five lie on one side of their median once in 16 times, which is more than 5%."""
    assert median_interval([0.5] * count) == (-inf, inf)
    assert verdict([0.5] * count, 1.0) == "not resolved"
    assert verdict([0.5] * count, 1.0, at_most=False) == "not resolved"


@pytest.mark.parametrize("count", range(6, 14))
def test_interval_is_the_narrowest_of_its_confidence(count: int) -> None:
    """Over all ways in which figures can fall below (0) and above (1) the true median, which are equally likely."""
    figures = list(range(count))
    low, high = median_interval(figures)
    below, above = int(low), count - 1 - int(high)
    assert (below, low + high) == (above, 2 * median(figures))

    def misses(rank: int) -> float:
        fallen = [sum(ways) for ways in product((0, 1), repeat=count)]
        return sum(not rank < up < count - rank for up in fallen) / 2**count

    assert misses(below) <= 0.05 < misses(below + 1)


def test_an_interval_on_one_side_of_the_goal_is_a_verdict() -> None:
    ratios = [0.9, 0.91, 0.92, 0.93, 0.94, 0.95]
    assert verdict(ratios, 1.0) == "met"
    assert verdict(ratios, 1.0, at_most=False) == "missed"
    assert verdict(ratios, 0.8) == "missed"
    assert verdict(ratios, 0.92) == "not resolved"
