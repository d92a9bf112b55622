"""The evictor: picks the victims for new blocks by the eviction policy in force, and exchanges policies.

Policies see only candidates: slots that are ready and not pinned. Batches are in the order of their request's blocks;
of a batch that was used at once the last slot is evicted first, so that prefixes are evicted from their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, Prefix
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.lru import LruPolicy
from kvferry.core.pool.eviction.queue import Segment
from kvferry.core.pool.index import KeyHashes
from kvferry.core.pool.slots import SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_LARGE_POOL = 8
"""A pool of so many times a request's slots does not come to evict them while the request runs."""
_RESIDENCY_FACTOR = 4
"""Candidates checked for residency on the device, for each victim wanted."""
_MIN_RESIDENCY = 16
_MAX_CANDIDATES = 1000

Residency = Callable[[Sequence[Key]], Sequence[bool]]
"""Returns which keys the device holds. Thread: engine."""


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

    def take_victims(self, wanted: KeyHashes, free: Slots, protected: Slots, young: int) -> Slots:
        """Remove and return victims for new keys, in the order of their eviction; fewer if there are no more.

        Args:
            wanted: Hashes of the new keys, which are not in the pool.
            free: Slots for the first of them; the others need victims.
            protected: Candidates that are not evicted.
            young: Number of slots at the MRU end of each queue that are not evicted either.
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
    """The policy in force and those in reserve. Requires: manager lock held.

    Callers must notify `policy` whenever a slot becomes, or stops being, a candidate.
    """

    def __init__(self, table: SlotTable, policy: str) -> None:
        self._table = table
        self._known: dict[str, EvictionPolicy] = {}
        self._prepared: dict[str, tuple[EvictionPolicy, int]] = {}
        self._planned_slots = table.num_slots
        self.policy = self._start(policy, Segment(table, 0), Segment(table, 1))
        self.version = 0
        """Raised whenever space may have appeared, so that refused stores are retried."""
        self.residency: Residency | None = None
        """In lazy mode: blocks that the device still holds are evicted first."""

    def take_victims(self, wanted: KeyHashes, free: Slots, own: Slots, prefix: Prefix) -> Slots:
        """Remove candidates from the policy as victims for new keys of a request; fewer if there are no more.

        Slots of `own` are not evicted, nor those that hold keys of `prefix`. The latter are not looked up: those that
        the policy takes are put back behind the other candidates, a bounded number a call.

        Args:
            wanted: Hashes of the new keys.
            free: Slots for the first of them; the others need victims.
            own: Slots of the request that were just used.
            prefix: The request's earlier keys.
        """
        missing = len(wanted) - len(free)
        protected = NO_SLOTS
        if missing > 0 and prefix.num_keys * _LARGE_POOL > self._table.num_slots:
            # In a larger pool the request's earlier blocks are among the latest used.
            coldest = self.policy.peek_victims(min(missing + prefix.num_keys, _MAX_CANDIDATES))
            coldest = coldest[self._are_in(prefix, coldest)]
            protected = coldest[~np.isin(coldest, own)]
        victims = self._take_unless_own(wanted, free, own, protected)
        if not prefix.num_keys or not len(victims):
            return victims
        is_prefix = self._are_in(prefix, victims)
        if not is_prefix.any():
            return victims
        taken, put_back = [victims[~is_prefix]], [victims[is_prefix]]
        num_taken, num_put_back = len(taken[0]), len(put_back[0])
        while num_taken < missing and len(victims):
            if num_put_back >= _MAX_CANDIDATES:
                # The offer ends here and may be repeated at once: other candidates come first then.
                self.version += 1
                break
            # Victims are no candidates any more: protecting them would add them again.
            own = own[~np.isin(own, victims)]
            victims = self._take_unless_own(wanted[len(free) + num_taken :], NO_SLOTS, own, NO_SLOTS)
            is_prefix = self._are_in(prefix, victims)
            taken.append(victims[~is_prefix])
            put_back.append(victims[is_prefix])
            num_taken += len(taken[-1])
            num_put_back += len(put_back[-1])
        # They were taken from a request's end to its beginning.
        self.policy.add(np.concatenate(put_back)[::-1])
        return np.concatenate(taken)

    def free(self, slots: Slots) -> None:
        """Free slots that are not candidates."""
        self._table.free(slots)
        self.version += 1

    def grow(self, end_slot: int) -> None:
        """Allow slots up to this one, at most a batch more, to be allocated. Their memory has to exist."""
        self._table.grow(end_slot)
        self.version += 1

    def reset(self) -> None:
        """Remove all candidates.

        Raises:
            Exception: The policy failed, and was replaced by a new instance of the default policy.
        """
        self.version += 1
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

    # --- exchange and resize ----------------------------------------------------------------------------------------

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

    # --- inside -----------------------------------------------------------------------------------------------------

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

    def _take_unless_own(self, wanted: KeyHashes, free: Slots, own: Slots, protected: Slots) -> Slots:
        """Take victims that are neither `protected` nor `own`, which were just used."""
        if not len(own):
            return self._take(wanted, free, protected, 0)
        missing = len(wanted) - len(free)
        candidates: Slots = own[self._table.pins[own] == 0]
        if len(own) * _LARGE_POOL > self._table.num_slots:
            return self._take(wanted, free, np.concatenate((candidates, protected)), 0)
        # In a large pool the own slots are among the latest used, and are protected without finding them.
        victims = self._take(wanted, free, protected, len(own))
        if missing > len(victims):
            rest = wanted[len(free) + len(victims) :]
            # Own slots may be further from the MRU end; victims are no candidates any more.
            left = np.concatenate((candidates[~np.isin(candidates, victims)], protected))
            victims = np.concatenate((victims, self._take(rest, NO_SLOTS, left, 0)))
        return victims

    def _take(self, wanted: KeyHashes, free: Slots, protected: Slots, young: int) -> Slots:
        missing = len(wanted) - len(free)
        if self.residency is None or missing <= 0:
            return self.policy.take_victims(wanted, free, protected, young)
        resident = self._take_resident(self.residency, missing, protected)
        if not len(resident):
            return self.policy.take_victims(wanted, free, protected, young)
        others = self.policy.take_victims(wanted, np.concatenate((free, resident)), protected, young)
        return np.concatenate((resident, others))

    def _take_resident(self, residency: Residency, count: int, protected: Slots) -> Slots:
        """Take up to `count` of the coldest slots whose blocks the device still holds, as nothing is lost with them."""
        limit = min(_RESIDENCY_FACTOR * max(count, _MIN_RESIDENCY), _MAX_CANDIDATES)
        candidates = self.policy.peek_victims(limit)
        if len(protected):
            candidates = candidates[~np.isin(candidates, protected)]
        if not len(candidates):
            return NO_SLOTS
        held: NDArray[np.bool_] = np.array(residency(self._table.keys[candidates].tolist()), dtype=np.bool_)
        victims = candidates[held][:count]
        self.policy.remove(victims)
        return victims

    def _are_in(self, prefix: Prefix, slots: Slots) -> NDArray[np.bool_]:
        table = self._table
        return np.array(prefix.holds(table.keys[slots].tolist(), table.positions[slots].tolist()), dtype=np.bool_)
