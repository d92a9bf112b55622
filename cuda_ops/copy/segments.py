"""Conversion of a job to segments: arrays of device address, host address and length, computed for the whole job.

All ids are checked first, so that a job with an invalid one fails before any copy. Neighbors that are adjacent on both
sides become one segment, within one region and one extent only: memory allocated or registered in two parts cannot be
copied in one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import BlockRun, TransferJob
from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions
from kvferry.cuda_ops.pool.host_pool import PoolTable

Int64s = NDArray[np.int64]


class Segments(NamedTuple):
    """Segments to copy: int64 addresses and lengths in bytes, views of a `SegmentBuffer`."""

    device: Int64s
    host: Int64s
    sizes: Int64s

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all segments."""
        return int(self.sizes.sum())


def _ordinary_memory(count: int) -> Int64s:
    return np.empty(count, dtype=np.int64)


class SegmentBuffer:
    """Growing buffer for the segments of one job at a time."""

    def __init__(self, capacity: int = 1024, allocate: Callable[[int], Int64s] = _ordinary_memory) -> None:
        """Allocate the buffer.

        Args:
            capacity: segments at first.
            allocate: returns an int64 array of a length, in page-locked memory if a device reads it.
        """
        self._allocate = allocate
        self._rows = allocate(3 * capacity).reshape(3, capacity)

    def take(self, count: int) -> Int64s:
        """Return `[3, n]` rows as in `Segments`, for at least `count` segments. Invalidates earlier results."""
        if count > self._rows.shape[1]:
            capacity = max(count, 2 * self._rows.shape[1])
            self._rows = self._allocate(3 * capacity).reshape(3, capacity)
        return self._rows


class SegmentPlanner:
    """Plans jobs for one layout. Any thread, each with a buffer of its own."""

    def __init__(self, layout: DeviceLayout, slot_bytes: int) -> None:
        """Check the layout. Raises `ValueError`, with both sizes, if a slot is too small for it."""
        layout.check_fits(slot_bytes)
        self._groups = layout.groups
        self._regions = [_table(group) for group in layout.groups]
        self._block_bytes = [group.block_bytes for group in layout.groups]

    def num_bytes(self, job: TransferJob) -> int:
        """Return the bytes of the job's blocks."""
        return sum(len(run) * self._block_bytes[run.group] for run in job.runs)

    def plan(self, job: TransferJob, table: PoolTable, buffer: SegmentBuffer, *, coalesce: bool) -> Segments:
        """Compute the segments of a job, in the order of its runs and blocks.

        Args:
            job: the job.
            table: addresses of the slots.
            buffer: receives the segments.
            coalesce: whether to merge neighbors.

        Raises:
            IndexError: a group, block, slot or part is out of range.
            ValueError: the arrays of a run differ in length.
        """
        count = 0
        for run in job.runs:
            self._check(run, table)
            count += len(run) * len(self._groups[run.group].regions)
        out = buffer.take(count)
        end = 0
        for run in filter(len, job.runs):
            end = self._plan_run(run, table, out, end, coalesce)
        return Segments(*out[:, :end])

    def _plan_run(self, run: BlockRun, table: PoolTable, out: Int64s, start: int, coalesce: bool) -> int:
        """Write the segments of a run to `out`, from index `start` on; return the index behind the last."""
        bases, strides, sizes, offsets = self._regions[run.group]
        firsts, addresses = table.places
        extents = np.searchsorted(firsts, run.slots, side="right") - 1
        host = addresses[extents] + (run.slots - firsts[extents]) * table.row_bytes
        host += run.numbers * self._block_bytes[run.group]
        if coalesce and len(bases) == 1:
            device = bases + run.block_ids * strides
            starts = _starts(device, host, extents, int(sizes[0]))
            end = start + len(starts)
            out[0, start:end] = np.minimum.reduceat(device, starts)
            out[1, start:end] = np.minimum.reduceat(host, starts)
            out[2, start:end] = np.diff(starts, append=len(run)) * sizes
            return end
        end = start + len(run) * len(bases)
        device_at, host_at, sizes_at = (row[start:end].reshape(len(run), len(bases)) for row in out)
        np.multiply(run.block_ids[:, None], strides, out=device_at)
        device_at += bases
        np.add(host[:, None], offsets, out=host_at)
        sizes_at[:] = sizes
        return end

    def _check(self, run: BlockRun, table: PoolTable) -> None:
        if not 0 <= run.group < len(self._groups):
            raise IndexError(f"group {run.group}: the device layout has {len(self._groups)} groups")
        if not len(run.block_ids) == len(run.slots) == len(run.numbers):
            raise ValueError(
                f"columns of a run differ in length: {len(run.block_ids)} blocks, {len(run.slots)} slots, "
                f"{len(run.numbers)} block numbers"
            )
        group = self._groups[run.group]
        for what, indexes, limit in (
            (f"blocks of group {run.group}", run.block_ids, group.num_blocks),
            ("slots", run.slots, table.num_slots),
            (f"block numbers in a slot of group {run.group}", run.numbers, group.slot_blocks),
        ):
            # As unsigned numbers, negative ones are too large.
            if indexes.view(np.uint64).max(initial=0) >= limit:
                raise IndexError(f"{what} {indexes.min()} to {indexes.max()}: must be in 0..{limit - 1}")


def _starts(device: Int64s, host: Int64s, extents: Int64s, size: int) -> Int64s:
    """Return the indices of the pieces of `size` bytes that start a segment: all but neighbors of the one before.

    Neighbors are adjacent on both sides, within one extent. They do not change direction, as a job has a block once.
    """
    steps = np.diff(device)
    is_next = (np.diff(host) == steps) & (np.abs(steps) == size) & (np.diff(extents) == 0)
    return np.flatnonzero(np.concatenate(([True], ~is_next)))


def _table(group: GroupRegions) -> Int64s:
    """Return a group's regions in the form of the native planner."""
    sizes = [region.block_bytes for region in group.regions]
    offsets = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    addresses = [region.address for region in group.regions]
    strides = [region.stride_bytes for region in group.regions]
    return np.array([addresses, strides, sizes, offsets], dtype=np.int64)
