"""Eviction policies: their interface, the current one, and its exchange while the pool is in use.

Policies see only candidates: slots that are ready and not pinned. Batches are in the order of their request's blocks;
of a batch that was used at once the last slot is evicted first, so that prefixes are evicted from their end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.lru import LruPolicy, Segment
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import SlotTable
from kvferry.core.transfers import Slots


class EvictionPolicy(Protocol):
    """The order in which candidates are evicted. Every method is O(1) amortized a slot."""

    name: str

    def import_order(self, candidates: Segment) -> None:
        """Start a new policy with these candidates, in their order of eviction. O(1)."""

    def export_order(self) -> Segment:
        """Return all candidates in their order of eviction, within their priority classes. Ends the policy. O(1)."""

    def __len__(self) -> int:
        """Return the number of candidates."""

    def admit(self, slots: Slots) -> None:
        """Add slots that were just published."""

    def add(self, slots: Slots) -> None:
        """Add slots that were unpinned, as used."""

    def touch(self, slots: Slots) -> None:
        """Count a use of candidates."""

    def reorder(self, slots: Slots) -> None:
        """Move these candidates to the MRU end in this order without counting a use."""

    def remove(self, slots: Slots) -> None:
        """Remove candidates, which were pinned or dropped."""

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots) -> Slots:
        """Remove and return victims for new keys, in the order of their eviction; fewer if there are no more.

        Args:
            wanted: Hashes of the new keys, which are not in the pool.
            free: Slots for the first of them; the others need victims.
            protected: Candidates that are not evicted.
        """

    def peek_victims(self, count: int) -> Slots:
        """Return some of the next `count` victims of one priority class, in order, without removing them."""

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Allocate for another number of slots. Requires: no lock held.

        The function returned applies the allocation, in O(1), and returns what is to be freed without the lock.
        """

    def reset(self) -> None:
        """Remove all candidates, in O(1)."""


EVICTION_POLICIES: dict[str, Callable[[SlotTable], EvictionPolicy]] = {
    LruPolicy.name: LruPolicy,
    ArcPolicy.name: ArcPolicy,
}
"""Every eviction policy by its name in the setting EVICTION_POLICY."""


class Evictor:
    """The current eviction policy. Requires: manager lock held.

    Callers must notify `policy` whenever a slot becomes, or stops being, a candidate.
    """

    def __init__(self, table: SlotTable, policy: str) -> None:
        self._table = table
        self.policy = EVICTION_POLICIES[policy](table)

    def reset(self) -> None:
        """Remove all candidates.

        Raises:
            Exception: The policy failed, and was replaced by a new instance of the default policy.
        """
        try:
            self.policy.reset()
            if len(self.policy):
                raise RuntimeError(f"eviction policy {self.policy.name} has candidates after reset()")
        except Exception:
            self.policy = LruPolicy(self._table)
            raise

    def exchange_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Replace the policy by a new one, which takes over the candidates in their order; return the old one. O(1)."""
        policy.import_order(self.policy.export_order())
        replaced, self.policy = self.policy, policy
        return replaced

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`."""
        policy = self.policy
        apply_planned = policy.plan_size(num_slots)

        def apply() -> object:
            # A policy that replaced it meanwhile may be made for the old size.
            return apply_planned() if self.policy is policy else self.policy.plan_size(num_slots)()

        return apply
