"""What every eviction policy keeps, exchanged while running or not: classes, order, pins, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.core.keys import Prefix, RequestIdentity
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.native import hash_keys
from kvferry.core.pool.pins import Pin
from tests.harness.effort import examples

ANYONE = RequestIdentity("r")
LOW, NORMAL, HIGH = 0, 1, 2
POLICIES = sorted(EVICTION_POLICIES)


def keys(first: int, count: int) -> list[bytes]:
    return [(first + i).to_bytes(16, "big") + b"\0" for i in range(count)]


def store(manager: OffloadManager, wanted: list[bytes], priority: int = NORMAL) -> int:
    answer = manager.prepare_store(wanted, ANYONE, np.arange(len(wanted)), priority, 1.0)
    return manager.complete_store(answer.slots, 1.0)


def load(manager: OffloadManager, wanted: list[bytes]) -> None:
    pin = manager.pin(manager.lookup(wanted))
    assert manager.prepare_load(pin, 1.0)
    assert manager.complete_load(pin)


def held(manager: OffloadManager, wanted: list[bytes]) -> list[bool]:
    return (manager.lookup_each(wanted) >= 0).tolist()


def exchange(manager: OffloadManager, name: str) -> int:
    calls = 1
    while manager.switch_policy(name):
        calls += 1
    assert manager.counts().eviction_policy == name
    return calls


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_offered_again_with_a_higher_priority_rises_and_never_falls(policy: str) -> None:
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


def test_a_pinned_block_rises_too() -> None:
    manager = OffloadManager(3, 64)
    store(manager, keys(0, 1), LOW)
    store(manager, keys(10, 2), NORMAL)
    pin = manager.pin(manager.lookup(keys(0, 1)))
    store(manager, keys(0, 1), HIGH)
    manager.unpin(pin)
    store(manager, keys(20, 2), HIGH)
    assert held(manager, keys(0, 1)) == [True]


def test_a_block_that_was_stored_twice_at_once_has_the_higher_of_both_priorities() -> None:
    manager = OffloadManager(3, 64)
    low, high = (manager.prepare_store(keys(0, 1), ANYONE, np.arange(1), priority, 1.0) for priority in (LOW, HIGH))
    assert manager.complete_store(low.slots, 1.0) == 1
    assert manager.complete_store(high.slots, 1.0) == 0
    store(manager, keys(10, 2), NORMAL)
    store(manager, keys(20, 2), NORMAL)
    assert held(manager, keys(0, 1)) == [True]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_low_priority_does_not_evict_its_own_prefix_in_a_large_pool(policy: str) -> None:
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
def test_room_is_made_as_long_as_anything_but_the_own_prefix_can_go(policy: str) -> None:
    manager = OffloadManager(100, 64, eviction_policy=policy)
    store(manager, keys(0, 10))
    store(manager, keys(100, 90))
    pin = manager.pin(manager.lookup(keys(101, 89)))
    load(manager, keys(0, 10))
    answer = manager.prepare_store(
        keys(10, 3), ANYONE, np.arange(10, 13), NORMAL, 1.0, prefix=Prefix({0: (keys(0, 10), 10)})
    )
    assert (answer.num_answered, len(answer.slots)) == (1, 1), "only key 100 is neither pinned nor its own"
    assert all(held(manager, keys(0, 10)))
    manager.unpin(pin)


def test_arc_keeps_what_was_used_again_through_a_scan_where_lru_does_not() -> None:
    kept = {}
    for policy in POLICIES:
        manager = OffloadManager(100, 64, eviction_policy=policy)
        store(manager, keys(0, 50))
        load(manager, keys(0, 50))
        for first in range(1000, 3000, 10):
            store(manager, keys(first, 10))
        kept[policy] = sum(held(manager, keys(0, 50)))
    assert kept == {"lru": 0, "arc": 50}


def test_blocks_that_are_only_put_in_order_are_not_used_again_for_arc() -> None:
    manager = OffloadManager(100, 64, eviction_policy="arc")
    answer = manager.prepare_store(keys(0, 10), ANYONE, np.arange(10), NORMAL, 1.0)
    manager.complete_store(answer.slots, 1.0, keys(0, 10))
    manager.touch(keys(0, 10))
    policy = manager.evictor.policy
    assert isinstance(policy, ArcPolicy)
    assert (len(policy._recent), len(policy._frequent)) == (10, 0)


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


def test_a_call_to_exchange_policies_moves_no_more_than_a_thousand_slots() -> None:
    manager = OffloadManager(5000, 64, eviction_policy="arc")
    for first in range(0, 5000, 500):
        store(manager, keys(first, 500))
    for first in range(0, 5000, 1000):
        load(manager, keys(first, 500))
    assert exchange(manager, "lru") >= 2500 // 1000
    assert exchange(manager, "arc") == 1
    assert exchange(manager, "arc") == 1
    assert manager.counts().ready == 5000


class ExchangeMachine(RuleBasedStateMachine):
    """Contents against a plain model of what must and may be there, while policies are exchanged step by step."""

    @initialize(size=st.sampled_from([1, 5, 40, 3000]))
    def start(self, size: int) -> None:
        self.size = size
        self.manager = OffloadManager(size, 64)
        self.pins: list[tuple[Pin, list[bytes]]] = []
        self.next = 0

    @rule(count=st.integers(1, 700), again=st.booleans(), priority=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]))
    def offer(self, count: int, again: bool, priority: int) -> None:
        first = max(self.next - 900, 0) if again else self.next
        self.next = max(self.next, first + count)
        store(self.manager, keys(first, count), priority)

    @rule(data=st.data(), count=st.integers(1, 500))
    def pin(self, data, count: int) -> None:
        wanted = keys(data.draw(st.integers(0, max(self.next - 1, 0))), count)
        pin = self.manager.pin(self.manager.lookup(wanted))
        self.pins.append((pin, wanted[: len(pin)]))

    @rule(data=st.data())
    def release(self, data) -> None:
        if self.pins:
            self.manager.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[0])

    @rule(data=st.data(), count=st.integers(1, 500))
    def reorder(self, data, count: int) -> None:
        self.manager.touch(keys(data.draw(st.integers(0, max(self.next - 1, 0))), count))

    @rule(data=st.data())
    def drop(self, data) -> None:
        if self.next:
            self.manager.drop_key(keys(data.draw(st.integers(0, self.next - 1)), 1)[0], 1.0)

    @rule(name=st.sampled_from(POLICIES))
    def switch_a_step(self, name: str) -> None:
        before = self.manager.counts()
        more = self.manager.switch_policy(name)
        after = self.manager.counts()
        assert (before.ready, before.pinned, before.free) == (after.ready, after.pinned, after.free)
        assert more or after.eviction_policy == name

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        if not hasattr(self, "manager"):
            return
        table, policy = self.manager.table, self.manager.evictor.policy
        ready = table.current_states(0, self.size) == 2
        candidates = ready & (table.pins == 0)
        assert len(policy) == int(candidates.sum())
        assert len(self.manager.index) == int(ready.sum()) == table.num_ready
        slots = np.flatnonzero(candidates)
        in_segments = sum(segment.holds(slots).astype(int) for segment in policy.export_order())
        assert (in_segments == 1).all()
        for pin, _ in self.pins:
            assert not set(pin.slots.tolist()) & set(slots.tolist())

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for pin, _ in self.pins:
            self.manager.unpin(pin)
        ready = self.manager.counts().ready
        found = set()
        while len(
            victims := self.manager.evictor.policy.take_victims(
                hash_keys(keys(10**6, 7)), np.empty(0, np.int64), np.empty(0, np.int64)
            )
        ):
            assert not found & set(victims.tolist()), "a slot goes once"
            found |= set(victims.tolist())
        assert len(found) == ready, "and every slot can go"


TestExchange = ExchangeMachine.TestCase
TestExchange.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None, derandomize=True)
