"""Eviction policies: their interface, the one in force, and its exchange while the pool is in use.

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

    def import_order(self, full: Segment, empty: Segment) -> None:
        """Start with the candidates in `full`, in their order of eviction. Both segments belong to the policy now."""

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
        """Allocate for another number of slots, also while the policy is not in force. Requires: no lock held.

        The function returned puts the allocation in force, in O(1), and returns what is to be freed without the lock.
        """

    def reset(self) -> None:
        """Remove all candidates, in O(1)."""

    def export_order(self) -> tuple[Segment, Segment]:
        """Return the two segments with all candidates, of which those in the first are evicted first."""


EVICTION_POLICIES: dict[str, Callable[[SlotTable], EvictionPolicy]] = {
    LruPolicy.name: lambda table: LruPolicy(),
    ArcPolicy.name: ArcPolicy,
}
"""Every eviction policy by its name in the setting EVICTION_POLICY."""


class Evictor:
    """The eviction policy in force, and those in reserve. Requires: manager lock held.

    Callers must notify `policy` whenever a slot becomes, or stops being, a candidate.
    """

    def __init__(self, table: SlotTable, policy: str) -> None:
        self._table = table
        self._known: dict[str, EvictionPolicy] = {}
        self._prepared: dict[str, tuple[EvictionPolicy, int]] = {}
        self._planned_slots = table.num_slots
        self.policy = self._start(policy, Segment(table, 0), Segment(table, 1))

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
            self._known = {name: policy for name, policy in self._known.items() if policy is not self.policy}
            self._known.pop(LruPolicy.name, None)
            self._prepared.pop(LruPolicy.name, None)
            self.policy = self._start(LruPolicy.name, Segment(self._table, 0), Segment(self._table, 1))
            raise

    def prepare(self, name: str) -> None:
        """Allocate a policy that was never used. Requires: no lock held; one thread at a time."""
        if name not in self._known and name not in self._prepared:
            num_slots = self._table.num_slots
            self._prepared[name] = EVICTION_POLICIES[name](self._table), num_slots

    def exchange_policy(self, name: str, limit: int) -> bool:
        """Replace the policy and keep the order of the candidates. Returns True while it has to be called again.

        A call works on at most `limit` slots. Until the exchange is done, the policy is LRU.
        """
        policy = self.policy
        if not isinstance(policy, LruPolicy):
            if policy.name == name:
                return False
            lru = LruPolicy()
            lru.inherit(*policy.export_order())
            self.policy = policy = lru
        if not policy.merge_segments(limit):
            return True
        if name != policy.name:
            empty, full = policy.export_order()
            self.policy = self._start(name, full, empty)
        return False

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Prepare a change of the size; see `kvferry.core.pool.resize.plan_size`."""
        plans = {name: policy.plan_size(num_slots) for name, policy in list(self._known.items())}

        def put_in_force() -> object:
            self._planned_slots = num_slots
            # A policy that was first used meanwhile was made for the old size.
            return [(plans.get(name) or policy.plan_size(num_slots))() for name, policy in self._known.items()]

        return put_in_force

    def _start(self, name: str, full: Segment, empty: Segment) -> EvictionPolicy:
        """Put a policy in force. It is retained afterwards, as freeing the memory of a large one takes too long."""
        policy = self._known.get(name)
        if policy is not None:
            policy.import_order(full, empty)
            return policy
        self.prepare(name)
        policy, num_slots = self._prepared.pop(name)
        self._known[name] = policy
        policy.import_order(full, empty)
        if self._planned_slots > num_slots:
            # The pool has grown or is about to, and the plan for that did not include this policy.
            policy.plan_size(self._planned_slots)()
        return policy
