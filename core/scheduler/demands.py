"""Stores on demand, in lazy mode: blocks that only the device has, and that a waiting request could load.

The device's own prefix cache cannot use them, as it lacks a part of the prefix: a window before its end, or blocks in
its middle that have left for the pool. They are stored at once, and the request waits for them for a limited time, as
it does for blocks whose store is already in flight. From then on they are hits like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupKind, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.native import hash_keys
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.lazy import Batches, LazyPlanner, PendingStore
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup
from kvferry.core.scheduler.promotions import Promotions
from kvferry.core.scheduler.requests import RequestPhase, RequestState


@dataclass(frozen=True, slots=True)
class _Demand:
    """Recorded slots to be stored for a request, and the keys of the hit that they make possible."""

    request: RequestState
    slots: Sequence[PendingStore]
    keys: frozenset[Key]


class Demands:
    """Stores what waiting requests could load. Requires: manager lock held. Thread: engine."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        lazy: LazyPlanner,
        lookup: PrefixLookup,
        inflight: InflightPrefixes,
        promotions: Promotions,
        choice: LoadOrCompute,
    ) -> None:
        self.open: list[_Demand] = []
        """Demands since the last step."""
        self._manager = manager
        self._layout = layout
        self._lazy = lazy
        self._lookup = lookup
        self._inflight = inflight
        self._promotions = promotions
        self._choice = choice

    def must_wait(self, state: RequestState, hit: PrefixHit, max_slots: int) -> bool:
        """See `HitSource`. Stores that are not in flight begin with the next step, once until `commit`."""
        until_s = state.wait.demand_until_s
        if not self._lazy.pending or (until_s is not None and state.now_s >= until_s):
            return False
        if any(demand.request is state for demand in self.open):
            return True
        storing, recorded = self._find_sources(state, hit, uses_device=until_s is None)
        if not (storing or recorded):
            return False
        limit = state.keys.loadable_tokens(state.policy.policy)
        longer = self._lookup.find_fitting(state.keys, hit, limit, storing.union(recorded), max_slots)
        gain = longer.end_token - hit.end_token
        if gain <= 0:
            return False
        if until_s is None:
            until_s = state.wait.demand_until_s = self._begin(state, longer, gain, recorded)
        return state.now_s < until_s

    def _begin(self, state: RequestState, longer: PrefixHit, gain: int, recorded: Mapping[Key, PendingStore]) -> float:
        """Demand the blocks of a longer hit that only the device has; return until when the request waits for it."""
        missing = self._lookup.list_elsewhere(state.keys, longer)
        slots = [recorded[key] for _, _, key in missing if key in recorded]
        num_bytes = longer.num_bytes + sum(slot.group.slot_bytes for slot in slots)
        if not self._choice.may_load(num_bytes, gain):
            return state.now_s
        state.wait.demanded = frozenset(slot.key for slot in slots)
        if slots:
            hits = longer.groups
            keys = (state.keys.of(one.group, one.first_slot, one.first_slot + len(one.slots)) for one in hits)
            self.open.append(_Demand(state, slots, frozenset(chain.from_iterable(keys))))
        return self._inflight.wait_deadline(state, gain)

    def forget(self, state: RequestState) -> None:
        """See `HitSource`."""
        if self.open:
            self.open = [demand for demand in self.open if demand.request is not state]

    def submit(self, now_s: float) -> Batches:
        """Begin the stores for requests that still wait. Must be called between `store_reused` and the walk."""
        demands, self.open = self.open, []
        for demand in demands:
            if demand.request.phase is RequestPhase.WAITING:
                yield from self._lazy.store_demanded(demand.slots, demand.keys, now_s)

    def _find_sources(
        self, state: RequestState, hit: PrefixHit, uses_device: bool
    ) -> tuple[set[Key], dict[Key, PendingStore]]:
        """Return the keys behind a hit that are being stored, and the recorded slots of those that only the device has.

        What a tier loads is waited for by `Promotions`, for as long as the policy's `tier_wait` says.
        Of full-attention groups, those before the first key that is nowhere, which ends every hit.
        """
        storing: set[Key] = set()
        recorded: dict[Key, PendingStore] = {}
        layout, demanded = self._layout, state.wait.demanded
        step, limit = layout.alignment_tokens, state.keys.loadable_tokens(state.policy.policy)
        for group in sorted(layout.groups, key=lambda group: group.spec.kind is not GroupKind.FULL):
            first_end = hit.end_token + step
            if first_end > limit:
                break
            is_full = group.spec.kind is GroupKind.FULL
            start = hit.end_token if is_full else max(hit.first_token, group.spec.needed_from(first_end))
            first = start // group.slot_tokens
            keys = state.keys.of(group, first, -(-limit // group.slot_tokens))
            # Most prompts end at their first missing key, however many they have.
            for at, some in ((0, keys[:1]), (1, keys[1:])) if is_full else ((0, keys),):
                missing = np.flatnonzero(self._manager.lookup_each(some) < 0).tolist()
                wanted = [some[i] for i in missing]
                busy = self._manager.table.are_in_flight(hash_keys(wanted)).tolist() if wanted else ()
                among = (key for key, is_busy in zip(wanted, busy, strict=True) if is_busy)
                storing.update(key for key in among if key in demanded or not self._promotions.is_loading(key))
                if uses_device:
                    recorded.update(self._lazy.find_recorded(wanted))
                nowhere = (i for i in missing if some[i] not in storing and some[i] not in recorded)
                end = next(nowhere, None) if is_full else None
                if end is not None:
                    limit = min(limit, (first + at + end) * group.slot_tokens)
                    break
        return storing, recorded
