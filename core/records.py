"""A slot's record, and what is done to the records of a batch in one native call.

A record is one cache line: whatever is done to a batch of slots waits for the memory of each slot once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.compiled import compiled
from kvferry.core.marks import Marks
from kvferry.core.transfers import Slots

SLOT_RECORD = np.dtype(
    [
        ("generation", np.int64),
        ("stored_s", np.float64),
        ("hit_s", np.float64),
        ("queued_at", np.int64),
        ("size", np.int64),
        ("position", np.int64),
        ("epoch", np.int32),
        ("hits", np.int32),
        ("pins", np.int32),
        ("state", np.uint8),
        ("priority_class", np.uint8),
        ("unused", np.uint16),
    ],
    align=True,
)

Records = NDArray[np.void]
Flags = NDArray[np.bool_]


def lines_of(records: Records) -> NDArray[np.int64]:
    """Records as rows of plain numbers, which NumPy copies as a whole; records themselves it copies piece by piece."""
    return records.view(np.int64).reshape(-1, SLOT_RECORD.itemsize // 8)


def records_in(lines: NDArray[np.int64]) -> Records:
    """The reverse, of whole rows."""
    return lines.view(SLOT_RECORD)[:, 0]


class RecordCalls(NamedTuple):
    """Each takes a whole table's records first. Slots are numbers within the table, which nobody checks."""

    begin_storing: Callable[..., None]
    """(records, marks, slots, their marks, positions, state, epoch, generation, size in bytes, priority class)"""
    make_ready: Callable[..., None]
    """(records, dirty, slots, state, Unix seconds)"""
    hit: Callable[..., None]
    """(records, dirty, slots, Unix seconds)"""
    pin: Callable[..., int]
    """(records, slots, out): `out` gets those slots that were not pinned before; how many they are."""
    unpin: Callable[..., int]
    """(records, slots, out): `out` gets those slots that are pinned no more; how many they are."""


@functools.cache
def record_calls() -> RecordCalls:
    """The calls, which are compiled by the first who asks."""
    from numba import from_dtype, types

    table = types.Array(from_dtype(SLOT_RECORD), 1, "C")
    dirty_type, marks_type = types.boolean[::1], types.uint64[::1]
    given_slots = types.Array(types.int64, 1, "A", readonly=True)
    given_marks = types.Array(types.uint64, 1, "A", readonly=True)
    number, seconds = types.int64, types.float64

    @compiled(types.void(table, marks_type, given_slots, given_marks, given_slots, *[number] * 5))
    def begin_storing(
        records: Any,
        all_marks: Marks,
        slots: Slots,
        marks: Marks,
        positions: Slots,
        state: int,
        epoch: int,
        generation: int,
        size_bytes: int,
        priority_class: int,
    ) -> None:
        for i in range(len(slots)):
            record = records[slots[i]]
            record.state = state
            record.epoch = epoch
            record.generation = generation
            record.position = positions[i]
            record.size = size_bytes
            record.priority_class = priority_class
            all_marks[slots[i]] = marks[i]

    @compiled(types.void(table, dirty_type, given_slots, number, seconds))
    def make_ready(records: Any, dirty: Flags, slots: Slots, state: int, now_s: float) -> None:
        for i in range(len(slots)):
            record = records[slots[i]]
            record.state = state
            record.stored_s = now_s
            record.hit_s = 0.0
            record.hits = 0
            dirty[slots[i]] = True

    @compiled(types.void(table, dirty_type, given_slots, seconds))
    def hit(records: Any, dirty: Flags, slots: Slots, now_s: float) -> None:
        for i in range(len(slots)):
            record = records[slots[i]]
            record.hits += 1
            record.hit_s = now_s
            dirty[slots[i]] = True

    @compiled(number(table, given_slots, types.int64[::1]))
    def pin(records: Any, slots: Slots, out: Slots) -> int:
        count = 0
        for i in range(len(slots)):
            record = records[slots[i]]
            if record.pins == 0:
                out[count] = slots[i]
                count += 1
            record.pins += 1
        return count

    @compiled(number(table, given_slots, types.int64[::1]))
    def unpin(records: Any, slots: Slots, out: Slots) -> int:
        count = 0
        for i in range(len(slots)):
            record = records[slots[i]]
            record.pins -= 1
            if record.pins == 0:
                out[count] = slots[i]
                count += 1
        return count

    return RecordCalls(begin_storing, make_ready, hit, pin, unpin)
