"""How blocks leave the pool: evicted for others, dropped by whoever finds them wrong or unwanted, and who is told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.core.change_lock import ChangeLock
from kvferry.core.events import EventSink, EvictionBatch
from kvferry.core.kept import PoolRecord
from kvferry.core.keys import Key
from kvferry.core.missing import MissingKeys
from kvferry.core.operator_pins import OperatorPins
from kvferry.core.origins import Origin
from kvferry.core.pins import Pins
from kvferry.core.pool_index import PoolIndex
from kvferry.core.reasons import EvictionReason
from kvferry.core.room import Room
from kvferry.core.slots import BATCH_SLOTS, SlotState, SlotTable
from kvferry.core.stats import EvictionCounts
from kvferry.core.transfers import Slots

_LIVE = np.ones(BATCH_SLOTS, dtype=np.bool_)


class Leaving:
    """The lock is the manager's. What drops blocks takes it; the rest says that it does not."""

    def __init__(
        self,
        table: SlotTable,
        index: PoolIndex,
        room: Room,
        pins: Pins,
        operator_pins: OperatorPins,
        missing: MissingKeys,
        counts: EvictionCounts,
        record: PoolRecord | None,
        sink: EventSink,
        lock: ChangeLock,
    ) -> None:
        """A pool that outlives its process has a `record`."""
        self.counts = counts
        self._table = table
        self._index = index
        self._room = room
        self._pins = pins
        self._operator_pins = operator_pins
        self._missing = missing
        self._record = record
        self._sink = sink
        self._lock = lock

    def drop(self, slots: Slots, reason: EvictionReason, now_s: float) -> int:
        """Take ready slots out of the pool and say how many.

        A slot under a transfer or a pin cannot be found any more at once, and is freed when the last of them ends.
        """
        with self._lock:
            table = self._table
            slots = slots[table.is_ready(slots)]
            if not len(slots):
                return 0
            self._operator_pins.end_with(table.keys[slots].tolist())
            self.forget(slots, reason, None, now_s)
            busy_mask = table.pins[slots] > 0
            idle, busy = slots[~busy_mask], slots[busy_mask]
            self._room.policy.remove(idle)
            self._room.free(idle)
            if len(busy):
                self._pins.linger(busy)
            return len(slots)

    def drop_key(self, key: Key, now_s: float) -> bool:
        """Take one block out of the pool for an operator; False if it is not there."""
        with self._lock:
            slot = self._index.get(key)
            return slot is not None and self.drop(np.array([slot]), EvictionReason.OPERATOR, now_s) == 1

    def drop_matching(self, matches: Callable[[Origin], bool], start_slot: int, now_s: float) -> tuple[int, int | None]:
        """Drop the blocks of one batch of slots whose origin matches: how many, and where to go on, None at the end."""
        table = self._table
        end = min(start_slot + BATCH_SLOTS, table.end_slot)
        with self._lock:
            slots = np.flatnonzero(table.current_states(start_slot, end) == SlotState.READY) + start_slot
            origins = table.origins[slots].tolist()
            verdicts = {id(origin): matches(origin) for origin in {id(origin): origin for origin in origins}.values()}
            matching = np.array([verdicts[id(origin)] for origin in origins], dtype=np.bool_)
            dropped = self.drop(slots[matching], EvictionReason.RESET, now_s) if matching.any() else 0
        return dropped, end if end < table.end_slot else None

    def forget(self, slots: Slots, reason: EvictionReason, needed_by: str | None, now_s: float) -> None:
        """Make ready slots unfindable and say so; what becomes of the slots is the caller's. Called under the lock.

        `needed_by` is the request that got their room.
        """
        table, count = self._table, len(slots)
        rows = table.rows(slots, _LIVE[:count] if count <= BATCH_SLOTS else np.ones(count, dtype=np.bool_))
        self._index.remove(slots)
        self._missing.note_gone(table.marks[slots], reason, now_s)
        table.dirty[slots] = True
        table.end_unverified(slots)
        self.void(slots)
        table.num_ready -= count
        self.count(reason, count)
        self._sink.evicted(EvictionBatch(now_s, reason, self._room.policy.name, rows, needed_by))

    def void(self, slots: Slots) -> None:
        """Queue an invalidation of what these slots hold, or are about to hold. Requires: manager lock held."""
        if self._record is not None and len(slots):
            self._record.void(slots, self._table.generations[slots])

    def count(self, reason: EvictionReason, count: int) -> None:
        """Count ready blocks that left. Called under the lock."""
        self.counts.total += count
        by_reason = self.counts.by_reason
        by_reason[reason.value] = by_reason.get(reason.value, 0) + count
