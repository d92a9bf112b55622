"""The slot table: what every slot of the pool holds, as columns, and which slots are free.

A slot is free, being stored, ready (its key can be found and loaded), or held: disowned by a reset while a transfer
still touches its bytes. Columns of a slot from an older epoch mean nothing, which makes a reset O(1): a reset moves
only the slots that open transfers touch to the new epoch.

A pool changes its size at its end. Slots from `num_slots` up to `end_slot` are leaving: none of them is given out, and
one that is free for good is retired. The columns have room for `max_slots`, which takes memory once it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvferry.core.arrays import zeros_on_lines
from kvferry.core.events import SlotRows
from kvferry.core.kept import KeptBlocks
from kvferry.core.keys import Key
from kvferry.core.marks import Marks, marks_of
from kvferry.core.origins import Origin
from kvferry.core.records import SLOT_RECORD, lines_of, record_calls
from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots

BATCH_SLOTS = 1000
"""The most slots that anything but the engine's own batches may work on while it holds the lock."""

_FRONTIER_CHUNK = 128


class SlotState(IntEnum):
    """State of a slot, one byte."""

    FREE = 0
    STORING = 1
    READY = 2
    HELD = 3
    RETIRED = 4


# Plain numbers: the columns are compared with them on the hot path, and looking up a member of an enum costs as much.
_FREE, _STORING, _READY, _HELD, _RETIRED = (int(state) for state in SlotState)


class PriorityClasses:
    """The eviction class of each slot. `uniform` is the class of them all while there is but one, None after that."""

    def __init__(self, column: NDArray[np.uint8]) -> None:
        self.column = column
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """No slot has a class."""
        self.uniform: int | None = None
        self._assigned = False

    def assign(self, slots: Slots, priority_class: int) -> None:
        """Give slots that are no candidates for eviction a class."""
        self.column[slots] = priority_class
        self.note(priority_class)

    def note(self, priority_class: int) -> None:
        """Somebody else has given slots a class, which were no candidates for eviction."""
        if not self._assigned:
            self._assigned = True
            self.uniform = priority_class
        elif self.uniform != priority_class:
            self.uniform = None

    def assign_each(self, slots: Slots, classes: NDArray[np.uint8]) -> None:
        """Give each of these slots a class of its own."""
        for priority_class in np.unique(classes).tolist():
            self.assign(slots[classes == priority_class], priority_class)


class SlotTable:
    """Columns over all slots, and the free ones: a stack of those given back, then those never given out this epoch."""

    def __init__(self, num_slots: int, slot_bytes: int, epoch: int = 0, max_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.wanted_slots = num_slots
        """Slots that there are to be, once a resize is done."""
        self.end_slot = num_slots
        self.num_retired = 0
        self.max_slots = max(max_slots, num_slots)
        self.last_end_slot = num_slots
        """The most that `end_slot` ever was."""
        self.slot_bytes = slot_bytes
        self.epoch = epoch
        self._records = records = zeros_on_lines(self.max_slots, SLOT_RECORD)
        self.states = records["state"]
        self.epochs = records["epoch"]
        self.generations = records["generation"]
        self.queued_at = records["queued_at"]
        self.sizes = records["size"]
        self.positions = records["position"]
        self.classes = PriorityClasses(records["priority_class"])
        self.pins = records["pins"]
        self.stored_s = records["stored_s"]
        self.hit_s = records["hit_s"]
        self.hits = records["hits"]
        self.keys = np.empty(self.max_slots, dtype=object)
        self.marks: Marks = np.zeros(self.max_slots, dtype=np.uint64)
        self.origins = np.empty(self.max_slots, dtype=object)
        # Looked through as a whole, so it is by itself.
        self.dirty = np.zeros(self.max_slots, dtype=np.bool_)
        self._returned = np.empty(self.max_slots, dtype=np.int64)
        self._num_returned = 0
        self._num_sifted = 0
        self._frontier = 0
        self._lendings = 0
        self.num_free = num_slots
        self.num_ready = 0
        self.num_unverified = 0
        self._unverified = np.zeros(0, dtype=np.bool_)
        self._calls = record_calls()
        self._lines = lines_of(records)

    @property
    def num_present(self) -> int:
        """Slots that there are: those that are leaving count until they are retired."""
        return self.end_slot - self.num_retired

    @property
    def is_shrinking(self) -> bool:
        """Whether some slots are leaving."""
        return self.end_slot > self.num_slots

    def take_free(self, count: int) -> Slots:
        """Up to `count` free slots, no longer free; their columns are stale."""
        if not self.num_free:
            return NO_SLOTS
        returned = min(count, self._num_returned)
        self._num_returned -= returned
        slots = self._returned[self._num_returned : self._num_returned + returned][::-1].copy()
        if self.end_slot > self.num_slots:
            # They are forgotten here, and retired when it is their turn.
            slots = slots[slots < self.num_slots]
        while len(slots) < count and self._frontier < self.num_slots:
            start = self._frontier
            wanted = count - len(slots)
            end = min(start + max(wanted, _FRONTIER_CHUNK), self.num_slots)
            fresh = (self.current_states(start, end) == _FREE).nonzero()[0][:wanted] + start
            self._frontier = int(fresh[-1]) + 1 if len(fresh) == wanted else end
            # Pins of an older epoch are void; within an epoch they are zero before a slot is given back.
            self.pins[fresh] = 0
            slots = np.concatenate((slots, fresh)) if len(slots) else fresh
        self.num_free -= len(slots)
        return slots

    def give_back(self, slots: Slots) -> None:
        """Make slots free again that are not."""
        self.states[slots] = _FREE
        self.num_free += len(slots)
        # Beyond the frontier a slot is found by its state; pushing it as well would give it out twice.
        passed = slots[slots < self._frontier] if self._frontier < self.end_slot else slots
        self._returned[self._num_returned : self._num_returned + len(passed)] = passed
        self._num_returned += len(passed)

    # --- growing and shrinking ----------------------------------------------------------------------------------

    def grow(self, end_slot: int) -> None:
        """Give out slots up to this one, in time proportional to them. What had been retired of them comes back.

        To be called once `sift` is done.
        """
        start = self.num_slots
        old_end = min(end_slot, self.end_slot)
        retired = (self.states[start:old_end] == _RETIRED).nonzero()[0] + start
        self.states[retired] = _FREE
        self.states[old_end:end_slot] = _FREE
        self.num_retired -= len(retired)
        self.num_free += len(retired) + end_slot - old_end
        if self._frontier == start:
            # All before them are given out, and whoever needs a slot must not search what is still in use of these.
            free = (self.current_states(start, end_slot) == _FREE).nonzero()[0] + start
            self.pins[free] = 0
            self._returned[self._num_returned : self._num_returned + len(free)] = free[::-1]
            self._num_returned += len(free)
            self._frontier = end_slot
        self.num_slots = end_slot
        self.end_slot = max(self.end_slot, end_slot)
        self.last_end_slot = max(self.last_end_slot, self.end_slot)

    def shrink(self, num_slots: int) -> None:
        """Give out no slot from this one on, in O(1). Those that are free are still counted until they are retired."""
        self.num_slots = num_slots
        # Behind it a slot is found by its state, should the pool grow again.
        self._frontier = min(self._frontier, num_slots)
        self._num_sifted = 0

    def sift(self, limit: int) -> bool:
        """Take slots that are leaving out of those given back, looking at `limit`; True while there is more to look at.

        A slot that came back to the pool with an entry left from before would be given out twice.
        """
        start = min(self._num_sifted, self._num_returned)
        end = min(start + limit, self._num_returned)
        staying = self._returned[start:end]
        staying = staying[staying < self.num_slots]
        num_gone = end - start - len(staying)
        # What stands last takes the place of what goes.
        moved = self._returned[max(self._num_returned - num_gone, end) : self._num_returned]
        kept = np.concatenate((staying, moved))
        self._returned[start : start + len(kept)] = kept
        self._num_returned -= num_gone
        self._num_sifted = start + len(staying)
        return self._num_sifted < self._num_returned

    def retire(self, start: int, end: int) -> Slots:
        """Retire the free ones of these slots, all of which are leaving; those that are still in use."""
        states = self.current_states(start, end)
        free = (states == _FREE).nonzero()[0] + start
        self.states[free] = _RETIRED
        self.num_free -= len(free)
        self.num_retired += len(free)
        in_use: Slots = ((states != _FREE) & (states != _RETIRED)).nonzero()[0] + start
        return in_use

    def cut(self, end_slot: int) -> None:
        """Slots from this one on, all of them retired, are no more."""
        self.num_retired -= self.end_slot - end_slot
        self.end_slot = end_slot

    # --- what slots hold ----------------------------------------------------------------------------------------

    def begin_storing(
        self,
        slots: Slots,
        keys: Sequence[Key],
        marks: Marks,
        origin: Origin,
        positions: Slots,
        priority_class: int,
        size_bytes: int | None,
    ) -> None:
        """Give slots that were just taken to keys that are about to be stored."""
        self._lendings += 1
        self._calls.begin_storing(
            self._records,
            self.marks,
            slots,
            marks,
            positions,
            _STORING,
            self.epoch,
            self._lendings,
            self.slot_bytes if size_bytes is None else size_bytes,
            priority_class,
        )
        self.classes.note(priority_class)
        self.keys[slots] = np.fromiter(keys, dtype=object, count=len(slots))
        self.origins[slots] = origin

    def make_ready(self, slots: Slots, now_s: float) -> None:
        """Publish slots that were being stored."""
        self._calls.make_ready(self._records, self.dirty, slots, _READY, now_s)
        self.num_ready += len(slots)

    def adopt(self, blocks: KeptBlocks) -> None:
        """Take over what an earlier process left, while every slot is free. In time proportional to all slots."""
        slots = blocks.slots
        self.states[slots] = _READY
        self.epochs[slots] = self.epoch
        self.generations[slots] = blocks.generations
        self.positions[slots] = blocks.positions
        self.sizes[slots] = blocks.sizes
        self.stored_s[slots] = blocks.stored_s
        self.hit_s[slots] = blocks.hit_s
        self.hits[slots] = blocks.hits
        self.keys[slots] = np.fromiter(blocks.keys, dtype=object, count=len(slots))
        self.marks[slots] = marks_of(blocks.keys)
        self.origins[slots] = np.fromiter(blocks.origins, dtype=object, count=len(slots))
        self.classes.assign_each(slots, blocks.classes)
        self._lendings = int(blocks.generations.max(initial=0))
        self._unverified = np.zeros(self.max_slots, dtype=np.bool_)
        self._unverified[slots] = True
        self.num_unverified = self.num_ready = len(slots)
        free = np.ones(self.num_slots, dtype=np.bool_)
        free[slots] = False
        returned = free.nonzero()[0][::-1]
        self._returned[: len(returned)] = returned
        self._num_returned = self.num_free = len(returned)
        self._frontier = self.num_slots

    def unverified_of(self, slots: Slots) -> Slots:
        """Those of these ready slots that an earlier process wrote and nobody has looked at since."""
        return slots[self._unverified[slots]] if self.num_unverified else NO_SLOTS

    def unverified_in(self, start: int, end: int) -> Slots:
        """Those slots of a range that are to be verified."""
        found: Slots = self._unverified[start:end].nonzero()[0] + start if self.num_unverified else NO_SLOTS
        return found

    def end_unverified(self, slots: Slots) -> None:
        """These slots are verified, or hold nothing that could be."""
        if self.num_unverified:
            self.num_unverified -= int(np.count_nonzero(self._unverified[slots]))
            self._unverified[slots] = False

    def hit(self, slots: Slots, now_s: float) -> None:
        """Count a hit on ready slots."""
        self._calls.hit(self._records, self.dirty, slots, now_s)

    def pin(self, slots: Slots) -> Slots:
        """Pin slots once more; those that were not pinned before."""
        fresh = np.empty(len(slots), dtype=np.int64)
        return fresh[: self._calls.pin(self._records, slots, fresh)]

    def unpin(self, slots: Slots) -> Slots:
        """Take one pin off each of these slots; those that have none left."""
        freed = np.empty(len(slots), dtype=np.int64)
        return freed[: self._calls.unpin(self._records, slots, freed)]

    def labels(self, slots: Slots) -> SlotLabels:
        """What is to be written beside the bytes of slots that are being stored."""
        return SlotLabels(
            slots,
            self.keys[slots].tolist(),
            self.generations[slots],
            self.epochs[slots].astype(np.int64),
            self.sizes[slots],
        )

    def begin_epoch(self, held: Slots) -> None:
        """Forget every slot but `held`, those that transfers under way still touch, in time proportional to `held`."""
        self.epoch += 1
        self.classes.begin_epoch()
        self.num_ready = 0
        self.num_unverified = 0
        self.states[held] = _HELD
        self.epochs[held] = self.epoch
        self.pins[held] = 0
        self.num_free = self.num_present - len(held)
        self._num_returned = 0
        self._frontier = 0

    def current_states(self, start: int, end: int) -> NDArray[np.uint8]:
        """A copy of the states of the slots in a range, with those left over from older epochs shown as free."""
        states = self.states[start:end].copy()
        states[(self.epochs[start:end] != self.epoch) & (states != _RETIRED)] = _FREE
        return states

    def is_ready(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these slots hold a block that can be found."""
        ready: NDArray[np.bool_] = (self.states[slots] == _READY) & (self.epochs[slots] == self.epoch)
        return ready

    def rows(self, slots: Slots, live: NDArray[np.bool_] | None = None) -> SlotRows:
        """A copy of these slots' columns; `live` if that is known."""
        # By position, which is quicker: in the order of `SlotRows`.
        return SlotRows(
            slots,
            self.keys.take(slots).tolist(),
            self.is_ready(slots) if live is None else live,
            self.origins.take(slots).tolist(),
            self._lines.take(slots, axis=0),
        )
