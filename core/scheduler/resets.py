"""Resets by operators, at any time: of all blocks, of the blocks of matching origins, or of one block.

A reset that a tier has not completed when the process ends must be repeated by the next one: `open_in_tiers` lists
these, and `repeat` submits one again. Among them are the resets of tiers that are detached, for which
`repeat_detached` submits them once they are attached again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.jobs import JobTable
from kvferry.core.scheduler.lazy import LazyPlanner
from kvferry.core.scheduler.stores import StoreJobs
from kvferry.core.scheduler.tiering import Tiering
from kvferry.core.tiers.base import HOST, TierResetResult
from kvferry.core.transfers import NO_SLOTS, Slots

_MAX_DETACHED = 100
"""Resets that are remembered for a detached tier; one more, and all of its blocks are dropped."""


@dataclass(frozen=True, slots=True)
class TierReset:
    """A reset that a tier has not completed, of all blocks, those of matching origins, or one key.

    `ticket` is unique among all tiers.
    """

    tier: str
    ticket: int
    match: RequestFilter | None = None
    key: Key | None = None


@dataclass(frozen=True, slots=True)
class ResetTicket:
    """Immediate effect of a reset on the pool, and the transfers in `job_ids` that it waits for.

    `epoch` is the pool's epoch after the reset; only a reset of the whole pool raises it. `tiers` are the tickets of
    the tiers' resets, which are among `job_ids` too; `detached` tiers are reset once they are attached again.
    """

    epoch: int
    dropped_blocks: int
    dropped_bytes: int
    job_ids: tuple[int, ...]
    tiers: Mapping[str, int] = field(default_factory=dict)
    detached: tuple[str, ...] = ()


class Resets:
    """Resets of the pool and the tiers. Thread: any; each method acquires the manager lock."""

    def __init__(
        self,
        manager: OffloadManager,
        jobs: JobTable,
        tiers: Tiering,
        stores: Callable[[], StoreJobs],
        lazy: Callable[[], LazyPlanner],
    ) -> None:
        """`stores` and `lazy` return what an exception replaces."""
        self._manager = manager
        self._jobs = jobs
        self._tiers = tiers
        self._stores = stores
        self._lazy = lazy
        self._detached: dict[str, list[TierReset]] = {}
        """Resets since a tier was detached, by its name."""

    def reset(
        self, now_s: float, match: RequestFilter | None = None, places: Sequence[str] | None = None
    ) -> ResetTicket:
        """Drop all blocks, or those of matching origins; stores of such blocks in flight are not published.

        The cost of a whole reset is bounded by the open jobs. A reset by origin examines every slot in batches, between
        which the lock is released, so it must not run on the engine thread.

        Args:
            now_s: The time.
            match: The origins; None for all blocks.
            places: Names of the tiers to reset, `HOST` for the pool; None for all.

        Returns:
            A ticket, with which `tier_results` finds what the tiers dropped.

        Raises:
            ValueError: A place is unknown.
        """
        manager, cascades = self._manager, self._tiers.cascades
        of_pool = places is None or HOST in places
        if places is not None:
            self._tiers.named([name for name in places if name != HOST])
        try:
            if not of_pool or match is None:
                return self._reset(now_s, match, places, of_pool)
            with manager.lock:
                cascades.resets.append(match)
            try:
                return self._reset(now_s, match, places, of_pool)
            finally:
                with manager.lock:
                    cascades.resets.remove(match)
        except BaseException:
            # Affected blocks must not be found again: the recovery drops all blocks.
            manager.changing.is_torn |= of_pool
            raise

    def _reset(
        self, now_s: float, match: RequestFilter | None, places: Sequence[str] | None, of_pool: bool
    ) -> ResetTicket:
        manager, tiers = self._manager, self._tiers
        dropped = 0
        with manager.lock:
            job_ids: list[int] = []
            tickets: dict[str, int] = {}
            # In the same hold, so that a tier that is detached meanwhile is among one of them.
            clients = [client for client in tiers.clients if places is None or client.name in places]
            detached = self._add_detached(match, None, places)
            if tiers.clients:
                job_ids += tiers.open_transfers()
                tiers.flushes.end_by_reset(None if of_pool else clients, now_s)
                # If the pool is reset too, affected promotions from all tiers are not published.
                tiers.loads.reset(match, None if of_pool else clients)
                tiers.forget_held(clients)
                tickets = {client.name: client.reset(match) for client in clients}
                job_ids += tickets.values()
            if of_pool and match is None:
                job_ids += [job.job.job_id for job in self._jobs]
                dropped = manager.reset(self.filled_slots(), now_s)
                self._stores().forget_blocks()
                if self._lazy().recorded:
                    self._lazy().restart()
            elif of_pool and match is not None:
                job_ids += [*self._stores().disown(match), *(job.job.job_id for job in self._jobs if not job.is_store)]
            epoch = manager.table.epoch
        if of_pool and match is not None:
            next_slot: int | None = 0
            while next_slot is not None:
                count, next_slot = manager.drop_matching(match.matches, next_slot, now_s)
                dropped += count
        return ResetTicket(epoch, dropped, dropped * manager.table.slot_bytes, tuple(job_ids), tickets, detached)

    def tier_results(self, ticket: ResetTicket) -> dict[str, TierResetResult]:
        """Return what the tiers dropped whose resets have ended."""
        with self._manager.lock:
            return self._tiers.reset_results(ticket.tiers)

    def count_open(self, ticket: ResetTicket) -> int:
        """Count the transfers and tier resets of a ticket that have not ended."""
        with self._manager.lock:
            return self._jobs.count_open(ticket.job_ids) + self._tiers.count_open(ticket.job_ids)

    def drop_block(self, key: Key, now_s: float) -> ResetTicket:
        """Drop one block from the pool, if it is there, and from the tiers."""
        table = self._manager.table
        with self._manager.lock:
            self._tiers.loads.drop(key)
            self._stores().drop(key)
            self._manager.leases.end_with([key])
            tickets = {client.name: client.reset(None, key) for client in self._tiers.clients}
            dropped = int(self._manager.drop_key(key, now_s))
            job_ids, detached = tuple(tickets.values()), self._add_detached(None, key)
            return ResetTicket(table.epoch, dropped, dropped * table.slot_bytes, job_ids, tickets, detached)

    def open_in_tiers(self) -> list[TierReset]:
        """Return the resets that tiers have not completed, the oldest first of each tier."""
        with self._manager.lock:
            return [
                TierReset(client.name, reset.ticket, reset.match, reset.key)
                for client in self._tiers.clients
                for reset in client.open_resets
            ] + [reset for resets in self._detached.values() for reset in resets]

    def repeat_detached(self, tier: str, now_s: float) -> None:
        """Submit the resets since a tier was detached, which was attached again and is not used yet."""
        with self._manager.lock:
            for reset in self._detached.pop(tier, ()):
                self.repeat(tier, reset.match, reset.key, now_s)

    def repeat(self, tier: str, match: RequestFilter | None, key: Key | None, now_s: float) -> TierReset:
        """Submit a reset of one tier, which an earlier process left open. Raises `ValueError` for an unknown tier."""
        with self._manager.lock:
            (client,) = self._tiers.named([tier])
            self._tiers.loads.reset(match, [client])
            self._tiers.flushes.end_by_reset([client], now_s)
            self._tiers.forget_held([client])
            return TierReset(tier, client.reset(match, key), match, key)

    def _add_detached(
        self, match: RequestFilter | None, key: Key | None, among: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """Remember a reset for the detached tiers `among` these, None for all, and return their names."""
        names = sorted(name for name in self._tiers.detached if among is None or name in among)
        for name in names:
            known = self._detached.setdefault(name, [])
            if (match is None and key is None) or len(known) >= _MAX_DETACHED:
                self._detached[name] = [TierReset(name, self._jobs.new_id())]
            elif not any(one.key is None and one.match is None for one in known):
                known.append(TierReset(name, self._jobs.new_id(), match, key))
        return tuple(names)

    def filled_slots(self) -> Slots:
        """Return the slots that transfers write to or will write to, each once. Requires: manager lock held."""
        filled = [job.slots for job in self._jobs if job.is_store]
        filled += [part.slots for part in self._stores().parts]
        filled += [promotion.slots for promotion in self._tiers.loads.open]
        return np.concatenate(filled) if filled else NO_SLOTS
