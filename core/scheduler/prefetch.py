"""Prefetches: promotions of a prompt's blocks into the pool that an operator requested, before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.prefix_query import MissingSlots, PrefixQuery
from kvferry.core.scheduler.tier_loads import TierLoads
from kvferry.core.tiers.base import TierJob
from kvferry.core.tiers.client import TierClient

_MAX_SHARE = 8
"""Prefetches hold at most an eighth of the slots until their blocks have arrived."""


class Prefetches:
    """Promotes blocks that no request waits for. Requires: manager lock held, except for `begin`.

    The blocks are not pinned: like all blocks in the pool that no request uses, they may be evicted.
    """

    def __init__(
        self,
        manager: OffloadManager,
        loads: TierLoads,
        clients: Sequence[TierClient],
        new_number: Callable[[], int],
    ) -> None:
        self._manager = manager
        self._loads = loads
        self._clients = clients
        self._new_number = new_number
        self._num_promised = 0
        """Blocks that calls under way are still to load."""

    @property
    def max_blocks(self) -> int:
        """The most blocks that are loaded at a time."""
        return max(self._manager.num_slots // _MAX_SHARE, 1)

    def begin(self, query: PrefixQuery, names: Collection[str], now_s: float) -> int | None:
        """Load what the pool lacks of a closed query's prompt from these tiers. Acquires the manager lock, in turns.

        Returns:
            The number of blocks that are being loaded from now on: less than what was found if the pool has no space.
            None if that would be more than `max_blocks`, with those of earlier calls: then nothing is loaded.
        """
        missing = query.missing_slots(names)
        asked = {key for part in missing for key in query.keys_at(part)}
        with self._manager.lock:
            promised = {key for key in asked if not self._loads.is_loading(key)}
            if len(promised) > self._num_left:
                return None
            self._num_promised += len(promised)
        num_loading = 0
        try:
            for part in missing:
                for first in range(0, len(part.positions), query.batch_keys):
                    batch = replace(part, positions=part.positions[first : first + query.batch_keys])
                    with self._manager.lock:
                        num_loading += self._load(query, batch, promised, now_s)
        finally:
            with self._manager.lock:
                self._num_promised -= len(promised)
        return num_loading

    @property
    def _num_left(self) -> int:
        num_open = sum(len(one.keys) for one in self._loads.open if one.is_prefetch)
        return self.max_blocks - num_open - self._num_promised

    def _load(self, query: PrefixQuery, part: MissingSlots, promised: set[Key], now_s: float) -> int:
        """Load those of some slots that are `promised`, as far as there is space; return their number."""
        # A prompt of hashes may repeat one.
        places = dict(zip(query.keys_at(part), part.positions.tolist(), strict=True))
        due = promised.intersection(places)
        promised -= due
        self._num_promised -= len(due)
        # Another call may load some of them.
        named = [(key, places[key]) for key in places if key in due and not self._loads.is_loading(key)]
        client = next((one for one in self._clients if one.name == part.name), None)
        if client is None or not client.is_usable or not named:
            return 0
        number, size_bytes = self._new_number(), part.group.slot_bytes
        offer = self._manager.prepare_store(
            [key for key, _ in named],
            RequestIdentity(f"prefetch-{number}"),
            np.array([position for _, position in named], dtype=np.int64),
            PRIORITY_CLASS[Priority.NORMAL],
            now_s,
            prefix=Prefix({index: (of_group, len(of_group)) for index, of_group in enumerate(query.keys)}),
            size_bytes=size_bytes,
            needs_admission=False,
            on_engine_thread=False,
        )
        keys = [named[i][0] for i in offer.stored_at.tolist()]
        if not keys:
            return 0
        # Unknown, so that each reset by match has them, unless the tier has the origin.
        self._manager.set_origin(offer.slots, RequestIdentity(""))

        def end(published: NDArray[np.bool_]) -> None:
            client.use.prefetched += int(np.count_nonzero(published))

        sizes = np.full(len(keys), size_bytes, dtype=np.int64)
        job = TierJob(number, keys, offer.slots, sizes)
        self._loads.load(client, job, now_s, end, is_prefetch=True)
        return len(keys)
