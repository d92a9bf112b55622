"""Tenants of the blocks in the pool: the slots that each uses, their limits, and the order in which those evict.

A limited tenant has a queue of its candidates for eviction, in the order of their use, beside the eviction policy's:
at its limit its own oldest ones are evicted for its new blocks. Blocks of tenants without a limit are in no queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.native import (
    AS_DEFAULT,
    NEWEST,
    NO_END,
    OLDEST,
    TENANT_ADDED,
    TENANT_COLUMNS,
    TENANT_ENDS,
    TENANT_EPOCH,
    TENANT_LIMIT,
    TENANT_QUEUED,
    TENANT_SLOTS,
    UNLIMITED,
    aligned_zeros,
    tenant_functions,
)
from kvferry.core.pool.records import Records
from kvferry.core.transfers import Slots

_RELEASED = 4
"""Numbers that are looked at for each new tenant, to be used again if their tenant has no slots."""
_MAX_LIMIT = 2**31 - 4
_NUMBER = np.dtype(np.int32)
Limit = int | None
"""Slots that a tenant may use; None is no limit."""


class TenantTable:
    """Slots in use by tenant, and limits. Requires: manager lock held, except for `prepare_queues`.

    A tenant has a number as long as it has slots; 0 is for all requests without a tenant, which have no limit. Counts
    and queues of an older epoch are empty, which makes a reset O(1).
    """

    def __init__(self, records: Records, epoch: int) -> None:
        """Count nothing; `records` are those of the slots."""
        self.epoch = epoch
        """The epoch of the slot table."""
        self._records = records
        # Numbers without slots are used again, so that there is always one for another tenant.
        self.rows = aligned_zeros((2 * len(records) + 16) * TENANT_COLUMNS, _NUMBER).reshape(-1, TENANT_COLUMNS)
        """Columns by number; see `native`."""
        self.rows[0, TENANT_LIMIT] = UNLIMITED
        self.names: list[str | None] = [None]
        """Tenants by number; one without slots may be out of date."""
        self.is_limiting = False
        """Whether there has been a limit, so that queues are kept."""
        self.version = 0
        """Raised by each change of limits."""
        self._links: NDArray[np.int32] = np.zeros((0, 2), dtype=_NUMBER)
        self._numbers: dict[str | None, int] = {None: 0}
        self._unused: list[int] = []
        self._next_released = 1
        self._wanted: dict[str, Limit] = {}
        self._active: dict[str, Limit] = {}
        """Those limits of tenants that are in effect: of a tenant that had none, once its candidates are queued."""
        self._default: Limit = None

    # --- slots in use -------------------------------------------------------------------------------------------

    def number_of(self, tenant: str | None) -> int:
        """Return the number of a tenant, which is only valid until the next one of a new tenant if it has no slots."""
        number = self._numbers.get(tenant)
        if number is None:
            for _ in range(_RELEASED):
                self._release_next()
            while not self._unused and len(self.names) == len(self.rows):
                self._release_next()
            number = self._add(tenant)
        return number

    def import_blocks(self, slots: Slots, origins: Sequence[RequestIdentity]) -> None:
        """Count slots that were filled with the blocks of an earlier process. Requires: no other tenant has slots."""
        tenants = [origin.tenant for origin in origins]
        for tenant in set(tenants).difference(self._numbers):
            # None has slots yet, so that no number may be released.
            self._add(tenant)
        self._records["tenant"][slots] = np.fromiter(map(self._numbers.__getitem__, tenants), _NUMBER, len(slots))
        self.count(slots, 1)

    def count(self, slots: Slots, change: int) -> None:
        """Add 1 to, or subtract 1 from, the number of slots in use of the tenant of each slot."""
        numbers = self._records["tenant"][slots]
        stale = numbers[self.rows[numbers, TENANT_EPOCH] != self.epoch]
        self.rows[stale, TENANT_EPOCH] = self.epoch
        self.rows[stale, TENANT_SLOTS] = 0
        self.rows[stale, TENANT_ENDS:] = 0
        np.add.at(self.rows[:, TENANT_SLOTS], numbers, change)

    def move(self, slots: Slots, tenant: str | None) -> None:
        """Set the tenant of reserved slots."""
        self.count(slots, -1)
        self._records["tenant"][slots] = self.number_of(tenant)
        self.count(slots, 1)

    def slots_of(self, tenant: str | None) -> int:
        """Return the number of slots that a tenant uses."""
        number = self._numbers.get(tenant)
        return 0 if number is None else self._used(number)

    def used_in(self, start: int, end: int) -> Mapping[str | None, int]:
        """Return the slots in use of those tenants that use any and whose numbers are in a range."""
        rows = self.rows[start : min(end, len(self.names))]
        numbers = ((rows[:, TENANT_SLOTS] > 0) & (rows[:, TENANT_EPOCH] == self.epoch)).nonzero()[0]
        return {self.names[start + i]: int(rows[i, TENANT_SLOTS]) for i in numbers.tolist()}

    # --- limits -------------------------------------------------------------------------------------------------

    def prepare_queues(self) -> NDArray[np.int32]:
        """Return the memory of the queues, which takes none until it is used. Requires: no lock held."""
        tenant_functions()
        return self._links if self.is_limiting else aligned_zeros(2 * len(self._records), _NUMBER).reshape(-1, 2)

    def begin_limiting(self, links: NDArray[np.int32]) -> None:
        """Keep queues from now on, in the memory that `prepare_queues` has returned."""
        if not self.is_limiting:
            self._links, self.is_limiting = links, True

    def set_limit(self, tenant: str, limit: Limit) -> None:
        """Set the limit of one tenant, in place of the default. Requires: queues are kept."""
        self._wanted[tenant] = limit
        self._limit_changed(tenant)

    def unset_limit(self, tenant: str) -> None:
        """Let the default apply to a tenant."""
        self._wanted.pop(tenant, None)
        self._limit_changed(tenant)

    def set_default(self, limit: Limit) -> None:
        """Set the limit of every tenant that has none of its own. Requires: queues are kept."""
        self.rows[0, TENANT_LIMIT] = _to_column(limit)
        if limit is None or self._default is not None:
            self._default = limit
        self.version += 1

    def activate(self) -> None:
        """Let all limits that were set take effect. Requires: all candidates of limited tenants are queued."""
        self._active = dict(self._wanted)
        self._default = _from_column(int(self.rows[0, TENANT_LIMIT]))

    def limit_of(self, tenant: str | None) -> Limit:
        """Return the limit of a tenant that is in effect."""
        if tenant is None:
            return None
        return self._active.get(tenant, self._default)

    def num_left(self, tenant: str | None) -> int | None:
        """Return how many more slots a tenant may use; None without a limit."""
        limit = self.limit_of(tenant)
        return None if limit is None else max(limit - self.slots_of(tenant), 0)

    def space_version(self, tenant: str | None) -> tuple[int, ...]:
        """Return what changes whenever a tenant at its limit may have space: its limit, slots or candidates."""
        number = self._numbers.get(tenant)
        if number is None:
            return (self.version,)
        return self.version, self._used(number), int(self.rows[number, TENANT_ADDED])

    def raise_space_version(self, tenant: str) -> None:
        """Have the blocks of a tenant at its limit offered again."""
        self.rows[self._numbers[tenant], TENANT_ADDED] += 1

    def excess_in(self, start: int, end: int) -> list[tuple[str, int]]:
        """Return the tenants with numbers in a range that use more slots than they may, and how many more."""
        start = max(start, 1)
        rows = self.rows[start : min(end, len(self.names))]
        limits = self._limit_columns(rows[:, TENANT_LIMIT])
        excess = np.where(limits == UNLIMITED, 0, rows[:, TENANT_SLOTS] - limits + 1)
        numbers = ((excess > 0) & (rows[:, TENANT_EPOCH] == self.epoch)).nonzero()[0]
        return [(name, int(excess[i])) for i in numbers.tolist() if (name := self.names[start + i]) is not None]

    # --- queues -------------------------------------------------------------------------------------------------

    def admit(self, slots: Slots) -> None:
        """Add candidates that were just published, to the queues of limited tenants."""
        # Links of an older epoch are no links.
        self._links[slots] = 0
        self.use(slots)

    def use(self, slots: Slots) -> None:
        """Add candidates, or move those that are queued, to the most recent end, the first of them as the latest."""
        tenant_functions()[0](self._records, self.rows, self._links, slots, NEWEST)

    def remove(self, slots: Slots) -> None:
        """Remove slots that are no candidates any more."""
        tenant_functions()[0](self._records, self.rows, self._links, slots, NO_END)

    def add_oldest(self, slots: Slots) -> None:
        """Add those of these candidates that are in no queue before all others, the first of them as the oldest."""
        slots = slots[self._links[slots, 0] == 0]
        tenant_functions()[0](self._records, self.rows, self._links, slots, OLDEST)

    def unqueued(self, slots: Slots) -> Slots:
        """Return those of these slots that belong to limited tenants and are in no queue."""
        numbers = self._records["tenant"][slots]
        is_limited = (numbers > 0) & (self._limit_columns(self.rows[numbers, TENANT_LIMIT]) != UNLIMITED)
        unqueued: Slots = slots[is_limited & (self._links[slots, 0] == 0)]
        return unqueued

    def num_queued(self, tenant: str) -> int:
        """Return the number of candidates of a tenant."""
        number = self._numbers.get(tenant)
        if number is None or self.rows[number, TENANT_EPOCH] != self.epoch:
            return 0
        return int(self.rows[number, TENANT_QUEUED])

    def oldest(self, tenant: str, count: int) -> Slots:
        """Return up to `count` candidates of a tenant, those of lower priority classes first, by their latest use."""
        count = min(count, self.num_queued(tenant))
        slots: Slots = np.empty(count, dtype=np.int64)
        return slots[: tenant_functions()[1](self.rows, self._links, self._numbers[tenant], slots)] if count else slots

    # --- inside -------------------------------------------------------------------------------------------------

    def _used(self, number: int) -> int:
        row = self.rows[number]
        return int(row[TENANT_SLOTS]) if row[TENANT_EPOCH] == self.epoch else 0

    def _add(self, tenant: str | None) -> int:
        if self._unused:
            number = self._unused.pop()
            self.names[number] = tenant
        else:
            number = len(self.names)
            self.names.append(tenant)
        self._numbers[tenant] = number
        self.rows[number] = 0
        # An epoch that no count belongs to.
        self.rows[number, TENANT_EPOCH] = -1
        self.rows[number, TENANT_LIMIT] = self._column_of(tenant)
        return number

    def _release_next(self) -> None:
        """Release the next number if its tenant has no slots, and so no candidates in its queues."""
        number = self._next_released
        if number < len(self.names):
            name = self.names[number]
            if self._numbers.get(name) == number and not self._used(number):
                del self._numbers[name]
                self._unused.append(number)
        self._next_released = number + 1 if number + 1 < len(self.names) else 1

    def _limit_changed(self, tenant: str) -> None:
        self.version += 1
        number = self._numbers.get(tenant)
        if number is not None:
            self.rows[number, TENANT_LIMIT] = self._column_of(tenant)
        is_unlimited = tenant in self._wanted and self._wanted[tenant] is None
        if is_unlimited or self.limit_of(tenant) is not None:
            self._active.pop(tenant, None)
            if tenant in self._wanted:
                self._active[tenant] = self._wanted[tenant]

    def _limit_columns(self, columns: NDArray[np.int32]) -> NDArray[np.int32]:
        """Replace `AS_DEFAULT` by the default."""
        return np.where(columns == AS_DEFAULT, self.rows[0, TENANT_LIMIT], columns)

    def _column_of(self, tenant: str | None) -> int:
        return _to_column(self._wanted[tenant]) if tenant in self._wanted else AS_DEFAULT


def _to_column(limit: Limit) -> int:
    return UNLIMITED if limit is None else min(limit, _MAX_LIMIT) + 1


def _from_column(value: int) -> Limit:
    return None if value == UNLIMITED else value - 1
