"""Compiled functions of the copy engines and pool files."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import compiled

Words = NDArray[np.int64]


@functools.cache
def word_copies() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return functions over mapped int64 words that run without the interpreter lock; compiled once per machine.

    A page fault on a file mapping can take milliseconds when the disk is busy; NumPy would hold the lock meanwhile.

    Returns:
        scatter: (words, places, values): `words[places[i]] = values[i]`.
        gather_rows: (rows, places, found): `found[i, :] = rows[places[i], :]`.
        scatter_columns: (rows, places, columns, values): `rows[places[i], c] = values[i, c]`, `columns` in order.
    """
    from numba import types

    words, rows = types.int64[::1], types.int64[:, ::1]
    given, given_rows = types.Array(types.int64, 1, "C", readonly=True), types.Array(types.int64, 2, "C", readonly=True)

    @compiled(types.void(words, given, given), nogil=True)
    def scatter(words: Words, places: Words, values: Words) -> None:
        for i in range(len(places)):
            words[places[i]] = values[i]

    @compiled(types.void(given_rows, given, rows), nogil=True)
    def gather_rows(rows: Words, places: Words, found: Words) -> None:
        for i in range(len(places)):
            for column in range(rows.shape[1]):
                found[i, column] = rows[places[i], column]

    @compiled(types.void(rows, given, given, given_rows), nogil=True)
    def scatter_columns(rows: Words, places: Words, columns: Words, values: Words) -> None:
        for i in range(len(places)):
            for column in columns:
                rows[places[i], column] = values[i, column]

    return scatter, gather_rows, scatter_columns


Int64s = NDArray[np.int64]


@functools.cache
def run_planner() -> Callable[..., int]:
    """Return a function that appends the segments of one run to a buffer.

    Args of the function, all arrays int64:
        block_ids, slots, parts: the run's columns.
        regions: rows: address, stride, bytes of a block's piece, offset of the piece within the block.
        num_blocks, slot_blocks, block_bytes: blocks of the group, blocks per slot, bytes per block.
        extents: rows: first slot, address of that slot's bytes.
        num_slots, row_bytes: slots of the pool, bytes per row.
        out: rows: device address, host address, bytes.
        start: index of the first segment in `out`.
        merge: whether to merge adjacent segments, if the group has one region.

    Returns of the function:
        Index behind the last segment; -1, -2 or -3 for a block, slot or part out of range, with nothing written.
    """
    from numba import types

    column = types.Array(types.int64, 1, "C", readonly=True)
    table = types.int64[:, ::1]
    number = types.int64

    # The interpreter lock is held: reacquiring it in a computing engine takes longer than this function.
    arguments = [column] * 3 + [table] + [number] * 3 + [table] + [number] * 2 + [table, number, types.bool_]

    @compiled(number(*arguments))
    def plan_run(
        block_ids: Int64s,
        slots: Int64s,
        parts: Int64s,
        regions: Int64s,
        num_blocks: int,
        slot_blocks: int,
        block_bytes: int,
        extents: Int64s,
        num_slots: int,
        row_bytes: int,
        out: Int64s,
        start: int,
        merge: bool,
    ) -> int:
        wrong_blocks = wrong_slots = wrong_parts = 0
        for i in range(len(block_ids)):
            # Without branches, so that the loop is vectorized.
            wrong_blocks += (block_ids[i] < 0) | (block_ids[i] >= num_blocks)
            wrong_slots += (slots[i] < 0) | (slots[i] >= num_slots)
            wrong_parts += (parts[i] < 0) | (parts[i] >= slot_blocks)
        if wrong_blocks:
            return -1
        if wrong_slots:
            return -2
        if wrong_parts:
            return -3
        device_at, host_at, sizes = out[0], out[1], out[2]
        firsts, addresses = extents[0], extents[1]
        bases, strides, lengths, offsets = regions[0], regions[1], regions[2], regions[3]
        # All extents have as many slots as the first, except some added later.
        extent_slots = firsts[1] if len(firsts) > 1 else num_slots
        last_extent, end = -1, start
        for i in range(len(block_ids)):
            slot, extent = slots[i], 0
            if len(firsts) > 1:
                extent = min(slot // extent_slots, len(firsts) - 1)
                while slot < firsts[extent]:
                    extent -= 1
                while extent + 1 < len(firsts) and slot >= firsts[extent + 1]:
                    extent += 1
            host = addresses[extent] + (slot - firsts[extent]) * row_bytes + parts[i] * block_bytes
            if merge and len(bases) == 1 and extent == last_extent:
                device, size, last = bases[0] + block_ids[i] * strides[0], lengths[0], end - 1
                is_behind = device == device_at[last] + sizes[last] and host == host_at[last] + sizes[last]
                is_before = device + size == device_at[last] and host + size == host_at[last]
                if is_behind or is_before:
                    device_at[last], host_at[last] = min(device, device_at[last]), min(host, host_at[last])
                    sizes[last] += size
                    continue
            last_extent = extent
            for region in range(len(bases)):
                device_at[end] = bases[region] + block_ids[i] * strides[region]
                host_at[end] = host + offsets[region]
                sizes[end] = lengths[region]
                end += 1
        return end

    return plan_run
