"""What an earlier process left in the pool: how it is taken over, and which of its bytes nobody has looked at since."""

from __future__ import annotations

from kvferry.core.change_lock import ChangeLock
from kvferry.core.grants import Pin
from kvferry.core.kept import KeptBlocks
from kvferry.core.leaving import Leaving
from kvferry.core.pins import Pins
from kvferry.core.pool_index import PoolIndex
from kvferry.core.reasons import EvictionReason
from kvferry.core.room import Room
from kvferry.core.slots import BATCH_SLOTS, SlotTable
from kvferry.core.transfers import Slots


class Recovered:
    """Each method takes the lock itself, which is the manager's."""

    def __init__(
        self, table: SlotTable, index: PoolIndex, room: Room, pins: Pins, leaving: Leaving, lock: ChangeLock
    ) -> None:
        self._table = table
        self._index = index
        self._room = room
        self._pins = pins
        self._leaving = leaving
        self._lock = lock
        self._verifying: dict[int, Pin] = {}

    @property
    def verifying(self) -> tuple[Pin, ...]:
        """The pins of `begin_verification` that have not ended. Requires: manager lock held."""
        return tuple(self._verifying.values())

    def adopt(self, blocks: KeptBlocks, stale: Slots) -> None:
        """Begin with what an earlier process left; slots of the earlier process with wrong or no rows are `stale`.

        Before anything else: raises `RuntimeError` once a slot was given out. In time proportional to all slots.
        """
        with self._lock:
            if self._table.num_free < self._table.num_slots:
                raise RuntimeError("blocks of an earlier process can only be taken over by an empty pool")
            self._table.adopt(blocks)
            self._index.claim(blocks.slots)
            self._table.dirty[stale] = True
            self._room.policy.admit(blocks.slots)

    def unverified(self, slots: Slots) -> Slots:
        """Those of these slots whose bytes nobody has looked at since an earlier process wrote them."""
        with self._lock:
            return self._table.unverified_of(slots)

    def note_verified(self, pin: Pin) -> None:
        """All slots of a pin were loaded, and what had to be verified was."""
        with self._lock:
            if pin.epoch == self._table.epoch:
                self._table.end_unverified(pin.slots)

    def begin_verification(self, start_slot: int) -> Pin:
        """Pin the next slots to be verified, from `start_slot` on; none at the end.

        Their bytes may be looked at until `end_verification`: a reset holds them until then.
        """
        for start in range(start_slot, self._table.end_slot, BATCH_SLOTS):
            with self._lock:
                slots = self._table.unverified_in(start, min(start + BATCH_SLOTS, self._table.end_slot))
                if len(slots):
                    pin = self._pins.pin(slots)
                    self._pins.begin_reading(pin)
                    self._verifying[id(pin)] = pin
                    return pin
        return Pin.empty()

    def end_verification(self, pin: Pin, corrupt: Slots, now_s: float) -> None:
        """Slots of a pin, this very object, were looked at: those that are `corrupt` are dropped."""
        with self._lock:
            self._verifying.pop(id(pin), None)
            if pin.epoch == self._table.epoch:
                self._leaving.drop(corrupt, EvictionReason.FAILED_VERIFICATION, now_s)
                self._table.end_unverified(pin.slots)
            self._pins.end_reading(pin)
