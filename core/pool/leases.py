"""Leases: blocks of requests that have ended are not evicted until a time, or until their session's next request.

A lease is of keys. Keys that are not in the pool yet are pending, and are pinned once they are published. However many
leases a key is under, its slot is pinned once, and counts once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvferry.core.expiry import Expiries
from kvferry.core.keys import Key, SessionKey
from kvferry.core.pool.eviction.evictor import Evictor
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.pins import AfterPin, OperatorPins, Pin, Pins
from kvferry.core.pool.slots import SlotTable
from kvferry.core.stats import LeaseCounts, LeaseEnd, LeaseOutcome
from kvferry.core.transfers import Slots

__all__ = ["Lease", "LeaseLimit", "LeaseOutcome", "LeaseReceipt", "Leases"]

_TENANT_SHARE = 2
"""At most this part of the slots that a tenant may use is under leases."""


class LeaseLimit(StrEnum):
    """Limit that a lease has met, as receipts say it."""

    SHARE = "pins and leases have their share of the pool (KVFERRY_MAX_PINNED_FRACTION)"
    TENANT = "leases have half of what the tenant may have in the pool"


@dataclass(frozen=True, slots=True)
class LeaseReceipt:
    """What a lease was of when it began."""

    outcome: LeaseOutcome
    num_blocks: int
    """Blocks of the lease, in slots; pending ones count."""
    num_pending: int
    """Those of them that were not in the pool yet: being stored, or in lazy mode on the device only."""
    num_bytes: int
    """Bytes of the slots of all blocks."""
    until_s: float | None
    """When the lease ends, unless something ends it earlier; None without one."""
    reason: str | None
    """Why it is not of all blocks."""


@dataclass(slots=True, eq=False)
class _LeasedBlock:
    key: Key
    tenant: str | None
    """The tenant that it counts for."""
    is_pending: bool
    num_leases: int = 0
    """Leases that have it; 0 once it has left them all."""


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that are not evicted until a time."""

    number: int
    session: SessionKey | None
    tenant: str | None
    sequence: int
    """The request that was announced last when it began."""
    began_s: float
    until_s: float
    blocks: list[_LeasedBlock] = field(default_factory=list)
    """In prefix order; some may have left the lease."""
    is_outlived: bool = False
    """Whether its blocks would have been evicted without it. They are in reverse order then."""


class Leases:
    """All leases, within the share of the pool that operators' pins leave. Acquires the manager lock."""

    def __init__(
        self,
        table: SlotTable,
        index: BlockIndex,
        pins: Pins,
        evictor: Evictor,
        operator_pins: OperatorPins,
        lock: AbstractContextManager[object, None],
    ) -> None:
        self.counts = LeaseCounts()
        self.batch_slots = max(table.batch_slots // 2, 1)
        """Blocks of leases that begin or are released under one hold of the manager lock."""
        self._table = table
        self._index = index
        self._pins = pins
        self._evictor = evictor
        self._operator_pins = operator_pins
        self._lock = lock
        self._blocks: dict[Key, _LeasedBlock] = {}
        self._num_of: Counter[str | None] = Counter()
        """Keys under leases by the tenant that they count for."""
        self._leases: dict[int, Lease] = {}
        self._by_session: dict[SessionKey, dict[int, Lease]] = {}
        self._expiries: Expiries[int] = Expiries()
        self._ended: deque[Lease] = deque()
        """Leases that have ended, and still have blocks."""
        self._last_number = 0

    def __len__(self) -> int:
        """Return the number of leases that have not ended."""
        return len(self._leases)

    def __contains__(self, lease: Lease) -> bool:
        """Return whether a lease has not ended."""
        return lease.number in self._leases

    @property
    def num_blocks(self) -> int:
        """Keys under leases, pending ones too."""
        return len(self._blocks)

    def is_pending(self, key: Key) -> bool:
        """Return whether a key is under a lease and not in the pool yet. Requires: manager lock held."""
        block = self._blocks.get(key)
        return block is not None and block.is_pending

    @property
    def next_s(self) -> float:
        """Earliest time at which `expire` has work to do."""
        return -math.inf if self._ended else self._expiries.next_s

    # --- begin ------------------------------------------------------------------------------------------------------

    def begin(
        self, session: SessionKey | None, tenant: str | None, sequence: int, now_s: float, until_s: float
    ) -> Lease:
        """Begin a lease without blocks. `sequence` is the request that was announced last."""
        with self._lock:
            self._last_number += 1
            lease = Lease(self._last_number, session, tenant, sequence, now_s, until_s)
            self._leases[lease.number] = lease
            if session is not None:
                self._by_session.setdefault(session, {})[lease.number] = lease
            self._expiries.set(lease.number, until_s)
            return lease

    def extend(self, lease: Lease, keys: Sequence[Key], slots: Slots) -> tuple[int, LeaseLimit | None]:
        """Add keys behind those of a lease, as many as its limits allow.

        Args:
            lease: A lease that has not ended.
            keys: At most `batch_slots` keys that it does not have.
            slots: The ready slot of each, found in the same hold of the lock, -1 where it is pending.

        Returns:
            How many were added, and if they are fewer, the limit.
        """
        with self._lock:
            num_left, limit = self._num_left(lease.tenant)
            blocks, fresh = self._blocks, []
            num_new = num_added = 0
            for key, slot in zip(keys, slots.tolist(), strict=True):
                block = blocks.get(key)
                if block is None:
                    if num_new == num_left:
                        break
                    num_new += 1
                    block = blocks[key] = _LeasedBlock(key, lease.tenant, slot < 0)
                    if slot >= 0:
                        fresh.append(slot)
                block.num_leases += 1
                num_added += 1
                lease.blocks.append(block)
            if num_new:
                self._num_of[lease.tenant] += num_new
            self.counts.slots += len(fresh)
            self.counts.pending += num_new - len(fresh)
            self._pins.pin(np.array(fresh, dtype=np.int64), AfterPin.NEXT_VICTIMS)
            return num_added, limit if num_added < len(keys) else None

    def _num_left(self, tenant: str | None) -> tuple[int, LeaseLimit]:
        """Return how many more keys may be leased for a tenant, and the limit of that."""
        share = int(self._operator_pins.max_fraction * self._table.num_slots)
        left = max(share - len(self._operator_pins.expiries) - len(self._blocks), 0)
        limit = self._table.tenants.limit_of(tenant)
        if limit is None:
            return left, LeaseLimit.SHARE
        of_tenant = max(limit // _TENANT_SHARE - self._num_of[tenant], 0)
        return (of_tenant, LeaseLimit.TENANT) if of_tenant < left else (left, LeaseLimit.SHARE)

    # --- end --------------------------------------------------------------------------------------------------------

    def end(self, lease: Lease, cause: LeaseEnd | None) -> None:
        """End a lease; `release_ended` releases its blocks. One that got no blocks has no cause, and is not counted."""
        with self._lock:
            if self._leases.pop(lease.number, None) is None:
                return
            self._expiries.discard(lease.number)
            if lease.session is not None:
                of_session = self._by_session[lease.session]
                del of_session[lease.number]
                if not of_session:
                    del self._by_session[lease.session]
            if lease.blocks:
                self._ended.append(lease)
            if cause is not None:
                self.counts.ended[cause.value] += 1

    def of_session(self, session: SessionKey) -> list[Lease]:
        """Return the leases of a session that have not ended. Requires: manager lock held."""
        return list(self._by_session.get(session, {}).values())

    def end_session(self, session: SessionKey, cause: LeaseEnd, before: float = math.inf) -> None:
        """End the leases of a session that began before request `before`."""
        with self._lock:
            for lease in self.of_session(session):
                if lease.sequence < before:
                    self.end(lease, cause)

    def expire(self, now_s: float) -> None:
        """End leases whose time is over, and release a bounded number of blocks of leases that have ended."""
        with self._lock:
            for number in self._expiries.pop_due(now_s, self.batch_slots):
                lease = self._leases[number]
                lease.is_outlived = self._is_outlived(lease)
                if lease.is_outlived:
                    lease.blocks.reverse()
                self.end(lease, LeaseEnd.TIME)
            self.release_ended()

    def _is_outlived(self, lease: Lease) -> bool:
        """Return whether the next victim was last used after a lease began, so that its blocks would be evicted.

        They are the next victims then, unless they were used meanwhile: as the most recently used ones they would cost
        others another round through the pool. In a pool with less traffic they are, so that a session that pauses for
        longer than its lease has no disadvantage from it.
        """
        victims = self._evictor.policy.peek_victims(1)
        used_s = np.maximum(self._table.stored_s[victims], self._table.hit_s[victims])
        return bool((used_s > lease.began_s).any())

    def release_ended(self) -> bool:
        """Release up to `batch_slots` blocks of leases that have ended. Returns True while there are more."""
        with self._lock:
            num_left = self.batch_slots
            while self._ended and num_left:
                lease = self._ended[0]
                # The end of a prefix is released first, and so evicted first; of outlived ones the start.
                released = lease.blocks[-num_left:]
                del lease.blocks[-num_left:]
                num_left -= len(released)
                unleased = []
                for block in released:
                    if block.num_leases:
                        block.num_leases -= 1
                        if not block.num_leases:
                            unleased.append(block)
                slots = self._forget(unleased)
                if not lease.is_outlived:
                    self._evictor.reorder(slots[self._table.pins[slots] == 0])
                if not lease.blocks:
                    self._ended.popleft()
            return bool(self._ended)

    def expend(self, slots: Slots) -> None:
        """Make ready slots, the next victim first, the next victims, unless they are pinned."""
        with self._lock:
            slots = slots[self._table.pins[slots] == 0]
            self._pins.release(self._pins.pin(slots, AfterPin.NEXT_VICTIMS))

    def make_space(self, max_blocks: int) -> None:
        """Take a block from the lease that ends first, its last one, if leases have more than `max_blocks`."""
        with self._lock:
            while len(self._blocks) > max_blocks:
                lease = self._ended[0] if self._ended else self._leases[self._expiries.first()]
                while lease.blocks:
                    block = lease.blocks.pop(0 if lease.is_outlived else -1)
                    if block.num_leases:
                        self._forget([block])
                        return
                if self._ended:
                    self._ended.popleft()
                else:
                    self.end(lease, LeaseEnd.OPERATOR)

    def reset(self) -> None:
        """End all leases, whose pins a reset has ended. Requires: manager lock held."""
        self.counts.ended[LeaseEnd.RESET.value] += len(self._leases)
        self.counts.slots = self.counts.pending = 0
        self._blocks = {}
        self._num_of.clear()
        self._leases.clear()
        self._by_session.clear()
        self._expiries.clear()
        self._ended.clear()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def publish(self, keys: Sequence[Key], slots: Slots) -> None:
        """Pin those of these slots, which were just published, whose keys are pending."""
        with self._lock:
            is_pending = [self.is_pending(key) for key in keys]
            if any(is_pending):
                pinned = slots[np.array(is_pending)]
                for key in self._table.keys[pinned].tolist():
                    self._blocks[key].is_pending = False
                self.counts.pending -= len(pinned)
                self.counts.slots += len(pinned)
                self._pins.pin(pinned, AfterPin.NEXT_VICTIMS)

    def end_with(self, keys: Iterable[Key]) -> None:
        """Remove keys that are about to be dropped from all leases."""
        if self._blocks:
            with self._lock:
                self._forget([block for key in keys if (block := self._blocks.get(key)) is not None])

    def end_pending_with(self, keys: Iterable[Key]) -> None:
        """Remove those of these keys that are pending, since they are not going to be stored, from all leases."""
        if self.counts.pending:
            with self._lock:
                self.end_with({key for key in keys if self.is_pending(key)})

    def slots(self) -> Slots:
        """Return the slots that leases pin, in time proportional to their number."""
        with self._lock:
            return self._index.find_some([key for key, block in self._blocks.items() if not block.is_pending])

    def until_s(self, session: SessionKey) -> float | None:
        """Return when the last lease of a session that has blocks ends, None without one."""
        with self._lock:
            leases = self.of_session(session)
            has_blocks = (lease.until_s for lease in leases if any(block.num_leases for block in lease.blocks))
            return max(has_blocks, default=None)

    def _forget(self, blocks: Sequence[_LeasedBlock]) -> Slots:
        """Remove blocks from all leases, and return the slots that these have pinned."""
        pinned = []
        for block in blocks:
            block.num_leases = 0
            del self._blocks[block.key]
            self._num_of[block.tenant] -= 1
            if not block.is_pending:
                pinned.append(block.key)
        for tenant in {block.tenant for block in blocks}:
            if not self._num_of[tenant]:
                del self._num_of[tenant]
        self.counts.slots -= len(pinned)
        self.counts.pending -= len(blocks) - len(pinned)
        slots = self._index.find_some(pinned)
        self._pins.release(Pin(slots, self._table.epoch))
        return slots
