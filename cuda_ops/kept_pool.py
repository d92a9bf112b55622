"""A kept pool as core sees it: what leaves is void in the headers at once, and what a process left comes back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core.transfers import SlotLabels, Slots
from cuda_ops.kept_file import KeptFile
from cuda_ops.kept_slots import KeptSlots, read_slots
from cuda_ops.pool_format import SLOT_HEADER, HeaderState


class Fillings(Protocol):
    """Who marks slots before a tier writes to them, and vouches for their bytes afterwards, on a thread of its own."""

    def begin_filling(self, labels: SlotLabels) -> None: ...
    def end_filling(self, labels: SlotLabels) -> None: ...
    def settle(self, timeout_s: float) -> bool:
        """Wait until nobody looks at slots that were filled by now; whether that came true in time."""


class KeptRecord:
    """A `core.kept.PoolRecord` in the file's headers. Memory only; called under the manager's lock."""

    def __init__(self, file: KeptFile) -> None:
        self.fillings: Fillings | None = None
        """Without it, what tiers bring does not outlive this process."""
        self.file = file
        self._dropped = file.headers(0)["dropped_generation"]

    def void(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """See `PoolRecord`."""
        self._dropped[slots] = generations

    def void_before(self, epoch: int) -> None:
        """See `PoolRecord`."""
        self.file.min_epoch = epoch

    def begin_filling(self, labels: SlotLabels) -> None:
        """See `PoolRecord`."""
        if self.fillings is not None:
            self.fillings.begin_filling(labels)

    def end_filling(self, labels: SlotLabels) -> None:
        """See `PoolRecord`."""
        if self.fillings is not None:
            self.fillings.end_filling(labels)

    def settle(self, timeout_s: float) -> bool:
        """Wait, under no lock, until nobody looks at slots that have left the pool; whether that came true in time."""
        return self.fillings is None or self.fillings.settle(timeout_s)


def recover_slots(file: KeptFile) -> KeptSlots:
    """What an earlier process left, once the headers of all else have been emptied."""
    num_slots = file.found.num_slots
    ranks = [file.headers(rank)[:num_slots] for rank in range(file.shape.num_ranks)]
    kept = read_slots(ranks, file.shape, file.min_epoch, file.found.num_whole)
    if len(kept.slots) == num_slots:
        return kept
    gone = np.ones(num_slots, dtype=np.bool_)
    gone[kept.slots] = False
    for headers in ranks:
        headers["state"][gone] = HeaderState.EMPTY
        headers[gone] = np.zeros(1, dtype=SLOT_HEADER)
    return kept
