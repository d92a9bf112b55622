"""History of missing keys: which were evicted, were not stored, or are in flight, for causes of misses and for regret.

It takes bounded memory and is dropped by a reset: a key without an entry counts as new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import numpy as np

from kvferry.core.keys import Key
from kvferry.core.pool.events import EventSink, RegretBatch
from kvferry.core.pool.index import BlockIndex, Ghosts, hash_keys
from kvferry.core.pool.slots import SlotTable
from kvferry.core.stats import EvictionCounts, EvictionReason, MissCause, MissReason, NotStored


class MissHistory:
    """Why keys are not in the pool. Requires: manager lock held.

    `plan_size` and `record_foreign` need no lock.
    """

    def __init__(self, table: SlotTable, index: BlockIndex, evictions: EvictionCounts, sink: EventSink | None) -> None:
        """Make room for twice as many evicted keys as there are slots, and once as many that were not stored."""
        self.evicted = Ghosts(2 * table.num_slots, EvictionReason, is_dated=True)
        self._table = table
        self._index = index
        self._evictions = evictions
        self._sink = sink
        self._not_stored = Ghosts(table.num_slots, NotStored)
        self._foreign: Ghosts[MissCause] | None = None

    def explain(self, keys: Sequence[Key], now_s: float) -> tuple[list[MissReason], tuple[float, float] | None]:
        """Return why each of these keys, behind a hit, cannot be loaded, and count evicted keys as regretted.

        The cause is that the key is being stored, else why it was evicted, else why it was not stored. Besides, returns
        the Unix seconds between which the evicted ones were evicted, None without any.
        """
        if not keys:
            return [], None
        hashes = hash_keys(keys)
        is_missing = self._index.find_hashed(keys, hashes)[0] < 0
        missing = hashes[is_missing]
        evicted, is_first, times_s = self.evicted.regret(missing)
        known_s = times_s[~np.isnan(times_s)]
        between_s = (float(known_s.min()), float(known_s.max())) if len(known_s) else None
        count = int(np.count_nonzero(is_first))
        if count:
            self._evictions.regretted += count
        if count and self._sink is not None:
            regretted = is_missing.nonzero()[0][is_first]
            self._sink(RegretBatch(now_s, [keys[i] for i in regretted.tolist()], times_s[is_first].tolist()))
        not_stored = self._not_stored.reasons(missing)
        foreign = repeat(None) if self._foreign is None else self._foreign.reasons(missing)
        in_flight = self._table.are_in_flight(missing).tolist()
        causes: list[MissReason] = [
            MissCause.IN_FLIGHT if storing else gone or never or other or MissCause.NEW
            for storing, gone, never, other in zip(in_flight, evicted, not_stored, foreign, strict=False)
        ]
        if len(causes) < len(keys):
            reasons = iter(causes)
            causes = [next(reasons) if missed else MissCause.GAP for missed in is_missing.tolist()]
        return causes, between_s

    def count_inner_blocks(self, keys: Sequence[Key]) -> int:
        """Count the leading keys, of inner blocks of one slot, that were computed without the rest of their slot."""
        reasons = self._not_stored.reasons(hash_keys(keys))
        return next((i for i, reason in enumerate(reasons) if reason is not NotStored.PART_OF_SLOT), len(keys))

    def record_not_stored(self, keys: Sequence[Key], reason: NotStored) -> None:
        """Record why these keys were not stored."""
        self._not_stored.add(hash_keys(keys), reason)

    def record_foreign(self, keys: Sequence[Key]) -> None:
        """Record keys that an earlier process had with bytes of another meaning."""
        foreign = Ghosts(len(keys), MissCause)
        foreign.add(hash_keys(keys), MissCause.OTHER_FINGERPRINT)
        self._foreign = foreign

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`."""
        plans = [self.evicted.plan_size(2 * num_slots), self._not_stored.plan_size(num_slots)]
        return lambda: [apply() for apply in plans]

    def reset(self) -> None:
        """Drop all entries, in O(1)."""
        self.evicted.reset()
        self._not_stored.reset()
        self._foreign = None
