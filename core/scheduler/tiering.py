"""Tiering: the tiers below the pool, their results, and their resets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import SlotRows
from kvferry.core.scheduler.cascades import Cascades
from kvferry.core.scheduler.flushes import Flushes
from kvferry.core.scheduler.prefetch import Prefetches
from kvferry.core.scheduler.tier_loads import TierLoads
from kvferry.core.tiers.base import CascadeWhen, Tier, TierResetResult, TierStats
from kvferry.core.tiers.client import OpenTierJob, TierClient

_log = logging.getLogger(__name__)


class Tiering:
    """The tiers below the pool, possibly none. Requires: manager lock held, except where a method acquires it."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        tiers: Mapping[str, Tier],
        new_number: Callable[[], int],
        cost_model: LoadOrCompute,
    ) -> None:
        """`tiers` by name, the fastest first. `cost_model` has the rates of loading and computing."""
        max_slots = manager.table.max_slots
        self.clients = [TierClient(name, tier, cost_model, new_number, max_slots) for name, tier in tiers.items()]
        self.cascades = Cascades(manager, self.clients, new_number)
        self.flushes = Flushes(manager, layout, self.cascades, self.clients)
        self.loads = TierLoads(manager)
        self.prefetches = Prefetches(manager, self.loads, self.clients, new_number)
        self.new_number = new_number
        self._cost_model = cost_model
        self._lock = manager.lock
        self._table = manager.table
        self.detached: set[str] = set()
        """Names of the tiers that were detached and not attached again."""

    def process_results(self, now_s: float) -> None:
        """Process the tiers' results, and cancel jobs that exceeded their time limit."""
        for client in self.clients:
            client.poll(now_s)

    # --- resets -----------------------------------------------------------------------------------------------------

    def named(self, names: Sequence[str]) -> list[TierClient]:
        """Return the tiers with these names. Raises `ValueError` for an unknown name."""
        unknown = sorted(set(names) - {client.name for client in self.clients})
        if unknown:
            raise ValueError(f"there is no tier called {', '.join(unknown)}")
        return [client for client in self.clients if client.name in names]

    def forget_held(self, clients: Sequence[TierClient]) -> None:
        """Forget which blocks these tiers hold: a reset by match forgets all, as the tier alone knows what matches."""
        self._table.last_generation += 1
        for client in clients:
            client.held_since = self._table.last_generation

    def abandon(self, now_s: float) -> None:
        """After an exception, end all flushes, and publish nothing that is in flight."""
        for client in self.clients:
            client.resubmit_resets()
        self.cascades.abandon(self.clients)
        self.loads.abandon(self.clients)
        self.flushes.abandon(now_s)

    def reset_results(self, tickets: Mapping[str, int]) -> dict[str, TierResetResult]:
        """Return the results of these resets that have arrived."""
        named = [client for client in self.clients if client.name in tickets]
        results = {client.name: client.reset_result(tickets[client.name]) for client in named}
        return {name: result for name, result in results.items() if result is not None}

    def open_transfers(self) -> list[int]:
        """Return the numbers of the open jobs, without look-ups."""
        return [job.number for job in self._open_jobs() if len(job.slots)]

    def count_open(self, numbers: Sequence[int]) -> int:
        """Count those of these jobs and resets that have not ended."""
        among = set(numbers)
        num_jobs = sum(job.number in among for job in self._open_jobs())
        return num_jobs + sum(reset.ticket in among for client in self.clients for reset in client.open_resets)

    # --- operators: each method acquires the manager lock -----------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiers, the fastest first."""
        return tuple(client.name for client in self.clients)

    def attach(self, name: str, tier: Tier, *, is_enabled: bool = True) -> None:
        """Use a tier from now on, or once it is enabled, as the slowest."""
        with self._lock:
            client = TierClient(name, tier, self._cost_model, self.new_number, self._table.max_slots)
            client.is_enabled = is_enabled
            self.detached.discard(name)
            self.clients.append(client)

    def enable(self, name: str, *, is_enabled: bool) -> None:
        """Submit jobs to a tier or none; jobs under way end, and resets reach it. Raises `ValueError`: unknown name."""
        with self._lock:
            self.named([name])[0].is_enabled = is_enabled

    def cascade_when(self, name: str, when: CascadeWhen) -> None:
        """Give blocks to a tier when they are stored, or before they are evicted. Raises `ValueError`: unknown name.

        Before an eviction it receives blocks that are stored from now on.
        """
        with self._lock:
            self.named([name])[0].when = when

    def enabled(self) -> dict[str, bool]:
        """Return whether jobs are submitted to each tier, by name."""
        with self._lock:
            return {client.name: client.is_enabled for client in self.clients}

    def drops_matching(self) -> dict[str, bool]:
        """Return, by tier, whether a reset by match drops the blocks of matching origins only."""
        with self._lock:
            return {client.name: client.drops_matching for client in self.clients}

    def is_idle(self, name: str) -> bool:
        """Return whether no job or reset of a tier is open. Raises `ValueError` for an unknown name."""
        with self._lock:
            client = self.named([name])[0]
            return not (client.open_jobs or client.open_resets)

    def count_most_open(self) -> int:
        """Return the number of resets and drops that the tier with most of them has not completed."""
        with self._lock:
            return max((len(client.open_resets) for client in self.clients), default=0)

    def detach(self, name: str, now_s: float) -> bool:
        """Cancel what is open of a tier and forget it; the caller closes it.

        Returns:
            False if the tier may still touch slots, or has not ended a reset: it stays, and is not used.

        Raises:
            ValueError: The name is unknown.
        """
        with self._lock:
            client = self.named([name])[0]
            client.is_enabled = False
            if client.open_resets or client.has_stuck_jobs():
                return False
            client.cancel_all(now_s)
            if client.has_stuck_jobs():
                return False
            client.close(now_s)
            self.clients.remove(client)
            self.detached.add(name)
            self.flushes.forget(name, now_s)
            return True

    def poll(self, now_s: float) -> None:
        """Process results as every step does, for times when the engine is idle."""
        with self._lock:
            self.process_results(now_s)
        self.log_warnings()

    def holders(self, rows: SlotRows) -> list[list[str]]:
        """Return the tiers that are known to hold each block: they stored it, or it was promoted from them.

        A tier that has evicted a block since is still named.
        """
        holders: list[list[str]] = [[] for _ in rows.keys]
        with self._lock:
            for client in self.clients:
                for i in client.is_held(rows.slots, rows.records["generation"]).nonzero()[0].tolist():
                    holders[i].append(client.name)
        return holders

    def health(self) -> list[str]:
        """Return the reasons why tiers work with restrictions, one per item."""
        with self._lock:
            return [reason for client in self.clients for reason in client.health()]

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier."""
        with self._lock:
            return {client.name: TierStats(*client.counts()) for client in self.clients}

    def close(self, now_s: float) -> None:
        """Cancel all jobs, and submit nothing from now on."""
        with self._lock:
            for client in self.clients:
                client.close(now_s)
        self.log_warnings()

    def log_warnings(self) -> None:
        """Log the warnings about tiers. Acquires the manager lock if there are any, and logs without it."""
        if not any(client.warnings for client in self.clients):
            return
        with self._lock:
            warnings = [text for client in self.clients for text in client.warnings]
            for client in self.clients:
                client.warnings.clear()
        for warning in warnings:
            _log.warning("tier failed, the engine continues without it: %s", warning)

    # --- internals --------------------------------------------------------------------------------------------------

    def _open_jobs(self) -> list[OpenTierJob]:
        return [job for client in self.clients for job in client.open_jobs]
