"""Pins: slots that cannot be evicted, since a request found them, a transfer reads them or an operator pinned them.

A pinned slot is no candidate for eviction. If its block is dropped nevertheless, the block cannot be found any more,
and the slot is freed with its last pin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvferry.core.expiry import Expiries
from kvferry.core.keys import Key
from kvferry.core.pool.eviction.evictor import Evictor
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.slots import SlotState, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots


@dataclass(frozen=True, slots=True)
class Pin:
    """Ready slots that cannot be evicted until the pin is released. A reset ends all pins of its epoch."""

    slots: Slots
    epoch: int

    def __len__(self) -> int:
        return len(self.slots)

    @staticmethod
    def empty() -> Pin:
        """Return a pin of no slots."""
        return Pin(NO_SLOTS, 0)


class AfterPin(Enum):
    """Place of slots in the order of eviction once nothing pins them, unless they are used meanwhile."""

    USED = "used"
    NEXT_VICTIMS = "next_victims"
    UNCHANGED = "unchanged"


class PinOutcome(Enum):
    """Result of an operator's request to pin a block."""

    PINNED = "pinned"
    NOT_FOUND = "not_found"
    LIMIT = "limit"
    LEAVING = "leaving"


class Pins:
    """Pins of slots, and those of them that transfers read. Requires: manager lock held."""

    def __init__(self, table: SlotTable, evictor: Evictor) -> None:
        self._table = table
        self._evictor = evictor
        self._loading: dict[int, Pin] = {}
        self._reading: dict[int, Pin] = {}
        self._verifying: dict[int, Pin] = {}
        self._freed_when_unpinned: set[int] = set()

    def pin(self, slots: Slots, after: AfterPin = AfterPin.USED) -> Pin:
        """Pin slots that were found in the same hold of the lock."""
        if len(slots):
            fresh = self._table.pin(slots)
            if after is AfterPin.USED:
                self._evictor.end_aside(slots)
                self._evictor.remove(fresh)
            elif after is AfterPin.NEXT_VICTIMS:
                self._evictor.set_aside(fresh)
            else:
                self._evictor.hold_place(fresh)
        return Pin(slots, self._table.epoch)

    def release(self, pin: Pin) -> None:
        """Undo a pin of this epoch, and count its slots as used."""
        if pin.epoch == self._table.epoch and len(pin):
            self._unpin(pin.slots)

    def begin_load(self, pin: Pin, now_s: float) -> bool:
        """Count a hit on the slots of a pin and mark them as loading. Returns False if one of them was dropped."""
        if pin.epoch != self._table.epoch or self._lost_any(pin.slots):
            return False
        self._table.hit(pin.slots, now_s)
        self._loading[id(pin)] = pin
        return True

    def end_load(self, pin: Pin) -> bool:
        """Undo `begin_load`, which was passed this object, and the pin. Returns False if a slot was dropped meanwhile.

        Dropped slots are freed with their last load.
        """
        return self._loading.pop(id(pin), None) is not None and self._end(pin)

    def begin_read(self, pin: Pin, *, verifies: bool = False) -> None:
        """Record that a tier, or the verification of recovered blocks, reads the slots of a pin until `end_read`."""
        self._reading[id(pin)] = pin
        if verifies:
            self._verifying[id(pin)] = pin

    def end_read(self, pin: Pin) -> None:
        """Undo `begin_read`, which was passed this object, and the pin."""
        self._verifying.pop(id(pin), None)
        if self._reading.pop(id(pin), None) is not None:
            self._end(pin)

    def loading_slots(self) -> Slots:
        """Return the distinct slots that loads of this epoch read; some may have been dropped."""
        return self._slots_of(self._loading)

    def count_loading(self) -> int:
        """Count the ready slots among those that loads read."""
        if not self._loading:
            return 0
        return int(np.count_nonzero(self._table.is_ready(self._slots_of(self._loading))))

    def reading_slots(self) -> Slots:
        """Return the distinct slots that tiers and verifications read."""
        return self._slots_of(self._reading)

    def free_when_unpinned(self, slots: Slots) -> None:
        """Free these dropped slots, which are pinned, with their last pin."""
        self._table.states[slots] = SlotState.HELD
        self._freed_when_unpinned.update(slots.tolist())

    def reset(self) -> list[Slots]:
        """End all pins but those of open loads and reads, and return the slots of each of these.

        The caller raises the epoch of the table, in which these slots are held, and pinned once for each.
        """
        self._freed_when_unpinned.clear()
        return [pin.slots for pin in (*self._loading.values(), *self._reading.values())]

    def keep_only(self, loads: Iterable[Pin], reads: Iterable[Pin]) -> None:
        """Record exactly these pins as those of open loads, and as those that tiers read; verifications go on."""
        self._loading = {id(pin): pin for pin in loads}
        self._reading = {id(pin): pin for pin in (*reads, *self._verifying.values())}

    def recount(self, filled: Slots, retained: Slots) -> bool:
        """Undo every pin but those of open loads and reads, operators and leases, in time proportional to the pool.

        Slots that hold no ready block are freed unless open transfers write to them.

        Args:
            filled: Slots that open transfers write to.
            retained: Slots that operators and leases have pinned, once for each.

        Returns:
            False if a slot lacks one of these pins, so that the pins are inconsistent.
        """
        table, end = self._table, self._table.end_slot
        owned = np.zeros(end, dtype=table.pins.dtype)
        for slots in (retained, *(pin.slots for pin in (*self._loading.values(), *self._reading.values()))):
            # As `pin` does, count a slot as often as a pin has it.
            np.add.at(owned, slots, 1)
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
        self._freed_when_unpinned.difference_update(idle.tolist())
        table.free(idle)
        self._evictor.add(unpinned)
        return True

    def _slots_of(self, pins: dict[int, Pin]) -> Slots:
        current = [pin.slots for pin in pins.values() if pin.epoch == self._table.epoch]
        return np.unique(np.concatenate(current)) if current else NO_SLOTS

    def _end(self, pin: Pin) -> bool:
        """Undo the pin of a transfer. Returns False if a slot was dropped meanwhile."""
        if pin.epoch != self._table.epoch:
            # After a reset, a pin of a held slot stands for a transfer that is still open on it.
            self._table.free(self._table.unpin(pin.slots))
            return False
        lost = self._lost_any(pin.slots)
        self._unpin(pin.slots)
        return not lost

    def _lost_any(self, pinned: Slots) -> bool:
        """Return whether any of these pinned slots was dropped."""
        return bool(self._freed_when_unpinned) and int(np.count_nonzero(self._table.is_ready(pinned))) < len(pinned)

    def _unpin(self, slots: Slots) -> None:
        unpinned = self._table.unpin(slots)
        if self._freed_when_unpinned:
            held = self._table.states[unpinned] == SlotState.HELD
            self._table.free(unpinned[held])
            self._evictor.end_aside(unpinned[held])
            self._freed_when_unpinned.difference_update(unpinned[held].tolist())
            unpinned = unpinned[~held]
        self._evictor.add(unpinned)


class OperatorPins:
    """Blocks that operators pinned until a time, within a share of the pool. Acquires the manager lock.

    A pin ends with its time, or with its block.
    """

    def __init__(
        self,
        table: SlotTable,
        index: BlockIndex,
        pins: Pins,
        lock: AbstractContextManager[object, None],
        limit_leases: Callable[[int], None],
    ) -> None:
        """`limit_leases` takes a block from leases if they have more than this number."""
        self.max_fraction = 0.25
        """Maximum share of the pool that may be pinned or leased. Pins and leases beyond it stay."""
        self._table = table
        self._index = index
        self._pins = pins
        self._lock = lock
        self._limit_leases = limit_leases
        self.expiries: Expiries[Key] = Expiries()
        """Times at which pins end."""

    def pin(self, key: Key, expires_s: float, now_s: float) -> PinOutcome:
        """Pin one block until `expires_s`, or change the time of its pin."""
        with self._lock:
            self.expire(now_s)
            slot = self._index.get(key)
            if slot is None:
                return PinOutcome.NOT_FOUND
            if key not in self.expiries:
                # A resize may have been requested and not begun.
                if slot >= min(self._table.num_slots, self._table.target_slots):
                    return PinOutcome.LEAVING
                num_left = int(self.max_fraction * self._table.num_slots) - len(self.expiries)
                if num_left < 1:
                    return PinOutcome.LIMIT
                self._limit_leases(num_left - 1)
                self._pins.pin(np.array([slot]))
            self.expiries.set(key, expires_s)
            return PinOutcome.PINNED

    def unpin(self, key: Key) -> bool:
        """End a pin. Returns False if there is none."""
        with self._lock:
            pinned = self.expiries.discard(key)
            if pinned:
                self._release([key])
            return pinned

    def expire(self, now_s: float) -> bool:
        """End pins whose time is over, a bounded number a call. Returns True while there are more."""
        if self.expiries.next_s > now_s:
            return False
        with self._lock:
            due = self.expiries.pop_due(now_s, self._table.batch_slots)
            if due:
                self._release(due)
            return self.expiries.next_s <= now_s

    def until_s(self, keys: Sequence[Key]) -> list[float | None]:
        """Return when the pin of each key ends, None for keys without one."""
        with self._lock:
            return [self.expiries.until_s(key) for key in keys]

    def slots(self) -> Slots:
        """Return the slots of all pinned blocks, in time proportional to their number."""
        with self._lock:
            return self._index.find_some(self.expiries.keys())

    def in_slots_from(self, start_slot: int) -> list[Key]:
        """Return the pinned keys whose blocks are in slots from `start_slot` on."""
        with self._lock:
            keys = self.expiries.keys()
        pinned: list[Key] = []
        for start in range(0, len(keys), self._table.batch_slots):
            some = keys[start : start + self._table.batch_slots]
            with self._lock:
                slots = self._index.find(some)
            pinned += [some[i] for i in (slots >= start_slot).nonzero()[0].tolist()]
        return pinned

    def end_with(self, keys: Sequence[Key]) -> None:
        """End the pins of keys that are about to be dropped and can still be found. Requires: manager lock held."""
        if self.expiries:
            self._release([key for key in keys if self.expiries.discard(key)])

    def reset(self) -> None:
        """Forget all pins, which a reset has ended. Requires: manager lock held."""
        self.expiries.clear()

    def _release(self, keys: Sequence[Key]) -> None:
        self._pins.release(Pin(self._index.find_some(keys), self._table.epoch))
