"""A pool that outlives its process, as far as core knows of it: what it is told, and what it gets at a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from core.keys import Key
from core.origins import Origin
from core.transfers import SlotLabels, Slots


class PoolRecord(Protocol):
    """Where it is written what a restart may bring back, and must not. Called under the lock: it only writes memory."""

    def void(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """What these slots held in these generations has left the pool."""

    def void_before(self, epoch: int) -> None:
        """Nothing of an epoch before this one exists any more."""

    def begin_filling(self, labels: SlotLabels) -> None:
        """A tier is about to overwrite these slots; those that the engine's copies write are marked by those."""

    def end_filling(self, labels: SlotLabels) -> None:
        """A tier has filled these slots, whose blocks can be found now: somebody else may vouch for their bytes."""


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
