"""Resizing a pool under traffic: what stays is untouched, what leaves is not given out, nothing goes under a copy."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import PinOutcome
from kvferry.core.pool.resize import PINNED_WAIT_S, PoolResize, Todo
from kvferry.core.pool.slots import BATCH_SLOTS, SlotState
from kvferry.core.stats import EvictionReason
from tests.harness.pool_blocks import key, store

ORIGIN = RequestIdentity("r")


class Pool:
    """A manager with a resize, whose one worker does at once what it is asked."""

    def __init__(self, num_slots: int, max_slots: int, extent_slots: int = 4, policy: str = "lru") -> None:
        self.manager = OffloadManager(num_slots, 64, policy, max_slots=max_slots)
        self.resize = PoolResize(self.manager, extent_slots)
        self.memory: list[int] = []

    def store(self, numbers: range, now_s: float = 1.0) -> np.ndarray:
        """Store what these numbers stand for; the slots that they got."""
        return store(self.manager, [key(number) for number in numbers], now_s=now_s).slots

    def drive(self, now_s: float = 1.0, max_steps: int = 1000) -> Todo:
        """Step until there is nothing to do, or only something to wait for."""
        for _ in range(max_steps):
            todo = self.resize.step(now_s)
            if todo is Todo.MEMORY:
                self.memory.append(self.resize.memory_slots)
                self.resize.acknowledge(self.resize.memory_slots)
            elif todo is not Todo.AGAIN:
                return todo
        raise AssertionError(f"not done after {max_steps} steps")

    def to(self, num_slots: int, now_s: float = 1.0) -> Todo:
        self.resize.request(num_slots)
        return self.drive(now_s)

    def has(self, numbers: range) -> list[int]:
        return [number for number in numbers if Inventory(self.manager).find_block(key(number)) is not None]


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_pool_when_shrunk_evicts_its_last_slots_as_shrink(policy: str) -> None:
    pool = Pool(40, 40, policy=policy)
    slots = pool.store(range(40))
    lost = [number for number, slot in enumerate(slots.tolist()) if slot >= 12]
    assert pool.to(12) is Todo.NOTHING
    assert pool.has(range(40)) == [number for number in range(40) if number not in lost]
    counts = pool.manager.counts()
    assert (counts.slots, counts.wanted_slots, counts.free, counts.ready, counts.storing) == (12, 12, 0, 12, 0)
    assert pool.manager.evictions.by_reason == {"shrink": 28}
    assert pool.memory[-1] == 12
    assert set(pool.manager.history.explain([key(number) for number in lost], 1.0)[0]) == {EvictionReason.SHRINK}
    assert max(pool.store(range(100, 120)).tolist()) < 12


def test_shrink_whose_memory_fails_changes_nothing_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory under an open load stays, also after an earlier shrink."""
    pool = Pool(40, 40)
    assert pool.to(28) is Todo.NOTHING
    pool.store(range(28))
    pin = pool.manager.pin(pool.manager.lookup([key(number) for number in range(28)]))
    assert pool.manager.prepare_load(pin, 1.0)
    pool.resize.request(8)
    with monkeypatch.context() as patch:
        patch.setattr("kvferry.core.pool.resize.plan_size", raise_memory_error)
        with pytest.raises(MemoryError):
            pool.resize.step(1.0)
    assert pool.manager.num_slots == 28
    pool.drive(1.0)
    assert pool.memory[-1] == 28, "no memory is freed under the load"
    pool.manager.complete_load(pin)
    assert (pool.drive(2.0), pool.memory[-1]) == (Todo.NOTHING, 8)


def raise_memory_error(*_: object) -> None:
    raise MemoryError


def test_freed_slots_that_leave_are_given_out_once_after_growing() -> None:
    """A slot that leaves is not allocated while a shrink is under way, though it is free."""
    pool = Pool(40, 80)
    pool.store(range(40))
    for number in range(40):
        pool.manager.drop_key(key(number), 1.0)
    pool.resize.request(8)
    pool.resize.step(1.0)
    early = [slot for number in range(50, 90) for slot in pool.store(range(number, number + 1)).tolist()]
    assert set(early) == set(range(8))
    for number in range(50, 90):
        pool.manager.drop_key(key(number), 1.0)
    for size in (8, 40, 4, 24, 80):
        pool.to(size)
        assert pool.manager.counts().free == size
    assert sorted(pool.store(range(100, 180)).tolist()) == list(range(80))


@pytest.mark.parametrize("num_steps", range(12))
def test_pool_when_grown_while_shrinking_keeps_remaining_blocks(num_steps: int) -> None:
    pool = Pool(40, 40)
    slots = pool.store(range(30))
    for number in range(0, 30, 3):
        pool.manager.drop_key(key(number), 1.0)
    pool.resize.request(8)
    for _ in range(num_steps):
        if pool.resize.step(1.0) is Todo.MEMORY:
            pool.resize.acknowledge(pool.resize.memory_slots)
    pool.resize.request(36)
    assert pool.drive() is Todo.NOTHING
    counts = pool.manager.counts()
    assert counts.slots == 36 == counts.free + counts.ready
    kept = pool.has(range(30))
    assert {number for number in range(30) if number % 3 and slots[number] < 8} <= set(kept)
    fresh = pool.store(range(100, 100 + counts.free))
    held = [slot for number, slot in enumerate(slots.tolist()) if number in kept]
    assert sorted([*fresh.tolist(), *held]) == list(range(36)), "each slot is one block's"


def test_store_while_shrinking_gets_slots_that_stay() -> None:
    pool = Pool(40, 40)
    slots = pool.manager.prepare_store([key(number) for number in range(40)], ORIGIN, np.arange(40), 1, 1.0).slots
    for i in range(20):
        pool.manager.complete_store(slots[i : i + 1], 1.0)
        pool.manager.complete_store(slots[39 - i : 40 - i], 1.0)
    pool.resize.request(8)
    assert pool.resize.step(1.0) is Todo.AGAIN
    # Every other of what is oldest leaves: it goes, and others make room.
    answer = pool.manager.prepare_store([key(number) for number in range(100, 104)], ORIGIN, np.arange(4), 1, 2.0)
    assert answer.num_decided == 4
    assert sorted(answer.slots.tolist()) == [0, 1, 2, 3]
    assert pool.manager.evictions.by_reason == {"capacity": 4, "shrink": 3}
    pool.manager.complete_store(answer.slots, 2.0)
    assert pool.drive() is Todo.NOTHING
    assert pool.has(range(100, 104)) == list(range(100, 104))


def test_pinned_blocks_while_shrinking_are_dropped_after_the_wait() -> None:
    pool = Pool(40, 40)
    pool.store(range(40))
    (kept,) = [number for number in range(40) if Inventory(pool.manager).find_block(key(number)).slots[0] == 20]
    pin = pool.manager.pin(np.array([20]))
    assert pool.to(8, now_s=10.0) is Todo.LATER
    assert pool.has(range(kept, kept + 1))
    assert pool.drive(now_s=10.0 + PINNED_WAIT_S) is Todo.LATER
    assert pool.has(range(kept, kept + 1))
    assert pool.drive(now_s=10.1 + PINNED_WAIT_S) is Todo.LATER
    assert not pool.has(range(kept, kept + 1))
    assert min(pool.memory) == 24
    assert not pool.manager.prepare_load(pin, 20.0), "whoever wanted to load it computes it"
    pool.manager.unpin(pin)
    assert pool.drive(now_s=20.0) is Todo.NOTHING
    assert pool.memory[-1] == 8


@pytest.mark.parametrize("num_slots", [0, 3, 5, 44])
def test_size_of_partial_extents_or_too_many_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match="whole extents of 4, up to 40"):
        Pool(8, 40).resize.request(num_slots)


def test_resize_names_operator_pins_and_refuses_new_ones() -> None:
    pool = Pool(12, 12)
    pool.store(range(12))
    by_slot = {int(Inventory(pool.manager).find_block(key(number)).slots[0]): number for number in range(12)}
    assert pool.manager.operator_pins.pin(key(by_slot[2]), 100.0, 1.0) is PinOutcome.PINNED
    assert pool.manager.operator_pins.pin(key(by_slot[9]), 100.0, 1.0) is PinOutcome.PINNED
    assert pool.resize.pinned_by_operators(8) == [key(by_slot[9])]
    pool.resize.request(8)
    pool.resize.step(1.0)
    assert pool.manager.operator_pins.pin(key(by_slot[10]), 100.0, 1.0) is PinOutcome.LEAVING
    assert pool.manager.operator_pins.pin(key(by_slot[9]), 200.0, 1.0) is PinOutcome.PINNED, "it was pinned before"
    assert pool.drive(2.0) is Todo.LATER
    assert pool.drive(20.0) is Todo.NOTHING
    assert not pool.manager.operator_pins.unpin(key(by_slot[9]))
    assert pool.manager.operator_pins.unpin(key(by_slot[2]))


def test_a_reset_by_match_finds_blocks_that_are_about_to_leave() -> None:
    pool = Pool(40, 40)
    pool.store(range(40))
    pool.resize.request(8)
    pool.resize.step(1.0)
    dropped, after = 0, 0
    while after is not None:
        count, after = pool.manager.drop_matching(RequestFilter(request="r").matches, after, 1.0)
        dropped += count
    assert dropped == 40
    assert pool.drive() is Todo.NOTHING


def test_listings_and_rows_after_a_resize_match_its_slots() -> None:
    pool = Pool(40, 40)
    pool.store(range(40))
    while Inventory(pool.manager).dirty_rows(1000) is not None:
        pass
    pool.to(8)
    assert len(Inventory(pool.manager).slot_states()) == 8
    assert len(Inventory(pool.manager).list_blocks(0, 100).slots) == 8
    rows = Inventory(pool.manager).dirty_rows(1000)
    assert rows is not None
    assert rows.slots.tolist() == list(range(8, 40)), "rows of what is no more are told, so that they go"
    assert not rows.live.any()
    pool.to(16)
    assert Inventory(pool.manager).slot_states()[8:].tolist() == [SlotState.FREE] * 8


def test_offer_after_an_undone_shrink_makes_few_calls() -> None:
    count = 100 * BATCH_SLOTS
    pool = Pool(count, count, extent_slots=BATCH_SLOTS)
    for start in range(0, count, BATCH_SLOTS):
        pool.store(range(start, start + BATCH_SLOTS))
    pool.resize.request(BATCH_SLOTS)
    pool.resize.step(1.0)
    assert pool.manager.table.is_shrinking
    pool.manager.drop_key(key(count - 1), 1.0)
    assert pool.to(count) is Todo.NOTHING
    assert pool.manager.counts().free == 1
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, function: calls.update([event]))
    try:
        slots = pool.store(range(count, count + 2)).tolist()
    finally:
        sys.setprofile(None)
    assert slots[0] == count - 1
    assert calls.total() < 1000, f"an offer of two blocks made {calls.total()} calls"
    assert len(set(slots)) == 2


def test_ghosts_when_the_pool_is_resized_are_kept() -> None:
    pool = Pool(8, 80_000, extent_slots=8)
    manager = pool.manager
    pool.store(range(10, 18))
    manager.drop_key(key(12), 5.0)
    for size in (80_000, 8):
        assert pool.to(size) is Todo.NOTHING
        assert manager.history.explain([key(12)], 9.0) == ([EvictionReason.OPERATOR], (5.0, 5.0))


def test_offers_when_the_pool_is_resized_are_counted_anew() -> None:
    pool = Pool(8, 80_000, extent_slots=8)
    pool.manager.admission.set_threshold(2)
    some, positions = [key(number) for number in range(4)], np.arange(4)
    for size in (80_000, 8):
        assert len(pool.manager.prepare_store(some, ORIGIN, positions, 1, 1.0).slots) == 0
        assert pool.to(size) is Todo.NOTHING
    for stored in (0, 4):
        assert len(pool.manager.prepare_store(some, ORIGIN, positions, 1, 2.0).slots) == stored


# --- room, where the pool is much smaller, or larger, than it was -----------------------------------------------------


def test_victims_taken_already_are_not_candidates_again() -> None:
    """In a large pool a request's own blocks are not looked for at first, and may be the oldest all the same."""
    manager = OffloadManager(10, 64)
    low, normal = ([key(number) for number in range(start, start + 5)] for start in (0, 5))
    for keys, priority_class in ((low, 0), (normal, 1)):
        manager.complete_store(manager.prepare_store(keys, ORIGIN, np.arange(5), priority_class, 1.0).slots, 1.0)
    wanted = [key(number) for number in range(50, 59)]
    answer = manager.prepare_store(wanted, ORIGIN, np.arange(9), 1, 2.0, prefix=Prefix({}, low[-1:]))
    assert len(answer.slots) == 9
    manager.unpin(manager.pin(manager.lookup(low[:1])))
    again = manager.prepare_store([key(number) for number in range(70, 80)], ORIGIN, np.arange(10), 1, 3.0)
    assert sorted([*answer.slots.tolist(), *again.slots.tolist()]) == list(range(10)), "one slot was left"


def test_policy_when_switched_while_growing_has_the_target_size() -> None:
    """ARC has room for as many ghosts as slots: made for fewer, it would fail an offer once all of it is full."""
    num_slots = 4 * BATCH_SLOTS
    pool = Pool(4, num_slots)
    pool.resize.request(num_slots)
    while pool.manager.counts().slots < 2 * BATCH_SLOTS:
        if pool.resize.step(1.0) is Todo.MEMORY:
            pool.resize.acknowledge(pool.resize.memory_slots)
    pool.manager.switch_policy("arc")
    assert pool.drive() is Todo.NOTHING
    for start in range(0, 4 * num_slots, 500):
        assert len(pool.store(range(start, start + 500))) == 500
        # A second use, so that what is evicted of it is remembered longer.
        assert pool.store(range(start, start + 250)).tolist() == []


@pytest.mark.parametrize("later_slots", [None, 16])
def test_missing_memory_keeps_the_size_or_a_smaller_one_requested_later(later_slots: int | None) -> None:
    pool = Pool(8, 40)
    pool.store(range(8))
    pool.resize.request(40)
    while pool.resize.step(1.0) is not Todo.MEMORY:
        continue
    pool.resize.acknowledge(24)
    assert pool.resize.step(1.0) is Todo.MEMORY, "workers changed their memory for another request"
    if later_slots:
        pool.resize.request(later_slots)
    pool.resize.fail()
    assert pool.drive() is Todo.NOTHING
    assert pool.manager.counts().slots == pool.manager.counts().wanted_slots == (later_slots or 8)
    assert pool.has(range(8)) == list(range(8))
    assert pool.to(16) is Todo.NOTHING, "less may fit"


def test_pin_of_a_slot_being_removed_is_refused() -> None:
    """A resize may be busy with memory for another size when a smaller one is asked for, and checked for pins."""
    pool = Pool(12, 40)
    pool.store(range(12))
    by_slot = {int(Inventory(pool.manager).find_block(key(number)).slots[0]): number for number in range(12)}
    pool.resize.request(40)
    while pool.resize.step(1.0) is not Todo.MEMORY:
        continue
    pool.resize.request(8)
    assert pool.manager.operator_pins.pin(key(by_slot[9]), 100.0, 1.0) is PinOutcome.LEAVING
    assert pool.manager.operator_pins.pin(key(by_slot[7]), 100.0, 1.0) is PinOutcome.PINNED


def test_slots_in_use_while_shrinking_are_counted_by_use() -> None:
    pool = Pool(16, 16)
    pool.store(range(12))
    manager = pool.manager
    filling = manager.prepare_store([key(20), key(21)], ORIGIN, np.arange(2), 1, 2.0).slots
    loading, reading, waiting = (manager.pin(np.array([slot])) for slot in (9, 10, 11))
    assert manager.prepare_load(loading, 2.0)
    manager.begin_read(reading)
    assert pool.to(8, 2.0) is Todo.LATER
    assert pool.drive(2.0 + 2 * PINNED_WAIT_S) is Todo.LATER
    assert pool.resize.in_use() == (
        "2 being stored, or promoted from a tier, 1 being loaded, 1 being read by a tier, or verified, "
        "1 pinned, or found by requests that wait"
    )
    manager.abort_store(filling)
    manager.complete_load(loading)
    manager.end_read(reading)
    manager.unpin(waiting)
    assert pool.resize.in_use() == "none"
    assert pool.drive(2.0 + 3 * PINNED_WAIT_S) is Todo.NOTHING
