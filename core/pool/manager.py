"""The offload manager: which slot a block gets, which blocks are evicted for it, and which can be found.

The manager owns the slot table, the index, the pins, the evictor and the history of missing keys, and the one lock. Of
a request it knows identity, priority class and the positions of blocks; progress, policies and jobs belong to the
scheduler. A block is stored and loaded so:

    prepare_store -> (the transfer) -> complete_store or abort_store                                   (StoreJobs)
    lookup (PrefixLookup) -> pin -> prepare_load -> (the transfer) -> complete_load, or only unpin      (LoadPlanner)

The other methods serve tiers (`Cascades`, `Promotions`), a pool that outlives its process (`HeaderQueue`), lazy mode
(`LazyPlanner`), eviction policies that learn, and operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.pool.admission import Admission, Reservation
from kvferry.core.pool.events import EventSink, EvictionBatch, ResetEvent, StoreBatch
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES, Evictor
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.history import MissHistory
from kvferry.core.pool.index import NO_PREFIX, BlockIndex, Prefix, hash_keys
from kvferry.core.pool.leases import Leases
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.pins import AfterPin, OperatorPins, Pin, Pins
from kvferry.core.pool.records import HeaderQueue
from kvferry.core.pool.slots import BATCH_SLOTS, SlotTable
from kvferry.core.stats import EvictionCounts, EvictionReason, NotStored, PoolCounts
from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots

_EVICTION_ROUNDS = 4
"""Most rounds of eviction for one store while the pool shrinks, in which victims in leaving slots make no space."""
_LIVE = np.ones(BATCH_SLOTS, dtype=np.bool_)
"""The column `live` of `SlotRows` for up to a batch of ready slots, made once, since a new one takes 0.7 us."""


class ChangeLock:
    """Acquires the manager lock, and marks the pool as torn when an exception leaves the context.

    Index, slots, pins and eviction policy of a torn pool may disagree: `recover` drops all its blocks. Re-entrant, as
    the lock is.
    """

    __slots__ = ("_lock", "is_torn")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.is_torn = False

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.is_torn = True
        self._lock.__exit__(kind, error, trace)


class OffloadManager:
    """Blocks by key, in slots of host memory.

    Public methods acquire the manager lock, except those that require it to be held; properties, `num_invalidations`
    and `are_flushed` need no lock. The lock is re-entrant, so callers may hold it over several calls. Under it there
    is no I/O and, but for what docs/architecture.md lists, no logging and no work in proportion to the pool. Slots,
    index, pins and candidates are changed within `changing`; to read, and to call the header queue, `lock` is enough.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        eviction_policy: str = "lru",
        sink: EventSink | None = None,
        header_queue: HeaderQueue | None = None,
        max_slots: int = 0,
        batch_slots: int = BATCH_SLOTS,
    ) -> None:
        """Make an empty pool.

        Args:
            num_slots: Number of slots.
            slot_bytes: Size of a slot.
            eviction_policy: A name in `EVICTION_POLICIES`.
            sink: Receives the events of the pool.
            header_queue: Changes of the slot headers of a pool that outlives its process.
            max_slots: Number of slots up to which the pool may grow; 0: `num_slots`.
            batch_slots: See `SlotTable`.
        """
        self.lock = threading.RLock()
        self.changing = ChangeLock(self.lock)
        """The same lock, for changes of the pool."""
        self.sink = sink
        self.evictions = EvictionCounts()
        epoch = 0 if header_queue is None else header_queue.epoch
        self.table = SlotTable(num_slots, slot_bytes, epoch, max_slots, batch_slots)
        self.index = BlockIndex(num_slots, self.table.keys, self.table.hashes)
        self.evictor = Evictor(self.table, eviction_policy)
        self.pins = Pins(self.table, self.evictor)
        self.operator_pins = OperatorPins(
            self.table, self.index, self.pins, self.changing, lambda max_blocks: self.leases.make_space(max_blocks)
        )
        self.leases = Leases(self.table, self.index, self.pins, self.evictor, self.operator_pins, self.changing)
        self.admission = Admission(num_slots, 1)
        self.history = MissHistory(self.table, self.index, self.evictions, sink)
        self._header_queue = header_queue
        self.observe_victims: Callable[[Slots], None] = lambda slots: None
        """Receives the slots of blocks that are about to be evicted for space."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.table.num_slots

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.table.slot_bytes

    @property
    def epoch(self) -> int:
        """Counter raised by `begin_epoch`. Results that belong to an older epoch are discarded."""
        return self.table.epoch

    # --- lookup -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key]) -> Slots:
        """Return the slots of the leading keys that are ready."""
        with self.lock:
            return self.index.find_prefix(keys)

    def lookup_each(self, keys: Sequence[Key]) -> Slots:
        """Return the slot of each key, -1 where it is not ready."""
        with self.lock:
            return self.index.find(keys)

    # --- store ------------------------------------------------------------------------------------------------------

    def prepare_store(
        self,
        keys: Sequence[Key],
        origin: RequestIdentity,
        positions: NDArray[np.int64],
        priority_class: int,
        now_s: float,
        prefix: Prefix = NO_PREFIX,
        size_bytes: int | None = None,
        needs_admission: bool = True,
        on_engine_thread: bool = True,
    ) -> Reservation:
        """Reserve slots for those of `keys` that are not in the pool, evicting others if necessary.

        Keys that are in the pool count as used. The first key without space ends the reservation, as blocks behind a
        missing one are never found; for the same reason no block among `keys` or in `prefix` is evicted. A tenant that
        uses as many slots as it may loses its own oldest blocks, and no other's. A key that is named twice counts as
        used once, or gets two slots, of which one is published.

        Args:
            keys: Blocks of one request and group, in order.
            origin: The request.
            positions: Index of each block in the request.
            priority_class: Priority class of the blocks.
            now_s: The time.
            prefix: Other blocks of the request, which are not evicted.
            size_bytes: Size of each block; None: a whole slot.
            needs_admission: False for blocks of a tier, which were admitted before.
            on_engine_thread: Whether the caller is the engine thread, which alone may call `Residency`: in lazy mode
                blocks that the device holds too are evicted first then.
        """
        hashes = hash_keys(keys)
        with self.changing:
            # Names in `_at` are indices of `keys`; `wanted` are hashes of keys to be stored, `present` slots of others.
            found, num_found = self.index.find_hashed(keys, hashes)
            present, wanted_at = NO_SLOTS, np.arange(len(keys))
            if num_found:
                present_at, wanted_at = (found >= 0).nonzero()[0], (found < 0).nonzero()[0]
                if len(set(found[present_at].tolist())) < len(present_at):
                    # One of the indices of each repeated key.
                    present_at = np.sort(np.unique(found, return_index=True)[1])
                    present_at = present_at[found[present_at] >= 0]
                present = found[present_at]
                self._use_again(present, positions[present_at], priority_class)
            absent_at, not_admitted_at = wanted_at, NO_SLOTS
            counts_offers = needs_admission and self.admission.is_counting
            if counts_offers:
                is_admitted = self.admission.admits(hashes[absent_at])
                wanted_at, not_admitted_at = absent_at[is_admitted], absent_at[~is_admitted]
            wanted = hashes if len(wanted_at) == len(keys) else hashes[wanted_at]
            slots, refusal = self._reserve(wanted, present, prefix, origin, now_s, on_engine_thread)
            num_decided = len(keys)
            if len(slots) < len(wanted):
                num_decided = int(wanted_at[len(slots)])
                wanted, wanted_at = wanted[: len(slots)], wanted_at[: len(slots)]
                not_admitted_at = not_admitted_at[not_admitted_at < num_decided]
            if counts_offers:
                # Keys after these are not counted, as they will be offered again.
                self.admission.count(hashes[absent_at[absent_at < num_decided]])
            if len(slots):
                if len(slots) < len(keys):
                    positions = positions[wanted_at]
                    keys = [keys[i] for i in wanted_at.tolist()]
                self.table.begin_storing(slots, keys, wanted, origin, positions, priority_class, size_bytes)
            return Reservation(num_decided, wanted_at, slots, not_admitted_at, refusal)

    def space_version(self, refusal: NotStored, tenant: str | None) -> tuple[int, ...]:
        """Return what changes whenever blocks of a tenant that were refused may find space.

        Requires: manager lock held.
        """
        tenants = self.table.tenants
        return tenants.space_version(tenant) if refusal is NotStored.TENANT_LIMIT else (self.table.space_version,)

    def complete_store(self, slots: Slots, now_s: float) -> int:
        """Publish stored slots, and free those whose key was published by another store meanwhile.

        Args:
            slots: Slots of one request, in the order of its blocks.
            now_s: The time.

        Returns:
            The number of slots published.
        """
        with self.changing:
            table = self.table
            holders = self.index.claim(slots)
            # Bytes, as a comparison of two short arrays takes five times as long.
            if holders.tobytes() != slots.tobytes():
                # Another slot holds the key, or none if the index is full (-1). The holder gets the highest class.
                is_holder = holders == slots
                lost = slots[~is_holder]
                # Distinct: a key that was offered twice has one holder, and policies must not get a slot twice.
                others = np.unique(holders[(holders >= 0) & ~is_holder])
                self._raise_class(others, int(table.classes[lost].max()))
                # Unlike in `abort_store`, their keys stay in leases: they are in the pool, in the holders' slots.
                self.invalidate(lost)
                table.free(lost)
                slots = slots[is_holder]
            keys = table.keys.take(slots).tolist()
            table.make_ready(slots, now_s)
            self.evictor.admit(slots)
            if self.leases.counts.pending:
                self.leases.publish(keys, slots)
            if keys and self.sink is not None:
                self.sink(StoreBatch(now_s, table.origins[slots[0]], keys))
            return len(slots)

    def abort_store(self, slots: Slots) -> None:
        """Free reserved slots whose blocks are not published. Requires: no transfer accesses them any more.

        Their store or promotion has failed, a reset or a deletion concerns their blocks, or `recover` has found that no
        job owns them.
        """
        with self.changing:
            self.invalidate(slots)
            self.leases.end_pending_with(self.table.keys[slots].tolist())
            self.table.free(slots)

    def set_origin(self, slots: Slots, origin: RequestIdentity) -> None:
        """Set the request that first stored the blocks of reserved slots, which a tier fills for another request."""
        with self.changing:
            self.table.origins[slots] = origin
            self.table.tenants.move(slots, origin.tenant)

    # --- load -------------------------------------------------------------------------------------------------------

    def pin(self, slots: Slots, after: AfterPin = AfterPin.USED) -> Pin:
        """Pin slots that were found in the same hold of the lock."""
        with self.changing:
            return self.pins.pin(slots, after)

    def unpin(self, pin: Pin) -> None:
        """Undo a pin, and count its slots as used."""
        if len(pin.slots):
            with self.changing:
                self.pins.release(pin)

    def prepare_load(self, pin: Pin, now_s: float) -> bool:
        """Count a hit on pinned slots and mark them as loading. Returns False if one of them was dropped."""
        with self.changing:
            return self.pins.begin_load(pin, now_s)

    def complete_load(self, pin: Pin, *, is_done: bool = True) -> bool:
        """End a load, which was prepared with this object, and its pin. Returns False if a slot was dropped.

        After a load that was done, its slots count as verified, and in lazy mode its blocks as held by the device.
        """
        with self.changing:
            is_intact = self.pins.end_load(pin)
            if is_intact and is_done:
                self.table.clear_unverified(pin.slots)
                self.enter_device(pin.slots)
            return is_intact

    def begin_read(self, pin: Pin) -> None:
        """Record that a tier reads pinned slots until `end_read`."""
        with self.changing:
            self.pins.begin_read(pin)

    def end_read(self, pin: Pin) -> None:
        """End a read, which was begun with this object, and its pin."""
        with self.changing:
            self.pins.end_read(pin)

    def unverified(self, slots: Slots) -> Slots:
        """Return those of these slots that were recovered and not verified since."""
        with self.lock:
            return self.table.unverified_of(slots) if self.table.num_unverified else NO_SLOTS

    # --- drop and reset ---------------------------------------------------------------------------------------------

    def drop(self, slots: Slots, reason: EvictionReason, now_s: float) -> int:
        """Drop ready slots and return how many. A pinned slot cannot be found any more, and is freed when unpinned."""
        with self.changing:
            table = self.table
            slots = slots[table.is_ready(slots)]
            if not len(slots):
                return 0
            keys = table.keys[slots].tolist()
            self.operator_pins.end_with(keys)
            self.leases.end_with(keys)
            self._evict(slots, reason, None, now_s)
            is_pinned = table.pins[slots] > 0
            idle, pinned = slots[~is_pinned], slots[is_pinned]
            self.evictor.remove(idle)
            table.free(idle)
            if len(pinned):
                self.pins.free_when_unpinned(pinned)
            return len(slots)

    def drop_key(self, key: Key, now_s: float) -> bool:
        """Drop one block for an operator. Returns False if it is not in the pool."""
        with self.changing:
            slot = self.index.get(key)
            return slot is not None and self.drop(np.array([slot]), EvictionReason.OPERATOR, now_s) == 1

    def drop_matching(
        self, matches: Callable[[RequestIdentity], bool], start_slot: int, now_s: float
    ) -> tuple[int, int | None]:
        """Drop the blocks of one batch of slots whose origin matches.

        Returns:
            Their number, and the first slot of the next batch, None at the end.
        """
        with self.changing:
            slots, next_slot = self.table.find_matching(matches, start_slot)
            dropped = self.drop(slots, EvictionReason.RESET, now_s) if len(slots) else 0
        return dropped, next_slot

    def reset(self, filled: Slots, now_s: float) -> int:
        """Drop all blocks, in time proportional to the slots of open transfers, and return how many were ready.

        Called by `kvferry.core.scheduler.resets` alone, which knows `filled`.

        Args:
            filled: Slots that open transfers write to. `abort_store` frees them; slots that are read are freed when
                their loads and reads end.
            now_s: The time.

        Raises:
            Exception: Eviction policy, header queue or sink failed; all blocks are dropped nevertheless.
        """
        with self.changing:
            dropped, errors = self.begin_epoch(filled, now_s)
            if errors:
                raise errors[0]
            return dropped

    def begin_epoch(self, filled: Slots, now_s: float) -> tuple[int, list[Exception]]:
        """Drop all blocks by raising the epoch, as `reset` does. Requires: manager lock held.

        Returns:
            How many blocks were ready, and the exceptions of eviction policy, header queue and sink, of which none
            prevents a later step.
        """
        dropped = self.table.num_ready
        read = self.pins.reset()
        self.table.raise_epoch(np.unique(np.concatenate((filled, *read))))
        for slots in read:
            # The new epoch has no pins; each open load or read ends with an unpin of its slots.
            self.table.pin(slots)
        self.index.reset()
        self.history.reset()
        self.operator_pins.reset()
        self.leases.reset()
        self._count_evicted(EvictionReason.RESET, dropped)
        errors: list[Exception] = []
        for step in (self.evictor.reset, lambda: self._emit_reset(dropped, now_s)):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - returned
                errors.append(error)
        return dropped, errors

    # --- pool files -------------------------------------------------------------------------------------------------

    def invalidate(self, slots: Slots) -> None:
        """Have no restart recover what slots hold, or what open stores write. Requires: manager lock held."""
        if self._header_queue is not None and len(slots):
            self._header_queue.invalidate(slots, self.table.generations[slots])

    def num_invalidations(self) -> int:
        """Return how many invalidations the header queue has received so far; 0 without a header queue."""
        return 0 if self._header_queue is None else self._header_queue.num_invalidations()

    def are_flushed(self, count: int) -> bool:
        """Return whether the first `count` invalidations survive a restart."""
        return self._header_queue is None or self._header_queue.are_flushed(count)

    def labels(self, slots: Slots) -> SlotLabels | None:
        """Return what a store writes to the headers of reserved slots; None without a header queue."""
        if self._header_queue is None:
            return None
        with self.lock:
            return self.table.labels(slots)

    def begin_tier_write(self, slots: Slots) -> None:
        """Record that a tier is about to write to reserved slots."""
        if self._header_queue is not None and len(slots):
            with self.lock:
                self._header_queue.begin_tier_write(self.table.labels(slots))

    def end_tier_write(self, slots: Slots) -> None:
        """Record that a tier has written to slots: those of them that were published may be recovered."""
        if self._header_queue is not None:
            with self.lock:
                published = slots[self.table.is_ready(slots)]
                if len(published):
                    self._header_queue.end_tier_write(self.table.labels(published))

    # --- counters ---------------------------------------------------------------------------------------------------

    def counts(self) -> PoolCounts:
        """Return the pool's slots by state; `SlotTable` says which there are during a resize."""
        with self.lock:
            table = self.table
            slots, free, ready = table.num_present, table.num_free, table.num_ready
            return PoolCounts(
                slots=slots,
                wanted_slots=table.target_slots,
                slot_bytes=table.slot_bytes,
                free=free,
                ready=ready,
                # Slots that are held count here.
                storing=slots - free - ready,
                loading=self.pins.count_loading(),
                # A ready slot is a candidate for eviction, or pinned.
                pinned=ready - len(self.evictor),
                unverified=table.num_unverified,
                bytes=slots * table.slot_bytes,
                eviction_policy=self.evictor.policy.name,
            )

    # --- eviction order ---------------------------------------------------------------------------------------------

    def reorder(self, keys: Sequence[Key]) -> None:
        """Move keys of one request, in order, to the MRU end, the last of them to be evicted first.

        This keeps a request's blocks in order, and does not count as a use: `prepare_store` and `unpin` count uses.
        """
        with self.changing:
            slots = self.index.find_some(keys)
            self.evictor.reorder(slots[self.table.pins[slots] == 0])

    @property
    def is_learning(self) -> bool:
        """Whether the eviction policy learns from all prompts, and needs the `record_*` calls below."""
        return isinstance(self.evictor.policy, HazardPolicy)

    def record_uses(self, keys: Sequence[Key], now_s: float, on_device: bool = False) -> None:
        """Record that a request uses these keys, in the pool or not; all are on the device, or none."""
        hashes = hash_keys(keys)
        with self.changing:
            if self.evictor.learner is not None:
                self.evictor.learner.record_uses(hashes, now_s, on_device)

    def record_end(self, keys: Sequence[Key], num_output_tokens: int, now_s: float) -> None:
        """Record the length of the answer to a request with these keys."""
        hashes = hash_keys(keys)
        with self.changing:
            slots = self.index.find_hashes(hashes)
            self.evictor.record_end(hashes, slots[slots >= 0], num_output_tokens, now_s)

    def record_request(self, now_s: float) -> None:
        """Record that a request has ended."""
        with self.changing:
            if self.evictor.learner is not None:
                self.evictor.learner.record_request(now_s)

    def enter_device(self, slots: Slots) -> None:
        """Record that the device has used the blocks of ready slots: in lazy mode they are evicted first."""
        with self.changing:
            if self.evictor.residency is not None:
                # A slot that is queued twice would be given out twice.
                self.evictor.enter_device(np.unique(slots))

    def leave_device(self, keys: Sequence[Key]) -> None:
        """Record that the device is about to lose these blocks of one request, in order, and `reorder` them."""
        with self.changing:
            self.evictor.leave_device(self.index.find_some(keys))

    def next_victims(self, count: int) -> Slots:
        """Return up to `count` ready slots that are evicted next, by the order of now, and stay in the pool until then.

        Uses until then change the order. Slots that leave the pool in a resize are left out.
        """
        with self.lock:
            slots = self.evictor.next_victims(count)
            return slots[slots < min(self.table.num_slots, self.table.target_slots)]

    def switch_policy(self, name: str) -> None:
        """Exchange the eviction policy, keeping blocks and their order. One thread at a time.

        Raises:
            ValueError: There is no such policy.
        """
        if name not in EVICTION_POLICIES:
            known = ", ".join(EVICTION_POLICIES)
            raise ValueError(f"eviction_policy={name!r} is not known: choose one of {known}")
        if name == self.evictor.policy.name:
            return
        # Made and freed without the lock, as its memory is in proportion to the pool.
        policy = EVICTION_POLICIES[name](self.table)
        with self.changing:
            replaced = self.evictor.exchange_policy(policy)
        del replaced

    # --- inside -----------------------------------------------------------------------------------------------------
    #
    # In the following, of one offer: `wanted` are the hashes of keys that need a slot, `present` the slots that hold
    # the other keys, `prefix` the request's earlier keys. The tenant's own victims and free slots serve the first of
    # the wanted hashes, other victims the rest; policies see the hashes, since ARC adapts to those it has evicted.

    def _reserve(
        self,
        wanted: KeyHashes,
        present: Slots,
        prefix: Prefix,
        origin: RequestIdentity,
        now_s: float,
        on_engine_thread: bool,
    ) -> tuple[Slots, NotStored]:
        """Return slots for the `wanted` hashes, freed by evictions where none is free; if they are fewer, also why."""
        table, slots, allowed = self.table, NO_SLOTS, wanted
        is_shrinking = table.end_slot > table.num_slots
        if table.tenants.is_limiting:
            own, num_allowed = self.evictor.take_own(origin.tenant, len(wanted), present, prefix)
            allowed = wanted[:num_allowed]
            slots = self._free_leaving(own, now_s) if is_shrinking else own
            if len(slots):
                self._evict(slots, EvictionReason.TENANT_LIMIT, origin.request_id, now_s)
        if table.num_free:
            free = table.take_free(len(allowed) - len(slots))
            slots = np.concatenate((slots, free)) if len(slots) else free
        try:
            for _ in range(_EVICTION_ROUNDS if is_shrinking else 1):
                victims = self.evictor.take_victims(allowed, slots, present, prefix, on_engine_thread)
                staying = self._free_leaving(victims, now_s) if is_shrinking else victims
                if len(staying):
                    self._evict(staying, EvictionReason.CAPACITY, origin.request_id, now_s)
                    slots = np.concatenate((slots, staying)) if len(slots) else staying
                if len(staying) == len(victims):
                    break
        except BaseException:
            table.free(slots)
            raise
        is_limited = len(slots) == len(allowed) < len(wanted)
        return slots, NotStored.TENANT_LIMIT if is_limited else NotStored.NO_SPACE

    def _free_leaving(self, victims: Slots, now_s: float) -> Slots:
        """Free those of the victims that leave the pool in a resize, and return the others."""
        is_leaving = victims >= self.table.num_slots
        leaving = victims[is_leaving]
        if len(leaving):
            self._evict(leaving, EvictionReason.SHRINK, None, now_s)
            self.table.free(leaving)
        return victims[~is_leaving]

    def _evict(self, slots: Slots, reason: EvictionReason, needed_by: str | None, now_s: float) -> None:
        """Remove ready slots from the index, and emit, record and count it, as an eviction or a drop by `reason`.

        The caller removes them from the candidates, and frees, holds or reuses them, which ends their state.
        `needed_by` is the request whose store needs the space, if one does.
        """
        table, count = self.table, len(slots)
        self._count_evicted(reason, count)
        rows = table.rows(slots, _LIVE[:count] if count <= BATCH_SLOTS else np.ones(count, dtype=np.bool_))
        if reason is EvictionReason.CAPACITY:
            self.observe_victims(slots)
        self.index.remove(slots)
        self.history.evicted.add(table.hashes.take(slots), reason, now_s)
        table.dirty[slots] = True
        table.num_ready -= count
        if table.tenants.is_limiting:
            table.tenants.remove(slots)
        if table.num_unverified:
            table.clear_unverified(slots)
        if self._header_queue is not None:
            self.invalidate(slots)
        if self.sink is not None:
            self.sink(EvictionBatch(now_s, reason, self.evictor.policy.name, rows, needed_by))

    def _count_evicted(self, reason: EvictionReason, count: int) -> None:
        self.evictions.total += count
        by_reason = self.evictions.by_reason
        by_reason[reason.value] = by_reason.get(reason.value, 0) + count

    def _emit_reset(self, dropped: int, now_s: float) -> None:
        """Queue the invalidation of all blocks before this epoch, and emit the reset."""
        if self._header_queue is not None:
            self._header_queue.invalidate_before(self.table.epoch)
        if self.sink is not None:
            self.sink(ResetEvent(now_s, self.table.epoch, dropped))

    def _use_again(self, slots: Slots, positions: NDArray[np.int64], priority_class: int) -> None:
        """Count a use of ready slots that a request offered at these positions, with this priority class."""
        table = self.table
        # `Prefix` compares positions, and those of recovered blocks may be unknown.
        has_moved = table.positions[slots] != positions
        if has_moved.any():
            table.positions[slots] = positions
            table.dirty[slots[has_moved]] = True
        self._raise_class(slots, priority_class)
        self.evictor.end_aside(slots)
        self.evictor.touch(slots[table.pins[slots] == 0])

    def _raise_class(self, slots: Slots, priority_class: int) -> None:
        """Set the priority class of ready slots that have a lower one."""
        table = self.table
        if table.uniform_class is not None and table.uniform_class >= priority_class:
            return
        slots = slots[table.classes[slots] < priority_class]
        candidates = slots[table.pins[slots] == 0]
        self.evictor.remove(candidates)
        table.set_class(slots, priority_class)
        table.dirty[slots] = True
        self.evictor.add(candidates)
