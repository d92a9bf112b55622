"""A job's segments name exactly the bytes that it is to copy, checked before one is named, and neighbors become one."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions, Region
from kvferry.cuda_ops.copy.segments import SegmentBuffer, SegmentPlanner
from kvferry.cuda_ops.pool.backing import AnonymousMemory
from kvferry.cuda_ops.pool.host_pool import HostPool


def run_of(group: int, blocks: list[int], slots: list[int], numbers: list[int] | None = None) -> BlockRun:
    arrays = (np.array(values, dtype=np.int64) for values in (blocks, slots, numbers or [0] * len(blocks)))
    return BlockRun(group, *arrays)


def job_of(*runs: BlockRun) -> TransferJob:
    return TransferJob(1, Direction.STORE, runs)


@pytest.mark.parametrize("order", [1, -1])
def test_neighbors_on_both_sides_become_one_segment_but_not_across_extents(order: int) -> None:
    blocks = np.zeros((20, 64), dtype=np.uint8)
    pool = HostPool(20, 64, extent_bytes=8 * 64)
    planner = SegmentPlanner(DeviceLayout.of_arrays([blocks]), pool.slot_bytes)
    ids = list(range(3, 20))[::order]
    slots = list(range(17))[::order]
    merged = planner.plan(job_of(run_of(0, ids, slots)), pool.hold(), SegmentBuffer(), coalesce=True)
    assert sorted(merged.sizes.tolist()) == [64, 8 * 64, 8 * 64]
    apart = planner.plan(job_of(run_of(0, [0, 2, 4], [0, 1, 2])), pool.hold(), SegmentBuffer(), coalesce=True)
    assert apart.sizes.tolist() == [64, 64, 64]


class SideBySide(AnonymousMemory):
    """Memory whose stretches lie one behind the other, as those that a kernel maps may well do."""

    def __init__(self, num_bytes: int) -> None:
        self._all = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)

    def map(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        return self._all[offset : offset + num_bytes]


@pytest.mark.parametrize("order", [1, -1])
def test_adjacent_extents_are_copied_apart(order: int) -> None:
    blocks = np.zeros((6, mmap.PAGESIZE), dtype=np.uint8)
    pool = HostPool(6, mmap.PAGESIZE, extent_bytes=2 * mmap.PAGESIZE, backing=SideBySide(6 * mmap.PAGESIZE))
    assert set(np.diff([pool.slot(slot).ctypes.data for slot in range(6)])) == {mmap.PAGESIZE}
    every = list(range(6))[::order]
    planner = SegmentPlanner(DeviceLayout.of_arrays([blocks]), pool.slot_bytes)
    merged = planner.plan(job_of(run_of(0, every, every)), pool.hold(), SegmentBuffer(), coalesce=True)
    assert merged.sizes.tolist() == [2 * mmap.PAGESIZE] * 3


def test_adjacent_regions_are_not_merged() -> None:
    memory = np.zeros(128, dtype=np.uint8)
    start = memory.ctypes.data
    layout = DeviceLayout((GroupRegions((Region(start, 1, 64, 64), Region(start + 64, 1, 64, 64))),))
    table = HostPool(1, 128).hold()
    merged = SegmentPlanner(layout, 128).plan(job_of(run_of(0, [0], [0])), table, SegmentBuffer(), coalesce=True)
    assert merged.sizes.tolist() == [64, 64]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of(1, [0], [0]), "group 1: the device layout has 1 groups"),
        (run_of(0, [0, 4], [0, 1]), r"blocks of group 0 0 to 4: must be in 0..3"),
        (run_of(0, [-1], [0]), r"blocks of group 0 -1 to -1"),
        (run_of(0, [0], [5]), r"slots 5 to 5: must be in 0..4"),
        (run_of(0, [0], [0], [2]), r"block numbers in a slot of group 0 2 to 2: must be in 0..1"),
        (run_of(0, [0, 1], [0]), "2 blocks, 1 slots"),
    ],
)
def test_unknown_block_or_slot_is_refused_with_the_numbers(run: BlockRun, message: str) -> None:
    planner = SegmentPlanner(DeviceLayout.of_arrays([np.zeros((4, 8), np.uint8)], slot_blocks=2), 16)
    with pytest.raises((IndexError, ValueError), match=message):
        planner.plan(job_of(run_of(0, [0], [0]), run), HostPool(5, 16).hold(), SegmentBuffer(), coalesce=True)


def test_a_slot_that_was_removed_is_refused_and_one_that_was_added_is_not() -> None:
    pool = HostPool(4, 64, extent_bytes=2 * 64)
    planner = SegmentPlanner(DeviceLayout.of_arrays([np.zeros((4, 64), np.uint8)]), pool.slot_bytes)
    pool.remove_extents(1)
    with pytest.raises(IndexError, match="must be in 0"):
        planner.plan(job_of(run_of(0, [0], [2])), pool.hold(), SegmentBuffer(), coalesce=False)
    pool.add_slots(3)
    segments = planner.plan(job_of(run_of(0, [0], [4])), pool.hold(), SegmentBuffer(), coalesce=False)
    assert segments.host.tolist() == [pool.slot(4).ctypes.data]


def test_a_block_that_does_not_fit_a_slot_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"2 blocks of group 1 have 66 bytes.*slot of 65"):
        SegmentPlanner(
            DeviceLayout.of_arrays([np.zeros((2, 8), np.uint8), np.zeros((2, 33), np.uint8)], slot_blocks=2),
            65,
        )
