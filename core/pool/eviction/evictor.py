"""Eviction policies: their interface, the current one, its exchange while the pool is in use, and choice of victims.

Policies see only candidates: slots that are ready and not pinned. Batches are in the order of their request's blocks;
of a batch that was used at once the last slot is evicted first, so that prefixes are evicted from their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.lru import LruPolicy, Segment
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import RecencyQueue, SlotTable
from kvferry.core.transfers import NO_SLOTS, Slots

_LARGE_POOL = 8
"""In a pool with more than this many times a request's slots, those are never among the next victims."""
_MAX_CANDIDATES = 1000
"""Candidates examined in one call at most, which bounds the time under the lock."""

Residency = Callable[[Sequence[Key]], Sequence[bool]]
"""Returns which keys the device holds. Thread: engine."""


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

    def queue_of(self, slot: int) -> RecencyQueue:
        """Return the queue in which a slot is when it is a candidate."""

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
        """Return up to `count` victims in the order in which they would be evicted, about, without removing them."""

    def plan_size(self, num_slots: int) -> Callable[[], object]:
        """Allocate for another number of slots. Requires: no lock held.

        The function returned applies the allocation, in O(1), and returns what is to be freed without the lock.
        """

    def reset(self) -> None:
        """Remove all candidates, in O(1)."""


EVICTION_POLICIES: dict[str, Callable[[SlotTable], EvictionPolicy]] = {
    LruPolicy.name: LruPolicy,
    ArcPolicy.name: ArcPolicy,
    HazardPolicy.name: HazardPolicy,
}
"""Every eviction policy by its name in the setting EVICTION_POLICY."""


class Evictor:
    """All candidates, and the choice of victims among them for an offer. Requires: manager lock held.

    Candidates whose blocks the device holds, as far as lazy mode knows, are evicted first, as nothing is lost
    with them: they are in a segment of their own. All others are the current policy's. Callers must
    notify the evictor whenever a slot becomes, or stops being, a candidate.
    """

    def __init__(self, table: SlotTable, policy: str) -> None:
        self._table = table
        self.policy = EVICTION_POLICIES[policy](table)
        self.residency: Residency | None = None
        """In lazy mode: returns which blocks the device holds, which are evicted first."""
        self._on_device = Segment(table)
        """In the order of their latest use on the device."""
        self._is_on_device = np.zeros(table.max_slots, dtype=np.bool_)
        """Whether a slot, when it is a candidate, is in `_on_device`."""
        self._has_on_device = False
        """Whether any slot was on the device so far: without, as in eager mode, none need be looked at."""
        self._set_aside: set[int] = set()
        """Slots that `set_aside` has removed, and that were not used since."""
        self._places: dict[int, tuple[int, int]] = {}
        """Of slots that `hold_place` has removed, and that were not used since: the candidate that would be evicted
        before, negative if there was none, and the generation of that one."""
        self._victim_numbers = np.zeros(table.max_slots, dtype=np.int64)
        """The order in which `next_victims` has returned slots since their latest use, 0 for the others."""
        self._last_victim_number = 0
        self.num_reordered = 0
        """Number of calls that moved candidates to the MRU end."""
        self._tenants = table.tenants

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.policy) + len(self._on_device)

    @property
    def learner(self) -> HazardPolicy | None:
        """The policy, if it learns from what requests use, wherever it is."""
        return self.policy if isinstance(self.policy, HazardPolicy) else None

    # --- candidates -------------------------------------------------------------------------------------------------

    def admit(self, slots: Slots) -> None:
        """Add slots that were just published."""
        if self._has_on_device:
            self._is_on_device[slots] = False
        self._forget_ranks(slots)
        self.policy.admit(slots)
        if self._tenants.is_limiting:
            self._tenants.admit(slots)

    def add(self, slots: Slots) -> None:
        """Add slots that were unpinned, as used, unless they were set aside or held in place and not used since."""
        in_place = NO_SLOTS
        if self._places:
            is_in_place = np.array([slot in self._places for slot in slots.tolist()], dtype=np.bool_)
            in_place, slots = slots[is_in_place], slots[~is_in_place]
        if self._set_aside:
            is_aside = np.array([slot in self._set_aside for slot in slots.tolist()], dtype=np.bool_)
            self._put_back(slots[is_aside])
            slots = slots[~is_aside]
        self._forget_ranks(slots)
        on_device, others = self._split(slots)
        if len(on_device):
            self._on_device.append(on_device)
        self.policy.add(others)
        if self._tenants.is_limiting:
            self._tenants.use(slots)
        if len(in_place):
            # Behind the others, of which some may be the candidates before them.
            self._put_in_place(in_place)

    def touch(self, slots: Slots) -> None:
        """Count a use of candidates."""
        self._move_to_end(slots, self.policy.touch)

    def reorder(self, slots: Slots) -> None:
        """Move candidates to the MRU end in this order without counting a use."""
        self._move_to_end(slots, self.policy.reorder)

    def _move_to_end(self, slots: Slots, move: Callable[[Slots], None]) -> None:
        self.num_reordered += 1
        self._forget_ranks(slots)
        on_device, others = self._split(slots)
        if len(on_device):
            self._on_device.touch(on_device)
        move(others)
        if self._tenants.is_limiting:
            self._tenants.use(slots)

    def remove(self, slots: Slots) -> None:
        """Remove candidates, which were pinned or dropped."""
        on_device, others = self._split(slots)
        if len(on_device):
            self._on_device.remove(on_device)
        self.policy.remove(others)
        if self._tenants.is_limiting:
            self._tenants.remove(slots)

    def record_end(self, hashes: KeyHashes, slots: Slots, num_output_tokens: int, now_s: float) -> None:
        """See `HazardPolicy`; `slots` are ready."""
        if self.learner is not None:
            candidates = np.sort(self._split(slots[self._table.pins[slots] == 0])[1])
            if (candidates[1:] == candidates[:-1]).any():
                # A slot that is queued twice would be given out twice.
                candidates = np.unique(candidates)
            self.learner.record_end(hashes, candidates, num_output_tokens, now_s)

    def reset(self) -> None:
        """Remove all candidates.

        Raises:
            Exception: The policy failed, and was replaced by a new instance of the default policy.
        """
        self._on_device.reset()
        self._set_aside.clear()
        self._places.clear()
        try:
            self.policy.reset()
            if len(self.policy):
                raise RuntimeError(f"eviction policy {self.policy.name} has candidates after reset()")
        except Exception:
            self.policy = LruPolicy(self._table)
            raise

    def _split(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return the slots that are in `_on_device` when they are candidates, and those that the policy has then."""
        if not self._has_on_device:
            return NO_SLOTS, slots
        is_on_device = self._is_on_device[slots]
        return slots[is_on_device], slots[~is_on_device]

    # --- the next victims, and those that are set aside meanwhile ---------------------------------------------------

    def next_victims(self, count: int) -> Slots:
        """Return up to `count` candidates that are evicted next, about, without those that the device holds."""
        slots = self.policy.peek_victims(count)
        unnumbered = slots[self._victim_numbers[slots] == 0]
        self._victim_numbers[unnumbered] = self._last_victim_number + 1 + np.arange(len(unnumbered))
        self._last_victim_number += len(unnumbered)
        return slots

    def set_aside(self, slots: Slots) -> None:
        """Remove candidates that are pinned without a use."""
        self.remove(slots)
        self._set_aside.update(slots.tolist())

    def end_aside(self, slots: Slots) -> None:
        """Record that slots, of which some may be set aside or held in place, were used or freed."""
        if self._set_aside:
            self._set_aside.difference_update(slots.tolist())
        if not self._places:
            return
        left = {slot: self._places.pop(slot) for slot in slots.tolist() if slot in self._places}
        for slot, place in self._places.items() if left else ():
            # Those that were behind a slot that leaves its place take it over.
            while place[0] in left:
                place = left[place[0]]
            self._places[slot] = place

    def hold_place(self, slots: Slots) -> None:
        """Remove candidates that are pinned without a use, and remember their places in the order of eviction."""
        older = self._table.older[slots]
        places = zip(older.tolist(), self._table.generations[older].tolist(), strict=True)
        self._places.update(zip(slots.tolist(), places, strict=True))
        self.remove(slots)

    def _put_in_place(self, slots: Slots) -> None:
        """Add slots that were held in place behind the candidates that would be evicted before them.

        If that one was evicted they are the next victims; if it was used meanwhile, without being held, they stay next
        to it.
        """
        table = self._table
        for slot in slots.tolist():
            older, generation = self._places.pop(slot)
            while (place := self._places.get(older)) is not None:
                older, generation = place
            queue = self._queue_of(slot)
            is_here = older >= 0 and table.generations[older] == generation and table.is_ready(np.array([older]))[0]
            if not is_here or older in self._set_aside:
                queue.prepend(np.array([slot]))
            elif not table.pins[older] and self._queue_of(older) is queue:
                queue.insert_after(slot, older)
            else:
                queue.append(np.array([slot]))
        if self._tenants.is_limiting:
            self._tenants.use(slots)

    def _queue_of(self, slot: int) -> RecencyQueue:
        """Return the queue in which a slot is when it is a candidate."""
        is_on_device = self._has_on_device and self._is_on_device[slot]
        return self._on_device.queue_of(slot) if is_on_device else self.policy.queue_of(slot)

    def _put_back(self, slots: Slots) -> None:
        """Make slots the next victims again that were set aside and not used since."""
        self._set_aside.difference_update(slots.tolist())
        numbers, queues = self._victim_numbers, dict[RecencyQueue, list[int]]()
        for slot in slots.tolist():
            queues.setdefault(self._queue_of(slot), []).append(slot)
        for queue, part in queues.items():
            # By number among those that have one, which are the next victims; those without one before all.
            has_none = numbers[queue.peek_oldest(_MAX_CANDIDATES)] == 0
            num_numbered = int(has_none.argmax()) if has_none.any() else len(has_none)
            first = np.concatenate((queue.take_oldest(num_numbered), part))
            queue.prepend(first[np.argsort(numbers[first], kind="stable")])
        if self._tenants.is_limiting:
            self._tenants.add_oldest(slots[np.argsort(self._victim_numbers[slots], kind="stable")])

    def _forget_ranks(self, slots: Slots) -> None:
        """Forget the places of slots among the next victims, as they were used."""
        if self._last_victim_number:
            self._victim_numbers[slots] = 0

    # --- blocks that the device holds -------------------------------------------------------------------------------

    def enter_device(self, slots: Slots) -> None:
        """Record that the device holds the blocks of these ready slots, and has just used them."""
        candidates = slots[self._table.pins[slots] == 0]
        self.remove(candidates)
        self._is_on_device[slots] = self._has_on_device = True
        self._on_device.append(candidates)
        if self._tenants.is_limiting:
            self._tenants.use(candidates)

    def leave_device(self, slots: Slots) -> None:
        """Record that the device is about to reuse the blocks of these ready slots; candidates become the latest."""
        self._forget_ranks(slots)
        candidates = slots[self._table.pins[slots] == 0]
        on_device, others = self._split(candidates)
        self.policy.reorder(others)
        self._on_device.remove(on_device)
        self.policy.add(on_device)
        if self._tenants.is_limiting:
            self._tenants.use(candidates)
        if self._has_on_device:
            self._is_on_device[slots] = False

    # --- exchange and size ------------------------------------------------------------------------------------------

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

    # --- choice of victims ------------------------------------------------------------------------------------------

    def take_victims(
        self, wanted: KeyHashes, free: Slots, present: Slots, prefix: Prefix, on_engine_thread: bool = True
    ) -> Slots:
        """Remove candidates from the policy as victims for new keys of a request; fewer if there are no more.

        Slots of `present` are not evicted, nor those that hold keys of `prefix`. The latter are not looked up: those
        that the policy takes are put back behind the other candidates, a bounded number a call.

        Args:
            wanted: Hashes of the new keys.
            free: Slots for the first of them; the others need victims.
            present: Slots that hold other keys of the offer, and were just used.
            prefix: The request's earlier keys.
            on_engine_thread: Whether `residency` may be called; see `OffloadManager.prepare_store`.
        """
        residency = self.residency if on_engine_thread else None
        table, missing = self._table, len(wanted) - len(free)
        if len(present):
            present = present[table.pins[present] == 0]
        protected = present
        num_earlier = _count_keys(prefix)
        if missing > 0 and num_earlier * _LARGE_POOL > table.num_slots:
            # In a larger pool the request's earlier blocks are among the latest used.
            coldest = self.policy.peek_victims(min(missing + num_earlier, _MAX_CANDIDATES))
            coldest = coldest[self._are_in(prefix, coldest) & ~np.isin(coldest, present)]
            protected = np.concatenate((self._in_request_order(coldest), present))
        victims = self._take(wanted, free, protected, prefix, residency)
        if not num_earlier or not len(victims):
            return victims
        is_prefix = self._are_in(prefix, victims)
        if not is_prefix.any():
            return victims
        taken, put_back = [victims[~is_prefix]], [victims[is_prefix]]
        num_taken, num_put_back = len(taken[0]), len(put_back[0])
        while num_taken < missing and len(victims):
            if num_put_back >= _MAX_CANDIDATES:
                # The offer ends here. A raised version lets the scheduler repeat it at once, with other candidates, as
                # long as there must be some that are not needed.
                table.space_version += len(self) + num_put_back > num_earlier + len(present)
                break
            # Victims are no candidates any more: protecting them would add them again.
            present = present[~np.isin(present, victims)]
            victims = self._take(wanted[len(free) + num_taken :], NO_SLOTS, present, prefix, residency)
            is_prefix = self._are_in(prefix, victims)
            taken.append(victims[~is_prefix])
            put_back.append(victims[is_prefix])
            num_taken += len(taken[-1])
            num_put_back += len(put_back[-1])
        self.add(self._in_request_order(np.concatenate(put_back)))
        return np.concatenate(taken)

    def take_own(self, tenant: str | None, num_wanted: int, present: Slots, prefix: Prefix) -> tuple[Slots, int]:
        """Remove candidates of a tenant as victims for its own new keys, as far as its limit requires that.

        Args:
            tenant: The tenant.
            num_wanted: Number of the new keys of a request.
            present: Slots that are not evicted, as for `take_victims`.
            prefix: The request's earlier keys, which are not evicted either.

        Returns:
            The victims, and how many of the new keys the limit allows once they are evicted.
        """
        tenants = self._tenants
        num_left = tenants.num_left(tenant)
        if tenant is None or num_left is None or num_left >= num_wanted:
            return NO_SLOTS, num_wanted
        missing = num_wanted - num_left
        victims = tenants.oldest(tenant, missing)
        is_needed = self._are_in(prefix, victims) | np.isin(victims, present)
        if is_needed.any():
            num_earlier = _count_keys(prefix) + len(present)
            oldest = tenants.oldest(tenant, min(missing + num_earlier, _MAX_CANDIDATES))
            is_needed = self._are_in(prefix, oldest) | np.isin(oldest, present)
            victims = oldest[~is_needed][:missing]
            # The next calls examine others.
            tenants.use(self._in_request_order(oldest[is_needed]))
            if len(victims) < missing and len(oldest) == _MAX_CANDIDATES and tenants.num_queued(tenant) > num_earlier:
                # Some that were not examined are not needed: the scheduler is to offer the blocks again at once.
                tenants.raise_space_version(tenant)
        self.remove(victims)
        return victims, num_left + len(victims)

    def _take(
        self, wanted: KeyHashes, free: Slots, protected: Slots, prefix: Prefix, residency: Residency | None
    ) -> Slots:
        """Take victims, those first whose blocks the device still holds."""
        missing = len(wanted) - len(free)
        on_device, others = self._split(protected)
        if not self._has_on_device or not len(self._on_device) or missing <= 0:
            return self.policy.take_victims(wanted, free, others)
        self._on_device.remove(on_device)
        first = NO_SLOTS if residency is None else self._take_held(missing, prefix, residency)
        if self.residency is None:
            # The mode was changed: what the device holds is not known any more.
            self.leave_device(self._on_device.peek_oldest(_MAX_CANDIDATES))
        rest = self.policy.take_victims(wanted, np.concatenate((free, first)), others)
        victims: Slots = np.concatenate((first, rest))
        if len(victims) < missing:
            last = self._on_device.peek_oldest(missing - len(victims))
            self._on_device.remove(last)
            victims = np.concatenate((victims, last))
        self._on_device.append(on_device)
        return victims

    def _take_held(self, count: int, prefix: Prefix, residency: Residency) -> Slots:
        """Remove and return up to `count` candidates that the device holds, none of them in `prefix`.

        Those that it has lost, or will lose soon, are the policy's from now on.
        """
        taken: list[Slots] = []
        # Those in `prefix` stay, behind the others: none is examined twice.
        num_left, num_examined = min(len(self._on_device), _MAX_CANDIDATES), count
        while count and num_left:
            # More each time: candidates that are of no use must not be examined one by one.
            oldest = self._on_device.peek_oldest(min(num_examined, num_left))
            num_left -= len(oldest)
            num_examined *= 2
            is_held: NDArray[np.bool_] = np.array(residency(self._table.keys[oldest].tolist()), dtype=np.bool_)
            self.leave_device(oldest[~is_held])
            held = oldest[is_held]
            is_prefix = self._are_in(prefix, held)
            self._on_device.touch(held[is_prefix])
            held = held[~is_prefix][:count]
            self._on_device.remove(held)
            taken.append(held)
            count -= len(held)
        return np.concatenate(taken) if taken else NO_SLOTS

    def _are_in(self, prefix: Prefix, slots: Slots) -> NDArray[np.bool_]:
        """Return which slots hold blocks of a prefix."""
        table = self._table
        return np.array(prefix.holds(table.keys[slots].tolist(), table.positions[slots].tolist()), dtype=np.bool_)

    def _in_request_order(self, slots: Slots) -> Slots:
        """Sort slots of a request as eviction policies expect them: its beginning first, its end evicted first."""
        return slots[np.argsort(self._table.positions[slots], kind="stable")]


def _count_keys(prefix: Prefix) -> int:
    return sum(count for _, count in prefix.groups.values()) + len(prefix.others)
