"""Layouts, pools and jobs of any shape, drawn by hypothesis, over real memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions, Region
from kvferry.cuda_ops.pool.host_pool import HostPool

PIECE_BYTES = [1, 3, 16, 64, 100, 4096]


@dataclass
class Device:
    """`memory` is all device memory; every region of `layout` lies in it."""

    memory: NDArray[np.uint8]
    layout: DeviceLayout


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Groups of regions with strides, some of them the memory of another group, at unaligned addresses or not."""
    memory = np.random.default_rng(1).integers(0, 256, 1 << 19, dtype=np.uint8)
    start = memory.ctypes.data
    groups: list[GroupRegions] = []
    offset = draw(st.sampled_from([0, 1, 64]))
    for _ in range(draw(st.integers(1, 3))):
        if groups and draw(st.booleans()):
            groups.append(draw(st.sampled_from(groups)))
            continue
        num_blocks = draw(st.integers(1, 6))
        regions = []
        for _ in range(draw(st.integers(1, 3))):
            piece = draw(st.sampled_from(PIECE_BYTES))
            stride = piece + draw(st.sampled_from([0, 0, 5, 64]))
            regions.append(Region(start + offset, num_blocks, piece, stride, memory))
            offset += num_blocks * stride + draw(st.sampled_from([0, 0, 7]))
        groups.append(GroupRegions(tuple(regions), draw(st.integers(1, 3))))
    return Device(memory, DeviceLayout(tuple(groups)))


@st.composite
def pools(draw: st.DrawFn, layout: DeviceLayout) -> HostPool:
    """Slots with room to spare or not, in one extent or in many, one or more ranks in a row; filled with noise."""
    slot_bytes = layout.slot_bytes + draw(st.sampled_from([0, 0, 3, 64]))
    num_ranks = draw(st.integers(1, 3))
    pool = HostPool(
        draw(st.integers(1, 12)),
        slot_bytes,
        extent_bytes=draw(st.integers(1, 9)) * num_ranks * slot_bytes,
        num_ranks=num_ranks,
        rank=draw(st.integers(0, num_ranks - 1)),
    )
    if draw(st.booleans()):
        pool.add_slots(draw(st.integers(1, 12)))
    noise = np.random.default_rng(2)
    for slot in range(pool.num_slots):
        pool.row(slot)[:] = noise.integers(0, 256, (num_ranks, slot_bytes), dtype=np.uint8)
    return pool


@st.composite
def jobs(draw: st.DrawFn, layout: DeviceLayout, pool: HostPool, direction: Direction) -> TransferJob:
    """A job that names no device memory and no place in a slot twice; often runs of neighbors, up or down."""
    free_slots = draw(st.permutations(range(pool.num_slots))) if draw(st.booleans()) else list(range(pool.num_slots))
    runs = []
    used: list[GroupRegions] = []
    for index, group in enumerate(layout.groups):
        # A slot holds blocks of one group; groups may be the same memory.
        slots, free_slots = free_slots[: len(free_slots) // 2 + 1], free_slots[len(free_slots) // 2 + 1 :]
        if group in used:
            continue
        used.append(group)
        here = [(slot, part) for slot in slots for part in range(group.slot_blocks)]
        if draw(st.booleans()):
            here = draw(st.permutations(here))
        ids = list(range(group.num_blocks))
        order = draw(st.sampled_from(["up", "down", "any"]))
        if order == "any":
            ids = draw(st.permutations(ids))
        count = draw(st.integers(0, min(len(ids), len(here))))
        chosen = list(zip(ids[:count], here[:count], strict=True))
        if order == "down":
            chosen.reverse()
        runs.append(
            BlockRun(
                index,
                np.array([block for block, _ in chosen], dtype=np.int64),
                np.array([slot for _, (slot, _) in chosen], dtype=np.int64),
                np.array([part for _, (_, part) in chosen], dtype=np.int64),
            )
        )
    return TransferJob(draw(st.integers(1, 99)), direction, tuple(runs))


def pieces(device: Device, pool: HostPool, job: TransferJob) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """The obvious reference: for each piece of each block of a job its bytes on the device and in the pool."""
    found = []
    for run in job.runs:
        group = device.layout.groups[run.group]
        for block, slot, part in zip(run.block_ids.tolist(), run.slots.tolist(), run.numbers.tolist(), strict=True):
            at = part * group.block_bytes
            for region in group.regions:
                start = region.address - device.memory.ctypes.data + block * region.stride_bytes
                found.append(
                    (
                        device.memory[start : start + region.block_bytes],
                        pool.slot(slot)[at : at + region.block_bytes],
                    )
                )
                at += region.block_bytes
    return found


def move_by_hand(device: Device, pool: HostPool, job: TransferJob) -> int:
    """Do what a job asks for, a piece at a time, and say how many bytes that was on the device."""
    moved = 0
    for on_device, on_host in pieces(device, pool, job):
        moved += len(on_device)
        if job.direction is Direction.STORE:
            on_host[:] = on_device
        else:
            on_device[:] = on_host
    return moved


def contents(pool: HostPool) -> NDArray[np.uint8]:
    """All bytes of a pool, of all ranks, a copy."""
    return np.stack([pool.row(slot) for slot in range(pool.num_slots)])
