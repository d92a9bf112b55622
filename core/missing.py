"""Why keys are missing: what left the pool, what was kept out of it, and what an earlier process had of no use here.

All of it is remembered in bounded memory, and forgotten at a reset: a forgotten key is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import numpy as np

from kvferry.core.change_lock import ChangeLock
from kvferry.core.events import EventSink
from kvferry.core.ghosts import Ghosts
from kvferry.core.keys import Key
from kvferry.core.marks import Marks, marks_of
from kvferry.core.misses import FoundMisses, MissCause
from kvferry.core.pool_index import PoolIndex
from kvferry.core.reasons import EvictionReason, NotStored
from kvferry.core.stats import EvictionCounts


class MissingKeys:
    """The lock is the manager's. What others tell and ask takes it; the rest says that it does not."""

    def __init__(
        self, num_slots: int, index: PoolIndex, evictions: EvictionCounts, sink: EventSink, lock: ChangeLock
    ) -> None:
        """Remembers about twice as many evicted keys as there are slots, and once as many that were kept out."""
        self._index = index
        self._evictions = evictions
        self._sink = sink
        self._lock = lock
        self._gone = Ghosts(2 * num_slots, EvictionReason, is_dated=True)
        self._kept_out = Ghosts(num_slots, NotStored)
        self._foreign: Ghosts[MissCause] | None = None
        self._filling = Ghosts(0, MissCause)

    def explain(self, keys: Sequence[Key], now_s: float) -> FoundMisses:
        """Why each of these keys, behind a hit, cannot be loaded: why it left the pool, or else why it did not come in.

        What was evicted is a regret, and counted once each time that it was.
        """
        if not keys:
            return FoundMisses([], None)
        marks = marks_of(keys)
        with self._lock:
            is_missing = self._index.find(keys, marks) < 0
            missing = marks[is_missing]
            left = self._gone.regret(missing)
            count = int(np.count_nonzero(left.is_first))
            if count:
                self._evictions.regretted += count
                regretted = is_missing.nonzero()[0][left.is_first]
                self._sink.regretted([keys[i] for i in regretted.tolist()], now_s)
            kept_out = self._kept_out.reasons(missing)
            foreign = repeat(None) if self._foreign is None else self._foreign.reasons(missing)
            coming = self._filling.reasons(missing)
            known = zip(coming, left.reasons, kept_out, foreign, strict=False)
            reasons = iter(
                [arriving or gone or never or other or MissCause.NEW for arriving, gone, never, other in known]
            )
            causes = [next(reasons) if missed else MissCause.GAP for missed in is_missing.tolist()]
            return FoundMisses(causes, left.between_s)

    def count_parts(self, keys: Sequence[Key]) -> int:
        """Count the leading keys, of single blocks of one slot, that were computed without the rest of their slot."""
        with self._lock:
            reasons = self._kept_out.reasons(marks_of(keys))
        return next((i for i, reason in enumerate(reasons) if reason is not NotStored.PART_OF_SLOT), len(keys))

    def begin_filling(self, marks: Marks) -> None:
        """Note that the keys of these marks are on their way into the pool. Requires: manager lock held.

        A table like that of missing keys: a dictionary would add half to the time that a store takes.
        """
        self._filling.add(marks, MissCause.IN_FLIGHT)

    def end_filling(self, marks: Marks) -> None:
        """Note that the keys of these marks have come, or will not. Requires: manager lock held."""
        self._filling.remove(marks)

    def note_gone(self, marks: Marks, reason: EvictionReason, now_s: float) -> None:
        """Remember why the keys of these marks left the pool. Called under the lock."""
        self._gone.add(marks, reason, now_s)

    def note_kept_out(self, keys: Sequence[Key], reason: NotStored) -> None:
        """Remember why these keys were not stored."""
        marks = marks_of(keys)
        with self._lock:
            self._kept_out.add(marks, reason)

    def note_foreign(self, keys: Sequence[Key]) -> None:
        """Remember that an earlier process had these keys with bytes that mean something else here."""
        foreign = Ghosts(len(keys), MissCause)
        foreign.add(marks_of(keys), MissCause.OTHER_FINGERPRINT)
        with self._lock:
            self._foreign = foreign

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `kvferry.core.resize.plan_size`."""
        plans = [self._gone.plan_size(2 * num_slots), self._kept_out.plan_size(num_slots)]
        return lambda: [put_in_force() for put_in_force in plans]

    def begin_epoch(self) -> None:
        """Forget everything, in O(1). Called under the lock."""
        self._gone.begin_epoch()
        self._kept_out.begin_epoch()
        self._foreign = None
        self._filling.begin_epoch()
