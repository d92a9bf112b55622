"""Promotions: copies of blocks that only a tier has into the pool, while their request waits for a limited time.

A request looks its missing keys up in the tiers once, when it is announced: *early*, before its first match. Blocks
that are found, and that the pool has space for, are loaded into slots and published when they have arrived. From then
on they are hits like any others. Its wait is counted, and limited by its `tier_wait`, from its first match on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.lookup import PrefixHit, PrefixLookup
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.scheduler.tier_loads import LookupPhase, TierLookup
from kvferry.core.scheduler.tiering import Tiering
from kvferry.core.stats import TierWaitCounts
from kvferry.core.tiers.allowed import allowed_tiers
from kvferry.core.tiers.base import TierJob, TierResult
from kvferry.core.tiers.client import TierClient

_LOOK_UP_SLOTS = 1000
"""Slots of one request that are looked up at once; the rest follows once these have arrived."""
_MAX_HELD_SHARE = 2
"""Promotions hold at most half the slots."""
_MAX_EARLY_SHARE = 4
"""Blocks promoted early for requests that were not matched yet take at most a quarter of the slots."""
_MAX_EARLY_REQUESTS = 64
"""Requests that look up or promote early at a time; others begin when one of them has ended, or is matched."""
_MAX_OPEN_EARLY = 2 * _LOOK_UP_SLOTS
"""Slots of a tier's early promotions that are open, beyond which no other begins: it has a time limit for each."""
_MAX_ADVANCED = 8
"""Requests whose early look-ups or promotions are begun, and continued, in one step; fewer if they are long: none
follows once they have as many slots as one look-up may have."""


class _Block(NamedTuple):
    """A block to be promoted: slot number `number` of its request in a group, into `slot` of the pool."""

    group: Group
    key: Key
    number: int
    slot: int = -1


class Promotions:
    """Promotes blocks for waiting requests. Requires: manager lock held. Thread: engine, except for the end of jobs."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        tiers: Tiering,
        lookup: PrefixLookup,
        inflight: InflightPrefixes,
        cost_model: LoadOrCompute,
        waits: TierWaitCounts,
    ) -> None:
        self._manager = manager
        self._layout = layout
        self._tier_loads = tiers.loads
        self._new_number = tiers.new_number
        self._clients = tiers.clients
        for client in self._clients:
            client.num_unawaited = 0
        self._lookup = lookup
        self._inflight = inflight
        self._cost_model = cost_model
        self._waits = waits
        self._arrived: dict[int, RequestState] = {}
        """Requests that were announced and not looked up, by sequence."""
        self._early: dict[int, RequestState] = {}
        """Requests that are looked up or promoted early, by sequence."""
        self._ready: deque[RequestState] = deque()
        """Requests of `_early` that wait for no tier any more, possibly outdated."""
        self._num_early_slots = 0
        num_slots, step = max(_LOOK_UP_SLOTS // len(layout.groups), 1), layout.alignment_tokens
        num_tokens = num_slots * min(group.slot_tokens for group in layout.groups)
        self._look_up_tokens = max(num_tokens // step, 1) * step
        """The most tokens of a look-up."""

    # --- before the first match -----------------------------------------------------------------------------------

    def begin_early(self, state: RequestState, now_s: float) -> None:
        """Look a request up that was just announced, and promote what is found, before it is scheduled."""
        self._arrived[state.sequence] = state
        self._begin_arrived(now_s)

    def advance(self, now_s: float) -> None:
        """Continue early promotions with results that have arrived. Called every step, after they were processed."""
        busy, num_tokens, num_states = self._find_busy() if self._ready else [], 0, 0
        for _ in range(len(self._ready)):
            if num_states >= _MAX_ADVANCED or num_tokens >= self._look_up_tokens:
                break
            state = self._ready.popleft()
            lookup = state.tiers.lookup
            if self._early.get(state.sequence) is not state or lookup is None or lookup.waits_for:
                continue
            if lookup.phase is LookupPhase.LOOKING and any(lookup.answers.get(name) for name in busy):
                self._ready.append(state)
                continue
            num_states += 1
            num_tokens += lookup.num_tokens
            state.now_s = now_s
            if not self._advance(state, lookup):
                self._early.pop(state.sequence, None)
            busy = self._find_busy()
        self._begin_arrived(now_s)

    def _find_busy(self) -> list[str]:
        """Return the names of tiers with as many slots of open early promotions as they may have."""
        num_slots: Counter[str] = Counter()
        for promotion in self._tier_loads.open:
            num_slots[promotion.client.name] += len(promotion.slots) if promotion.is_early else 0
        return [name for name, count in num_slots.items() if count >= _MAX_OPEN_EARLY]

    def _begin_arrived(self, now_s: float) -> None:
        """Look up the next requests that were announced, as far as the limits allow."""
        num_tokens = 0
        for _ in range(_MAX_ADVANCED):
            if not self._arrived or len(self._early) >= _MAX_EARLY_REQUESTS or num_tokens >= self._look_up_tokens:
                return
            state = self._arrived.pop(next(iter(self._arrived)))
            state.now_s = now_s
            if self._look_up_early(state) and state.tiers.lookup is not None:
                num_tokens += state.tiers.lookup.num_tokens

    def _look_up_early(self, state: RequestState) -> bool:
        """Look up early what device and pool lack; return whether there is anything to wait for."""
        hit = self._expected_hit(state)
        lookup = None if hit is None else self._begin_look_up(state, hit, is_early=True)
        state.tiers.lookup = lookup
        if lookup is None:
            return False
        self._early[state.sequence] = state
        if not lookup.waits_for:
            self._ready.append(state)
        return True

    def _advance(self, state: RequestState, lookup: TierLookup) -> bool:
        """Promote what was found, or look up what follows; return whether that is under way."""
        if self._is_stale(lookup) or not _may_promote(state):
            # The first match looks up again.
            state.tiers.lookup = None
            return False
        hit = self._expected_hit(state)
        if hit is None:
            return False
        if lookup.phase is LookupPhase.PROMOTING:
            return self._has_all(lookup, hit) and self._look_up_early(state)
        if self._inflight.is_loading(state, hit.end_token):
            return False
        max_slots = self._manager.num_slots // _MAX_EARLY_SHARE - self._num_early_slots
        return self._promote(state, lookup, hit, max_slots)

    def _expected_hit(self, state: RequestState) -> PrefixHit | None:
        """Return the hit that a match would find now; None if the policy allows no load."""
        if not _may_promote(state):
            return None
        limit = state.keys.loadable_tokens(state.policy.policy)
        return self._lookup.find(state.keys, self._lookup.count_resident(state.keys, limit), limit)

    def _end_early(self, state: RequestState) -> None:
        """Record that a request is early no more: it is matched, or has ended."""
        self._arrived.pop(state.sequence, None)
        self._early.pop(state.sequence, None)
        self._num_early_slots -= state.tiers.num_early_slots
        state.tiers.num_early_slots = 0

    def _adopt_early(self, state: RequestState, hit: PrefixHit) -> None:
        """Have a request wait for what was begun early from now on, if it is of use for its first match."""
        self._end_early(state)
        lookup = state.tiers.lookup
        if lookup is None or not lookup.is_early:
            return
        lookup.is_early = False
        is_behind = lookup.phase is LookupPhase.LOOKING and hit.end_token < lookup.first_token
        if is_behind or self._is_stale(lookup):
            # Blocks that were expected on the device or in the pool have left it, and were not looked up.
            state.tiers.lookup = None
        else:
            lookup.deadline_s = self._inflight.tier_deadline(state, max(lookup.limit_token - hit.end_token, 0))
            for client in list(lookup.waits_for) if lookup.phase is LookupPhase.LOOKING else ():
                if not self._is_of_use(client, lookup, state.now_s):
                    client.use.gave_up += 1
                    client.num_unawaited += lookup.waits_for.pop(client)

    def _has_all(self, lookup: TierLookup, hit: PrefixHit) -> bool:
        """Return whether everything that was looked up has arrived, so that there may be more."""
        return not lookup.num_lost and hit.end_token + self._layout.skipped_tokens >= lookup.limit_token

    def _is_stale(self, lookup: TierLookup) -> bool:
        """Return whether its answers must not be used, as tiers or the pool were reset since it began."""
        is_outdated = lookup.version != self._tier_loads.num_resets and lookup.phase is LookupPhase.LOOKING
        return is_outdated or lookup.epoch != self._manager.epoch

    # --- the wait of a request that could run -----------------------------------------------------------------------

    def must_wait(self, state: RequestState, hit: PrefixHit, max_slots: int) -> bool:
        """Return whether a request with this hit in the pool waits for more; at most `max_slots` slots are promoted.

        To be called until it returns False.
        """
        if not self._clients and state.tiers.lookup is None:
            return False
        self._adopt_early(state, hit)
        must_wait = self._must_wait(state, hit, max_slots)
        if not must_wait:
            self._end_wait(state)
        elif state.tiers.wait_began_s is None:
            state.tiers.wait_began_s = state.now_s
            self._waits.requests += state.times.tier_s is None
        return must_wait

    def forget(self, state: RequestState) -> None:
        """See `HitSource`."""
        self._end_early(state)
        self._end_wait(state)
        state.tiers.lookup = None

    def _end_wait(self, state: RequestState) -> None:
        """Count the time of a wait that has ended, if there was one."""
        began_s, state.tiers.wait_began_s = state.tiers.wait_began_s, None
        if began_s is not None:
            waited_s = max(0.0, state.now_s - began_s)
            state.times.tier_s = (state.times.tier_s or 0.0) + waited_s
            self._waits.seconds += waited_s

    def _must_wait(self, state: RequestState, hit: PrefixHit, max_slots: int) -> bool:
        """Look up, then promote, then look up what follows, until there is nothing more or the deadline has passed."""
        lookup = state.tiers.lookup
        if lookup is None:
            lookup = state.tiers.lookup = self._begin_look_up(state, hit)
            if lookup is None:
                return False
        if lookup.phase is LookupPhase.DONE:
            return False
        if not self._is_stale(lookup) and _may_promote(state):
            if lookup.waits_for:
                if state.now_s < lookup.deadline_s:
                    return True
                self._stop_waiting(lookup)
                if lookup.phase is LookupPhase.PROMOTING:
                    lookup.phase = LookupPhase.DONE
                    return False
            # Answers that arrived are used even if the deadline has passed.
            if lookup.phase is LookupPhase.LOOKING and self._promote(state, lookup, hit, max_slots):
                return True
            if lookup.phase is LookupPhase.PROMOTING and self._has_all(lookup, hit):
                # Everything has arrived, and there may be more.
                state.tiers.lookup = None
                return self._must_wait(state, hit, max_slots)
        lookup.phase = LookupPhase.DONE
        return False

    # --- look-up ----------------------------------------------------------------------------------------------------

    def _stop_waiting(self, lookup: TierLookup) -> None:
        """Stop waiting for the open jobs. A tier with an unawaited look-up receives no other."""
        self._waits.ended_early += 1
        for client, count in lookup.waits_for.items():
            client.use.gave_up += 1
            if lookup.phase is LookupPhase.LOOKING:
                client.num_unawaited += count
        lookup.waits_for.clear()

    def _begin_look_up(self, state: RequestState, hit: PrefixHit, *, is_early: bool = False) -> TierLookup | None:
        """Look up what the pool lacks in the tiers; None if there is nothing to look up or no tier for it."""
        step = self._layout.alignment_tokens
        limit = state.keys.loadable_tokens(state.policy.policy) // step * step
        clients = [client for client in allowed_tiers(self._clients, state.policy.policy) if not client.num_unawaited]
        if (
            limit <= hit.end_token + self._layout.skipped_tokens
            or hit.first_token % step
            or not clients
            or not _may_promote(state)
        ):
            return None
        if not is_early and self._inflight.is_overdue(state):
            return None
        limit = min(limit, hit.end_token + self._look_up_tokens)
        missing = [self._missing_keys(state, group, hit, limit) for group in self._layout.groups]
        keys = list(dict.fromkeys(chain.from_iterable(missing)))
        if not keys:
            return None
        num_bytes = sum(len(missing[group.index]) * group.slot_bytes for group in self._layout.full_groups)
        deadline_s = math.inf if is_early else self._inflight.tier_deadline(state, limit - hit.end_token)
        version, epoch = self._tier_loads.num_resets, self._manager.epoch
        lookup = TierLookup(version, epoch, state.now_s, deadline_s, hit.end_token, limit, is_early, num_bytes)
        for client in clients:
            known = client.known_missing
            asked = [key for key in keys if not known.holds(key, state.now_s)] if known else keys
            client.use.known_missing += len(keys) - len(asked)
            if asked:
                self._look_up(client, state, lookup, asked)
        return lookup

    def _missing_keys(self, state: RequestState, group: Group, hit: PrefixHit, limit: int) -> list[Key]:
        """Return the keys that a longer hit may need and the pool lacks."""
        first_token = max(hit.first_token, group.spec.needed_from(hit.end_token))
        if group.spec.kind is GroupKind.FULL:
            first_token = hit.end_token
        keys = state.keys.of(group, first_token // group.slot_tokens, -(-limit // group.slot_tokens))
        slots = self._manager.lookup_each(keys)
        return [keys[i] for i in np.flatnonzero(slots < 0).tolist()]

    def _look_up(self, client: TierClient, state: RequestState, lookup: TierLookup, keys: Sequence[Key]) -> None:
        client.cost_model.decision = self._cost_model.decision
        if self._is_of_use(client, lookup, state.now_s):
            lookup.waits_for[client] += 1
        else:
            # A tier that is too slow is still measured, but the request does not wait for it.
            client.use.gave_up += 1
            client.num_unawaited += 1

        def end(result: TierResult | None, now_s: float) -> None:
            if client in lookup.waits_for:
                lookup.count_down(client)
            else:
                # Promotions that replace these set it to 0.
                client.num_unawaited = max(client.num_unawaited - 1, 0)
            client.look_up_rate.observe(1, now_s - lookup.began_s)
            if result is not None:
                answered = {keys[i] for i in np.flatnonzero(result.ok).tolist()}
                client.use.found += len(answered)
                if lookup.loads_anyway.get(client, True):
                    lookup.answers[client.name] = answered
                else:
                    client.use.declined += len(answered)
            self._add_ready(state, lookup)

        client.use.looked_up += len(keys)
        client.look_up(keys, state.now_s, end)

    def _is_of_use(self, client: TierClient, lookup: TierLookup, now_s: float) -> bool:
        """Return whether a tier is expected to answer a look-up in time, and what it has would then be loaded."""
        look_up_s = _look_up_s(client, lookup, now_s)
        if now_s + look_up_s > lookup.deadline_s:
            return False
        cost_model, num_bytes, num_tokens = client.cost_model, lookup.num_bytes, lookup.num_tokens
        # A load that is faster is decided once the answer is known, which may be that there is nothing to load.
        if client not in lookup.loads_anyway and not cost_model.may_load(num_bytes, num_tokens, look_up_s):
            lookup.loads_anyway[client] = cost_model.should_load(num_bytes, 0, num_tokens, look_up_s)
        return lookup.loads_anyway.get(client, True)

    def _add_ready(self, state: RequestState, lookup: TierLookup) -> None:
        """Have `advance` continue an early request once it waits for no tier any more."""
        if lookup.is_early and not lookup.waits_for:
            if lookup.phase is LookupPhase.PROMOTING and state.tiers.lookup is lookup:
                # The blocks are in the pool: the request is matched when it is scheduled, and others need not wait.
                self._inflight.end(state)
            self._ready.append(state)

    # --- promotion --------------------------------------------------------------------------------------------------

    def _promote(self, state: RequestState, lookup: TierLookup, hit: PrefixHit, max_slots: int) -> bool:
        """Promote blocks that make the hit longer; False if there are none, or computing them is faster."""
        sources: dict[Key, TierClient] = {}
        for client in allowed_tiers(self._clients, state.policy.policy):
            for key in lookup.answers.get(client.name, ()):
                sources.setdefault(key, client)
        if not sources:
            return False
        num_held = sum(len(promotion.slots) for promotion in self._tier_loads.open)
        max_slots = min(max_slots, max(self._manager.num_slots // _MAX_HELD_SHARE, 1) - num_held)
        longer = self._lookup.find_fitting(state.keys, hit, lookup.limit_token, sources, max_slots)
        gain = longer.end_token - hit.end_token
        if gain <= 0:
            return False
        elsewhere = self._lookup.list_elsewhere(state.keys, longer)
        wanted = [_Block(group, key, number) for group, number, key in elsewhere]
        if not self._is_faster(lookup, wanted, sources, gain):
            lookup.phase = LookupPhase.DONE
            return False
        if not lookup.is_early:
            lookup.deadline_s = self._inflight.tier_deadline(state, gain)
            if self._inflight.is_overdue(state):
                for client in {sources[block.key] for block in wanted}:
                    client.use.gave_up += 1
                return False
        lookup.phase = LookupPhase.PROMOTING
        parts: dict[TierClient, list[_Block]] = {}
        for _, blocks in groupby(wanted, key=lambda block: block.group.index):
            for block in self._reserve(state, list(blocks)):
                parts.setdefault(sources[block.key], []).append(block)
        for client, reserved in parts.items():
            self._load_reserved(client, state, lookup, reserved)
        if lookup.waits_for:
            self._inflight.begin(state, hit.first_token, longer.end_token)
        return bool(lookup.waits_for)

    def _is_faster(
        self, lookup: TierLookup, wanted: Sequence[_Block], sources: Mapping[Key, TierClient], num_tokens: int
    ) -> bool:
        """Return whether every tier loads its part faster than computing takes."""
        sizes: dict[TierClient, list[int]] = {}
        for block in wanted:
            sizes.setdefault(sources[block.key], []).append(block.group.slot_bytes)
        for client, of_client in sizes.items():
            is_decided = client in lookup.loads_anyway
            if not is_decided and not client.cost_model.should_load(sum(of_client), client.bytes_in_flight, num_tokens):
                for each, declined in sizes.items():
                    each.use.declined += len(declined)
                return False
        return True

    def _reserve(self, state: RequestState, wanted: Sequence[_Block]) -> list[_Block]:
        """Reserve slots for blocks of one group as for a store; blocks at the end may get none."""
        offer = self._manager.prepare_store(
            [block.key for block in wanted],
            state.origin,
            np.array([block.number for block in wanted], dtype=np.int64),
            PRIORITY_CLASS[state.policy.policy.priority],
            state.now_s,
            prefix=Prefix({i: (keys, len(keys)) for i, keys in enumerate(state.keys.by_group)}),
            size_bytes=wanted[0].group.slot_bytes,
            needs_admission=False,
        )
        reserved = zip(offer.stored_at.tolist(), offer.slots.tolist(), strict=True)
        return [_Block(wanted[i].group, wanted[i].key, wanted[i].number, slot) for i, slot in reserved]

    def _load_reserved(
        self, client: TierClient, state: RequestState, lookup: TierLookup, blocks: Sequence[_Block]
    ) -> None:
        """Have a tier load blocks into the slots reserved for them; the look-up waits for it."""
        slots = np.array([block.slot for block in blocks], dtype=np.int64)
        sizes = np.array([block.group.slot_bytes for block in blocks], dtype=np.int64)
        lookup.waits_for[client] += 1
        if lookup.is_early:
            state.tiers.num_early_slots += len(slots)
            self._num_early_slots += len(slots)

        def end(published: NDArray[np.bool_]) -> None:
            lookup.count_down(client)
            num_published = int(np.count_nonzero(published))
            lookup.num_lost += len(blocks) - num_published
            client.use.promoted += num_published
            step = self._layout.alignment_tokens
            for block, ok in zip(blocks, published.tolist(), strict=True):
                if ok:
                    size = block.group.slot_tokens
                    first, last = block.number * size // step, ((block.number + 1) * size - 1) // step
                    state.record_promoted(first, last, client.name)
            self._add_ready(state, lookup)

        job = TierJob(self._new_number(), [block.key for block in blocks], slots, sizes)
        self._tier_loads.load(client, job, state.now_s, end, is_early=lookup.is_early)


def _look_up_s(client: TierClient, lookup: TierLookup, now_s: float) -> float:
    """Return how long a look-up will still delay its request, 0 if it is not measured; an early one does not."""
    expected_s = 0.0 if lookup.is_early else client.look_up_rate.shortest_s(1) or 0.0
    return max(lookup.began_s + expected_s - now_s, 0.0)


def _may_promote(state: RequestState) -> bool:
    """Return whether a request may promote: the blocks are for a load, and are written to the pool."""
    return state.policy.policy.load and state.policy.policy.store
