"""From a job to what has to be copied: three arrays of device address, host address and length, for all of it at once.

Everything is checked before an address is given out, so that a job which names what is not there fails untouched.
Neighbors that are adjacent on both sides become one segment, within one region and one extent only: memory that was
allocated or registered in two parts may not be copied in one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import BlockRun, TransferJob
from kvferry.cuda_ops.host_pool import PoolTable
from kvferry.cuda_ops.layout import DeviceLayout, GroupRegions
from kvferry.cuda_ops.native_plan import run_planner

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

    def take(self, count: int) -> Int64s:
        """Room for at least so many segments, `[3, n]` as `Segments` has them; what was handed out before is void."""
        if count > self._rows.shape[1]:
            capacity = max(count, 2 * self._rows.shape[1])
            self._rows = self._allocate(3 * capacity).reshape(3, capacity)
        return self._rows


class _GroupTable:
    """A group's regions as the native planner takes them."""

    def __init__(self, group: GroupRegions) -> None:
        self.num_blocks = group.num_blocks
        self.slot_blocks = group.slot_blocks
        self.block_bytes = group.block_bytes
        self.num_regions = len(group.regions)
        sizes = [region.block_bytes for region in group.regions]
        offsets = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        addresses = [region.address for region in group.regions]
        strides = [region.stride_bytes for region in group.regions]
        self.regions = np.array([addresses, strides, sizes, offsets], dtype=np.int64)


class SegmentPlanner:
    """Knows a layout. One at a time may plan into one buffer."""

    def __init__(self, layout: DeviceLayout, slot_bytes: int) -> None:
        """Raises `ValueError`, with both sizes, if a slot is too small for the layout."""
        layout.check_fits(slot_bytes)
        self._groups = [_GroupTable(group) for group in layout.groups]
        self._plan_run = run_planner()

    def num_bytes(self, job: TransferJob) -> int:
        """What the job's blocks have together."""
        return sum(len(run) * self._groups[run.group].block_bytes for run in job.runs)

    def plan(self, job: TransferJob, table: PoolTable, buffer: SegmentBuffer, *, coalesce: bool) -> Segments:
        """The segments of a job, in the order of its runs and blocks; neighbors are merged where that is wanted.

        Raises `IndexError` for a group, block, slot or part that is not there, and `ValueError` for a run whose
        arrays differ in length.
        """
        count = 0
        for run in job.runs:
            self._check(run)
            count += len(run) * self._groups[run.group].num_regions
        out = buffer.take(count)
        end = 0
        for run in job.runs:
            group = self._groups[run.group]
            end = self._plan_run(
                np.ascontiguousarray(run.block_ids),
                np.ascontiguousarray(run.slots),
                np.ascontiguousarray(run.parts),
                group.regions,
                group.num_blocks,
                group.slot_blocks,
                group.block_bytes,
                table.places,
                table.num_slots,
                table.row_bytes,
                out,
                end,
                coalesce,
            )
            if end < 0:
                what, indexes, there_are = (
                    (f"blocks of group {run.group}", run.block_ids, group.num_blocks),
                    ("slots", run.slots, table.num_slots),
                    (f"parts of a slot of group {run.group}", run.parts, group.slot_blocks),
                )[-1 - end]
                named = f"{what} {indexes.min()} to {indexes.max()}"
                raise IndexError(f"{named} are not all among the {there_are} there are")
        return Segments(*out[:, :end])

    def _check(self, run: BlockRun) -> None:
        if not 0 <= run.group < len(self._groups):
            raise IndexError(f"group {run.group} is not one of the {len(self._groups)} of the device layout")
        if not len(run.block_ids) == len(run.slots) == len(run.parts):
            raise ValueError(f"{len(run.block_ids)} blocks for {len(run.slots)} slots and {len(run.parts)} parts")
