"""The native copy moves every segment whole, whatever its size and wherever it lies, and touches nothing else."""

from __future__ import annotations

import sys
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cuda_ops.copy.segment_copier import copy_segments
from tests.harness.effort import examples
from tests.harness.waiting import DEADLINE_S

SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, 8192, 16384, 20_000, 65_535, 65_536, 70_001]


@settings(max_examples=examples(200))
@given(sizes=st.lists(st.sampled_from(SIZES), max_size=12), data=st.data())
def test_every_segment_arrives_and_nothing_else_is_touched(sizes: list[int], data: st.DataObject) -> None:
    gaps = st.sampled_from([0, 0, 1, 64])
    source_at, target_at, at = [], [0] * len(sizes), 0
    for size in sizes:
        source_at.append(at)
        at += size + data.draw(gaps)
    source = np.random.default_rng(1).integers(0, 256, at + 64, dtype=np.uint8)
    aligned = data.draw(st.booleans())
    at = 0
    for index in data.draw(st.permutations(range(len(sizes)))):
        target_at[index] = at
        at += sizes[index] + data.draw(gaps)
        at = -(-at // 64) * 64 if aligned else at
    room = np.full(at + 192, 7, dtype=np.uint8)
    target = room[-room.ctypes.data % 64 :][: at + 64]
    expected = target.copy()
    for start, to, size in zip(source_at, target_at, sizes, strict=True):
        expected[to : to + size] = source[start : start + size]
    copy_segments(
        np.array(target_at, dtype=np.int64) + target.ctypes.data,
        np.array(source_at, dtype=np.int64) + source.ctypes.data,
        np.array(sizes, dtype=np.int64),
    )
    assert np.array_equal(target, expected)


def test_a_copy_runs_without_the_interpreters_lock() -> None:
    """While one thread copies, this one goes on: with the lock held for the whole batch it could not."""
    blocks = np.zeros((2, 64 << 20), dtype=np.uint8)
    target, source, size = (np.array([value] * 8) for value in (blocks[0].ctypes.data, blocks[1].ctypes.data, 64 << 20))
    running, interval = threading.Event(), sys.getswitchinterval()

    def copy() -> None:
        running.set()
        copy_segments(target, source, size)

    sys.setswitchinterval(10.0)
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        running.wait(DEADLINE_S)
        # With a switch interval of ten seconds, nothing but the copy's giving the lock up lets this line run now.
        assert thread.is_alive()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
