"""Cascades: copies from the pool to the tiers below it, from slots that stay pinned until the tier has read them.

A tier receives blocks when they are stored in the pool, or (`CascadeWhen.EVICT`) shortly before they are evicted from
it. An eviction cannot wait for a tier, since the slot is needed at once. Each step therefore submits those of the next
victims that the tier lacks: twice as many as a recent step has evicted. Once they are written they are the next victims
again, unless they were used meanwhile. Blocks that are evicted before that are lost and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import AfterPin, Pin
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.stats import EvictionReason
from kvferry.core.tiers.allowed import AllowedTiers, allowed_tiers
from kvferry.core.tiers.base import CascadeWhen, TierJob, TierResult
from kvferry.core.tiers.client import TierClient
from kvferry.core.transfers import NO_SLOTS, Slots

_MAX_HELD_SHARE = 4
"""Cascades hold at most a quarter of the slots."""
_VICTIMS_SHARE = 16
"""The next victims that are written before their eviction are at least this part of the slots."""
_MAX_VICTIMS = 1000
"""The most next victims that are written, and examined in one step."""
_VICTIM_PEAKS = 2
_PEAK_STEPS = 64
"""Steps after which most of a recent peak of evictions is forgotten."""
_IDLE_STEPS = 64
"""Steps until unchanged victims are examined again: no version shows, for example, that a tier is usable again."""
_JOB_VICTIMS = 128
"""Victims in one job: the first ones can be evicted before the last ones are written."""


class Cascades:
    """Submits blocks to tiers. Requires: manager lock held. Thread: engine, except for the end of jobs."""

    def __init__(self, manager: OffloadManager, clients: Sequence[TierClient], new_number: Callable[[], int]) -> None:
        self.resets: list[RequestFilter] = []
        """Resets by origin that are in progress in the pool: matching blocks are not cascaded."""
        self.num_held = 0
        """Slots that cascades hold, each counted once."""
        self.allowed = AllowedTiers(manager.table.max_slots, manager.table.generations)
        """The tiers that the policies of stored blocks allow."""
        self._manager = manager
        self._clients = clients
        self._new_number = new_number
        self._num_readers = np.zeros(manager.table.max_slots, dtype=np.int32)
        self._open: dict[int, tuple[Pin, AfterPin]] = {}
        """Pins of the open jobs, and the places of their slots in the order of eviction afterwards."""
        self._peak = self._num_evicted = self._num_idle = 0
        self._examined = (-1, -1, -1)
        """The pool's versions when its next victims were examined last."""

    def submit_stored(self, states: Sequence[RequestState], slots: Slots, now_s: float) -> None:
        """Submit slots that were just published for some requests to every tier that any of their policies allows."""
        if len(slots) and self._clients:
            for client in _tiers_of_any(states, lambda state: allowed_tiers(self._clients, state.policy.policy)):
                self._offer(client, slots, now_s)

    def submit_present(self, states: Sequence[RequestState], keys: Sequence[Key], now_s: float) -> None:
        """Submit blocks of some requests that the pool has already to the request-level tiers of any of them."""
        tiers = _tiers_of_any(states, self.request_level_tiers) if self._clients else []
        if not tiers or not keys:
            return
        slots = self._manager.lookup_each(list(dict.fromkeys(keys)))
        slots = slots[slots >= 0]
        if len(slots):
            for client in tiers:
                self._offer(client, slots, now_s)

    @property
    def has_tiers(self) -> bool:
        """Whether there is a tier."""
        return bool(self._clients)

    def submit_next_victims(self, now_s: float) -> None:
        """Submit next victims to the tiers that receive blocks before their eviction. Called every step."""
        clients = [client for client in self._clients if client.when is CascadeWhen.EVICT]
        if not clients:
            return
        table, before = self._manager.table, self._num_evicted
        self._num_evicted = self._manager.evictions.by_reason.get(EvictionReason.CAPACITY.value, 0)
        self._peak = max(self._num_evicted - before, self._peak - -(-self._peak // _PEAK_STEPS))
        version = self._num_evicted, table.space_version, self._manager.evictor.num_reordered
        if self._num_idle and version == self._examined:
            self._num_idle -= 1
            return
        clients = [client for client in clients if client.is_usable]
        num_victims = min(max(_VICTIM_PEAKS * self._peak, table.num_slots // _VICTIMS_SHARE), _MAX_VICTIMS)
        count = min(num_victims - table.num_free - self.count_writing_victims(), self.num_allowed)
        if not clients or count <= 0:
            return
        slots = self._manager.next_victims(count)
        self._num_idle, self._examined = _IDLE_STEPS, version
        for client in clients:
            # Those that this loop has pinned for another tier are included.
            wanted = slots[client.is_wanted(slots, table.generations[slots])]
            client.record_given(wanted)
            if len(wanted):
                self._num_idle = 0
            for start in range(0, len(wanted), _JOB_VICTIMS):
                batch = wanted[start : start + _JOB_VICTIMS]
                self.submit(client, batch, now_s, after=AfterPin.NEXT_VICTIMS)

    def allows_more(self, state: RequestState, others: Sequence[RequestState]) -> bool:
        """Return whether a request with the same blocks as `others` allows a tier to receive them that these do not.

        Tiers that cannot be used now are included.
        """
        return any(
            set(tiers_of(state)).difference(*map(tiers_of, others))
            for tiers_of in (self._allowed, self._allowed_at_request_level)
        )

    def request_level_tiers(self, state: RequestState) -> list[TierClient]:
        """Return the usable tiers that receive every block of a request, by its policy or by their own level."""
        return [client for client in self._allowed_at_request_level(state) if client.is_usable]

    def _allowed_at_request_level(self, state: RequestState) -> list[TierClient]:
        """Return the tiers of `request_level_tiers`, including those that cannot be used now."""
        level = state.policy.policy.level
        return [client for client in self._allowed(state) if Level.REQUEST in (level, client.level)]

    def _allowed(self, state: RequestState) -> list[TierClient]:
        """Return the tiers that a request's policy allows, including those that cannot be used now."""
        names = state.policy.policy.tiers
        return [client for client in self._clients if names is None or client.name in names]

    def abandon(self, clients: Sequence[TierClient]) -> None:
        """Release the slots of cascades that are not open in any of these clients, after an exception."""
        open_numbers = {job.number for client in clients for job in client.open_jobs}
        self._open = {number: pinned for number, pinned in self._open.items() if number in open_numbers}
        self._num_readers[:] = 0
        for pin in self.open_pins():
            self._num_readers[pin.slots] += 1
        self.num_held = int(np.count_nonzero(self._num_readers))

    @property
    def num_allowed(self) -> int:
        """Number of further slots that cascades may hold."""
        return max(self._manager.num_slots // _MAX_HELD_SHARE, 1) - self.num_held

    def count_writing_victims(self) -> int:
        """Count the next victims that tiers are receiving."""
        return sum(len(pin) for pin, after in self._open.values() if after is AfterPin.NEXT_VICTIMS)

    def open_pins(self) -> list[Pin]:
        """Return the pins of open cascades."""
        return [pin for pin, _ in self._open.values()]

    def _offer(self, client: TierClient, slots: Slots, now_s: float) -> None:
        """Submit ready slots, or record that the tier may receive them before their eviction."""
        if client.when is CascadeWhen.EVICT:
            client.record_wanted(slots, self._manager.table.last_generation)
            self._manager.observe_victims = self._count_lost
            self._num_idle = 0
        else:
            self.submit(client, slots, now_s)

    def _count_lost(self, slots: Slots) -> None:
        """Count blocks that are evicted before a tier received them."""
        for client in self._clients:
            if client.when is CascadeWhen.EVICT:
                is_wanted = client.is_wanted(slots, self._manager.table.generations[slots])
                client.use.cascades_dropped += int(np.count_nonzero(is_wanted))

    def submit(
        self,
        client: TierClient,
        slots: Slots,
        now_s: float,
        on_end: Callable[[NDArray[np.bool_] | None], None] = lambda ok: None,
        after: AfterPin = AfterPin.USED,
    ) -> Slots:
        """Submit a job for as many of these ready slots as may be held, from the first on; count the others.

        Args:
            client: The tier.
            slots: Ready slots, each once.
            now_s: The time.
            on_end: Receives which of the submitted blocks were stored; None if the tier did not answer in time.
            after: The place of the slots in the order of eviction afterwards.

        Returns:
            The slots submitted.
        """
        manager, table = self._manager, self._manager.table
        wanted = len(slots)
        if not client.is_usable:
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
        slots = slots[np.cumsum(self._num_readers[slots] == 0) <= self.num_allowed]
        client.use.cascades_dropped += wanted - len(slots)
        if not len(slots):
            return slots
        number, held_since = self._new_number(), client.held_since

        def end(result: TierResult | None, now_s: float) -> None:
            if result is not None and client.held_since == held_since:
                client.record_held(slots[result.ok], table.last_generation)
            pin, _ = self._open.pop(number, (None, after))
            if pin is not None:
                self._num_readers[slots] -= 1
                self.num_held -= int(np.count_nonzero(self._num_readers[slots] == 0))
                manager.end_read(pin)
            on_end(None if result is None else result.ok)

        pin = manager.pin(slots, after)
        manager.begin_read(pin)
        self._open[number] = pin, after
        self.num_held += int(np.count_nonzero(self._num_readers[slots] == 0))
        self._num_readers[slots] += 1
        keys, origins = table.keys[slots].tolist(), table.origins[slots].tolist()
        job = TierJob(number, keys, slots, table.sizes[slots], origins)
        client.store(job, now_s, end)
        return slots


def _tiers_of_any(
    states: Sequence[RequestState], tiers_of: Callable[[RequestState], Sequence[TierClient]]
) -> list[TierClient]:
    """Return the tiers of any of these requests, each once."""
    return list(dict.fromkeys(client for state in states for client in tiers_of(state)))
