"""Resets: what operators have the pool and the tiers forget, at any moment: everything, what matches, or one block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.jobs import JobTable
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.lazy import LazySide
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.stores import StoreSide
from kvferry.core.tier_links import TierLink
from kvferry.core.tier_side import TierSide
from kvferry.core.tiers import HOST, TierResetResult
from kvferry.core.transfers import NO_SLOTS, Slots


@dataclass(frozen=True, slots=True)
class ResetTicket:
    """What a reset did at once to the pool: `job_ids` are the transfers it disowned that still have to end.

    `epoch` is the pool's from then on: a reset of the whole pool raises it, one by match or of tiers only does not.
    `tiers` are the numbers of the resets that it asked of tiers, which are among `job_ids` too.
    """

    epoch: int
    dropped_blocks: int
    dropped_bytes: int
    job_ids: tuple[int, ...]
    tiers: Mapping[str, int] = field(default_factory=dict)


class Resets:
    """Any thread: each method takes the manager's lock itself."""

    def __init__(
        self, manager: OffloadManager, jobs: JobTable, stores: StoreSide, lazy: LazySide, tiers: TierSide
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._stores = stores
        self._lazy = lazy
        self._tiers = tiers

    def reset(
        self, now_s: float, match: RequestFilter | None = None, places: Sequence[str] | None = None
    ) -> ResetTicket:
        """Forget all blocks, or those whose origin matches; nothing that is being stored of them is published.

        `places` are the names of the tiers that forget, `HOST` being the pool; None is all of them. Raises `ValueError`
        for an unknown one. What a tier dropped is found by the ticket (`tier_results`), once it has carried it out.

        A whole reset costs no more than the open jobs. One by match looks at every slot, in batches between which the
        lock is free, so it belongs on a thread that may take its time.
        """
        manager, tiers = self._manager, self._tiers
        of_pool = places is None or HOST in places
        links = tiers.named(None if places is None else [name for name in places if name != HOST])
        try:
            if not of_pool or match is None:
                return self._reset(now_s, match, links, of_pool)
            with manager.lock:
                tiers.cascades.resets.append(match)
            try:
                return self._reset(now_s, match, links, of_pool)
            finally:
                with manager.lock:
                    tiers.cascades.resets.remove(match)
        except BaseException:
            # What it was to drop must not be found again: the recovery drops all blocks.
            manager.changing.is_torn |= of_pool
            raise

    def _reset(
        self, now_s: float, match: RequestFilter | None, links: Sequence[TierLink], of_pool: bool
    ) -> ResetTicket:
        manager, tiers = self._manager, self._tiers
        dropped = 0
        with manager.lock:
            job_ids = tiers.open_transfers()
            asked = tiers.reset(links, match, of_pool, now_s)
            job_ids += asked.values()
            if of_pool and match is None:
                job_ids += [job.job.job_id for job in self._jobs]
                dropped = manager.reset(self.filled_slots(), now_s)
                self._stores.disown_all()
                self._lazy.look_again()
            elif of_pool and match is not None:
                job_ids += [*self._stores.disown(match), *(job.job.job_id for job in self._jobs if not job.is_store)]
            epoch = manager.epoch
        if of_pool and match is not None:
            next_slot: int | None = 0
            while next_slot is not None:
                count, next_slot = manager.drop_matching(match.matches, next_slot, now_s)
                dropped += count
        return ResetTicket(epoch, dropped, dropped * manager.slot_bytes, tuple(job_ids), asked)

    def tier_results(self, ticket: ResetTicket) -> dict[str, TierResetResult]:
        """What the tiers dropped that have carried out a reset by now."""
        with self._manager.lock:
            return self._tiers.reset_results(ticket.tiers)

    def count_open(self, ticket: ResetTicket) -> int:
        """How many of the transfers that a reset disowned, and of the tiers' resets, have not ended."""
        with self._manager.lock:
            return self._jobs.count_open(ticket.job_ids) + self._tiers.count_open(ticket.job_ids)

    def drop_block(self, key: Key, now_s: float) -> bool:
        """Take one block out of the pool, and out of the tiers; False if the pool does not have it."""
        with self._manager.lock:
            self._tiers.drop(key)
            return self._manager.drop_key(key, now_s)

    def filled_slots(self) -> Slots:
        """The slots that transfers open or decided write to, each once. Requires: manager lock held."""
        filled = [job.slots for job in self._jobs if job.is_store] + self._stores.touched_slots()
        filled += self._tiers.promotions.touched_slots()
        return np.concatenate(filled) if filled else NO_SLOTS
