"""Room: who goes when no slot is free, by the eviction policy in force, and how policies are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.eviction import EVICTION_POLICIES, EvictionPolicy
from kvferry.core.keys import Key, Prefix
from kvferry.core.lru import LruPolicy
from kvferry.core.marks import Marks
from kvferry.core.segments import Segment
from kvferry.core.slots import SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_LARGE_POOL = 8
"""A pool that holds a request so many times over does not come to evict it while it runs."""
_RESIDENCY_LOOK = 4
"""How many candidates for eviction are asked after on the device, for each that is wanted."""
_LEAST_LOOK = 16
_MOST_LOOK = 1000

Residency = Callable[[Sequence[Key]], Sequence[bool]]


class Room:
    """`policy` is to be told of every slot that may go from now on, or may not go any more."""

    def __init__(self, table: SlotTable, policy: str) -> None:
        self._table = table
        self._known: dict[str, EvictionPolicy] = {}
        self._prepared: dict[str, tuple[EvictionPolicy, int]] = {}
        self._planned_slots = table.num_slots
        self.policy = self._start(policy, Segment(table, 0), Segment(table, 1))
        self.version = 0
        """Raised whenever room may have appeared, so that a refused store knows when to ask again."""
        self.residency: Residency | None = None
        """Asked which keys the device holds, whose copies go first when room is needed. On the engine's thread."""

    def make(self, wanted: Marks, free: Slots, own: Slots, prefix: Prefix) -> Slots:
        """Evict candidates for the keys of the `wanted` marks, of which the first get the `free` slots.

        They are fewer if there are no more. Neither slots of `own` are evicted nor those that hold keys of `prefix`.
        The latter are not looked up: those that are next move behind the other candidates, a bounded number a call.
        """
        missing = len(wanted) - len(free)
        spared = NO_SLOTS
        if missing > 0 and len(prefix) * _LARGE_POOL > self._table.num_slots:
            # In a larger pool the request's earlier blocks are among the latest used.
            coldest = self.policy.peek_victims(min(missing + len(prefix), _MOST_LOOK))
            coldest = coldest[self._holds(prefix, coldest)]
            spared = coldest[~np.isin(coldest, own)]
        victims = self._make_beside(wanted, free, own, spared)
        if not len(prefix) or not len(victims):
            return victims
        mine = self._holds(prefix, victims)
        if not mine.any():
            return victims
        taken, aside = [victims[~mine]], [victims[mine]]
        num_taken, num_aside = len(taken[0]), len(aside[0])
        while num_taken < missing and len(victims):
            if num_aside >= _MOST_LOOK:
                # The offer ends here and may be repeated at once: other candidates come first then.
                self.version += 1
                break
            # What was taken is no candidate any more: sparing it would make it one again.
            own = own[~np.isin(own, victims)]
            victims = self._make_beside(wanted[len(free) + num_taken :], NO_SLOTS, own, NO_SLOTS)
            mine = self._holds(prefix, victims)
            taken.append(victims[~mine])
            aside.append(victims[mine])
            num_taken += len(taken[-1])
            num_aside += len(aside[-1])
        # They were taken from a request's end to its beginning.
        self.policy.add(np.concatenate(aside)[::-1])
        return np.concatenate(taken)

    def _make_beside(self, wanted: Marks, free: Slots, own: Slots, spared: Slots) -> Slots:
        """Evict candidates other than these slots, of which `own` were just used."""
        if not len(own):
            return self._make(wanted, free, spared, 0)
        missing = len(wanted) - len(free)
        if len(own) * _LARGE_POOL > self._table.num_slots:
            return self._make(wanted, free, np.concatenate((self._candidates(own), spared)), 0)
        # In a large pool the own slots are among the latest used, and safe without looking for them.
        victims = self._make(wanted, free, spared, len(own))
        if missing > len(victims):
            rest = wanted[len(free) + len(victims) :]
            # Not all candidates need have been used since, and what was taken is no candidate any more.
            left = self._candidates(own)
            left = np.concatenate((left[~np.isin(left, victims)], spared))
            victims = np.concatenate((victims, self._make(rest, NO_SLOTS, left, 0)))
        return victims

    def _holds(self, prefix: Prefix, slots: Slots) -> NDArray[np.bool_]:
        table = self._table
        return np.array(prefix.holds(table.keys[slots].tolist(), table.positions[slots].tolist()), dtype=np.bool_)

    def _candidates(self, slots: Slots) -> Slots:
        """Those of these ready slots that could go."""
        candidates: Slots = slots[self._table.pins[slots] == 0]
        return candidates

    def free(self, slots: Slots) -> None:
        """These slots, none of which is free, hold nothing any more."""
        self._table.give_back(slots)
        self.version += 1

    def grow(self, end_slot: int) -> None:
        """Give out slots up to this one, a batch more than before at most. Their memory has to be there."""
        self._table.grow(end_slot)
        self.version += 1

    def start_over(self) -> None:
        """Forget every candidate.

        Raises what a policy that cannot do so raises, after it was replaced by a new one of the default policy.
        """
        self.version += 1
        try:
            self.policy.clear()
            if len(self.policy):
                raise RuntimeError(f"eviction policy {self.policy.name} has candidates after clear()")
        except Exception:
            self._replace_policy()
            raise

    def _replace_policy(self) -> None:
        self._known = {name: policy for name, policy in self._known.items() if policy is not self.policy}
        self._known.pop(LruPolicy.name, None)
        self._prepared.pop(LruPolicy.name, None)
        self.policy = self._start(LruPolicy.name, Segment(self._table, 0), Segment(self._table, 1))

    def prepare(self, name: str) -> None:
        """Allocate what a policy takes that was never used. Called without the lock, by one thread."""
        if name not in self._known and name not in self._prepared:
            num_slots = self._table.num_slots
            self._prepared[name] = EVICTION_POLICIES[name](self._table), num_slots

    def exchange_policy(self, name: str, limit: int) -> bool:
        """Move on to another policy, with the order of the candidates as it is; True while there is more to do.

        Each call works on `limit` slots at most. Until it is done, the least recently used go first.
        """
        policy = self.policy
        if not isinstance(policy, LruPolicy):
            if policy.name == name:
                return False
            lru = LruPolicy()
            lru.inherit(*policy.hand_over())
            self.policy = policy = lru
        if not policy.settle(limit):
            return True
        if name != policy.name:
            empty, full = policy.hand_over()
            self.policy = self._start(name, full, empty)
        return False

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """See `kvferry.core.resize.plan_size`."""
        plans = {name: policy.plan_size(num_slots) for name, policy in list(self._known.items())}

        def put_in_force() -> object:
            self._planned_slots = num_slots
            # One that was first used meanwhile is made for the old size.
            return [(plans.get(name) or policy.plan_size(num_slots))() for name, policy in self._known.items()]

        return put_in_force

    def _start(self, name: str, full: Segment, empty: Segment) -> EvictionPolicy:
        """A policy is kept once it was used: to free the memory of one for a large pool takes too long for any lock."""
        policy = self._known.get(name)
        if policy is not None:
            policy.take_over(full, empty)
            return policy
        self.prepare(name)
        policy, num_slots = self._prepared.pop(name)
        self._known[name] = policy
        policy.take_over(full, empty)
        if self._planned_slots > num_slots:
            # The pool has grown since or is about to, and what was made for that did not know this policy.
            policy.plan_size(self._planned_slots)()
        return policy

    def _make(self, wanted: Marks, free: Slots, spared: Slots, young: int) -> Slots:
        missing = len(wanted) - len(free)
        if self.residency is None or missing <= 0:
            return self.policy.make_room(wanted, free, spared, young)
        resident = self._take_resident(self.residency, missing, spared)
        if not len(resident):
            return self.policy.make_room(wanted, free, spared, young)
        others = self.policy.make_room(wanted, np.concatenate((free, resident)), spared, young)
        return np.concatenate((resident, others))

    def _take_resident(self, residency: Residency, count: int, spared: Slots) -> Slots:
        """Up to `count` of the coldest slots whose blocks the device still holds: nothing is lost with them."""
        look = min(_RESIDENCY_LOOK * max(count, _LEAST_LOOK), _MOST_LOOK)
        candidates = self.policy.peek_victims(look)
        if len(spared):
            candidates = candidates[~np.isin(candidates, spared)]
        if not len(candidates):
            return NO_SLOTS
        held: NDArray[np.bool_] = np.array(residency(self._table.keys[candidates].tolist()), dtype=np.bool_)
        victims = candidates[held][:count]
        self.policy.remove(victims)
        return victims
