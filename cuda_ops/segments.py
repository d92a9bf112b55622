"""From a job to what has to be copied: three arrays of device address, host address and length, for all of it at once.

Everything is checked before an address is given out, so that a job which names what is not there fails untouched.
Neighbors that are adjacent on both sides become one segment, within one region and one extent only: memory that was
allocated or registered in two parts may not be copied in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.transfers import BlockRun, TransferJob
from cuda_ops.host_pool import HostPool
from cuda_ops.layout import DeviceLayout, GroupRegions

Int64s = NDArray[np.int64]


class Segments(NamedTuple):
    """What to copy between device and host: int64 addresses and lengths in bytes, views of a `SegmentBuffer`."""

    device: Int64s
    host: Int64s
    sizes: Int64s

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return int(self.sizes.sum())


def _ordinary_memory(count: int) -> Int64s:
    return np.empty(count, dtype=np.int64)


class SegmentBuffer:
    """Room for the segments of one job, used again by the next. Grows, and never shrinks."""

    def __init__(self, capacity: int = 1024, allocate: Callable[[int], Int64s] = _ordinary_memory) -> None:
        """`allocate` gives an array of so many numbers, in memory that a device knows where that matters."""
        self._allocate = allocate
        self._rows = allocate(3 * capacity).reshape(3, capacity)

    def take(self, count: int) -> Segments:
        """Room for so many segments; what was handed out before is void."""
        if count > self._rows.shape[1]:
            capacity = max(count, 2 * self._rows.shape[1])
            self._rows = self._allocate(3 * capacity).reshape(3, capacity)
        return Segments(*self._rows[:, :count])


class _GroupTable:
    """A group's regions as columns."""

    def __init__(self, group: GroupRegions) -> None:
        self.num_blocks = group.num_blocks
        self.slot_blocks = group.slot_blocks
        self.block_bytes = group.block_bytes
        self.num_regions = len(group.regions)
        self.addresses = np.array([region.address for region in group.regions], dtype=np.int64)
        self.strides = np.array([region.stride_bytes for region in group.regions], dtype=np.int64)
        self.sizes = np.array([region.block_bytes for region in group.regions], dtype=np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes


class SegmentPlanner:
    """Knows a layout and a pool. One at a time may plan into one buffer."""

    def __init__(self, layout: DeviceLayout, pool: HostPool) -> None:
        """Raises `ValueError`, with both sizes, if a slot of the pool is too small for the layout."""
        layout.check_fits(pool.slot_bytes)
        self._pool = pool
        self._groups = [_GroupTable(group) for group in layout.groups]

    def num_bytes(self, job: TransferJob) -> int:
        """What the job's blocks have together."""
        return sum(len(run) * self._groups[run.group].block_bytes for run in job.runs)

    def plan(self, job: TransferJob, buffer: SegmentBuffer, *, coalesce: bool) -> Segments:
        """The segments of a job, in the order of its runs and blocks, or in the reverse order where that coalesces.

        Raises `IndexError` for a group, block, slot or part that is not there, and `ValueError` for a run whose
        arrays differ in length.
        """
        for run in job.runs:
            self._check(run)
        count = sum(len(run) * self._groups[run.group].num_regions for run in job.runs)
        segments = buffer.take(count)
        end = 0
        for run in job.runs:
            group = self._groups[run.group]
            start, end = end, end + len(run) * group.num_regions
            part = Segments(segments.device[start:end], segments.host[start:end], segments.sizes[start:end])
            self._fill(group, run, part)
            if coalesce and group.num_regions == 1:
                end = start + self._coalesce(run, part)
        return Segments(segments.device[:end], segments.host[:end], segments.sizes[:end])

    def _check(self, run: BlockRun) -> None:
        if not 0 <= run.group < len(self._groups):
            raise IndexError(f"group {run.group} is not one of the {len(self._groups)} of the device layout")
        if not len(run.block_ids) == len(run.slots) == len(run.parts):
            raise ValueError(f"{len(run.block_ids)} blocks for {len(run.slots)} slots and {len(run.parts)} parts")
        if not len(run.block_ids):
            return
        group = self._groups[run.group]
        for what, indexes, count in (
            ("blocks of group {}", run.block_ids, group.num_blocks),
            ("slots", run.slots, self._pool.num_slots),
            ("parts of a slot of group {}", run.parts, group.slot_blocks),
        ):
            # As unsigned numbers the negative ones are the largest.
            if np.maximum.reduce(indexes.view(np.uint64)) >= count:
                named = f"{what.format(run.group)} {indexes.min()} to {indexes.max()}"
                raise IndexError(f"{named} are not all among the {count} there are")

    def _fill(self, group: _GroupTable, run: BlockRun, out: Segments) -> None:
        """One row a block, one column a region, written in place."""
        shape = len(run), group.num_regions
        device, host, sizes = (array.reshape(shape) for array in out)
        np.multiply(run.block_ids[:, None], group.strides, out=device)
        device += group.addresses
        starts = self._pool.addresses(run.slots)
        if group.slot_blocks > 1:
            starts += run.parts * group.block_bytes
        np.add(starts[:, None], group.offsets, out=host)
        sizes[:] = group.sizes

    def _coalesce(self, run: BlockRun, segments: Segments) -> int:
        """Merge adjacent segments of one region, in place; how many are left."""
        device, host, sizes = segments
        if len(device) < 2:
            return len(device)
        size = int(sizes[0])
        device_steps, host_steps = np.diff(device), np.diff(host)
        extents = self._pool.extents_of(run.slots)
        within = extents[1:] == extents[:-1]
        up = (device_steps == size) & (host_steps == size) & within
        down = (device_steps == -size) & (host_steps == -size) & within
        num_up, num_down = np.count_nonzero(up), np.count_nonzero(down)
        if not num_up and not num_down:
            return len(device)
        if num_down > num_up:
            device, host, up = device[::-1], host[::-1], down[::-1]
        firsts = np.concatenate(([0], np.flatnonzero(~up) + 1))
        count = len(firsts)
        counts = np.diff(firsts, append=len(device))
        # The right-hand sides are copies, since the arrays read from are those written to.
        segments.device[:count], segments.host[:count] = device[firsts], host[firsts]
        segments.sizes[:count] = counts * size
        return count
