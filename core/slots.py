"""The slot table: what every slot of the pool holds, as columns, and which slots are free.

A slot is free, being stored, ready (its key can be found and loaded), or held: disowned by a reset while a transfer
still touches its bytes. Columns of a slot from an older epoch mean nothing, unless it is held; that is what makes a
reset O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from core.arrays import zeros_on_lines
from core.events import Origin, SlotRows
from core.kept import KeptBlocks
from core.keys import Key
from core.transfers import NO_SLOTS, SlotLabels, Slots

_FRONTIER_CHUNK = 128

_RECORD = np.dtype(
    [
        ("generation", np.int64),
        ("stored_s", np.float64),
        ("hit_s", np.float64),
        ("queued_at", np.int64),
        ("size", np.int64),
        ("epoch", np.int32),
        ("position", np.int64),
        ("hits", np.int32),
        ("pins", np.int32),
        ("state", np.uint8),
        ("priority_class", np.uint8),
        ("unused", "V2"),
    ]
)
"""A slot, in one cache line: whatever is done to a batch of slots waits for the memory of each slot once."""


class SlotState(IntEnum):
    """State of a slot, one byte."""

    FREE = 0
    STORING = 1
    READY = 2
    HELD = 3


# Plain numbers: the columns are compared with them on the hot path, and looking up a member of an enum costs as much.
_FREE, _STORING, _READY, _HELD = (int(state) for state in SlotState)


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
        if not self._assigned:
            self._assigned = True
            self.uniform = priority_class
        elif self.uniform != priority_class:
            self.uniform = None


class SlotTable:
    """Columns over all slots, and the free ones: a stack of those given back, then those never given out this epoch."""

    def __init__(self, num_slots: int, slot_bytes: int, epoch: int = 0) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.epoch = epoch
        records = zeros_on_lines(num_slots, _RECORD)
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
        self.keys = np.empty(num_slots, dtype=object)
        self.origins = np.empty(num_slots, dtype=object)
        # Looked through as a whole, so it is by itself.
        self.dirty = np.zeros(num_slots, dtype=np.bool_)
        self._returned = np.empty(num_slots, dtype=np.int64)
        self._num_returned = 0
        self._frontier = 0
        self._lendings = 0
        self.num_free = num_slots
        self.num_ready = 0
        self.num_unverified = 0
        self._unverified = np.zeros(0, dtype=np.bool_)

    @property
    def num_storing(self) -> int:
        """Slots that are neither free nor loadable: being stored, or held."""
        return self.num_slots - self.num_free - self.num_ready

    def take_free(self, count: int) -> Slots:
        """Up to `count` free slots, no longer free; their columns are stale."""
        if not self.num_free:
            return NO_SLOTS
        returned = min(count, self._num_returned)
        self._num_returned -= returned
        slots = self._returned[self._num_returned : self._num_returned + returned][::-1].copy()
        while len(slots) < count and self._frontier < self.num_slots:
            start = self._frontier
            wanted = count - len(slots)
            end = min(start + max(wanted, _FRONTIER_CHUNK), self.num_slots)
            fresh = (self.states[start:end] != _HELD).nonzero()[0][:wanted] + start
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
        passed = slots[slots < self._frontier] if self._frontier < self.num_slots else slots
        self._returned[self._num_returned : self._num_returned + len(passed)] = passed
        self._num_returned += len(passed)

    def begin_storing(
        self,
        slots: Slots,
        keys: Sequence[Key],
        origin: Origin,
        positions: Slots,
        priority_class: int,
        size_bytes: int | None,
    ) -> None:
        """Give slots that were just taken to keys that are about to be stored."""
        self.states[slots] = _STORING
        self.epochs[slots] = self.epoch
        self._lendings += 1
        self.generations[slots] = self._lendings
        self.positions[slots] = positions
        self.sizes[slots] = self.slot_bytes if size_bytes is None else size_bytes
        self.classes.assign(slots, priority_class)
        self.keys[slots] = np.fromiter(keys, dtype=object, count=len(slots))
        self.origins[slots] = origin

    def make_ready(self, slots: Slots, now_s: float) -> None:
        """Publish slots that were being stored."""
        self.states[slots] = _READY
        self.stored_s[slots] = now_s
        self.hit_s[slots] = 0.0
        self.hits[slots] = 0
        self.dirty[slots] = True
        self.num_ready += len(slots)

    def adopt(self, blocks: KeptBlocks, priority_class: int) -> None:
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
        self.origins[slots] = np.fromiter(blocks.origins, dtype=object, count=len(slots))
        self.classes.assign(slots, priority_class)
        self._lendings = int(blocks.generations.max(initial=0))
        self._unverified = np.zeros(self.num_slots, dtype=np.bool_)
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

    def unverified_from(self, start: int, limit: int) -> Slots:
        """Up to `limit` slots to be verified, from `start` on."""
        found: Slots = self._unverified[start:].nonzero()[0][:limit] + start if self.num_unverified else NO_SLOTS
        return found

    def end_unverified(self, slots: Slots) -> None:
        """These slots are verified, or hold nothing that could be."""
        if self.num_unverified:
            self.num_unverified -= int(np.count_nonzero(self._unverified[slots]))
            self._unverified[slots] = False

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
        self.pins[held] = 0
        self.num_free = self.num_slots - len(held)
        self._num_returned = 0
        self._frontier = 0

    def current_states(self, start: int, end: int) -> NDArray[np.uint8]:
        """A copy of the states of the slots in a range, with those left over from older epochs shown as free."""
        states = self.states[start:end].copy()
        states[(self.epochs[start:end] != self.epoch) & (states != _HELD)] = _FREE
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
            self.keys[slots].tolist(),
            self.is_ready(slots) if live is None else live,
            self.generations[slots],
            self.epochs[slots],
            self.sizes[slots],
            self.positions[slots],
            self.origins[slots].tolist(),
            self.stored_s[slots],
            self.hit_s[slots],
            self.hits[slots],
        )
