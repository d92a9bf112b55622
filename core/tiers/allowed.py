"""Tiers that the policies of requests allow, at once and for blocks that were stored, where a policy names some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.policy import RequestPolicy
from kvferry.core.tiers.client import TierClient
from kvferry.core.transfers import Slots


def allowed_tiers(clients: Sequence[TierClient], policy: RequestPolicy) -> list[TierClient]:
    """Return the usable tiers that a policy allows."""
    names = policy.tiers
    return [client for client in clients if client.is_usable and (names is None or client.name in names)]


class AllowedTiers:
    """Names of tiers by slot, each valid for one generation of it. Requires: manager lock held.

    Blocks without an entry are allowed in all tiers: there is none unless a policy names tiers.
    """

    def __init__(self, max_slots: int, generations: NDArray[np.int64]) -> None:
        """`generations` is the column of the slot table."""
        self._generations = generations
        self._recorded_at = np.zeros(max_slots, dtype=np.int64)
        self._numbers = np.zeros(max_slots, dtype=np.int32)
        self._sets: dict[frozenset[str], int] = {}

    def record(self, slots: Slots, policies: Iterable[RequestPolicy]) -> None:
        """Record the tiers of blocks that were just stored for requests with these policies: all that one allows."""
        names: set[str] = set()
        for policy in policies:
            if policy.tiers is None:
                return
            names.update(policy.tiers)
        self._recorded_at[slots] = self._generations[slots]
        self._numbers[slots] = self._sets.setdefault(frozenset(names), len(self._sets))

    def allow(self, name: str, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these blocks a tier may receive."""
        is_allowed = np.array([name in names for names in self._sets] or [True], dtype=np.bool_)
        is_recorded = self._recorded_at[slots] == self._generations[slots]
        allowed: NDArray[np.bool_] = ~is_recorded | is_allowed[self._numbers[slots]]
        return allowed
