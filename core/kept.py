"""A pool that outlives its process, as far as core knows of it: what it is told, and what it gets at a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.origins import Origin
from kvferry.core.transfers import SlotLabels, Slots


class PoolRecord(Protocol):
    """The record of which blocks a restart may bring back, and which not.

    Requires: manager lock held, unless said otherwise. No method waits or accesses the pool's file: calls are queued,
    and written in their order by another thread.
    """

    def void(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """Queue an invalidation: the blocks of these slots, in these generations, have left the pool."""

    def void_before(self, epoch: int) -> None:
        """Queue an invalidation of every block of an epoch before this one."""

    def num_invalidations(self) -> int:
        """Return how many invalidations were queued so far. Any thread, no lock."""

    def are_written(self, count: int) -> bool:
        """Return whether the first `count` invalidations are written. Any thread, no lock."""

    def begin_filling(self, labels: SlotLabels) -> None:
        """Note that a tier is about to overwrite these slots."""

    def end_filling(self, labels: SlotLabels) -> None:
        """Note that a tier has filled these slots, whose blocks can be found now: their headers may be sealed."""


class KeptBlocks(NamedTuple):
    """Blocks that an earlier process left, as columns of one length, the most recently used first. No key is twice.

    What nobody knows is zero, `Origin("")`, and the class of normal priority.
    """

    slots: Slots
    keys: Sequence[Key]
    generations: NDArray[np.int64]
    sizes: NDArray[np.int64]
    positions: NDArray[np.int64]
    origins: Sequence[Origin]
    stored_s: NDArray[np.float64]
    hit_s: NDArray[np.float64]
    hits: NDArray[np.int64]
    classes: NDArray[np.uint8]
