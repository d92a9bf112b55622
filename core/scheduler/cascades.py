"""Cascades: copies from the pool to the tiers below it, from slots that stay pinned until the tier has read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.tiers.base import TierJob, TierResult
from kvferry.core.tiers.client import TierClient, TierSession, allowed_tiers
from kvferry.core.transfers import NO_SLOTS, Slots

_MAX_HELD_SHARE = 4
"""Cascades hold at most a quarter of the slots."""


class Cascades:
    """Submits blocks to tiers. Requires: manager lock held. Thread: engine, except for the end of jobs."""

    def __init__(self, manager: OffloadManager, clients: Sequence[TierClient], new_number: Callable[[], int]) -> None:
        self.resets: list[RequestFilter] = []
        """Resets by origin that are in progress in the pool: matching blocks are not cascaded."""
        self.num_held = 0
        """Slots that cascades hold, each counted once."""
        self.is_used = bool(clients)
        """Whether there is or was a tier; it must be set before one is attached."""
        self._manager = manager
        self._clients = clients
        self._new_number = new_number
        self._num_readers = np.zeros(manager.table.max_slots, dtype=np.int32)
        self._open: dict[int, Pin] = {}

    def submit_stored(self, states: Sequence[RequestState], slots: Slots, now_s: float) -> None:
        """Submit slots that were just published for some requests to every tier that any of their policies allows."""
        if len(slots) and self._clients:
            for client, state in _first_for_each(states, lambda one: allowed_tiers(self._clients, one.policy.policy)):
                self.submit(client, state.tiers.session, slots, now_s)

    def submit_present(self, states: Sequence[RequestState], keys: Sequence[Key], now_s: float) -> None:
        """Submit blocks of some requests that the pool has already to the request-level tiers of any of them."""
        tiers = _first_for_each(states, self.request_level_tiers) if self._clients else []
        if not tiers or not keys:
            return
        slots = self._manager.lookup_each(list(dict.fromkeys(keys)))
        slots = slots[slots >= 0]
        if len(slots):
            for client, state in tiers:
                self.submit(client, state.tiers.session, slots, now_s)

    def allows_more(self, state: RequestState, others: Sequence[RequestState]) -> bool:
        """Return whether a request with the same blocks as `others` allows a tier to receive them that these do not.

        Tiers that cannot be used now are included.
        """
        return state.tiers.session is not None and any(
            set(tiers_of(state)).difference(*map(tiers_of, others))
            for tiers_of in (self._allowed, self.request_level_tiers)
        )

    def request_level_tiers(self, state: RequestState) -> list[TierClient]:
        """Return the tiers that receive every block of a request: by its policy all, or those that requested it."""
        session = state.tiers.session
        if session is None or session.ended:
            return []
        policy = state.policy.policy
        if policy.level is not Level.REQUEST and not session.request_level_tiers:
            return []
        allowed = allowed_tiers(self._clients, policy)
        if policy.level is Level.REQUEST:
            return allowed
        return [client for client in allowed if client in session.request_level_tiers]

    def _allowed(self, state: RequestState) -> list[TierClient]:
        """Return the tiers that a request's policy allows, including those that cannot be used now."""
        names, session = state.policy.policy.tiers, state.tiers.session
        known = [] if session is None else [client for client in self._clients if session.knows(client)]
        return [client for client in known if names is None or client.name in names]

    def abandon(self, clients: Sequence[TierClient]) -> None:
        """Release the slots of cascades that are not open in any of these clients, after an exception."""
        open_numbers = {job.number for client in clients for job in client.open_jobs}
        self._open = {number: pin for number, pin in self._open.items() if number in open_numbers}
        self._num_readers[:] = 0
        for pin in self._open.values():
            self._num_readers[pin.slots] += 1
        self.num_held = int(np.count_nonzero(self._num_readers))

    def open_pins(self) -> list[Pin]:
        """Return the pins of open cascades."""
        return list(self._open.values())

    def submit(
        self,
        client: TierClient,
        session: TierSession | None,
        slots: Slots,
        now_s: float,
        on_end: Callable[[NDArray[np.bool_] | None], None] = lambda ok: None,
    ) -> Slots:
        """Submit a job for as many of these ready slots as may be held, from the first on; count the others.

        Args:
            client: The tier.
            session: The request whose blocks they are, as the tier knows it.
            slots: Ready slots, each once.
            now_s: The time.
            on_end: Receives which of the submitted blocks were stored; None if the tier did not answer in time.

        Returns:
            The slots submitted.
        """
        manager, table = self._manager, self._manager.table
        wanted = len(slots)
        if session is None or not session.knows(client):
            client.use.cascades_dropped += wanted
            return NO_SLOTS
        if self.resets:
            origins = table.origins[slots].tolist()
            affected = [any(match.matches(origin) for match in self.resets) for origin in origins]
            slots = slots[~np.array(affected, dtype=np.bool_)]
        # Skip unverified recovered slots: the tier would give corrupt bytes a valid checksum.
        unverified = self._manager.unverified(slots)
        if len(unverified):
            slots = slots[~np.isin(slots, unverified)]
        max_held = max(self._manager.num_slots // _MAX_HELD_SHARE, 1)
        slots = slots[np.cumsum(self._num_readers[slots] == 0) <= max_held - self.num_held]
        client.use.cascades_dropped += wanted - len(slots)
        if not len(slots):
            return slots
        number, held_since = self._new_number(), client.held_since

        def end(result: TierResult | None, now_s: float) -> None:
            if result is not None and client.held_since == held_since:
                client.record_held(slots[result.ok], table.last_generation)
            pin = self._open.pop(number, None)
            if pin is not None:
                self._num_readers[slots] -= 1
                self.num_held -= int(np.count_nonzero(self._num_readers[slots] == 0))
                manager.end_read(pin)
            on_end(None if result is None else result.ok)

        pin = manager.pin(slots)
        manager.begin_read(pin)
        self._open[number] = pin
        self.num_held += int(np.count_nonzero(self._num_readers[slots] == 0))
        self._num_readers[slots] += 1
        keys, origins = table.keys[slots].tolist(), table.origins[slots].tolist()
        job = TierJob(number, session.request_id, keys, slots, table.sizes[slots], origins)
        client.store(job, now_s, end)
        return slots


def _first_for_each(
    states: Sequence[RequestState], tiers_of: Callable[[RequestState], Sequence[TierClient]]
) -> list[tuple[TierClient, RequestState]]:
    """Return each tier of any of these requests, with the first request that has it."""
    first: dict[TierClient, RequestState] = {}
    for state in states:
        for client in tiers_of(state):
            first.setdefault(client, state)
    return list(first.items())
