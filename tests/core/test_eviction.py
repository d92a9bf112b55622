"""What every eviction policy keeps, exchanged while running or not: classes, order, pins, and nothing lost."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES, EvictionPolicy
from kvferry.core.pool.eviction.hazard import HazardPolicy
from kvferry.core.pool.eviction.lru import Segment
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.core.pool.slots import BATCH_SLOTS, SlotState
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.stats import EvictionReason, NotStored
from kvferry.core.transfers import NO_SLOTS, Slots
from tests.harness.effort import examples
from tests.harness.pool_blocks import ANYONE, HIGH, LOW, NORMAL, Recorder, held, keys, load, offer, store

POLICIES = sorted(EVICTION_POLICIES)
TENANTS = [None, "a", "b"]


def exchange(manager: OffloadManager, name: str) -> None:
    manager.switch_policy(name)
    assert manager.counts().eviction_policy == name


@pytest.mark.parametrize("policy", POLICIES)
def test_block_when_offered_again_keeps_its_highest_priority(policy: str) -> None:
    manager = OffloadManager(6, 64, eviction_policy=policy)
    store(manager, keys(0, 3), LOW)
    store(manager, keys(10, 3), NORMAL)
    store(manager, keys(0, 1), HIGH)
    store(manager, keys(10, 1), LOW)
    store(manager, keys(20, 4), HIGH)
    assert held(manager, keys(0, 3)) == [True, False, False]
    assert held(manager, keys(10, 3)) == [True, False, False]
    store(manager, keys(30, 1), HIGH)
    assert held(manager, [*keys(0, 1), *keys(10, 1)]) == [True, False]


def test_pinned_block_when_offered_again_gets_a_higher_priority() -> None:
    manager = OffloadManager(3, 64)
    store(manager, keys(0, 1), LOW)
    store(manager, keys(10, 2), NORMAL)
    pin = manager.pin(manager.lookup(keys(0, 1)))
    store(manager, keys(0, 1), HIGH)
    manager.unpin(pin)
    store(manager, keys(20, 2), HIGH)
    assert held(manager, keys(0, 1)) == [True]


def test_block_when_stored_twice_at_once_has_the_higher_priority() -> None:
    manager = OffloadManager(3, 64)
    low, high = (manager.prepare_store(keys(0, 1), ANYONE, np.arange(1), priority, 1.0) for priority in (LOW, HIGH))
    assert manager.complete_store(low.slots, 1.0) == 1
    assert manager.complete_store(high.slots, 1.0) == 0
    store(manager, keys(10, 2), NORMAL)
    store(manager, keys(20, 2), NORMAL)
    assert held(manager, keys(0, 1)) == [True]


@pytest.mark.parametrize("policy", POLICIES)
def test_low_priority_request_does_not_evict_its_own_prefix(policy: str) -> None:
    manager = OffloadManager(200, 64, eviction_policy=policy)
    store(manager, keys(1000, 190), NORMAL)
    for first in range(0, 20, 4):
        wanted = keys(first, 4)
        answer = manager.prepare_store(
            wanted, ANYONE, np.arange(first, first + 4), LOW, 1.0, prefix=Prefix({0: (keys(0, first), first)})
        )
        assert manager.complete_store(answer.slots, 1.0) == 4
    assert all(held(manager, keys(0, 20)))


@pytest.mark.parametrize("policy", POLICIES)
def test_offer_evicts_anything_but_its_own_prefix(policy: str) -> None:
    manager = OffloadManager(100, 64, eviction_policy=policy)
    store(manager, keys(0, 10))
    store(manager, keys(100, 90))
    pin = manager.pin(manager.lookup(keys(101, 89)))
    load(manager, keys(0, 10))
    answer = manager.prepare_store(
        keys(10, 3), ANYONE, np.arange(10, 13), NORMAL, 1.0, prefix=Prefix({0: (keys(0, 10), 10)})
    )
    assert (answer.num_decided, len(answer.slots)) == (1, 1), "only key 100 is neither pinned nor its own"
    assert all(held(manager, keys(0, 10)))
    manager.unpin(pin)


def test_request_when_its_blocks_were_protected_is_evicted_from_its_end() -> None:
    manager, chain = OffloadManager(64, 64), keys(0, 14)
    store(manager, chain[:12])
    store(manager, keys(1000, 52))
    # Two of the offer are present, its ten earlier blocks are the next victims, and two need space.
    answer = manager.prepare_store(chain[10:], ANYONE, np.arange(10, 14), NORMAL, 1.0, prefix=Prefix({0: (chain, 10)}))
    manager.complete_store(answer.slots, 1.0)
    order: list[int] = []
    for number in range(64):
        store(manager, keys(5000 + number, 1))
        order += [i for i, is_held in enumerate(held(manager, chain)) if not is_held and i not in order]
    assert order == [*range(11, -1, -1), 13, 12]


def test_arc_keeps_reused_blocks_through_a_scan_and_lru_does_not() -> None:
    kept = {}
    for policy in POLICIES:
        manager = OffloadManager(100, 64, eviction_policy=policy)
        store(manager, keys(0, 50))
        load(manager, keys(0, 50))
        for first in range(1000, 3000, 10):
            store(manager, keys(first, 10))
        kept[policy] = sum(held(manager, keys(0, 50)))
    assert (kept["lru"], kept["arc"]) == (0, 50)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_the_device_when_offered_again_stay_in_one_queue(policy: str) -> None:
    manager = OffloadManager(4, 64, eviction_policy=policy)
    manager.evictor.residency = lambda wanted: [True] * len(wanted)
    store(manager, keys(0, 4))
    manager.enter_device(manager.lookup(keys(1, 2)))
    store(manager, keys(0, 4))
    assert sorted(queued(manager).tolist()) == [0, 1, 2, 3]
    store(manager, keys(10, 2))
    assert held(manager, keys(0, 4)) == [True, False, False, True]
    assert sorted(queued(manager).tolist()) == [0, 1, 2, 3]


def test_many_blocks_of_the_device_that_may_not_be_evicted_are_examined_in_few_calls() -> None:
    manager, num_asked = OffloadManager(1200, 64), []

    def residency(wanted):
        num_asked.append(len(wanted))
        return [True] * len(wanted)

    manager.evictor.residency = residency
    own = keys(0, 900)
    for first, number in ((0, 900), (900, 300)):
        store(manager, keys(first, number))
        manager.enter_device(manager.lookup(keys(first, number)))
    place, prefix = np.array([900]), Prefix({0: (own, 900)})
    assert len(manager.prepare_store(keys(5000, 1), ANYONE, place, NORMAL, 1.0, prefix=prefix).slots) == 1
    assert held(manager, own) == [True] * 900
    assert len(num_asked) <= 16


def test_few_blocks_of_the_device_that_may_not_be_evicted_are_examined_once() -> None:
    manager, asked = OffloadManager(100, 64), []

    def residency(wanted):
        asked.extend(wanted)
        return [True] * len(wanted)

    manager.evictor.residency = residency
    own = keys(0, 3)
    store(manager, own)
    store(manager, keys(900, 97))
    manager.enter_device(manager.lookup(own))
    place, prefix = np.array([3]), Prefix({0: (own, 3)})
    assert len(manager.prepare_store(keys(5000, 1), ANYONE, place, NORMAL, 1.0, prefix=prefix).slots) == 1
    assert held(manager, own) == [True] * 3
    assert sorted(asked) == sorted(own)


def test_an_unknown_policy_is_refused_with_the_names_of_all() -> None:
    manager = OffloadManager(10, 64)
    with pytest.raises(ValueError, match=r"eviction_policy='fifo' is not known: choose one of lru, arc"):
        manager.switch_policy("fifo")


def test_exchanging_policies_keeps_contents_and_order() -> None:
    manager = OffloadManager(30, 64)
    store(manager, keys(0, 30))
    load(manager, keys(5, 5))
    exchange(manager, "arc")
    assert all(held(manager, keys(0, 30)))
    load(manager, keys(20, 2))
    exchange(manager, "lru")
    order = [*reversed(keys(10, 20)), *reversed(keys(0, 5)), *reversed(keys(5, 5))]
    order = [key for key in order if key not in keys(20, 2)] + list(reversed(keys(20, 2)))
    for number, key in enumerate(order):
        assert held(manager, order[number:]) == [True] * (30 - number)
        store(manager, keys(100 + number, 1))
        assert held(manager, [key]) == [False]


def test_exchange_of_policies_when_the_pool_is_large_moves_no_slot() -> None:
    manager = OffloadManager(5000, 64, eviction_policy="arc")
    for first in range(0, 5000, 500):
        store(manager, keys(first, 500))
    for first in range(0, 5000, 1000):
        load(manager, keys(first, 500))
    calls: Counter[str] = Counter()
    for name in ("lru", "arc"):
        sys.setprofile(lambda frame, event, function: calls.update([event]))
        try:
            manager.switch_policy(name)
        finally:
            sys.setprofile(None)
    assert calls.total() < 1000
    assert len(manager.evictor) == 5000


def segments_of(policy: EvictionPolicy) -> list[Segment]:
    """All segments of a policy."""
    if isinstance(policy, ArcPolicy):
        return [policy._recent, policy._frequent]
    return policy._segments if isinstance(policy, HazardPolicy) else [policy.export_order()]


def queued(manager: OffloadManager) -> Slots:
    """All slots in queues of candidates."""
    segments = [manager.evictor._on_device, *segments_of(manager.evictor.policy)]
    every = manager.table.max_slots
    return np.concatenate([queue.peek_oldest(every) for segment in segments for queue in segment.queues])


class PoolMachine(RuleBasedStateMachine):
    """Stores, loads, pins, drops and resets in any order, while policies are exchanged and the pool is resized.

    Blocks belong to tenants, whose limits change, too.
    """

    @initialize(size=st.sampled_from([1, 5, 5, 40, 40, 3000]))
    def start(self, size: int) -> None:
        self.memory = size
        self.now_s = 1.0
        self.evicted = Recorder()
        self.manager = OffloadManager(size, 64, max_slots=4 * size, sink=self.evicted)
        self.limits = TenantLimits(self.manager)
        self.are_limits_applied = True
        self.resize = PoolResize(self.manager, max(size // 5, 1))
        self.pins: list[Pin] = []
        self.loads: list[Pin] = []
        self.stores: list[np.ndarray] = []
        self.next = 0

    def some_keys(self, data, count: int) -> list[bytes]:
        """Keys of which the pool mostly has the first ones."""
        table = self.manager.table
        ready = np.flatnonzero(table.is_ready(np.arange(table.end_slot)))
        if not len(ready):
            return keys(0, count)
        first = table.keys[ready[data.draw(st.integers(0, len(ready) - 1))]]
        return keys(int.from_bytes(first[:-1], "big"), count)

    def in_use(self) -> set[int]:
        """Slots that open transfers access."""
        return {int(slot) for slots in (*self.stores, *(load.slots for load in self.loads)) for slot in slots}

    @rule(
        count=st.integers(1, 30) | st.integers(1, 700),
        again=st.booleans(),
        priority=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]),
        tenant=st.sampled_from(TENANTS),
    )
    def begin_store(self, count: int, again: bool, priority: int, tenant: str | None) -> None:
        first = max(self.next - 900, 0) if again else self.next
        self.next = max(self.next, first + count)
        wanted = keys(first, count)
        tenants, before = self.manager.table.tenants, self.manager.lookup_each(wanted)
        used = tenants.slots_of(tenant)
        self.evicted.batches.clear()
        answer = offer(self.manager, wanted, priority, RequestIdentity("r", tenant))
        for batch in self.evicted.batches:
            if batch.reason is EvictionReason.TENANT_LIMIT:
                assert {origin.tenant for origin in batch.rows.origins} == {tenant}, "another tenant's block is evicted"
        limit = tenants.limit_of(tenant)
        assert limit is None or tenants.slots_of(tenant) <= max(limit, used)
        if answer.refusal is NotStored.TENANT_LIMIT:
            assert limit is not None
            assert tenants.slots_of(tenant) >= limit
            left = set(self.candidates(tenant)).difference(before.tolist())
            assert not left, "a block of the tenant could be evicted"
        assert self.in_use().isdisjoint(answer.slots.tolist()), "a slot under a transfer is given out"
        assert len(set(answer.slots.tolist())) == len(answer.slots), "a slot is given out twice"
        assert (answer.slots < self.manager.num_slots).all(), "a slot that leaves is given out"
        self.stores.append(answer.slots)

    @rule(
        count=st.integers(1, 30) | st.integers(1, 700),
        priority=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]),
        tenant=st.sampled_from(TENANTS),
    )
    def store(self, count: int, priority: int, tenant: str | None) -> None:
        self.begin_store(count, False, priority, tenant)
        self.end_store(True, -1)

    @precondition(lambda self: self.stores)
    @rule(ok=st.booleans(), at=st.integers(0, 9))
    def end_store(self, ok: bool, at: int) -> None:
        slots = self.stores.pop(at % len(self.stores))
        # A reset holds the slots of open stores in the new epoch, to be freed only.
        if ok and (self.manager.table.states[slots] == SlotState.STORING).all():
            self.manager.complete_store(slots, 1.0)
        else:
            self.manager.abort_store(slots)

    @precondition(lambda self: self.manager.counts().ready)
    @rule(data=st.data(), count=st.integers(1, 30) | st.integers(1, 500), twice=st.booleans(), loads=st.booleans())
    def pin(self, data, count: int, twice: bool, loads: bool) -> None:
        found = self.manager.lookup(self.some_keys(data, count))
        self.pins.append(self.manager.pin(np.concatenate([found, found[:1]]) if twice else found))
        if loads:
            self.begin_load(-1)

    @precondition(lambda self: self.pins)
    @rule(at=st.integers(0, 9))
    def release(self, at: int) -> None:
        self.manager.unpin(self.pins.pop(at % len(self.pins)))

    @precondition(lambda self: self.pins)
    @rule(at=st.integers(0, 9))
    def begin_load(self, at: int) -> None:
        pin = self.pins.pop(at % len(self.pins))
        if self.manager.prepare_load(pin, 1.0):
            self.loads.append(pin)
        else:
            self.manager.unpin(pin)

    @precondition(lambda self: self.loads)
    @rule(at=st.integers(0, 9))
    def end_load(self, at: int) -> None:
        pin = self.loads.pop(at % len(self.loads))
        assert not self.manager.complete_load(pin) or pin.epoch == self.manager.epoch

    @rule(data=st.data(), count=st.integers(1, 30) | st.integers(1, 500))
    def reorder(self, data, count: int) -> None:
        self.manager.reorder(self.some_keys(data, count))

    @rule(data=st.data(), count=st.integers(1, 30) | st.integers(1, 500), tokens=st.sampled_from([0, 100, 1000]))
    def use(self, data, count: int, tokens: int) -> None:
        used = self.some_keys(data, count)
        self.now_s += 1.0
        self.manager.record_uses(used, self.now_s)
        self.manager.record_end(used, tokens, self.now_s)
        self.manager.record_request(self.now_s)

    @rule(held_of=st.sampled_from([0, 1, 2, 7]))
    def change_mode(self, held_of: int) -> None:
        """Eager, or lazy with a device that holds one block of so many."""
        in_some = lambda keys: [int.from_bytes(key[:-1], "big") % held_of == 0 for key in keys]  # noqa: E731
        self.manager.evictor.residency = in_some if held_of else None

    @rule(data=st.data(), count=st.integers(1, 30) | st.integers(1, 500))
    def enter_device(self, data, count: int) -> None:
        slots = self.manager.lookup_each(self.some_keys(data, count))
        self.manager.enter_device(slots[slots >= 0])

    @rule(data=st.data(), count=st.integers(1, 30) | st.integers(1, 500))
    def leave_device(self, data, count: int) -> None:
        self.manager.leave_device(self.some_keys(data, count))

    @rule(data=st.data())
    def drop(self, data) -> None:
        self.manager.drop_key(self.some_keys(data, 1)[0], 1.0)

    @precondition(lambda self: self.pins or self.loads)
    @rule(at=st.integers(0, 9), count=st.integers(1, 3))
    def drop_pinned(self, at: int, count: int) -> None:
        pins = self.pins + self.loads
        slots = pins[at % len(pins)].slots[:count]
        ready = slots[self.manager.table.is_ready(slots)]
        self.manager.drop(np.unique(ready), EvictionReason.OPERATOR, 1.0)

    @precondition(lambda self: self.loads or self.stores)
    @rule()
    def reset(self) -> None:
        self.manager.reset(np.concatenate([NO_SLOTS, *self.stores]), 1.0)
        assert self.manager.counts().ready == 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        num_slots=st.none() | st.integers(0, 8) | st.integers(0, 30) | st.integers(0, 1500),
        steps=st.sampled_from([0, 2, 100]),
    )
    def limit(self, tenant: str | None, num_slots: int | None, steps: int) -> None:
        """Change the default or, of a tenant, its own limit; of a tenant that has one, None takes it away."""
        max_bytes = None if num_slots is None else num_slots * 64 + 63
        if tenant is None:
            self.limits.set_default(max_bytes)
        elif num_slots is not None or not self.limits.unset_limit(tenant):
            self.limits.set_limit(tenant, max_bytes)
        self.are_limits_applied = False
        self.apply_limits(steps)

    @rule(steps=st.sampled_from([1, 2, 3, 100]))
    def apply_limits(self, steps: int) -> None:
        for _ in range(steps):
            before = self.manager.counts()
            if not self.limits.step(1.0):
                self.are_limits_applied = True
                for tenant, _ in self.manager.table.tenants.excess_in(0, len(self.manager.table.tenants.names)):
                    assert not self.candidates(tenant), "a tenant has more than it may"
                return
            after = self.manager.counts()
            assert 0 <= before.ready - after.ready <= BATCH_SLOTS

    @rule(tenant=st.sampled_from(TENANTS), at=st.integers(0, 9))
    @precondition(lambda self: self.stores)
    def change_origin(self, tenant: str | None, at: int) -> None:
        """Set the origin of blocks that a tier fills."""
        slots = self.stores[at % len(self.stores)][:3]
        if (self.manager.table.states[slots] == SlotState.STORING).all():
            self.manager.set_origin(slots, RequestIdentity("other", tenant))

    @rule(name=st.sampled_from(POLICIES))
    def switch(self, name: str) -> None:
        before = self.manager.counts()
        exchange(self.manager, name)
        after = self.manager.counts()
        assert (before.ready, before.pinned, before.free) == (after.ready, after.pinned, after.free)

    @rule(num_extents=st.integers(1, 20))
    def request_size(self, num_extents: int) -> None:
        extent_slots = self.resize.extent_slots
        self.resize.request(min(num_extents, self.manager.table.max_slots // extent_slots) * extent_slots)

    @rule(steps=st.integers(1, 9), memory=st.sampled_from(["changed", "changed", "missing", "pending"]))
    def step_resize(self, steps: int, memory: str) -> None:
        table = self.manager.table
        for _ in range(steps):
            self.now_s += 1.0
            before, stay = self.manager.counts(), table.is_ready(np.arange(min(table.target_slots, table.num_slots)))
            todo = self.resize.step(self.now_s)
            after = self.manager.counts()
            assert (table.is_ready(np.arange(len(stay))) == stay).all(), "a block that stays was dropped"
            assert max(abs(after.ready - before.ready), abs(after.slots - before.slots)) <= BATCH_SLOTS
            if todo is Todo.MEMORY and memory == "missing" and self.resize.memory_slots > self.memory:
                self.resize.fail()
            elif todo is Todo.MEMORY and memory != "pending":
                self.memory = self.resize.memory_slots
                self.resize.acknowledge(self.memory)

    def candidates(self, tenant: str | None) -> list[int]:
        """The slots of a tenant that can be evicted."""
        table = self.manager.table
        slots = np.flatnonzero(table.is_ready(np.arange(table.end_slot)) & (table.pins[: table.end_slot] == 0))
        return [slot for slot in slots.tolist() if table.origins[slot].tenant == tenant]

    @invariant()
    def tenants_use_what_their_slots_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        table = self.manager.table
        used = np.isin(table.current_states(0, table.end_slot), (SlotState.FREE, SlotState.RETIRED), invert=True)
        tenants = Counter(table.origins[slot].tenant for slot in np.flatnonzero(used).tolist())
        assert {tenant: num_bytes // 64 for tenant, num_bytes in self.limits.usage().items()} == tenants
        for tenant in TENANTS[1:] if table.tenants.is_limiting else ():
            slots, expected = table.tenants.oldest(tenant, table.end_slot).tolist(), self.candidates(tenant)
            assert len(set(slots)) == len(slots)
            assert set(slots) <= set(expected)
            if self.are_limits_applied and table.tenants.limit_of(tenant) is not None:
                assert sorted(slots) == expected

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        if not hasattr(self, "manager"):
            return
        table, evictor = self.manager.table, self.manager.evictor
        ready = table.is_ready(np.arange(table.end_slot))
        candidates = ready & (table.pins[: table.end_slot] == 0)
        assert len(evictor) == int(candidates.sum())
        assert len(self.manager.index) == int(ready.sum()) == table.num_ready
        slots = queued(self.manager)
        assert sorted(slots.tolist()) == np.flatnonzero(candidates).tolist()
        assert self.in_use().isdisjoint(slots.tolist())
        counts = self.manager.counts()
        assert counts.free + counts.ready + counts.storing == counts.slots
        assert max(self.in_use(), default=-1) < table.end_slot <= self.memory, "a slot is used that has no memory"
        assert counts.storing >= len({int(slot) for slots in self.stores for slot in slots})

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.pins:
            self.release(0)
        while self.loads:
            self.end_load(0)
        while self.stores:
            self.end_store(False, 0)
        for num_slots in (self.manager.table.max_slots, self.resize.extent_slots):
            self.resize.request(num_slots)
            for _ in range(20):
                self.step_resize(9, "changed")
            counts = self.manager.counts()
            assert not self.resize.is_open
            assert (counts.storing, counts.pinned, counts.loading, counts.slots) == (0, 0, 0, num_slots)
            wanted = keys(num_slots << 40, num_slots)
            taken = offer(self.manager, wanted, HIGH)
            assert sorted(taken.slots.tolist()) == list(range(num_slots)), "every slot can be given out, and once"
            assert self.manager.complete_store(taken.slots, 1.0) == num_slots
            assert all(held(self.manager, wanted))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None, derandomize=True)
