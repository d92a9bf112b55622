"""Stores on demand, in lazy mode: blocks that only the device has, and that a waiting request could load.

The device's own prefix cache cannot use them, as it lacks a part of the prefix: a window before its end, or blocks in
its middle that have left for the pool. They are stored at once, and the request waits for them for a limited time, as
it does for blocks whose store is already in flight. From then on they are hits like any others.

Each match looks for a limited number of such blocks. Their stores hold a limited share of the device's free blocks,
beside blocks that running requests use: requests wait for those of others, and a prefix that has more is stored and
found in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupKind, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.pool.index import hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.lazy import Batches, LazyPlanner, RecordedSlot
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup
from kvferry.core.scheduler.requests import DemandProgress, RequestPhase, RequestState
from kvferry.core.scheduler.tier_loads import TierLoads

_EXAMINED_KEYS = 1000
"""Keys among which one match looks for sources."""
_DEMANDED_KEYS = 500
"""Keys that one match demands at most, whose blocks are looked at one by one."""
_MAX_DEMANDED = 1000
"""Device blocks that stores for waiting requests hold at most."""
_MAX_CHOICES = 3
"""Hits that one match chooses, where keys of those before are not on the device any more."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """Recorded slots to be stored for a request, and the keys of the hit that they make possible."""

    request: RequestState
    slots: Sequence[RecordedSlot]
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
        tier_loads: TierLoads,
        cost_model: LoadOrCompute,
    ) -> None:
        self.open: list[_Demand] = []
        """Demands since the last step."""
        self._open_blocks: set[int] = set()
        """Their device blocks."""
        self._manager = manager
        self._layout = layout
        self._lazy = lazy
        self._lookup = lookup
        self._inflight = inflight
        self._tier_loads = tier_loads
        self._cost_model = cost_model

    def must_wait(self, state: RequestState, hit: PrefixHit, max_slots: int) -> bool:
        """See `HitSource`. Stores that are not in flight begin with the next step."""
        wait = state.wait
        if not self._lazy.recorded or (wait.demand_until_s is not None and state.now_s >= wait.demand_until_s):
            return False
        demand = self._search(state, hit)
        if demand.search is not None:
            if wait.demand_until_s is None:
                wait.demand_until_s = self._inflight.wait_deadline(state, demand.limit_token - hit.end_token)
            return state.now_s < wait.demand_until_s
        if self._will_be_stored(state, demand.keys):
            return True
        for _ in range(_MAX_CHOICES):
            if not demand.target and not self._choose(state, hit, demand, max_slots):
                break
            if self._begin_next(state, demand):
                return True
            if demand.target:
                break
        wait.demand = None
        if wait.demand_until_s is not None:
            wait.demand_until_s = state.now_s
        return False

    def forget(self, state: RequestState) -> None:
        """See `HitSource`."""
        if self.open:
            self.open = [demand for demand in self.open if demand.request is not state]
            slots = (slot for demand in self.open for slot in demand.slots)
            self._open_blocks = {block for slot in slots for block in slot.block_ids}

    def submit(self, now_s: float) -> Batches:
        """Begin the stores for requests that still wait. Must be called between `store_reused` and the walk."""
        demands, self.open = self.open, []
        self._open_blocks.clear()
        for demand in demands:
            if demand.request.phase is RequestPhase.WAITING:
                yield from self._lazy.store_demanded(demand.slots, demand.keys, now_s)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _will_be_stored(self, state: RequestState, keys: Sequence[Key]) -> bool:
        """Return whether any of the keys that a request waits for is in flight, or is going to be."""
        if not keys:
            return False
        is_open = any(demand.request is state for demand in self.open)
        return is_open or bool(self._manager.table.are_in_flight(hash_keys(keys)).any())

    def _choose(self, state: RequestState, hit: PrefixHit, demand: DemandProgress, max_slots: int) -> bool:
        """Choose the longer hit that a request waits for; return False if there is none, or it takes too long."""
        if not demand.sources:
            return False
        longer = self._lookup.find_fitting(state.keys, hit, demand.limit_token, demand.sources, max_slots)
        gain, num_bytes = longer.end_token - hit.end_token, longer.num_bytes
        target: list[Key] = []
        missing: list[Key] = []
        for one in longer.groups:
            keys = state.keys.of(one.group, one.first_slot, one.first_slot + len(one.slots))
            elsewhere = np.flatnonzero(one.slots == self._lookup.elsewhere).tolist()
            target += keys
            missing += [keys[i] for i in elsewhere]
            num_bytes += len(elsewhere) * one.group.slot_bytes
        if gain <= 0 or not self._cost_model.may_load(num_bytes, gain):
            return False
        demand.target, demand.missing, demand.num_begun = frozenset(target), missing, 0
        state.wait.demand_until_s = self._inflight.wait_deadline(state, gain)
        return state.now_s < state.wait.demand_until_s

    def _begin_next(self, state: RequestState, demand: DemandProgress) -> bool:
        """Demand the next keys of the chosen hit that the pool lacks; return whether the request waits for any."""
        if demand.keys and (self._manager.lookup_each(demand.keys) < 0).any():
            # Their stores failed, or found no space.
            return False
        demand.keys = ()
        while demand.num_begun < len(demand.missing):
            some = demand.missing[demand.num_begun : demand.num_begun + _DEMANDED_KEYS]
            absent = np.flatnonzero(self._manager.lookup_each(some) < 0).tolist()
            if absent:
                return self._begin(state, demand, some, absent)
            demand.num_begun += len(some)
        return False

    def _begin(self, state: RequestState, demand: DemandProgress, some: Sequence[Key], absent: Sequence[int]) -> bool:
        """Demand those of the next keys that are `absent`: as many as the device may hold, and later the rest.

        Where the stores for others hold as many blocks as they may, the request waits for those to end.
        """
        num_held, slot_blocks = self._lazy.num_demanded + len(self._open_blocks), self._layout.blocks_per_slot
        if num_held and num_held + slot_blocks > self._limit(num_held + slot_blocks):
            return True
        recorded = self._lazy.find_recorded([some[at] for at in absent])
        others = [some[at] for at in absent if some[at] not in recorded]
        busy = self._select_in_flight(others)
        if len(busy) < len(others):
            # They have left the device: without them, another hit has to be chosen.
            demand.sources.difference_update(set(others).difference(busy))
            demand.target = frozenset()
            return False
        num_wanted = sum(len(slot.block_ids) for slot in recorded.values())
        num_allowed = self._limit(num_held + num_wanted) - num_held
        slots: list[RecordedSlot] = []
        blocks: set[int] = set()
        keys: list[Key] = []
        num_taken, num_free = len(some), 0
        for at in absent:
            key, slot = some[at], recorded.get(some[at])
            if slot is not None:
                more = [block for block in slot.block_ids if block not in blocks and block not in self._open_blocks]
                num_free += 0 if slot.is_in_use else len(more)
                if num_free > num_allowed or num_held + len(blocks) + len(more) > _MAX_DEMANDED:
                    num_taken = at
                    break
                slots.append(slot)
                blocks.update(more)
            keys.append(key)
        demand.keys = keys
        demand.num_begun += num_taken
        if slots:
            self._open_blocks.update(blocks)
            self.open.append(_Demand(state, slots, demand.target))
        return bool(keys) or (num_taken < len(some) and num_held > 0)

    def _limit(self, num_wanted: int) -> int:
        """Return how many of `num_wanted` free blocks the demands may hold, all together."""
        return self._lazy.limit_demanded(min(num_wanted, _MAX_DEMANDED))

    def _select_in_flight(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of these keys that are being stored."""
        are_busy = self._manager.table.are_in_flight(hash_keys(keys)).tolist() if keys else ()
        return [key for key, is_busy in zip(keys, are_busy, strict=True) if is_busy]

    # --- searching --------------------------------------------------------------------------------------------------

    def _search(self, state: RequestState, hit: PrefixHit) -> DemandProgress:
        """Begin to search for what could make a hit longer, or go on with it."""
        demand = state.wait.demand
        if demand is None or demand.first_token != hit.first_token or demand.end_token > hit.end_token:
            limit = state.keys.loadable_tokens(state.policy.policy)
            demand = state.wait.demand = DemandProgress(hit.first_token, hit.end_token, limit)
            demand.search = self._find_sources(state, demand)
        if demand.search is not None and next(demand.search, self) is self:
            demand.search = None
        return demand

    def _find_sources(self, state: RequestState, demand: DemandProgress) -> Iterator[None]:
        """Find the keys behind a hit that are being stored, and those that only the device has, in batches.

        What a tier loads is waited for by `Promotions`, for as long as the policy's `tier_wait` says.
        Of full-attention groups, those before the first key that is nowhere, which ends every hit.
        """
        layout, num_left = self._layout, _EXAMINED_KEYS
        first_end = demand.end_token + layout.alignment_tokens
        for group in sorted(layout.groups, key=lambda group: group.spec.kind is not GroupKind.FULL):
            if first_end > demand.limit_token:
                return
            is_full = group.spec.kind is GroupKind.FULL
            start = demand.end_token if is_full else max(demand.first_token, group.spec.needed_from(first_end))
            first, end = start // group.slot_tokens, -(-demand.limit_token // group.slot_tokens)
            # Most prompts end at their first missing key, however many they have.
            size = 1 if is_full else _EXAMINED_KEYS
            while first < end:
                if not num_left:
                    yield
                    num_left = _EXAMINED_KEYS
                keys = state.keys.of(group, first, min(first + min(size, num_left), end))
                num_present = self._add_sources(keys, demand)
                if is_full and num_present < len(keys):
                    end = first + num_present
                    demand.limit_token = min(demand.limit_token, end * group.slot_tokens)
                first, num_left, size = first + len(keys), num_left - len(keys), _EXAMINED_KEYS
                if not keys:
                    break

    def _add_sources(self, keys: Sequence[Key], demand: DemandProgress) -> int:
        """Add those of these keys that will be in the pool, or may be; return the index of the first that will not."""
        missing = np.flatnonzero(self._manager.lookup_each(keys) < 0).tolist()
        if not missing:
            return len(keys)
        wanted = [keys[i] for i in missing]
        busy = self._select_in_flight(wanted)
        demand.sources.update(key for key in busy if not self._tier_loads.is_loading(key))
        demand.sources.update(self._lazy.filter_recorded(wanted))
        return next((i for i, key in zip(missing, wanted, strict=True) if key not in demand.sources), len(keys))
