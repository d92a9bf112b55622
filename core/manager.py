"""The offload manager: which slot a block gets, who must go for it, and what can be found.

It makes the parts that a pool consists of, and has the one lock. Everything that it and they do for the engine is a
batch under that lock, with no I/O, no logging and no work in proportion to the pool. They know keys and slots;
requests, jobs and policies of requests are the scheduler's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.admission import Admission
from kvferry.core.arrays import counting
from kvferry.core.change_lock import change_lock
from kvferry.core.events import EventSink, NullSink, ResetEvent, StoreBatch
from kvferry.core.eviction import EVICTION_POLICIES
from kvferry.core.grants import Offer, Pin
from kvferry.core.inventory import Inventory
from kvferry.core.kept import PoolRecord
from kvferry.core.keys import NO_PREFIX, Key, Prefix
from kvferry.core.leaving import Leaving
from kvferry.core.marks import Marks, marks_of
from kvferry.core.missing import MissingKeys
from kvferry.core.operator_pins import OperatorPins
from kvferry.core.origins import Origin
from kvferry.core.pins import Pins
from kvferry.core.pool_index import PoolIndex
from kvferry.core.reasons import EvictionReason
from kvferry.core.recovered import Recovered
from kvferry.core.room import Room
from kvferry.core.slots import BATCH_SLOTS, SlotState, SlotTable
from kvferry.core.stats import EvictionCounts
from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots

_ROOM_ROUNDS = 4
"""How often an offer asks for room while the pool shrinks, when what it gets is leaving."""


class OffloadManager:
    """Slots by key. Each method takes the lock itself; the lock is re-entrant, so callers may span several calls."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        eviction_policy: str = "lru",
        sink: EventSink | None = None,
        max_pinned_fraction: float = 0.25,
        store_threshold: int = 1,
        record: PoolRecord | None = None,
        epoch: int = 0,
        max_slots: int = 0,
    ) -> None:
        """`num_slots` slots of `slot_bytes` each; operators may pin at most `max_pinned_fraction` of them.

        `max_slots` is how many there may come to be, by a resize (0: no more).

        A block is stored from its offer number `store_threshold` on. A pool that outlives its process has a `record`,
        and begins with the `epoch` that its last process had come to.
        """
        self.lock = threading.RLock()
        self.changing = change_lock(self.lock)
        """The same lock, for what changes the pool: an exception there has `recover` drop all blocks."""
        self.table = SlotTable(num_slots, slot_bytes, epoch, max_slots)
        self.index = PoolIndex(self.table, self.changing)
        self.room = Room(self.table, eviction_policy)
        self.pins = Pins(self.table, self.room, self.changing)
        self.admission = Admission(num_slots, store_threshold)
        self.sink = sink if sink is not None else NullSink()
        """Where core says what it did."""
        self._record = record
        evictions = EvictionCounts()
        self.missing = MissingKeys(num_slots, self.index, evictions, self.sink, self.changing)
        self.operator_pins = OperatorPins(self.table, self.index, self.pins, self.changing, max_pinned_fraction)
        self.inventory = Inventory(self.table, self.index, self.room, self.pins, self.operator_pins, self.lock)
        self.leaving = Leaving(
            self.table,
            self.index,
            self.room,
            self.pins,
            self.operator_pins,
            self.missing,
            evictions,
            record,
            self.sink,
            self.changing,
        )
        self.recovered = Recovered(self.table, self.index, self.room, self.pins, self.leaving, self.changing)

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.table.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.table.slot_bytes

    @property
    def epoch(self) -> int:
        """Raised by each whole reset; what belongs to an older one is void."""
        return self.table.epoch

    # --- stores -------------------------------------------------------------------------------------------------

    def offer(
        self,
        keys: Sequence[Key],
        origin: Origin,
        positions: NDArray[np.int64],
        priority_class: int,
        now_s: float,
        prefix: Prefix = NO_PREFIX,
        size_bytes: int | None = None,
        is_counted: bool = True,
    ) -> Offer:
        """Reserve slots for those of `keys` that are not in the pool, evicting what must go.

        `keys` are blocks of one request in their order, at the indices `positions` in it, of `size_bytes` each (None:
        a whole slot). Keys that are present count as used. Where room ends, the answer ends: a block behind one that is
        missing would never be found. For the same reason nothing is evicted that stands among `keys` or in `prefix`,
        the request's blocks before them. What is not `is_counted` needs no admission: it comes back from
        a tier, and was admitted once.
        """
        marks = marks_of(keys)
        with self.changing:
            table = self.table
            num_answered = len(keys)
            found = self.index.find(keys, marks)
            absent = found < 0
            if int(np.count_nonzero(absent)) == num_answered:
                own, wanted_at = NO_SLOTS, counting(num_answered)
            else:
                own, wanted_at = found[~absent], absent.nonzero()[0]
                # `Prefix` relies on them, and of recovered blocks they may be unknown.
                elsewhere = table.positions[own] != positions[~absent]
                if elsewhere.any():
                    table.positions[own] = positions[~absent]
                    table.dirty[own[elsewhere]] = True
                self._use_again(own, priority_class)
            counted, held_back_at = None, NO_SLOTS
            if is_counted and self.admission.threshold > 1:
                counted = wanted_at, marks[wanted_at]
                admitted = self.admission.admits(counted[1])
                wanted_at, held_back_at = wanted_at[admitted], wanted_at[~admitted]
            wanted = marks if len(wanted_at) == len(keys) else marks[wanted_at]
            slots = self._reserve(wanted, own, prefix, origin, now_s)
            if len(slots) < len(wanted):
                num_answered = int(wanted_at[len(slots)])
                wanted, wanted_at = wanted[: len(slots)], wanted_at[: len(slots)]
                held_back_at = held_back_at[held_back_at < num_answered]
            if counted is not None:
                offered_at, marks = counted
                self.admission.count(marks[offered_at < num_answered])
            if len(slots):
                if len(slots) < len(keys):
                    positions = positions[wanted_at]
                    keys = [keys[i] for i in wanted_at.tolist()]
                table.begin_storing(slots, keys, wanted, origin, positions, priority_class, size_bytes)
                self.missing.begin_filling(wanted)
            return Offer(num_answered, wanted_at, slots, held_back_at)

    def publish(self, slots: Slots, now_s: float, chain: Sequence[Key] = ()) -> int:
        """Make stored slots findable and say how many were; one that lost a race for its key is freed instead.

        `slots` are of one request, in the order of its blocks; `chain` are the keys from its first block to the last of
        them, all of which are used once more, so that what is stored later of a request goes sooner.
        """
        with self.changing:
            self.missing.end_filling(self.table.marks[slots])
            holders = self.index.claim(slots)
            # As bytes: to compare two short arrays takes five times as long.
            if holders.tobytes() != slots.tobytes():
                won = holders == slots
                lost = slots[~won]
                self._raise_class(holders[(holders >= 0) & ~won], int(self.table.classes.column[lost].max()))
                self.leaving.void(lost)
                self.room.free(lost)
                slots = slots[won]
            keys = self.table.keys[slots].tolist()
            self.table.make_ready(slots, now_s)
            self.room.policy.admit(slots)
            self.touch(chain)
            self.room.version += 1
            if keys:
                self.sink.stored(StoreBatch(now_s, self.table.origins[slots[0]], keys))
            return len(slots)

    def touch(self, keys: Sequence[Key]) -> None:
        """Put keys of one request, in the order of its blocks, behind others, the last of them to go first.

        It keeps a request's blocks in order, and does not count as another use of them.
        """
        if keys:
            with self.changing:
                slots = self.index.find_some(keys)
                self.room.policy.reorder(slots[self.table.pins[slots] == 0])

    def abandon(self, slots: Slots) -> None:
        """Free slots whose store failed, or that a reset disowned, now that nothing touches them any more."""
        with self.changing:
            self.missing.end_filling(self.table.marks[slots])
            self.leaving.void(slots)
            self.room.free(slots)

    def num_invalidations(self) -> int:
        """Return how many invalidations the pool's record has queued so far; 0 without a record."""
        return 0 if self._record is None else self._record.num_invalidations()

    def are_written(self, count: int) -> bool:
        """Return whether a restart cannot undo the first `count` invalidations any more."""
        return self._record is None or self._record.are_written(count)

    def labels(self, slots: Slots) -> SlotLabels | None:
        """What a store has to write beside the bytes of slots that were reserved; None if nothing outlives us."""
        if self._record is None:
            return None
        with self.lock:
            return self.table.labels(slots)

    def begin_filling(self, slots: Slots) -> None:
        """A tier is about to write to slots that were reserved."""
        if self._record is not None and len(slots):
            with self.lock:
                self._record.begin_filling(self.table.labels(slots))

    def end_filling(self, slots: Slots) -> None:
        """A tier has written to slots that were published since: those that did not lose a race may be kept."""
        if self._record is not None:
            with self.lock:
                kept = slots[self.table.is_ready(slots)]
                if len(kept):
                    self._record.end_filling(self.table.labels(kept))

    # --- loads --------------------------------------------------------------------------------------------------

    def find_prefix(self, keys: Sequence[Key]) -> Slots:
        """The slots of the leading keys that are ready."""
        with self.lock:
            return self.index.find_prefix(keys)

    def find_each(self, keys: Sequence[Key]) -> Slots:
        """The slot of each key, -1 where it is not ready."""
        with self.lock:
            return self.index.find(keys)

    def note_origin(self, slots: Slots, origin: Origin) -> None:
        """Slots that are not published yet hold what this request once stored, whoever had it brought back."""
        with self.lock:
            self.table.origins[slots] = origin

    # --- reset --------------------------------------------------------------------------------------------------

    def reset(self, filled: Slots, now_s: float) -> int:
        """Forget everything, in time proportional to the slots that open transfers still touch. How many were ready.

        `filled` are those that are being filled, which come back by `abandon`; what is being read, of which `pins`
        knows, comes back when that ends.
        """
        with self.changing:
            dropped = self._forget_all(filled)
            self._note_reset(dropped, now_s)
            self.room.start_over()
            return dropped

    def recover(self, filled: Slots, loads: Iterable[Pin], now_s: float) -> list[Exception]:
        """Undo what an exception left behind, and drop all blocks if it interrupted a change of the pool.

        Slots that are being stored are freed and blocks unpinned, but for those that are `filled` or read by open
        transfers, or pinned by operators. Nothing that is being stored may be published any more. Takes time
        proportional to the pool.

        Args:
            filled: slots that open transfers write to.
            loads: the pins of open loads.
            now_s: the time.

        Returns:
            Exceptions in the eviction policy, the record or the sink, which did not prevent the recovery. Blocks of an
            older epoch that a restart finds because of them still have the bytes of their keys.
        """
        errors: list[Exception] = []
        with self.lock:
            self.pins.keep_loads(loads)
            if not self.changing.is_torn:
                try:
                    if self._keep_blocks(filled):
                        return errors
                except Exception as error:  # noqa: BLE001 - returned; the other way needs nothing of what failed
                    errors.append(error)
                self.changing.is_torn = True
            dropped = self._forget_all(filled)
            for step in (self.room.start_over, lambda: self._note_reset(dropped, now_s)):
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - returned
                    errors.append(error)
            self.changing.is_torn = False
        return errors

    def switch_policy(self, name: str) -> bool:
        """Exchange the eviction policy and keep the contents and their order; True while it has to be called again.

        Each call is short, and the engine may work between them; meanwhile, the least recently used blocks go first.
        """
        if name not in EVICTION_POLICIES:
            known = ", ".join(EVICTION_POLICIES)
            raise ValueError(f"eviction_policy={name!r} is not known: choose one of {known}")
        # Not under the lock, as it allocates what takes the size of the pool.
        self.room.prepare(name)
        with self.changing:
            return self.room.exchange_policy(name, BATCH_SLOTS)

    # --- inside -------------------------------------------------------------------------------------------------

    def _reserve(self, wanted: Marks, own: Slots, prefix: Prefix, origin: Origin, now_s: float) -> Slots:
        """Take free slots for the `wanted` marks, and evict for the rest; fewer if there is no more room."""
        table = self.table
        slots = table.take_free(len(wanted))
        try:
            for _ in range(_ROOM_ROUNDS if table.is_shrinking else 1):
                victims = self.room.make(wanted, slots, own, prefix)
                staying = self._let_leave(victims, now_s) if table.is_shrinking else victims
                if len(staying):
                    self.leaving.forget(staying, EvictionReason.CAPACITY, origin.request_id, now_s)
                    slots = np.concatenate((slots, staying)) if len(slots) else staying
                if len(staying) == len(victims):
                    break
        except BaseException:
            self.room.free(slots)
            raise
        return slots

    def _keep_blocks(self, filled: Slots) -> bool:
        """Free slots and undo pins that have no owner; False if the pool is found to be inconsistent."""
        table, policy = self.table, self.room.policy
        with self.changing:
            self.leaving.void(filled)
            is_lost = table.current_states(0, table.end_slot) == SlotState.STORING
            is_lost[filled] = False
            self.abandon(is_lost.nonzero()[0])
            if not self.pins.recount(filled, self.operator_pins.slots()):
                return False
            states, pins = table.current_states(0, table.end_slot), table.pins[: table.end_slot]
            is_ready = states == SlotState.READY
            return (
                int(np.count_nonzero(is_ready)) == table.num_ready == len(self.index)
                and len(policy) == int(np.count_nonzero(is_ready & (pins == 0)))
                and table.num_free == int(np.count_nonzero(states == SlotState.FREE))
            )

    def _note_reset(self, dropped: int, now_s: float) -> None:
        """Queue the invalidation of all blocks before this epoch, and emit the reset."""
        if self._record is not None:
            self._record.void_before(self.table.epoch)
        self.sink.was_reset(ResetEvent(now_s, self.table.epoch, dropped))

    def _forget_all(self, filled: Slots) -> int:
        """Begin a new epoch in which only slots under a transfer are not free; the number of blocks dropped.

        `room.start_over` has to follow.
        """
        dropped = self.table.num_ready
        self.pins.begin_epoch(filled)
        self.index.clear()
        self.missing.begin_epoch()
        self.operator_pins.begin_epoch()
        self.leaving.count(EvictionReason.RESET, dropped)
        return dropped

    def _let_leave(self, victims: Slots, now_s: float) -> Slots:
        """Those of the slots that were taken for new blocks that stay in the pool; the others go for good."""
        leaving = victims >= self.table.num_slots
        gone = victims[leaving]
        if len(gone):
            self.leaving.forget(gone, EvictionReason.SHRINK, None, now_s)
            self.room.free(gone)
        return victims[~leaving]

    def _use_again(self, slots: Slots, priority_class: int) -> None:
        """Slots in the order of their request's blocks were offered again, with this priority."""
        self._raise_class(slots, priority_class)
        self.room.policy.touch(slots[self.table.pins[slots] == 0])

    def _raise_class(self, slots: Slots, priority_class: int) -> None:
        """Ready slots get this class if theirs is lower."""
        classes = self.table.classes
        if classes.uniform is not None and classes.uniform >= priority_class:
            return
        slots = slots[classes.column[slots] < priority_class]
        # Each once, in their order, whatever is named twice.
        slots = slots[np.sort(np.unique(slots, return_index=True)[1])]
        candidates = slots[self.table.pins[slots] == 0]
        self.room.policy.remove(candidates)
        classes.assign(slots, priority_class)
        self.table.dirty[slots] = True
        self.room.policy.add(candidates)
