"""Listings of the pool's content for readers beside the engine: blocks, states, use of slots, and changed rows.

Readers work in batches, each copied under the manager lock, so that a listing of ten million slots never holds it long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import SlotRows
from kvferry.core.pool.slots import SlotState
from kvferry.core.transfers import NO_SLOTS, Slots

_SCAN_SLOTS = 1 << 16
_USES = (
    "being stored, or promoted from a tier",
    "being loaded",
    "being read by a tier, or verified",
    "pinned, or found by requests that wait",
)


class BlockState(StrEnum):
    """State of a block that can be found. One that is loading is pinned, too."""

    READY = "ready"
    PINNED = "pinned"
    LOADING = "loading"


class BlockHold(NamedTuple):
    """The state of a block, and when an operator's pin of it ends, if there is one."""

    state: BlockState
    pinned_until_s: float | None


class Inventory:
    """A reader of a manager's pool. `dirty_rows` is for one caller; other methods may be called from any thread."""

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager
        self._dirty_cursor = 0

    def find_block(self, key: Key) -> SlotRows | None:
        """Return the row of one key, or None."""
        manager = self._manager
        with manager.lock:
            slot = manager.index.get(key)
            return None if slot is None else manager.table.rows(np.array([slot]))

    def count_blocks(self, match: RequestFilter | None = None) -> int:
        """Count the loadable blocks, or those stored by matching requests. Acquires the manager lock for each batch."""
        manager, table = self._manager, self._manager.table
        if match is None:
            with manager.lock:
                return table.num_ready
        count = 0
        next_slot: int | None = 0
        while next_slot is not None:
            with manager.lock:
                slots, next_slot = table.find_matching(match.matches, next_slot)
            count += len(slots)
        return count

    def holds(self, rows: SlotRows) -> list[BlockHold | None]:
        """Return the state of each block now, None for one that has left the pool since the rows were copied."""
        manager, table, slots = self._manager, self._manager.table, rows.slots
        with manager.lock:
            is_present = table.is_ready(slots) & (table.generations[slots] == rows.records["generation"])
            is_pinned = table.pins[slots] > 0
            is_loading = np.isin(slots, manager.pins.loading_slots())
            until_s = manager.operator_pins.until_s(rows.keys)
        states = np.where(is_loading, BlockState.LOADING, np.where(is_pinned, BlockState.PINNED, BlockState.READY))
        columns = zip(is_present.tolist(), states.tolist(), until_s, strict=True)
        return [BlockHold(BlockState(state), until) if present else None for present, state, until in columns]

    def list_blocks(self, start_slot: int, limit: int, end_slot: int | None = None) -> SlotRows:
        """Return up to `limit` ready slots from `start_slot` to before `end_slot`, in the order of their numbers."""
        manager, table = self._manager, self._manager.table
        chosen: list[Slots] = []
        start = start_slot
        end = table.end_slot if end_slot is None else min(end_slot, table.end_slot)
        while limit > 0 and start < end:
            with manager.lock:
                ready = table.ready_in(start, min(start + table.batch_slots, end))[:limit]
            chosen.append(ready)
            limit -= len(ready)
            start += table.batch_slots
        slots = np.concatenate(chosen) if chosen else NO_SLOTS
        with manager.lock:
            return table.rows(slots[table.is_ready(slots)])

    def slot_states(self) -> NDArray[np.uint8]:
        """Return the `SlotState` of every slot, one byte each, as of several moments."""
        table = self._manager.table
        states = np.empty(table.end_slot, dtype=np.uint8)
        for start in range(0, len(states), table.batch_slots):
            with self._manager.lock:
                end = min(start + table.batch_slots, len(states))
                states[start:end] = table.current_states(start, end)
        return states

    def all_rows(self) -> Iterator[SlotRows]:
        """Yield the rows of all slots in batches, in the order of their numbers, as of several moments."""
        table = self._manager.table
        num_slots = table.end_slot
        for start in range(0, num_slots, table.batch_slots):
            slots = np.arange(start, min(start + table.batch_slots, num_slots))
            with self._manager.lock:
                rows = table.rows(slots)
            yield rows

    def describe_leaving(self) -> str:
        """Count the slots in use that leave the pool in a resize, each once, by their use, as of several moments."""
        uses, table = Counter[str](), self._manager.table
        for start in range(table.num_slots, table.end_slot, table.batch_slots):
            self._count_uses(start, min(start + table.batch_slots, table.end_slot), uses)
        return ", ".join(f"{uses[use]:,} {use}" for use in _USES if uses[use]) or "none"

    def dirty_rows(self, limit: int) -> SlotRows | None:
        """Return up to `limit` rows that changed since they were last returned, or None."""
        slots = self._next_dirty(limit)
        if not len(slots):
            return None
        table = self._manager.table
        with self._manager.lock:
            rows = table.rows(slots)
            table.dirty[slots] = False
            return rows

    def _next_dirty(self, limit: int) -> Slots:
        """Scan the dirty bits once, from where the last scan ended. Bits set meanwhile are found by the next one."""
        table = self._manager.table
        # Rows of slots that were removed by a resize have to be deleted, too.
        num_slots = table.last_end_slot
        scanned = 0
        while scanned < num_slots:
            start = self._dirty_cursor
            end = min(start + _SCAN_SLOTS, num_slots)
            # A copy, as other threads write meanwhile, and NumPy raises if an array changes during `nonzero`.
            slots = table.dirty[start:end].copy().nonzero()[0][:limit] + start
            scanned += end - start
            self._dirty_cursor = (int(slots[-1]) + 1 if len(slots) == limit else end) % num_slots
            if len(slots):
                return slots
        return NO_SLOTS

    def _count_uses(self, start: int, end: int, uses: Counter[str]) -> None:
        table, pins = self._manager.table, self._manager.pins
        with self._manager.lock:
            states = table.current_states(start, end)
            is_used = (states == SlotState.HELD) | ((states == SlotState.READY) & (table.pins[start:end] > 0))
            slots = is_used.nonzero()[0] + start
            loading = np.isin(slots, pins.loading_slots())
            reading = ~loading & np.isin(slots, pins.reading_slots())
        filling = states == SlotState.STORING
        for use, is_so in zip(_USES, (filling, loading, reading, ~(loading | reading)), strict=True):
            uses[use] += int(np.count_nonzero(is_so))
