"""Host pool: the memory of the slots, in extents of bounded size that are mapped and registered one by one.

Rows are slots, columns are ranks: a row is one slot of every rank, and a copy engine accesses its own rank's column.
Extents start on a page; rows do if their size is a multiple of a page.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvferry.cuda_ops.pool.backing import AnonymousMemory, Backing
from kvferry.cuda_ops.pool.extents import DEFAULT_EXTENT_BYTES
from kvferry.cuda_ops.pool.limits import NotEnoughMemory, check_fits
from kvferry.cuda_ops.pool.pages import whole_pages
from kvferry.cuda_ops.pool.prepare import Preparation, prepare, unregister


@dataclass(frozen=True, slots=True)
class _Extent:
    """A mapping of whole pages that starts with `rows`, at `offset` in the backing.

    It is unmapped with its last view.
    """

    memory: NDArray[np.uint8]
    rows: NDArray[np.uint8]
    offset: int
    is_registered: bool = False


class PoolTable:
    """Immutable snapshot of the slots' addresses for one rank.

    The memory stays mapped while it is referenced, also after the pool is closed. `places`, int64 `[2, num_extents]`,
    has each extent's first slot and the address of that slot's bytes.
    """

    def __init__(self, extents: tuple[_Extent, ...], offset_bytes: int) -> None:
        """Create a table; the rank's bytes start `offset_bytes` into a row."""
        self.extents = extents
        self.row_bytes = extents[0].rows.shape[1] if extents else 0
        self.end_offset = extents[-1].offset + extents[-1].memory.nbytes if extents else 0
        counts = [len(extent.rows) for extent in extents]
        self.num_slots = sum(counts)
        self._firsts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        addresses = [extent.rows.ctypes.data + offset_bytes for extent in extents]
        self.places = np.array([self._firsts, addresses], dtype=np.int64)

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of one slot's bytes of all ranks."""
        extent = bisect_right(self._firsts, slot) - 1
        row: NDArray[np.uint8] = self.extents[extent].rows[slot - self._firsts[extent]]
        return row


class HostPool:
    """Memory for `num_slots` slots of `slot_bytes` for each of `num_ranks` ranks.

    All processes that map one backing must pass equal sizes. Slots may be added and removed during copies of others;
    the caller must ensure that removed slots are unused.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
        *,
        backing: Backing | None = None,
        num_ranks: int = 1,
        rank: int = 0,
        preparation: Preparation | None = None,
    ) -> None:
        """Check the limits, then map the extents and prepare them. Raises `NotEnoughMemory`."""
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank}: must be in 0..{num_ranks - 1}")
        self.slot_bytes = slot_bytes
        self.num_ranks = num_ranks
        self.rank = rank
        self.row_bytes = num_ranks * slot_bytes
        self.slots_per_extent = max(extent_bytes // self.row_bytes, 1)
        self._backing = AnonymousMemory() if backing is None else backing
        wanted = Preparation() if preparation is None else preparation
        self._preparation = replace(wanted, touch=wanted.touch or self._backing.must_touch)
        self._lay_out(())
        try:
            self.add_slots(num_slots)
        except BaseException:
            self.close()
            raise

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return self._table.num_slots

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all slots of all ranks."""
        return self.num_slots * self.row_bytes

    @property
    def is_page_locked(self) -> bool:
        """Return whether all memory is registered with the device."""
        return bool(self._table.extents) and all(extent.is_registered for extent in self._table.extents)

    @property
    def extent_slots(self) -> list[int]:
        """Return the number of slots of each extent."""
        return [len(extent.rows) for extent in self._table.extents]

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of this rank's bytes of one slot."""
        start = self.rank * self.slot_bytes
        return self._table.row(slot)[start : start + self.slot_bytes]

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of one slot's bytes of all ranks, `[num_ranks, slot_bytes]`."""
        return self._table.row(slot).reshape(self.num_ranks, self.slot_bytes)

    def hold(self) -> PoolTable:
        """Return the current addresses; their memory stays mapped while the table is referenced."""
        return self._table

    def add_slots(self, num_slots: int) -> None:
        """Map `num_slots` more in new extents. A failure changes nothing. Raises `NotEnoughMemory`."""
        table = self._table
        full, rest = divmod(num_slots, self.slots_per_extent)
        end_offset = self._check_fits(num_slots)
        had_bytes = self._reserve(end_offset)
        try:
            extents: list[_Extent] = []
            offset = table.end_offset
            for count in [self.slots_per_extent] * full + [rest] * (rest > 0):
                extents.append(self._map(offset, count))
                offset += extents[-1].memory.nbytes
            if prepare([extent.memory for extent in extents], self._preparation):
                extents = [replace(extent, is_registered=True) for extent in extents]
        except BaseException:
            extents.clear()
            if had_bytes is not None:
                # The file of an earlier process has blocks beyond the mapped ones.
                self._backing.free(had_bytes)
            raise
        self._lay_out((*table.extents, *extents))

    def check_room(self, num_slots: int) -> None:
        """Raise `NotEnoughMemory` if a larger pool of `num_slots` does not fit."""
        if num_slots > self.num_slots:
            self._check_fits(num_slots - self.num_slots)

    def remove_extents(self, count: int, *, free: bool = True) -> None:
        """Unmap the last extents. With `free`, for the last process only, also free a shared file's memory."""
        extents = self._table.extents
        if not 0 <= count <= len(extents):
            raise ValueError(f"count={count}: the pool has {len(extents)} extents")
        keep = len(extents) - count
        self._unregister(extents[keep:])
        self._lay_out(extents[:keep])
        if free:
            self._backing.free(self._table.end_offset)

    def close(self) -> None:
        """Unmap everything. Requires: no copy runs. An extent stays mapped while a view of it exists."""
        self._unregister(self._table.extents)
        self._lay_out(())
        self._backing.close()

    def _lay_out(self, extents: tuple[_Extent, ...]) -> None:
        self._table = PoolTable(extents, self.rank * self.slot_bytes)
        self._backing.mapped_bytes = self._table.end_offset

    def _check_fits(self, num_slots: int) -> int:
        """Return the end offset of the pool after growing by `num_slots`. Raises `NotEnoughMemory`."""
        table = self._table
        full, rest = divmod(num_slots, self.slots_per_extent)
        end_offset = table.end_offset + full * whole_pages(self.slots_per_extent * self.row_bytes)
        end_offset += whole_pages(rest * self.row_bytes)
        missing_bytes = end_offset - max(self._backing.reserved_bytes(), table.end_offset)
        check_fits("KVFERRY_POOL_BYTES", max(missing_bytes, 0), self._backing.limits())
        return end_offset

    def _reserve(self, num_bytes: int) -> int | None:
        try:
            return self._backing.reserve(num_bytes)
        except OSError as error:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES: reserving {num_bytes:,} bytes for the pool failed: {error}"
            ) from error

    def _map(self, offset: int, count: int) -> _Extent:
        num_bytes = count * self.row_bytes
        try:
            memory = self._backing.map(offset, whole_pages(num_bytes))
        except OSError as error:
            raise NotEnoughMemory(
                f"KVFERRY_POOL_BYTES: mapping an extent of {num_bytes:,} bytes at offset {offset:,} failed: {error}"
            ) from error
        return _Extent(memory, memory[:num_bytes].reshape(count, self.row_bytes), offset)

    def _unregister(self, extents: tuple[_Extent, ...]) -> None:
        registrar = self._preparation.registrar
        if registrar is not None:
            unregister([extent.memory for extent in extents if extent.is_registered], registrar)
