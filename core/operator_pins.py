"""Operators' pins: single blocks that are kept from eviction until a time, within a share of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.core.change_lock import ChangeLock
from kvferry.core.expiry import Expiries
from kvferry.core.grants import Pin, PinOutcome
from kvferry.core.keys import Key
from kvferry.core.pins import Pins
from kvferry.core.pool_index import PoolIndex
from kvferry.core.slots import BATCH_SLOTS, SlotTable
from kvferry.core.transfers import Slots


class OperatorPins:
    """Each method takes the lock itself, which is the manager's. A pin ends with its time, or with its block."""

    def __init__(self, table: SlotTable, index: PoolIndex, pins: Pins, lock: ChangeLock, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        """The most of the pool that may be pinned."""
        self._table = table
        self._index = index
        self._pins = pins
        self._lock = lock
        self._until_s: Expiries[Key] = Expiries()

    def pin(self, key: Key, expires_s: float, now_s: float) -> PinOutcome:
        """Keep one block from eviction until `expires_s`. Pinning it again moves the time."""
        with self._lock:
            self.expire(now_s)
            slot = self._index.get(key)
            if slot is None:
                return PinOutcome.NOT_FOUND
            if key not in self._until_s:
                # Another size may have been asked for, and not have begun to come about.
                if slot >= min(self._table.num_slots, self._table.wanted_slots):
                    return PinOutcome.LEAVING
                if len(self._until_s) + 1 > self.max_fraction * self._table.num_slots:
                    return PinOutcome.LIMIT
                self._pins.pin(np.array([slot]))
            self._until_s.set(key, expires_s)
            return PinOutcome.PINNED

    def unpin(self, key: Key) -> bool:
        """Take a pin away; False if there is none."""
        with self._lock:
            pinned = self._until_s.discard(key)
            if pinned:
                self._release([key])
            return pinned

    def expire(self, now_s: float) -> bool:
        """Let go of pins whose time is over, a bounded number a call; True while there are more."""
        with self._lock:
            due = self._until_s.pop_due(now_s, BATCH_SLOTS)
            if due:
                self._release(due)
            return self._until_s.is_due(now_s)

    def until_s(self, keys: Sequence[Key]) -> list[float | None]:
        """When the pin of each of these keys ends; None for those that have none."""
        with self._lock:
            return [self._until_s.until_s(key) for key in keys]

    def slots(self) -> Slots:
        """Return the slots of all pinned blocks. Takes time proportional to their number."""
        with self._lock:
            return self._index.find_some(self._until_s.keys())

    def in_slots_from(self, start_slot: int) -> list[Key]:
        """The pinned keys whose blocks are in slots from `start_slot` on."""
        with self._lock:
            keys = self._until_s.keys()
        found: list[Key] = []
        for start in range(0, len(keys), BATCH_SLOTS):
            some = keys[start : start + BATCH_SLOTS]
            with self._lock:
                slots = self._index.find(some)
            found += [some[i] for i in (slots >= start_slot).nonzero()[0].tolist()]
        return found

    def end_with(self, keys: Sequence[Key]) -> None:
        """These keys, which can still be found, are about to leave the pool. Called under the lock."""
        if self._until_s:
            self._release([key for key in keys if self._until_s.discard(key)])

    def begin_epoch(self) -> None:
        """A reset has voided every pin. Called under the lock."""
        self._until_s.clear()

    def _release(self, keys: Sequence[Key]) -> None:
        self._pins.release(Pin(self._index.find_some(keys), self._table.epoch))
