"""Division of a pool into extents, the unit in which it grows and shrinks, and its maximum size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

DEFAULT_EXTENT_BYTES = 1 << 30
_LEAST_EXTENTS = 8
"""Minimum number of extents, so that a small pool can be resized too."""
_MOST_GROWTH = 64
"""Maximum growth: arrays per slot are sized for this many times the initial slots, and use no memory before."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool of `num_slots`, in whole extents of `extent_slots`, that may grow to `max_slots`."""

    num_slots: int
    extent_slots: int
    max_slots: int


class PoolMemory(Protocol):
    """Memory of a pool that can be resized: in one process, or in all that map it."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots with memory."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots of all ranks."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a slot, all ranks together."""

    def check_room(self, num_slots: int) -> None:
        """Raise `NotEnoughMemory` if a larger pool of `num_slots` does not fit."""

    def add_slots(self, num_slots: int) -> None:
        """Add memory for `num_slots` more, in whole extents. A failure changes nothing."""

    def remove_extents(self, count: int) -> None:
        """Free the last extents. Requires: their slots are unused."""


def plan_pool(pool_bytes: int, row_bytes: int, largest_bytes: int) -> PoolPlan:
    """Return the largest pool of rows of `row_bytes` that fits `pool_bytes`; without slots if no row fits.

    Args:
        pool_bytes: wanted size.
        row_bytes: bytes of a slot, all ranks together.
        largest_bytes: the most that the machine can hold.

    Returns:
        A plan that leaves fewer slots unused than it has extents.
    """
    fitting = pool_bytes // row_bytes
    num_extents = max(-(-fitting * row_bytes // DEFAULT_EXTENT_BYTES), _LEAST_EXTENTS)
    extent_slots = max(fitting // num_extents, 1)
    num_slots = whole_extents(fitting, extent_slots)
    largest = whole_extents(largest_bytes // row_bytes, extent_slots)
    return PoolPlan(num_slots, extent_slots, max(min(largest, _MOST_GROWTH * num_slots), num_slots))


def whole_extents(num_slots: int, extent_slots: int) -> int:
    """Round a number of slots down to whole extents."""
    return num_slots // extent_slots * extent_slots
