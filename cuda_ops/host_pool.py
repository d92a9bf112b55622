"""The host pool: the memory that holds the slots, in extents of bounded size that are mapped one by one.

Slot `s` lives in extent `s // slots_per_extent` at row `s % slots_per_extent`. Rows are page-aligned when slots are.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from core.transfers import Slots
from cuda_ops.limits import NotEnoughMemory, check_fits, memory_limits

DEFAULT_EXTENT_BYTES = 1 << 30


class HostPool:
    """Anonymous memory for `num_slots` slots of `slot_bytes` each. Nothing is kept when the process ends."""

    def __init__(self, num_slots: int, slot_bytes: int, extent_bytes: int = DEFAULT_EXTENT_BYTES) -> None:
        """Map the extents, after checking that memory and cgroup have room; raises `NotEnoughMemory`."""
        check_fits("POOL_BYTES", num_slots * slot_bytes, memory_limits())
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slots_per_extent = max(extent_bytes // slot_bytes, 1)
        self._maps: list[mmap.mmap] = []
        self._extents: list[NDArray[np.uint8]] = []
        for first in range(0, num_slots, self.slots_per_extent):
            count = min(self.slots_per_extent, num_slots - first)
            try:
                mapped = mmap.mmap(-1, count * slot_bytes)
            except OSError as error:
                self.close()
                raise NotEnoughMemory(
                    f"POOL_BYTES: mapping an extent of {count * slot_bytes:,} bytes after {first * slot_bytes:,} "
                    f"failed: {error}"
                ) from error
            self._maps.append(mapped)
            self._extents.append(np.frombuffer(mapped, dtype=np.uint8).reshape(count, slot_bytes))

    @property
    def num_bytes(self) -> int:
        """All slots together."""
        return self.num_slots * self.slot_bytes

    def extents_of(self, slots: Slots) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64], slice | Slots]]:
        """The rows of a batch of slots, extent by extent: the extent as `[rows, slot_bytes]`, the rows, and which of
        the batch they are."""
        if len(self._extents) == 1:
            yield self._extents[0], slots, slice(None)
            return
        extents = slots // self.slots_per_extent
        for index in np.unique(extents).tolist():
            chosen = np.flatnonzero(extents == index)
            yield self._extents[index], slots[chosen] - index * self.slots_per_extent, chosen

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of one slot, not a copy."""
        row: NDArray[np.uint8] = self._extents[slot // self.slots_per_extent][slot % self.slots_per_extent]
        return row

    def close(self) -> None:
        """Unmap everything. No copy may be running; views that are still about keep their extent mapped."""
        self._extents.clear()
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                continue
        self._maps.clear()
