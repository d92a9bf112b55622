"""The manager by itself: priorities, operator pins, listings, dirty rows, resets of a large pool."""

from __future__ import annotations

import tracemalloc

import numpy as np
import psutil
import pytest

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.inventory import BlockState, Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin, PinOutcome
from kvferry.core.pool.recovery import recover
from kvferry.core.transfers import NO_SLOTS
from tests.harness.pool_blocks import ANYONE, HIGH, LOW, NORMAL, held, keys, store
from tests.harness.resident import resident_share


def pin_prefix(manager: OffloadManager, wanted: list[bytes]) -> Pin:
    return manager.pin(manager.lookup(wanted))


def test_operator_pins_hold_are_limited_and_end() -> None:
    manager = OffloadManager(8, 64)
    store(manager, keys(0, 8))
    first, second, third = keys(0, 3)
    assert manager.operator_pins.pin(first, 100.0, 1.0) is PinOutcome.PINNED
    assert manager.operator_pins.pin(first, 200.0, 1.0) is PinOutcome.PINNED
    assert manager.operator_pins.pin(second, 50.0, 1.0) is PinOutcome.PINNED
    assert manager.operator_pins.pin(third, 50.0, 1.0) is PinOutcome.LIMIT
    assert manager.operator_pins.pin(b"nothing", 50.0, 1.0) is PinOutcome.NOT_FOUND
    store(manager, keys(100, 8))
    assert held(manager, [first, second, third]) == [True, True, False]
    for now_s in (60.0, 150.0):
        manager.operator_pins.expire(now_s)
    store(manager, keys(200, 8))
    assert held(manager, [first, second]) == [True, False], "the later time counts"
    assert manager.operator_pins.unpin(first)
    assert not manager.operator_pins.unpin(first)
    store(manager, keys(300, 8))
    assert not Inventory(manager).find_block(first)
    assert manager.counts().pinned == 0


def test_dirty_rows_contain_each_change_once() -> None:
    manager = OffloadManager(5000, 64)
    known: dict[int, bytes] = {}

    def project() -> int:
        told = 0
        while (rows := Inventory(manager).dirty_rows(700)) is not None:
            told += len(rows.slots)
            for slot, key, live in zip(rows.slots.tolist(), rows.keys, rows.live.tolist(), strict=True):
                if live:
                    known[slot] = key
                else:
                    known.pop(slot, None)
        return told

    store(manager, keys(0, 4000))
    assert project() == 4000
    store(manager, keys(10_000, 1500))
    for key in keys(20, 5):
        manager.drop_key(key, 1.0)
    assert project() == 1500 + 5
    assert project() == 0
    rows = Inventory(manager).list_blocks(0, 10_000)
    assert known == dict(zip(rows.slots.tolist(), rows.keys, strict=True))


@pytest.mark.parametrize("num_slots", [1000, 200_000])
def test_a_reset_allocates_nothing_in_proportion_to_the_pool(num_slots: int) -> None:
    manager = OffloadManager(num_slots, 64)
    for first in range(0, num_slots, 1000):
        store(manager, keys(first, 1000))
    tracemalloc.start()
    try:
        assert manager.reset(np.array([3, 5]), 1.0) == num_slots
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000
    assert manager.counts().storing == 2
    store(manager, keys(0, 500))
    assert all(held(manager, keys(0, 500)))
    manager.abort_store(np.array([3, 5]))
    assert manager.counts().free == num_slots - 500
    taken = manager.prepare_store(keys(10**6, num_slots), RequestIdentity("all"), np.arange(num_slots), NORMAL, 1.0)
    assert sorted(taken.slots.tolist()) == list(range(num_slots)), "every slot is given out, and once"


def test_offer_does_not_evict_its_own_prefix() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 2))
    answer = manager.prepare_store(keys(0, 6), ANYONE, np.arange(6), NORMAL, 1.0)
    assert (answer.num_decided, len(answer.slots)) == (4, 2)
    manager.complete_store(answer.slots, 1.0)
    assert len(manager.lookup(keys(0, 6))) == 4
    answer = manager.prepare_store(
        keys(4, 2), ANYONE, np.arange(4, 6), NORMAL, 1.0, prefix=Prefix({0: (keys(0, 4), 4)})
    )
    assert (answer.num_decided, len(answer.slots)) == (0, 0)
    store(manager, keys(50, 2))
    assert len(manager.lookup(keys(0, 6))) == 2


def test_an_operator_pin_does_not_outlive_a_reset() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    manager.operator_pins.pin(keys(0, 1)[0], 50.0, 1.0)
    manager.reset(NO_SLOTS, 1.0)
    store(manager, keys(0, 1))
    manager.operator_pins.expire(60.0)
    assert (manager.counts().pinned, manager.counts().ready) == (0, 1)
    assert manager.operator_pins.pin(keys(0, 1)[0], 90.0, 61.0) is PinOutcome.PINNED


def test_holds_are_those_of_the_listed_generation() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 4))
    rows = Inventory(manager).list_blocks(0, 4)
    loaded, pinned = (pin_prefix(manager, [key]) for key in keys(0, 2))
    assert manager.prepare_load(loaded, 1.0)
    manager.drop_key(keys(2, 1)[0], 1.0)
    store(manager, keys(9, 1))
    states = {key: hold and hold.state for key, hold in zip(rows.keys, Inventory(manager).holds(rows), strict=True)}
    assert [states[key] for key in keys(0, 4)] == ["loading", "pinned", None, "ready"]
    manager.complete_load(loaded)
    manager.unpin(pinned)
    assert [hold and hold.state for hold in Inventory(manager).holds(rows)].count(BlockState.READY) == 3
    manager.reset(NO_SLOTS, 2.0)
    store(manager, keys(0, 4))
    assert Inventory(manager).holds(rows) == [None] * 4


def test_rows_have_the_real_size_of_a_block() -> None:
    manager = OffloadManager(4, 64)
    small = manager.prepare_store(keys(0, 2), ANYONE, np.arange(2), NORMAL, 1.0, size_bytes=48)
    manager.complete_store(small.slots, 1.0)
    store(manager, keys(10, 2))
    rows = Inventory(manager).list_blocks(0, 10)
    sizes = dict(zip(rows.keys, rows.records["size"].tolist(), strict=True))
    assert sizes == dict.fromkeys(keys(0, 2), 48) | dict.fromkeys(keys(10, 2), 64)


def test_pins_that_are_over_end_in_batches_without_an_engine() -> None:
    manager = OffloadManager(6000, 64)
    manager.operator_pins.max_fraction = 1.0
    store(manager, keys(0, 2600))
    for number, key in enumerate(keys(0, 2600)):
        manager.operator_pins.pin(key, 10.0 if number < 2500 else 30.0, 1.0)
    assert not manager.operator_pins.expire(9.0)
    assert manager.counts().pinned == 2600
    left = []
    while manager.operator_pins.expire(20.0):
        left.append(manager.counts().pinned)
    assert left == [1600, 600]
    assert manager.counts().pinned == 100
    store(manager, keys(10_000, 6000))
    assert sum(held(manager, keys(0, 2600))) == 100


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_tables_of_a_large_pool_are_resident_before_use(policy: str) -> None:
    """Pages of two megabytes that are cleared when they are first touched would stall the engine under the lock."""
    manager = OffloadManager(3_000_000, 64)
    manager.switch_policy(policy)
    tables = [manager.index._cells, manager.history.evicted._table]
    if isinstance(manager.evictor.policy, ArcPolicy):
        tables.append(manager.evictor.policy._ghosts._table._cells)
    assert [resident_share(table) for table in tables] == [1.0] * len(tables)
    before = psutil.Process().memory_info().rss
    for first in range(0, 10_000, 100):
        store(manager, keys(first, 100))
    assert psutil.Process().memory_info().rss - before < tables[0].nbytes // 4


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_key_when_offered_twice_with_higher_priority_counts_once(policy: str) -> None:
    manager = OffloadManager(4, 64, policy)
    store(manager, keys(0, 2))
    manager.prepare_store(keys(0, 1) * 2, RequestIdentity("again"), np.arange(2), NORMAL + 1, 2.0)
    assert manager.counts().ready == 2
    assert len(manager.evictor) == 2
    offers = [manager.prepare_store(keys(10 + n, 1), RequestIdentity("o"), np.arange(1), NORMAL, 3.0) for n in range(5)]
    assert [len(offer.slots) for offer in offers] == [1] * 4 + [0]


def test_offer_of_a_key_that_cannot_be_hashed_changes_nothing() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 2))
    with pytest.raises(TypeError):
        manager.prepare_store(["not bytes"], RequestIdentity("bad"), np.arange(1), NORMAL, 1.0)  # type: ignore[list-item]
    assert not manager.changing.is_torn


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_key_offered_twice_while_another_stores_it_gets_one_place(policy: str) -> None:
    manager = OffloadManager(8, 64, policy)

    def offer(numbers: list[int], priority_class: int) -> np.ndarray:
        wanted = [keys(number, 1)[0] for number in numbers]
        return manager.prepare_store(wanted, RequestIdentity("a"), np.arange(len(wanted)), priority_class, 1.0).slots

    first, repeated = offer([0], LOW), offer([0, 0], HIGH)
    assert manager.complete_store(first, 1.0) == 1
    assert manager.complete_store(repeated, 1.0) == 0
    manager.complete_store(offer(list(range(1, 8)), NORMAL), 1.0)
    slots = offer(list(range(11, 22)), NORMAL)
    assert len(slots) == len(set(slots.tolist()))
    assert manager.complete_store(slots, 1.0) == len(slots)


def test_recovery_keeps_a_load_that_reads_a_slot_twice() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    pin = manager.pin(manager.lookup(keys(0, 1)).repeat(2))
    assert manager.prepare_load(pin, 2.0)
    assert recover(manager, NO_SLOTS, [pin], [], 3.0) == []
    assert manager.counts().pinned == 1
    assert manager.complete_load(pin)
    assert manager.counts().pinned == 0
    assert len(manager.evictor) == 1
    pin_prefix(manager, keys(0, 1))
    assert manager.counts().pinned == 1
