"""The slot table: the content of every slot of the pool, as columns, and the free slots.

A slot is free, being stored, ready (its key can be found and loaded), or held: dropped while a transfer still accesses
its bytes. Columns of a slot from an older epoch are invalid, which makes a reset O(1): it moves only the slots of open
transfers to the new epoch.

A pool changes its size at its end. Slots from `num_slots` up to `end_slot` are leaving: none of them is allocated,
and a free one is retired. The columns have room for `max_slots`, which takes memory once it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.index import HashTable, hash_keys
from kvferry.core.pool.native import (
    QUEUE_COLUMNS,
    QUEUE_LENGTH,
    KeyHashes,
    aligned_zeros,
    queue_functions,
    record_functions,
)
from kvferry.core.pool.records import SLOT_RECORD, RecoveredBlocks, SlotRows, lines_of
from kvferry.core.pool.tenants import TenantTable
from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots

BATCH_SLOTS = 1000
MAX_POSITION = 2**31 - 1
"""The highest position of a block within its request that a slot can record."""

_FRONTIER_CHUNK = 128
_BEGUN_SLOTS = 4096
"""Slots whose store has begun, of which those that have ended are forgotten at once."""
_NO_SLOT = -1
_ALL_IN_ONE = np.zeros(0, dtype=np.uint8)


class SlotState(IntEnum):
    """State of a slot, one byte."""

    FREE = 0
    STORING = 1
    READY = 2
    HELD = 3
    RETIRED = 4


# Plain numbers, as a lookup of an enum member costs as much as a comparison of columns on the hot path.
_FREE, _STORING, _READY, _HELD, _RETIRED = (int(state) for state in SlotState)


class RecencyQueue:
    """Slots from least to most recently used, as a linked list. Batches have distinct slots, and cost O(1) a slot.

    A batch leaves in the opposite order of its entry: a request's blocks enter in order, and its last is evicted first.
    """

    def __init__(
        self, older: NDArray[np.int32], newer: NDArray[np.int32], ends: NDArray[np.int64] | None = None
    ) -> None:
        """Make an empty queue.

        Args:
            older: Column of neighbors, shared by all queues over the same slots.
            newer: The other one.
            ends: Where the queue has its ends and length, `[QUEUE_COLUMNS]`, for functions over many queues.
        """
        self._older = older
        self._newer = newer
        self._ends = np.empty(QUEUE_COLUMNS, dtype=np.int64) if ends is None else ends
        relink, self._oldest = queue_functions()
        self._relink = partial(relink, older, newer, self._ends[None, None], _ALL_IN_ONE, _ALL_IN_ONE)
        self.reset()

    def reset(self) -> None:
        """Remove all slots, in O(1)."""
        self._ends[:] = _NO_SLOT, _NO_SLOT, 0

    @property
    def length(self) -> int:
        """Return the number of slots in the queue."""
        return int(self._ends[QUEUE_LENGTH])

    def append(self, slots: Slots) -> None:
        """Add slots that are in no queue at the most recent end, the first of them as the most recent."""
        self._relink(slots, False, True)

    def prepend(self, slots: Slots) -> None:
        """Add slots that are in no queue at the least recent end, the first of them as the least recent."""
        front = RecencyQueue(self._older, self._newer)
        front.append(slots[::-1])
        front.join(self)
        self._ends[:] = front._ends

    def insert_after(self, slot: int, older: int) -> None:
        """Add a slot that is in no queue next to one of this queue, which stays the less recent of both."""
        newer = int(self._newer[older])
        self._older[slot], self._newer[slot] = older, newer
        self._newer[older] = slot
        if newer == _NO_SLOT:
            self._ends[1] = slot
        else:
            self._older[newer] = slot
        self._ends[QUEUE_LENGTH] += 1

    def touch(self, slots: Slots) -> None:
        """Move slots that are in the queue to its most recent end, the first of them as the most recent."""
        self._relink(slots, True, True)

    def remove(self, slots: Slots) -> None:
        """Remove slots that are in the queue."""
        self._relink(slots, True, False)

    @property
    def oldest(self) -> int:
        """Return the least recently used slot, a negative number if there is none."""
        return int(self._ends[0])

    def take_oldest(self, count: int) -> Slots:
        """Remove and return up to `count` slots, the least recently used first."""
        taken: Slots = np.empty(min(count, self.length), dtype=np.int64)
        self._oldest(self._older, self._newer, self._ends, True, taken)
        return taken

    def peek_oldest(self, count: int) -> Slots:
        """Return up to `count` slots, the least recently used first."""
        oldest: Slots = np.empty(min(count, self.length), dtype=np.int64)
        self._oldest(self._older, self._newer, self._ends, False, oldest)
        return oldest

    def join(self, newer: RecencyQueue) -> None:
        """Move all slots of another queue to the most recent end, in their order, in O(1)."""
        if not newer.length:
            return
        first, newest = int(newer._ends[0]), int(self._ends[1])
        self._older[first] = newest
        if newest == _NO_SLOT:
            self._ends[0] = first
        else:
            self._newer[newest] = first
        self._ends[1] = newer._ends[1]
        self._ends[QUEUE_LENGTH] += newer._ends[QUEUE_LENGTH]
        newer.reset()


class SlotTable:
    """Columns over all slots, and the free slots: a queue of freed ones, then those never allocated in this epoch.

    Free slots before `_frontier` are in the queue; those behind it are found by their state.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, epoch: int = 0, max_slots: int = 0, batch_slots: int = BATCH_SLOTS
    ) -> None:
        self.batch_slots = batch_slots
        """Slots processed in one hold of the manager lock, except in calls of the engine."""
        self.num_slots = num_slots
        self.target_slots = num_slots
        """Value of `num_slots` once the resize in progress is done."""
        self.end_slot = num_slots
        self.num_retired = 0
        self.max_slots = max(max_slots, num_slots)
        self.last_end_slot = num_slots
        """Maximum of `end_slot` so far."""
        self.slot_bytes = slot_bytes
        self.epoch = epoch
        self._records = records = aligned_zeros(self.max_slots, SLOT_RECORD)
        self.states = records["state"]
        self.epochs = records["epoch"]
        self.generations = records["generation"]
        self.older = records["older"]
        self.newer = records["newer"]
        self.sizes = records["size"]
        self.positions = records["position"]
        self.classes = records["priority_class"]
        self.pins = records["pins"]
        self.stored_s = records["stored_s"]
        self.hit_s = records["hit_s"]
        self.hits = records["hits"]
        self.tenants = TenantTable(records, epoch)
        self.keys = np.empty(self.max_slots, dtype=object)
        self.hashes: KeyHashes = np.zeros(self.max_slots, dtype=np.uint64)
        self.origins = np.empty(self.max_slots, dtype=object)
        # Not part of a record, as it is scanned as a whole.
        self.dirty = np.zeros(self.max_slots, dtype=np.bool_)
        self._free = RecencyQueue(self.older, self.newer)
        self._frontier = 0
        self.last_generation = 0
        """The highest generation of any slot so far."""
        self.num_free = num_slots
        self.num_ready = 0
        self.num_unverified = 0
        self.uniform_class: int | None = PRIORITY_CLASS[Priority.NORMAL]
        """The priority class of all blocks, None once there are several."""
        self.space_version = 0
        """Raised whenever space may have appeared, so that refused stores are retried."""
        self._unverified = np.zeros(0, dtype=np.bool_)
        self._native = record_functions()
        self._begun: list[Slots] = []
        """Slots whose store has begun in this epoch, those that are being stored among them."""
        self._num_begun, self._max_begun = 0, _BEGUN_SLOTS
        self._storing = HashTable(0, self.hashes)
        """The slots that are being stored, by their keys, as of `_storing_version`."""
        self._storing_version = self._slots_version
        self._lines = lines_of(records)

    @property
    def num_present(self) -> int:
        """Number of slots; leaving ones count until they are retired."""
        return self.end_slot - self.num_retired

    @property
    def _slots_version(self) -> tuple[int, int]:
        """Return what changes whenever the store of a slot begins or ends."""
        return self.last_generation, self.space_version

    @property
    def is_shrinking(self) -> bool:
        """Whether slots are leaving."""
        return self.end_slot > self.num_slots

    def find_matching(self, matches: Callable[[RequestIdentity], bool], start_slot: int) -> tuple[Slots, int | None]:
        """Return the ready slots of one batch whose origin matches, and the first slot of the next batch or None."""
        end = min(start_slot + self.batch_slots, self.end_slot)
        slots = self.ready_in(start_slot, end)
        origins = self.origins[slots].tolist()
        matched = {id(origin): matches(origin) for origin in {id(origin): origin for origin in origins}.values()}
        is_matching = np.array([matched[id(origin)] for origin in origins], dtype=np.bool_)
        return slots[is_matching], end if end < self.end_slot else None

    def ready_in(self, start: int, end: int) -> Slots:
        """Return the ready slots of a range."""
        ready: Slots = (self.current_states(start, end) == _READY).nonzero()[0] + start
        return ready

    def take_free(self, count: int) -> Slots:
        """Allocate up to `count` free slots, whose columns are stale."""
        slots = self._free.take_oldest(count)
        if self.end_slot > self.num_slots:
            self._retire(slots[slots >= self.num_slots])
            slots = slots[slots < self.num_slots]
        while len(slots) < count and self._frontier < self.num_slots:
            start = self._frontier
            wanted = count - len(slots)
            end = min(start + max(wanted, _FRONTIER_CHUNK), self.num_slots)
            fresh = (self.current_states(start, end) == _FREE).nonzero()[0][:wanted] + start
            self._frontier = int(fresh[-1]) + 1 if len(fresh) == wanted else end
            # Pins of an older epoch are invalid; within an epoch they are zero before a slot is freed.
            self.pins[fresh] = 0
            slots = np.concatenate((slots, fresh)) if len(slots) else fresh
        self.num_free -= len(slots)
        return slots

    def free(self, slots: Slots) -> None:
        """Free allocated slots, which are no candidates for eviction."""
        self.space_version += 1
        states = self.states[slots]
        is_used = (states != _FREE) & (states != _RETIRED) & (self.epochs[slots] == self.epoch)
        if is_used.any():
            self.tenants.count(slots[is_used], -1)
        self.states[slots] = _FREE
        self.num_free += len(slots)
        # Slots just freed are reused first, the lowest first: their memory is in use already, and a pool that is not
        # full has its blocks where a smaller one keeps them.
        self._free.prepend(slots[slots < self._frontier] if self._frontier < self.end_slot else slots)

    # --- growing and shrinking ----------------------------------------------------------------------------------

    def grow(self, end_slot: int) -> None:
        """Allow slots up to this one to be allocated, in time proportional to them; retired ones become free."""
        start, old_end = self.num_slots, min(end_slot, self.end_slot)
        retired = (self.states[start:old_end] == _RETIRED).nonzero()[0] + start
        self.num_retired -= len(retired)
        added = np.concatenate((retired, np.arange(old_end, end_slot)))
        self.num_slots = end_slot
        self.end_slot = max(self.end_slot, end_slot)
        self.pins[added] = 0
        self.free(added)
        self.last_end_slot = max(self.last_end_slot, self.end_slot)

    def retire(self, start: int, end: int) -> Slots:
        """Retire the free ones of these leaving slots, and return those in use."""
        states = self.current_states(start, end)
        free = (states == _FREE).nonzero()[0] + start
        self._free.remove(free[free < self._frontier])
        self._retire(free)
        in_use: Slots = ((states != _FREE) & (states != _RETIRED)).nonzero()[0] + start
        return in_use

    def truncate(self, end_slot: int) -> None:
        """Remove the slots from this one on, which are all retired."""
        self.num_retired -= self.end_slot - end_slot
        self.end_slot = end_slot

    # --- content of slots ----------------------------------------------------------------------------------------

    def begin_storing(
        self,
        slots: Slots,
        keys: Sequence[Key],
        hashes: KeyHashes,
        origin: RequestIdentity,
        positions: Slots,
        priority_class: int,
        size_bytes: int | None,
    ) -> None:
        """Assign keys to slots that were just allocated for a store: free ones, and victims."""
        self.last_generation += 1
        self._include_class(priority_class)
        self._begun.append(slots)
        self._num_begun += len(slots)
        if self._num_begun > self._max_begun:
            self._storing_slots()
        self._native.begin_storing(
            self._records,
            self.hashes,
            self.tenants.rows,
            slots,
            hashes,
            positions,
            _STORING,
            self.epoch,
            self.last_generation,
            self.slot_bytes if size_bytes is None else size_bytes,
            priority_class,
            0 if origin.tenant is None else self.tenants.number_of(origin.tenant),
        )
        self.keys[slots] = np.fromiter(keys, dtype=object, count=len(slots))
        self.origins[slots] = origin

    def make_ready(self, slots: Slots, now_s: float) -> None:
        """Publish slots that were being stored."""
        self._native.make_ready(self._records, self.dirty, slots, _READY, now_s)
        self.num_ready += len(slots)
        self.space_version += 1

    def are_in_flight(self, hashes: KeyHashes) -> NDArray[np.bool_]:
        """Return which of these keys are being stored, after a change in time proportional to all that are."""
        if self._storing_version != self._slots_version:
            slots = self._storing_slots()
            self._storing, self._storing_version = HashTable(len(slots), self.hashes), self._slots_version
            self._storing.claim(slots)
        are_storing: NDArray[np.bool_] = self._storing.find_hashes(hashes) >= 0
        return are_storing

    def import_blocks(self, blocks: RecoveredBlocks) -> None:
        """Fill slots with the blocks that an earlier process left. Requires: all slots free. O(slots)."""
        slots = blocks.slots
        self.states[slots] = _READY
        self.epochs[slots] = self.epoch
        self.generations[slots] = blocks.generations
        self.positions[slots] = np.clip(blocks.positions, 0, MAX_POSITION)
        self.sizes[slots] = blocks.sizes
        self.stored_s[slots] = blocks.stored_s
        self.hit_s[slots] = blocks.hit_s
        self.hits[slots] = blocks.hits
        self.keys[slots] = np.fromiter(blocks.keys, dtype=object, count=len(slots))
        self.hashes[slots] = hash_keys(blocks.keys)
        self.origins[slots] = np.fromiter(blocks.origins, dtype=object, count=len(slots))
        self.tenants.import_blocks(slots, blocks.origins)
        self.classes[slots] = blocks.classes
        for priority_class in np.unique(blocks.classes).tolist():
            self._include_class(priority_class)
        self.last_generation = int(blocks.generations.max(initial=0))
        self._unverified = np.zeros(self.max_slots, dtype=np.bool_)
        self._unverified[slots] = True
        self.num_unverified = self.num_ready = len(slots)
        is_free = np.ones(self.num_slots, dtype=np.bool_)
        is_free[slots] = False
        self._frontier, self.num_free = self.num_slots, 0
        self.free(is_free.nonzero()[0])

    def unverified_of(self, slots: Slots) -> Slots:
        """Return those of these ready slots that were recovered and not verified since."""
        return slots[self._unverified[slots]] if self.num_unverified else NO_SLOTS

    def unverified_in(self, start: int, end: int) -> Slots:
        """Return the slots of a range that were recovered and not verified since."""
        slots: Slots = self._unverified[start:end].nonzero()[0] + start if self.num_unverified else NO_SLOTS
        return slots

    def clear_unverified(self, slots: Slots) -> None:
        """Mark slots as verified, or as emptied."""
        if self.num_unverified:
            self.num_unverified -= int(np.count_nonzero(self._unverified[slots]))
            self._unverified[slots] = False

    def hit(self, slots: Slots, now_s: float) -> None:
        """Count a hit on ready slots."""
        self._native.hit(self._records, self.dirty, slots, now_s)

    def pin(self, slots: Slots) -> Slots:
        """Add one pin to each slot, and return the slots that had none."""
        fresh = np.empty(len(slots), dtype=np.int64)
        return fresh[: self._native.change_pins(self._records, slots, 1, fresh)]

    def unpin(self, slots: Slots) -> Slots:
        """Remove one pin from each slot, and return the slots that have none left."""
        self.space_version += 1
        freed = np.empty(len(slots), dtype=np.int64)
        return freed[: self._native.change_pins(self._records, slots, -1, freed)]

    def set_class(self, slots: Slots, priority_class: int) -> None:
        """Set the priority class of slots that are not candidates for eviction."""
        self.classes[slots] = priority_class
        self._include_class(priority_class)

    def labels(self, slots: Slots) -> SlotLabels:
        """Return what the headers of slots that are being stored have to contain."""
        return SlotLabels(
            slots,
            self.keys[slots].tolist(),
            self.generations[slots],
            self.epochs[slots].astype(np.int64),
            self.sizes[slots],
        )

    def raise_epoch(self, held: Slots) -> None:
        """Begin a new epoch, in which `held` slots, which open transfers access, are held and all others free.

        Takes time proportional to `held`.
        """
        self.epoch += 1
        self.tenants.epoch = self.epoch
        self.space_version += 1
        self.uniform_class = PRIORITY_CLASS[Priority.NORMAL]
        self._begun, self._num_begun = [], 0
        self.num_ready = 0
        self.num_unverified = 0
        self.states[held] = _HELD
        self.epochs[held] = self.epoch
        self.tenants.count(held, 1)
        self.pins[held] = 0
        self.num_free = self.num_present - len(held)
        self._free.reset()
        self._frontier = 0

    def current_states(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of the states of a range of slots, in which those of older epochs are free."""
        states = self.states[start:end].copy()
        states[(self.epochs[start:end] != self.epoch) & (states != _RETIRED)] = _FREE
        return states

    def is_ready(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these slots are ready."""
        ready: NDArray[np.bool_] = (self.states[slots] == _READY) & (self.epochs[slots] == self.epoch)
        return ready

    def rows(self, slots: Slots, live: NDArray[np.bool_] | None = None) -> SlotRows:
        """Return a copy of the columns of slots; `live` if known."""
        # Positional arguments are faster.
        return SlotRows(
            slots,
            self.keys.take(slots).tolist(),
            self.is_ready(slots) if live is None else live,
            self.origins.take(slots).tolist(),
            self._lines.take(slots, axis=0),
        )

    def _storing_slots(self) -> Slots:
        """Return the slots that are being stored, each at least once, and forget the others of `_begun`."""
        begun = np.concatenate([NO_SLOTS, *self._begun])
        slots: Slots = begun[self.states[begun] == _STORING]
        self._begun, self._num_begun = [slots], len(slots)
        self._max_begun = 2 * len(slots) + _BEGUN_SLOTS
        return slots

    def _retire(self, slots: Slots) -> None:
        """Retire free leaving slots, which are not in the queue any more."""
        self.states[slots] = _RETIRED
        self.num_free -= len(slots)
        self.num_retired += len(slots)

    def _include_class(self, priority_class: int) -> None:
        if self.uniform_class != priority_class:
            self.uniform_class = None
