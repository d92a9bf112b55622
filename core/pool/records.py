"""Metadata of slots: the record in memory, a copy for readers, and the data that a pool file keeps over a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.transfers import SlotLabels, Slots

SLOT_RECORD = np.dtype(
    [
        ("generation", np.int64),
        ("stored_s", np.float64),
        ("hit_s", np.float64),
        ("older", np.int32),
        ("newer", np.int32),
        ("size", np.int64),
        ("position", np.int32),
        ("epoch", np.int32),
        ("hits", np.int32),
        ("pins", np.int32),
        ("tenant", np.int32),
        ("state", np.uint8),
        ("priority_class", np.uint8),
        ("unused", np.uint16),
    ],
    align=True,
)
"""One cache line, so that work on a batch of slots waits for the memory of each slot once."""

Records = NDArray[np.void]


def lines_of(records: Records) -> NDArray[np.int64]:
    """View records as rows of plain numbers, which NumPy copies as a whole; records it copies field by field."""
    return records.view(np.int64).reshape(-1, SLOT_RECORD.itemsize // 8)


def records_in(lines: NDArray[np.int64]) -> Records:
    """View whole rows of `lines_of` as records."""
    return lines.view(SLOT_RECORD)[:, 0]


# Created on the hot path: a named tuple takes less than half of a frozen dataclass's time.
class SlotRows(NamedTuple):
    """A copy of a batch of slots as columns of one length, for history and listings.

    In `records`, `position` is the index of the block within its request, `size` is in bytes, and times are Unix
    seconds (`hit_s` 0 for a block never hit). `live` is False for a slot that no longer holds a loadable block; its
    other columns are then stale.
    """

    slots: NDArray[np.int64]
    keys: Sequence[Key]
    live: NDArray[np.bool_]
    origins: Sequence[RequestIdentity]
    lines: NDArray[np.int64]

    @property
    def records(self) -> Records:
        """Columns by the names in `SLOT_RECORD`."""
        return records_in(self.lines)


class HeaderQueue(Protocol):
    """Changes of the slot headers of a pool that outlives its process: which blocks a restart may recover.

    Requires: manager lock held, unless said otherwise. No method waits or accesses the pool's file: calls are queued,
    and written in their order by another thread.
    """

    @property
    def epoch(self) -> int:
        """Epoch of the blocks that the last process left, or the first epoch if it left none."""

    def invalidate(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """Queue an invalidation of the blocks of these slots, in these generations, which have left the pool."""

    def invalidate_before(self, epoch: int) -> None:
        """Queue an invalidation of every block of an epoch before this one."""

    def num_invalidations(self) -> int:
        """Return how many invalidations were queued so far. Any thread, no lock."""

    def are_flushed(self, count: int) -> bool:
        """Return whether the first `count` invalidations are on the disk. Any thread, no lock."""

    def begin_tier_write(self, labels: SlotLabels) -> None:
        """Record that a tier is about to overwrite these slots."""

    def end_tier_write(self, labels: SlotLabels) -> None:
        """Record that a tier has filled these slots, whose blocks were published: their headers may be sealed."""


class RecoveredBlocks(NamedTuple):
    """Blocks that an earlier process left, as columns of one length, most recently used first. Keys are unique.

    Unknown values are zero, `RequestIdentity("")`, and the class of normal priority.
    """

    slots: Slots
    keys: Sequence[Key]
    generations: NDArray[np.int64]
    sizes: NDArray[np.int64]
    positions: NDArray[np.int64]
    origins: Sequence[RequestIdentity]
    stored_s: NDArray[np.float64]
    hit_s: NDArray[np.float64]
    hits: NDArray[np.int64]
    classes: NDArray[np.uint8]
