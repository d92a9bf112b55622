"""How a pool is divided into extents, which it grows and shrinks by, and how far it may grow while it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

DEFAULT_EXTENT_BYTES = 1 << 30
_LEAST_EXTENTS = 8
"""So that a small pool can change its size, too."""
_MOST_GROWTH = 64
"""Whatever is kept for each slot has room for so many times the slots at start, and takes no memory before."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool of `num_slots`, in whole extents of `extent_slots`, that may come to have `max_slots`."""

    num_slots: int
    extent_slots: int
    max_slots: int


class PoolMemory(Protocol):
    """A pool's memory, as whoever changes its size sees it: of one process, or of all that map it."""

    @property
    def num_slots(self) -> int:
        """Slots that there is memory for."""

    @property
    def num_bytes(self) -> int:
        """All slots of all ranks together."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a slot, all ranks together."""

    def check_room(self, num_slots: int) -> None:
        """Raise `NotEnoughMemory` if a pool of so many slots does not fit; one that is not larger does."""

    def add_slots(self, num_slots: int) -> None:
        """Have memory for so many more, in whole extents; on failure nothing has changed."""

    def remove_extents(self, count: int) -> None:
        """Give the last extents back, whose slots nobody uses any more."""


def plan_pool(pool_bytes: int, row_bytes: int, largest_bytes: int) -> PoolPlan:
    """The largest pool of rows of `row_bytes` that fits `pool_bytes`: no slot at all if a row does not fit.

    The machine holds no pool of more than `largest_bytes`. Fewer slots stay unused than there are extents.
    """
    fitting = pool_bytes // row_bytes
    num_extents = max(-(-fitting * row_bytes // DEFAULT_EXTENT_BYTES), _LEAST_EXTENTS)
    extent_slots = max(fitting // num_extents, 1)
    num_slots = whole_extents(fitting, extent_slots)
    largest = whole_extents(largest_bytes // row_bytes, extent_slots)
    return PoolPlan(num_slots, extent_slots, max(min(largest, _MOST_GROWTH * num_slots), num_slots))


def whole_extents(num_slots: int, extent_slots: int) -> int:
    """So many slots, rounded down to whole extents."""
    return num_slots // extent_slots * extent_slots
