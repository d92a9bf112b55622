"""Common output of all benchmarks: machine and versions, spreads and confidence intervals."""

from __future__ import annotations

import os
import platform
import statistics
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import comb, inf
from pathlib import Path


def environment(*packages: str) -> str:
    """Return one line with date, machine and versions; packages may be absent."""
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    return f"{datetime.now(UTC):%Y-%m-%d}, {machine}, {versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def thread_times_s(pid: int) -> dict[str, float]:
    """Return the CPU time of each thread of a process, to the nanosecond."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended.
        with suppress(OSError):
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def python_thread_times_s() -> dict[str, float]:
    """Return the CPU time of this process's Python threads, by name, which several may have."""
    times, taken = thread_times_s(os.getpid()), defaultdict[str, float](float)
    for thread in threading.enumerate():
        taken[thread.name] += times.get(str(thread.native_id), 0.0)
    return taken


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median with minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median: the enclosing order statistics.

    Unbounded if even the extremes do not reach the confidence, as with fewer than six values at 95%.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail = 0.0
    rank = 0
    while rank < count // 2:
        tail += comb(count, rank) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    if not rank:
        return -inf, inf
    low = rank - 1
    return ordered[low], ordered[count - 1 - low]


def verdict(ratios: Sequence[float], goal: float, *, at_most: bool = True) -> str:
    """Return whether the interval of a ratio's median meets a goal."""
    low, high = median_interval(ratios)
    if low <= goal <= high:
        return "not resolved"
    return "met" if (high < goal) == at_most else "missed"
