"""Pins: what keeps blocks in their slots, and which transfers read them.

A pinned slot is no candidate for eviction. If its block is dropped all the same, nobody finds it any more, and the slot
is free when the last pin on it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvferry.core.change_lock import ChangeLock
from kvferry.core.grants import Pin
from kvferry.core.room import Room
from kvferry.core.slots import SlotState, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots


class Pins:
    """Each method takes the lock itself, which is the manager's."""

    def __init__(self, table: SlotTable, room: Room, lock: ChangeLock) -> None:
        self._table = table
        self._room = room
        self._lock = lock
        self._loading: dict[int, Pin] = {}
        self._reading: dict[int, Pin] = {}
        self._lingering: set[int] = set()

    def pin(self, slots: Slots) -> Pin:
        """Pin slots that were found under this same hold of the lock; the pin may be empty."""
        with self._lock:
            if len(slots):
                self._room.policy.remove(self._table.pin(slots))
            return Pin(slots, self._table.epoch)

    def release(self, pin: Pin) -> None:
        """Undo a pin. Its slots were used just now. Void once a reset has come in between."""
        if not len(pin):
            return
        with self._lock:
            if pin.epoch == self._table.epoch:
                self._unpin(pin.slots)

    def begin_load(self, pin: Pin, now_s: float) -> bool:
        """Count a hit on the slots of a pin and mark them as being loaded; False if one of them was dropped since."""
        with self._lock:
            if pin.epoch != self._table.epoch or self._lost_any(pin.slots):
                return False
            self._table.hit(pin.slots, now_s)
            self._loading[id(pin)] = pin
            return True

    def end_load(self, pin: Pin) -> bool:
        """Undo `begin_load`, which was given this very object, and the pin; False if a slot was dropped meanwhile.

        Those are free once their last load ends.
        """
        with self._lock:
            return self._loading.pop(id(pin), None) is not None and self._end(pin)

    def begin_reading(self, pin: Pin) -> None:
        """Something that is no load reads the slots of a pin from now on: a reset holds them until `end_reading`."""
        with self._lock:
            self._reading[id(pin)] = pin

    def end_reading(self, pin: Pin) -> None:
        """Undo `begin_reading`, which was given this very object, and the pin."""
        with self._lock:
            if self._reading.pop(id(pin), None) is not None:
                self._end(pin)

    def keep_loads(self, pins: Iterable[Pin]) -> None:
        """Treat exactly these pins as those of loads under way, whatever was noted before."""
        with self._lock:
            self._loading = {id(pin): pin for pin in pins}

    def keep_readings(self, pins: Iterable[Pin]) -> None:
        """Treat exactly these pins as those of `begin_reading`, whatever was noted before."""
        with self._lock:
            self._reading = {id(pin): pin for pin in pins}

    def loading_slots(self) -> Slots:
        """The slots that loads of this epoch are reading, each once; some may have been dropped since."""
        with self._lock:
            return self._slots_of(self._loading)

    def count_loading(self) -> int:
        """How many of these slots hold blocks, not counting those dropped since. The caller holds the lock."""
        if not self._loading:
            return 0
        return int(np.count_nonzero(self._table.is_ready(self._slots_of(self._loading))))

    def reading_slots(self) -> Slots:
        """Those that something else is reading."""
        with self._lock:
            return self._slots_of(self._reading)

    def linger(self, slots: Slots) -> None:
        """These pinned slots hold nothing that can be found any more: they are free when their last pin ends."""
        with self._lock:
            self._table.states[slots] = SlotState.HELD
            self._lingering.update(slots.tolist())

    def begin_epoch(self, filled: Slots) -> None:
        """Begin the table's next epoch, in which no pin counts.

        Slots that are `filled` by open transfers, or read by them, are held until those end.
        """
        with self._lock:
            read = [pin.slots for pin in (*self._loading.values(), *self._reading.values())]
            held = np.unique(np.concatenate((filled, *read)))
            self._lingering.clear()
            self._table.begin_epoch(held)
            for slots in read:
                self._table.pin(slots)

    def recount(self, filled: Slots, operated: Slots) -> bool:
        """Undo every pin but those of loads and readings under way and of operators.

        Slots that hold nothing that can be found are freed unless they are `filled` by open transfers. Takes time
        proportional to the pool.

        Args:
            filled: slots that open transfers write to.
            operated: slots that operators have pinned.

        Returns:
            False if a slot lacks a pin of those, so that the pins cannot be relied on.
        """
        with self._lock:
            table, end = self._table, self._table.end_slot
            owned = np.zeros(end, dtype=table.pins.dtype)
            for slots in (operated, *(pin.slots for pin in (*self._loading.values(), *self._reading.values()))):
                owned[slots] += 1
            states, pins = table.current_states(0, end), table.pins[:end]
            is_ready, is_held = states == SlotState.READY, states == SlotState.HELD
            if ((owned > 0) & ~(is_ready | is_held) | (owned > pins)).any():
                return False
            unpinned = (is_ready & (owned == 0) & (pins > 0)).nonzero()[0]
            is_idle = is_held & (owned == 0)
            is_idle[filled] = False
            idle = is_idle.nonzero()[0]
            used = (is_ready | is_held).nonzero()[0]
            table.pins[used] = owned[used]
            self._lingering.difference_update(idle.tolist())
            self._room.free(idle)
            self._room.policy.add(unpinned)
            return True

    # --- inside -------------------------------------------------------------------------------------------------

    def _slots_of(self, pins: dict[int, Pin]) -> Slots:
        current = [pin.slots for pin in pins.values() if pin.epoch == self._table.epoch]
        return np.unique(np.concatenate(current)) if current else NO_SLOTS

    def _end(self, pin: Pin) -> bool:
        """Undo a pin whose slots were under a transfer; False if a slot was dropped meanwhile."""
        if pin.epoch != self._table.epoch:
            # Since the reset, a pin of a held slot stands for a transfer that is still open on it.
            self._room.free(self._table.unpin(pin.slots))
            return False
        lost = self._lost_any(pin.slots)
        self._unpin(pin.slots)
        return not lost

    def _lost_any(self, pinned: Slots) -> bool:
        """Whether any of these pinned slots was dropped since; nothing else can happen to them within an epoch."""
        return bool(self._lingering) and int(np.count_nonzero(self._table.is_ready(pinned))) < len(pinned)

    def _unpin(self, slots: Slots) -> None:
        freed = self._table.unpin(slots)
        if self._lingering:
            held = self._table.states[freed] == SlotState.HELD
            self._room.free(freed[held])
            self._lingering.difference_update(freed[held].tolist())
            freed = freed[~held]
        self._room.policy.add(freed)
        self._room.version += 1
