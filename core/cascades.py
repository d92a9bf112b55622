"""Cascades: what is in the pool goes on to the tiers below it, from slots that stay pinned until the tier is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.requests import RequestState
from kvferry.core.tier_links import OpenTierJob, TierLink, allowed_links
from kvferry.core.tiers import TierJob, TierResult
from kvferry.core.transfers import Slots

_SLOTS_SHARE = 4
"""Cascades hold at most a quarter of the slots."""


class CascadeSide:
    """Called under the manager's lock, on the engine's thread but for the end of jobs."""

    def __init__(self, manager: OffloadManager, links: Sequence[TierLink], new_number: Callable[[], int]) -> None:
        self.resets: list[RequestFilter] = []
        """Resets by match that are on their way through the pool: what they mean does not get away to a tier."""
        self.num_held = 0
        """Slots that cascades hold, each once."""
        self._manager = manager
        self._links = links
        self._new_number = new_number
        self._holds = np.zeros(manager.table.max_slots, dtype=np.int32)
        self._open: dict[int, Pin] = {}

    def stored(self, states: Sequence[RequestState], slots: Slots, now_s: float) -> None:
        """These slots of some requests were just published: every tier that any of these allows gets them."""
        if len(slots):
            for link, state in _first_for_each(states, lambda one: allowed_links(self._links, one.policy.policy)):
                self._send(link, state, slots, now_s)

    def found(self, states: Sequence[RequestState], keys: Sequence[Key], now_s: float) -> None:
        """These blocks of some requests are in the pool already: tiers that are to have every block of any get them."""
        links = _first_for_each(states, self.wishers)
        if not links or not keys:
            return
        slots = self._manager.lookup_each(list(dict.fromkeys(keys)))
        slots = slots[slots >= 0]
        if len(slots):
            for link, state in links:
                self._send(link, state, slots, now_s)

    def adds(self, state: RequestState, others: Sequence[RequestState]) -> bool:
        """Whether a tier is to have blocks for this request that none of the others, which have them too, lets it have.

        Whether it can be used now is not asked.
        """
        session = state.session
        if session is None:
            return False
        for link in self._links:
            if _allows(state, link) and not any(_allows(other, link) for other in others):
                return True
            if link in self.wishers(state) and not any(link in self.wishers(other) for other in others):
                return True
        return False

    def wishers(self, state: RequestState) -> list[TierLink]:
        """The tiers that are to have every block of a request: those that asked for it, or by its policy all."""
        session = state.session
        if session is None or session.ended:
            return []
        policy = state.policy.policy
        if policy.level is not Level.REQUEST and not session.wishers:
            return []
        allowed = allowed_links(self._links, policy)
        return allowed if policy.level is Level.REQUEST else [link for link in allowed if link in session.wishers]

    def abandon(self) -> None:
        """Release what is held for cascades that no tier works on, after an exception."""
        worked_on = {job.number for link in self._links for job in link.open_jobs}
        self._open = {number: pin for number, pin in self._open.items() if number in worked_on}
        self._holds[:] = 0
        for pin in self._open.values():
            self._holds[pin.slots] += 1
        self.num_held = int(np.count_nonzero(self._holds))
        self._manager.pins.keep_reads(self._open.values())

    def _send(self, link: TierLink, state: RequestState, slots: Slots, now_s: float) -> None:
        """Submit a job for as many of these ready slots as may be held, from the first on; count the others."""
        session, table = state.session, self._manager.table
        wanted = len(slots)
        if session is None or not session.knows(link):
            link.use.cascades_dropped += wanted
            return
        if self.resets:
            origins = table.origins[slots].tolist()
            doomed = [any(match.matches(origin) for match in self.resets) for origin in origins]
            slots = slots[~np.array(doomed, dtype=np.bool_)]
        # What an earlier process left may be damaged, and a tier would vouch for it.
        unverified = self._manager.unverified(slots)
        if len(unverified):
            slots = slots[~np.isin(slots, unverified)]
        most_held = max(self._manager.num_slots // _SLOTS_SHARE, 1)
        slots = slots[np.cumsum(self._holds[slots] == 0) <= most_held - self.num_held]
        link.use.cascades_dropped += wanted - len(slots)
        if not len(slots):
            return
        number = self._new_number()

        def end(result: TierResult | None, now_s: float) -> None:
            pin = self._open.pop(number, None)
            if pin is not None:
                self._holds[slots] -= 1
                self.num_held -= int(np.count_nonzero(self._holds[slots] == 0))
                self._manager.end_read(pin)

        job = OpenTierJob(number, len(slots), now_s, end, slots)
        pin = self._manager.pin(slots)
        self._manager.begin_read(pin)
        self._open[number] = pin
        self.num_held += int(np.count_nonzero(self._holds[slots] == 0))
        self._holds[slots] += 1
        blocks = TierJob(
            job.number,
            session.request_id,
            table.keys[slots].tolist(),
            slots,
            table.sizes[slots],
            table.origins[slots].tolist(),
        )
        link.store(job, blocks)


def _allows(state: RequestState, link: TierLink) -> bool:
    """Whether a tier may have what is stored of a request."""
    names = state.policy.policy.tiers
    return state.session is not None and state.session.knows(link) and (names is None or link.name in names)


def _first_for_each(
    states: Sequence[RequestState], links_of: Callable[[RequestState], Sequence[TierLink]]
) -> list[tuple[TierLink, RequestState]]:
    """Each tier that any of these requests names, with the first of them that does."""
    first: dict[TierLink, RequestState] = {}
    for state in states:
        for link in links_of(state):
            first.setdefault(link, state)
    return list(first.items())
