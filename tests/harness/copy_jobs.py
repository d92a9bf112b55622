"""Jobs for a copy engine, and a check of the bytes that it moved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import BlockRun, Direction, TransferJob
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.drawn_devices import Device, contents, move_by_hand
from tests.harness.waiting import DEADLINE_S


def job(number: int, direction: Direction, blocks: list[int], slots: list[int], **extra: object) -> TransferJob:
    ids, places = np.array(blocks, dtype=np.int64), np.array(slots, dtype=np.int64)
    return TransferJob(number, direction, (BlockRun(0, ids, places, np.zeros_like(places)),), **extra)  # type: ignore[arg-type]


def store(number: int, block: int) -> TransferJob:
    return job(number, Direction.STORE, [block], [block])


def assert_moved(
    copies: CopyEngine, one: TransferJob, device: Device, pool: HostPool, memory: NDArray[np.uint8]
) -> None:
    """Run a job, and compare device and pool with a copy by hand. `memory` is what the device holds before it."""
    pool_before = contents(pool)
    copies.submit(one)
    assert copies.wait([one.job_id], DEADLINE_S)
    (result,) = copies.poll()
    device_after, pool_after = device.memory.copy(), contents(pool)
    device.memory[:] = memory
    for slot in range(pool.num_slots):
        pool.row(slot)[:] = pool_before[slot]
    assert result.error is None
    assert result.num_bytes == move_by_hand(device, pool, one)
    assert np.array_equal(device_after, device.memory)
    assert np.array_equal(pool_after, contents(pool))
