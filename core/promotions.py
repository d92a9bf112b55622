"""Promotions: what a prompt needs and only a tier has is brought into the pool while its request waits, within limits.

A request asks the tiers once, without waiting longer than computing would take; what they have and there is room for is
loaded into slots, and published when it has come. From there it is a hit like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.hits import PrefixHit
from kvferry.core.keys import Key, Prefix, RequestFilter, RequestIdentity
from kvferry.core.leaders import Leaders
from kvferry.core.patience import Patience
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.prefixes import PrefixFinder
from kvferry.core.requests import RequestState
from kvferry.core.tier_links import OpenTierJob, TierLink, allowed_links
from kvferry.core.tier_look import LookPhase, TierLook
from kvferry.core.tiers import TierJob, TierResult
from kvferry.core.transfers import Slots

_LOOK_UP_SLOTS = 1000
"""Slots of one request that tiers are asked for at once; the rest follows once these are there."""
_POOL_SHARE = 2
"""Promotions hold at most half the slots."""


@dataclass(slots=True, eq=False)
class OpenPromotion:
    """Slots that a tier is filling, of one epoch. A reset means the rest: all of it (`is_void`), or `matches`."""

    link: TierLink
    epoch: int
    slots: Slots
    keys: Sequence[Key]
    num_bytes: int
    is_void: bool = False
    matches: list[RequestFilter] = field(default_factory=list)
    dropped: set[Key] = field(default_factory=set)


class PromotionSide:
    """Called under the manager's lock, on the engine's thread but for the end of jobs."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        links: Sequence[TierLink],
        new_number: Callable[[], int],
        finder: PrefixFinder,
        leaders: Leaders,
        patience: Patience,
        choice: LoadOrCompute,
    ) -> None:
        self.open: list[OpenPromotion] = []
        self._manager = manager
        self._layout = layout
        self._links = links
        self._new_number = new_number
        self._finder = finder
        self._leaders = leaders
        self._patience = patience
        self._choice = choice
        self._version = 0

    def waits(self, state: RequestState, hit: PrefixHit, room: int) -> bool:
        """Whether a request, of which the pool has `hit`, goes on waiting for more; up to `room` slots may be brought.

        To be asked until it says no.
        """
        look = state.look
        if look is None:
            look = state.look = self._begin(state, hit)
            if look is None:
                return False
        if look.phase is LookPhase.DONE:
            return False
        is_stale = look.version != self._version and look.phase is LookPhase.LOOKING
        if is_stale or look.epoch != self._manager.epoch or not self._may_promote(state):
            return self._finish(look)
        if look.waits_for:
            if state.now_s < look.until_s:
                return True
            self._give_up(look)
            if look.phase is LookPhase.PROMOTING:
                return self._finish(look)
        # Whatever has been said by now is used, however late it came.
        if look.phase is LookPhase.LOOKING and self._promote(state, look, hit, room):
            return True
        if look.phase is LookPhase.PROMOTING and not look.num_lost and hit.end_token >= look.limit_token:
            # All of it has come, and there may be more.
            state.look = None
            return self.waits(state, hit, room)
        return self._finish(look)

    def touched_slots(self) -> list[Slots]:
        """The slots that tiers may write to."""
        return [promotion.slots for promotion in self.open]

    def forget_looks(self) -> None:
        """A reset has come: what tiers said before it means nothing, in O(1)."""
        self._version += 1

    def disown(self, match: RequestFilter | None, links: Sequence[TierLink] | None) -> None:
        """A reset has come: publish nothing that it means of what is under way, from some tiers, or from any."""
        for promotion in self.open:
            if links is None or promotion.link in links:
                if match is None:
                    promotion.is_void = True
                else:
                    promotion.matches.append(match)

    def disown_key(self, key: Key) -> None:
        """An operator dropped a block: it is not published if it is under way."""
        for promotion in self.open:
            promotion.dropped.add(key)

    def abandon(self) -> None:
        """Forget promotions that no tier works on, and publish nothing of the others."""
        worked_on = {id(job.slots) for link in self._links for job in link.open_jobs}
        self.open = [promotion for promotion in self.open if id(promotion.slots) in worked_on]
        for link in self._links:
            link.num_unawaited = 0
            link.bytes_in_flight = sum(promotion.num_bytes for promotion in self.open if promotion.link is link)
        self.forget_looks()
        self.disown(None, None)

    # --- inside -------------------------------------------------------------------------------------------------

    def _links_of(self, state: RequestState) -> list[TierLink]:
        session = state.session
        if session is None:
            return []
        return [link for link in allowed_links(self._links, state.policy.policy) if session.knows(link)]

    def _may_promote(self, state: RequestState) -> bool:
        """A promotion is for a load and writes to the pool."""
        return state.policy.policy.load and state.policy.policy.store

    def _give_up(self, look: TierLook) -> None:
        """Nobody waits any more for what is under way; while a look-up is, nobody asks that tier again."""
        for link, count in look.waits_for.items():
            link.use.gave_up += 1
            if look.phase is LookPhase.LOOKING:
                link.num_unawaited += count
        look.waits_for.clear()

    def _finish(self, look: TierLook) -> bool:
        look.phase = LookPhase.DONE
        return False

    def _begin(self, state: RequestState, hit: PrefixHit) -> TierLook | None:
        """Ask the tiers for what the pool lacks; None if there is nothing to ask, or nobody."""
        step = self._layout.alignment_tokens
        limit = state.loadable_tokens // step * step
        links = [link for link in self._links_of(state) if not link.num_unawaited]
        if limit <= hit.end_token or hit.first_token % step or not links or not self._may_promote(state):
            return None
        if self._patience.is_over(state):
            return None
        num_asked = max(_LOOK_UP_SLOTS // len(self._layout.groups), 1)
        piece = num_asked * min(group.slot_tokens for group in self._layout.groups)
        limit = min(limit, hit.end_token + max(piece // step, 1) * step)
        keys = list(
            dict.fromkeys(key for group in self._layout.groups for key in self._missing(state, group, hit, limit))
        )
        if not keys:
            return None
        until_s = self._patience.until(state, limit - hit.end_token)
        look = TierLook(self._version, self._manager.epoch, until_s, limit)
        for link in links:
            self._look_up(link, state, look, keys)
        return look

    def _missing(self, state: RequestState, group: Group, hit: PrefixHit, limit: int) -> list[Key]:
        """The keys that a longer hit might need, and that are not in the pool."""
        first_token = max(hit.first_token, group.spec.needed_from(hit.end_token))
        if group.spec.kind is GroupKind.FULL:
            first_token = hit.end_token
        first, end = first_token // group.slot_tokens, -(-limit // group.slot_tokens)
        keys = self._finder.keys(state, group, first, end)
        slots = self._manager.lookup_each(keys)
        return [keys[i] for i in np.flatnonzero(slots < 0).tolist()]

    def _look_up(self, link: TierLink, state: RequestState, look: TierLook, keys: Sequence[Key]) -> None:
        expected_s = link.look_up_rate.estimate_s(1)
        begun_s = state.now_s
        if expected_s is None or state.now_s + expected_s <= look.until_s:
            look.waits_for[link] += 1
        else:
            # One that is known to take too long is measured on, and nobody waits for it.
            link.num_unawaited += 1

        def end(result: TierResult | None, now_s: float) -> None:
            if link in look.waits_for:
                _count_down(look, link)
            else:
                # `abandon` sets it to 0.
                link.num_unawaited = max(link.num_unawaited - 1, 0)
            link.look_up_rate.observe(1, now_s - begun_s)
            if result is not None:
                found = {keys[i] for i in np.flatnonzero(result.ok).tolist()}
                link.use.found += len(found)
                look.answers[link.name] = found

        link.look_up(OpenTierJob(self._new_number(), len(keys), state.now_s, end), keys)

    def _promote(self, state: RequestState, look: TierLook, hit: PrefixHit, room: int) -> bool:
        """Begin to bring in what makes the hit longer; False if there is nothing, or it does not pay."""
        links = [link for link in self._links_of(state) if look.answers.get(link.name)]
        places: dict[Key, TierLink] = {}
        for link in links:
            for key in look.answers[link.name]:
                places.setdefault(key, link)
        if not places:
            return False
        longer = self._fit(state, look, hit, room, places)
        gain = longer.end_token - hit.end_token
        if gain <= 0:
            return False
        wanted = {group.group.index: self._wanted(state, group.group, longer) for group in longer.groups}
        if not self._pays(wanted, places, gain):
            return False
        look.until_s = self._patience.until(state, gain)
        if self._patience.is_over(state):
            for link in {places[key] for _, keys in wanted.values() for key in keys}:
                link.use.gave_up += 1
            return False
        look.phase = LookPhase.PROMOTING
        parts: dict[TierLink, list[tuple[Group, Key, int, int]]] = {}
        for group_hit in longer.groups:
            group = group_hit.group
            numbers, keys = wanted[group.index]
            for key, slot, number in self._take_slots(state, group, numbers, keys):
                if key in places:
                    parts.setdefault(places[key], []).append((group, key, slot, number))
        for link, blocks in parts.items():
            self._load(link, state, look, blocks)
        if look.waits_for:
            self._leaders.lead(state, hit.first_token, longer.end_token)
        return bool(look.waits_for)

    def _fit(
        self, state: RequestState, look: TierLook, hit: PrefixHit, room: int, places: Mapping[Key, TierLink]
    ) -> PrefixHit:
        """The longest hit with what the tiers have, for which there is room."""
        held = sum(len(promotion.slots) for promotion in self.open)
        room = min(room, max(self._manager.num_slots // _POOL_SHARE, 1) - held)
        limit = look.limit_token
        while True:
            longer = self._finder.find(state, hit.first_token, limit, places)
            num_wanted = int(np.count_nonzero(longer.slots == self._finder.elsewhere))
            if num_wanted <= room or longer.end_token <= hit.end_token:
                return longer
            gain = longer.end_token - hit.end_token
            limit = hit.end_token + gain * max(room, 0) // num_wanted

    def _wanted(self, state: RequestState, group: Group, hit: PrefixHit) -> tuple[list[int], list[Key]]:
        """The slots of a group that a hit takes from tiers: their numbers within the request, and their keys."""
        (found,) = (one for one in hit.groups if one.group is group)
        places = np.flatnonzero(found.slots == self._finder.elsewhere).tolist()
        keys = self._finder.keys(state, group, found.first_slot, found.end_slot)
        return [found.first_slot + i for i in places], [keys[i] for i in places]

    def _pays(
        self, wanted: Mapping[int, tuple[list[int], list[Key]]], places: Mapping[Key, TierLink], num_tokens: int
    ) -> bool:
        """Whether every tier brings its part sooner than it could be computed."""
        num_bytes: dict[TierLink, int] = {}
        num_blocks: dict[TierLink, int] = {}
        for group in self._layout.groups:
            for key in wanted[group.index][1]:
                link = places[key]
                num_bytes[link] = num_bytes.get(link, 0) + group.slot_bytes
                num_blocks[link] = num_blocks.get(link, 0) + 1
        for link, count in num_bytes.items():
            link.choice.decision = self._choice.decision
            if not link.choice.should_load(count, link.bytes_in_flight, num_tokens):
                for each, blocks in num_blocks.items():
                    each.use.declined += blocks
                return False
        return True

    def _take_slots(
        self, state: RequestState, group: Group, numbers: Sequence[int], keys: Sequence[Key]
    ) -> list[tuple[Key, int, int]]:
        """Make room for blocks as for a store, and say which got which slot; those at the end may get none."""
        if not keys:
            return []
        own = Prefix({progress.group.index: (progress.keys, len(progress.keys)) for progress in state.groups})
        answer = self._manager.prepare_store(
            keys,
            state.origin,
            np.array(numbers, dtype=np.int64),
            PRIORITY_CLASS[state.policy.policy.priority],
            state.now_s,
            prefix=own,
            size_bytes=group.slot_bytes,
            is_counted=False,
        )
        chosen = answer.stored_at.tolist()
        return [(keys[i], slot, numbers[i]) for i, slot in zip(chosen, answer.slots.tolist(), strict=True)]

    def _load(
        self, link: TierLink, state: RequestState, look: TierLook, blocks: Sequence[tuple[Group, Key, int, int]]
    ) -> None:
        slots = np.array([slot for _, _, slot, _ in blocks], dtype=np.int64)
        keys = [key for _, key, _, _ in blocks]
        sizes = np.array([group.slot_bytes for group, _, _, _ in blocks], dtype=np.int64)
        num_bytes = int(sizes.sum())
        self._manager.begin_tier_write(slots)
        promotion = OpenPromotion(link, self._manager.epoch, slots, keys, num_bytes)
        self.open.append(promotion)
        look.waits_for[link] += 1
        link.bytes_in_flight += num_bytes

        def end(result: TierResult | None, now_s: float) -> None:
            link.bytes_in_flight -= num_bytes
            _count_down(look, link)
            self.open = [other for other in self.open if other is not promotion]
            came = self._publish(promotion, result, now_s)
            look.num_lost += int(np.count_nonzero(~came))
            if result is not None and result.ok.all():
                link.choice.bytes_rate.observe(result.num_bytes, result.seconds)
            link.use.promoted += int(np.count_nonzero(came))
            link.use.promotions_failed += int(np.count_nonzero(~came))
            step = self._layout.alignment_tokens
            for (group, _, _, number), ok in zip(blocks, came.tolist(), strict=True):
                if ok:
                    first, last = number * group.slot_tokens // step, ((number + 1) * group.slot_tokens - 1) // step
                    state.note_promoted(first, last, link.name)

        session = state.session
        number = self._new_number()
        request_id = state.request.request_id if session is None else session.request_id
        link.load(
            OpenTierJob(number, len(blocks), state.now_s, end, slots), TierJob(number, request_id, keys, slots, sizes)
        )

    def _publish(self, promotion: OpenPromotion, result: TierResult | None, now_s: float) -> np.ndarray:
        """Let what came be found, under the name of whoever stored it; free the rest. Which of the blocks came."""
        slots, keys = promotion.slots, promotion.keys
        came = np.zeros(len(slots), dtype=np.bool_) if result is None else result.ok.copy()
        if promotion.is_void or promotion.epoch != self._manager.epoch:
            came[:] = False
        origins: list[RequestIdentity | None] = list(result.origins) if result is not None else []
        origins += [None] * (len(slots) - len(origins))
        if promotion.matches or promotion.dropped:
            for i in np.flatnonzero(came).tolist():
                origin = origins[i]
                meant = origin is None or any(match.matches(origin) for match in promotion.matches)
                came[i] = keys[i] not in promotion.dropped and not (promotion.matches and meant)
        self._manager.abort_store(slots[~came])
        # Histories tell a batch as one request's.
        for origin, run in groupby(np.flatnonzero(came).tolist(), key=lambda i: origins[i]):
            chosen = slots[list(run)]
            if origin is not None:
                self._manager.record_origin(chosen, origin)
            self._manager.complete_store(chosen, now_s)
            self._manager.end_tier_write(chosen)
        return came


def _count_down(look: TierLook, link: TierLink) -> None:
    if link not in look.waits_for:
        return
    look.waits_for[link] -= 1
    if not look.waits_for[link]:
        del look.waits_for[link]
