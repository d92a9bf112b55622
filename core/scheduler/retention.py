"""Retention: leases of the blocks of requests that have ended, and of sessions for operators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.groups import GroupLayout
from kvferry.core.keys import Key, SessionKey, group_of
from kvferry.core.policy import MAX_RETAIN_S
from kvferry.core.pool.index import hash_keys
from kvferry.core.pool.leases import LeaseOutcome, LeaseReceipt
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.lazy import LazyPlanner
from kvferry.core.scheduler.prefix_query import keys_in_order
from kvferry.core.scheduler.requests import RequestState, RequestTable
from kvferry.core.stats import LeaseEnd
from kvferry.core.transfers import Slots

_NO_BLOCKS = "none of its blocks is in the pool or about to be stored"
_NO_LEASE = "`retain_s` is 0"
_ENDED = "another call ended it while it began"


class Retention:
    """Begins leases in batches, each under a hold of the manager lock.

    A lease is of the blocks in prefix order that are in the pool, are being stored or, in lazy mode, are recorded on
    the device, up to the first one with full attention that is none of these: what is behind it cannot be loaded.
    """

    def __init__(
        self, manager: OffloadManager, layout: GroupLayout, requests: RequestTable, lazy: Callable[[], LazyPlanner]
    ) -> None:
        """`lazy` returns what an exception replaces."""
        self.max_retain_s = MAX_RETAIN_S
        """Longest lease that begins from now on."""
        self._manager = manager
        self._leases = manager.leases
        self._requests = requests
        self._lazy = lazy
        self._layout = layout
        self._full_groups = frozenset(group.index for group in layout.full_groups)

    def begin(
        self, state: RequestState, keys: Sequence[Key], num_storable: int, now_s: float
    ) -> Generator[None, None, None]:
        """Begin the lease of a request that ends, in batches, and record its receipt. Thread: engine.

        Args:
            state: The request.
            keys: Keys of its full slots, in prefix order.
            num_storable: How many of the first ones its policy lets be stored.
            now_s: The time.
        """
        origin = state.origin
        state.lease = yield from self._begin(
            origin.session_key, origin.tenant, keys, num_storable, state.policy.policy.retain_s, now_s
        )

    def retain(self, session: SessionKey, block_hashes: Sequence[bytes], retain_s: float, now_s: float) -> LeaseReceipt:
        """Replace the leases of a session by one of the blocks of a prompt; 0 seconds only end them. Thread: any."""
        with self._manager.lock:
            replaced = self._leases.of_session(session)
        receipt = LeaseReceipt(LeaseOutcome.ACCEPTED, 0, 0, 0, None, _NO_LEASE)
        if retain_s > 0:
            keys = keys_in_order(self._layout, block_hashes)
            batches = self._begin(session, session.tenant, keys, 0, retain_s, now_s)
            while True:
                try:
                    with self._manager.lock:
                        next(batches)
                except StopIteration as end:
                    receipt = end.value
                    break
        with self._manager.lock:
            for lease in replaced:
                self._leases.end(lease, LeaseEnd.OPERATOR)
        return receipt

    def release(self, session: SessionKey, expendable_hashes: Sequence[bytes]) -> None:
        """End the leases of a session, and evict `expendable_hashes`, its last blocks, next. Thread: any."""
        self._leases.end_session(session, LeaseEnd.OPERATOR)
        while self._leases.release_ended():
            pass
        expendable = keys_in_order(self._layout, expendable_hashes)
        step = self._leases.batch_slots
        for start in range(0, len(expendable), step):
            with self._manager.lock:
                slots = self._manager.index.find_some(expendable[start : start + step])
                self._leases.expend(slots[::-1])

    def _begin(
        self,
        session: SessionKey | None,
        tenant: str | None,
        keys: Sequence[Key],
        num_storable: int,
        retain_s: float,
        now_s: float,
    ) -> Generator[None, None, LeaseReceipt]:
        leases = self._leases
        until_s = now_s + min(retain_s, self.max_retain_s)
        lease = leases.begin(session, tenant, self._requests.last_sequence, now_s, until_s)
        num_blocks = num_pending = 0
        reason: str | None = None
        for start in range(0, len(keys), leases.batch_slots):
            if lease not in leases:
                reason = _ENDED
                break
            batch = keys[start : start + leases.batch_slots]
            slots, is_leasable = self._select(batch)
            chosen = [batch[i] for i in np.flatnonzero(is_leasable).tolist()]
            num_added, limit = leases.extend(lease, chosen, slots[is_leasable])
            num_blocks += num_added
            num_pending += int(np.count_nonzero(slots[is_leasable][:num_added] < 0))
            end = start + len(slots)
            if limit is not None:
                reason = limit.value
                break
            if len(slots) < len(batch):
                if end < num_storable:
                    reason = f"of {num_storable:,} blocks only the first {end:,} are in the pool or about to be stored"
                break
            yield
        if reason == _ENDED:
            num_blocks = num_pending = 0
        if not num_blocks:
            leases.end(lease, None)
            reason = reason or _NO_BLOCKS
        outcome = LeaseOutcome.ACCEPTED if reason is None else LeaseOutcome.CLIPPED
        outcome = outcome if num_blocks else LeaseOutcome.REJECTED
        leases.counts.outcomes[outcome.value] += 1
        num_bytes = num_blocks * self._manager.slot_bytes
        return LeaseReceipt(outcome, num_blocks, num_pending, num_bytes, until_s if num_blocks else None, reason)

    def _select(self, keys: Sequence[Key]) -> tuple[Slots, NDArray[np.bool_]]:
        """Return the slots of keys, -1 for those without, and which keys a lease may have, up to the first gap.

        Requires: manager lock held.
        """
        slots = self._manager.lookup_each(keys)
        is_leasable: NDArray[np.bool_] = slots >= 0
        absent_at = np.flatnonzero(~is_leasable)
        absent = [keys[i] for i in absent_at.tolist()]
        if absent:
            recorded = set(self._lazy().filter_recorded(absent))
            is_recorded = np.array([key in recorded for key in absent], dtype=np.bool_)
            is_leasable[absent_at] = self._manager.table.are_in_flight(hash_keys(absent)) | is_recorded
        gaps = (i for i in np.flatnonzero(~is_leasable).tolist() if group_of(keys[i]) in self._full_groups)
        end = next(gaps, len(keys))
        return slots[:end], is_leasable[:end]
