"""Limits of tenants in bytes, their application to the blocks in the pool, and what each tenant has there.

A store honours a limit at once: at its limit a tenant's own oldest blocks are evicted for its new ones. What a tenant
has beyond a limit that was lowered is evicted here, in short steps beside the engine.
"""

from __future__ import annotations

import numpy as np

from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.tenants import Limit
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import NO_SLOTS, Slots


class TenantLimits:
    """Limits of a manager's tenants. One thread calls `step`; other methods may be called from any thread.

    Acquires the manager lock. A block takes a whole slot of the pool, so that a limit holds `max_bytes // slot_bytes`
    blocks. The first limit of a tenant that has blocks takes effect once `step` has put them in the order in which they
    are evicted.
    """

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager
        self._batch_slots = manager.table.batch_slots
        self._default_bytes: int | None = None
        self._own_bytes: dict[str, int | None] = {}
        self._version = 0
        """Version of the limits that queues were completed for, or are being completed."""
        self._scan_from: int | None = None
        self._found: list[tuple[Slots, Slots, Slots]] = []
        self._unqueued: Slots = NO_SLOTS
        self._next_number = 0

    # --- limits -------------------------------------------------------------------------------------------------

    @property
    def default_bytes(self) -> int | None:
        """Bytes that each tenant without a limit of its own may have in the pool; None is no limit."""
        return self._default_bytes

    def set_default(self, max_bytes: int | None) -> None:
        """Set the limit of tenants without one of their own; None is no limit."""
        if max_bytes == self._default_bytes:
            return
        self._prepare(max_bytes)
        with self._manager.lock:
            self._default_bytes = max_bytes
            if self._manager.table.tenants.is_limiting:
                self._manager.table.tenants.set_default(self._to_slots(max_bytes))
                self._changed()

    def set_limit(self, tenant: str, max_bytes: int | None) -> None:
        """Set a tenant's own limit, which holds in place of the default; None is no limit."""
        self._prepare(max_bytes)
        with self._manager.lock:
            self._own_bytes[tenant] = max_bytes
            self._manager.table.tenants.set_limit(tenant, self._to_slots(max_bytes))
            self._changed()

    def unset_limit(self, tenant: str) -> bool:
        """Remove a tenant's own limit. Returns False if it has none."""
        with self._manager.lock:
            if tenant not in self._own_bytes:
                return False
            del self._own_bytes[tenant]
            self._manager.table.tenants.unset_limit(tenant)
            self._changed()
            return True

    def own_limits(self) -> dict[str, int | None]:
        """Return the limits of tenants that have their own."""
        with self._manager.lock:
            return dict(self._own_bytes)

    def usage(self) -> dict[str | None, int]:
        """Return the bytes in the pool of each tenant that has any, as of several moments; None is without a tenant."""
        manager, tenants = self._manager, self._manager.table.tenants
        used_slots: dict[str | None, int] = {}
        for start in range(0, len(tenants.names), self._batch_slots):
            with manager.lock:
                used_slots |= tenants.used_in(start, start + self._batch_slots)
        return {tenant: slots * manager.slot_bytes for tenant, slots in used_slots.items()}

    def usage_of(self, tenant: str | None) -> int:
        """Return the bytes that one tenant has in the pool."""
        with self._manager.lock:
            return self._manager.table.tenants.slots_of(tenant) * self._manager.slot_bytes

    # --- application --------------------------------------------------------------------------------------------

    def step(self, now_s: float) -> bool:
        """Process at most one batch of slots, or of tenants. Returns True if there is more to do."""
        tenants = self._manager.table.tenants
        if not tenants.is_limiting:
            return False
        if self._scan_from is not None:
            self._find_unqueued(self._scan_from)
            return True
        if len(self._unqueued):
            self._queue()
            return True
        with self._manager.lock:
            is_queued, self._version = self._version == tenants.version, tenants.version
            if is_queued:
                tenants.activate()
        if not is_queued:
            self._scan_from = 0
            return True
        return self._trim(now_s)

    def _changed(self) -> None:
        """Let limits that were set take effect at once in a pool without blocks."""
        table = self._manager.table
        if not table.num_ready:
            table.tenants.activate()

    def _find_unqueued(self, start: int) -> None:
        """Find the blocks of one batch of slots that have been in the pool since before their tenants were limited."""
        table = self._manager.table
        end = min(start + self._batch_slots, table.end_slot)
        with self._manager.lock:
            slots = table.tenants.unqueued(table.ready_in(start, end))
            used_s = np.maximum(table.stored_s[slots], table.hit_s[slots])
            positions = table.positions[slots]
        if len(slots):
            self._found.append((slots, used_s, positions))
        self._scan_from = end if end < table.end_slot else None
        if self._scan_from is None and self._found:
            slots, used_s, positions = map(np.concatenate, zip(*self._found, strict=True))
            # A request's blocks are evicted from their end.
            self._unqueued = slots[np.lexsort((positions, -used_s))]
            self._found.clear()

    def _queue(self) -> None:
        """Queue the next batch of the found blocks, from the latest used on, each before all that are queued."""
        table = self._manager.table
        slots, self._unqueued = self._unqueued[: self._batch_slots], self._unqueued[self._batch_slots :]
        with self._manager.changing:
            is_candidate = table.is_ready(slots) & (table.pins[slots] == 0)
            table.tenants.add_oldest(slots[is_candidate][::-1])

    def _trim(self, now_s: float) -> bool:
        """Evict blocks of a batch of tenants that have more than they may, if they can be evicted."""
        manager, tenants = self._manager, self._manager.table.tenants
        num_left = self._batch_slots
        with manager.changing:
            end = self._next_number + self._batch_slots
            for tenant, excess in tenants.excess_in(self._next_number, end):
                victims = tenants.oldest(tenant, min(excess, num_left))
                manager.drop(victims, EvictionReason.TENANT_LIMIT, now_s)
                num_left -= len(victims)
                if not num_left:
                    return True
            self._next_number = end if end < len(tenants.names) else 0
        return self._next_number > 0

    def _prepare(self, max_bytes: int | None) -> None:
        tenants = self._manager.table.tenants
        if max_bytes is not None and not tenants.is_limiting:
            links = tenants.prepare_queues()
            with self._manager.lock:
                tenants.begin_limiting(links)

    def _to_slots(self, max_bytes: int | None) -> Limit:
        return None if max_bytes is None else max_bytes // self._manager.slot_bytes
