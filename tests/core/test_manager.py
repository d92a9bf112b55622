"""The manager by itself: priorities, operator pins, listings, dirty rows, resets of a large pool."""

from __future__ import annotations

import tracemalloc

import numpy as np
import psutil
import pytest

from kvferry.core.keys import Prefix, RequestIdentity
from kvferry.core.pool.events import EvictionBatch, NullSink
from kvferry.core.pool.eviction.arc import ArcPolicy
from kvferry.core.pool.inventory import BlockState, Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin, PinOutcome
from kvferry.core.pool.slots import SlotState
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import NO_SLOTS
from tests.harness.resident import resident_share

ANYONE = RequestIdentity("r")
LOW, NORMAL, HIGH = 0, 1, 2


class Recorder(NullSink):
    def __init__(self) -> None:
        self.batches: list[EvictionBatch] = []

    def evicted(self, batch: EvictionBatch) -> None:
        self.batches.append(batch)


def keys(first: int, count: int) -> list[bytes]:
    return [(first + i).to_bytes(16, "big") + b"\0" for i in range(count)]


def store(
    manager: OffloadManager,
    wanted: list[bytes],
    priority: int = NORMAL,
    origin: RequestIdentity = ANYONE,
    now_s: float = 1.0,
) -> None:
    answer = manager.prepare_store(wanted, origin, np.arange(len(wanted)), priority, now_s)
    manager.complete_store(answer.slots, now_s)


def pin_prefix(manager: OffloadManager, wanted: list[bytes]) -> Pin:
    return manager.pin(manager.lookup(wanted))


def holds(manager: OffloadManager, wanted: list[bytes]) -> list[bool]:
    return [Inventory(manager).find_block(key) is not None for key in wanted]


def test_lower_priorities_go_first_and_the_highest_last() -> None:
    manager = OffloadManager(6, 64)
    for priority, first in ((HIGH, 0), (LOW, 10), (NORMAL, 20)):
        store(manager, keys(first, 2), priority)
    store(manager, keys(30, 3))
    assert holds(manager, keys(10, 2)) == [False, False]
    assert holds(manager, keys(20, 2)) == [True, False], "of a class, the tail goes first"
    store(manager, keys(40, 4), HIGH)
    assert holds(manager, keys(0, 2)) == [True, True]


def test_an_eviction_says_what_left_why_and_for_whom() -> None:
    sink = Recorder()
    manager = OffloadManager(2, 64, sink=sink)
    store(manager, keys(0, 2), origin=RequestIdentity("first", "tenant", "lora"), now_s=10.0)
    pin = pin_prefix(manager, keys(0, 1))
    manager.prepare_load(pin, 11.0)
    manager.complete_load(pin)
    store(manager, keys(5, 2), origin=RequestIdentity("second"), now_s=20.0)
    (batch,) = sink.batches
    assert (batch.reason, batch.needed_by, batch.policy) == (EvictionReason.CAPACITY, "second", "lru")
    assert batch.rows.keys == [keys(1, 1)[0], keys(0, 1)[0]]
    assert [origin.request_id for origin in batch.rows.origins] == ["first", "first"]
    assert batch.rows.records["position"].tolist() == [1, 0]
    assert batch.rows.records["hits"].tolist() == [0, 1]
    assert batch.rows.records["hit_s"].tolist() == [0.0, 11.0]


def test_an_offer_that_finds_no_room_ends_where_room_ends() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 2))
    pin = pin_prefix(manager, keys(0, 2))
    answer = manager.prepare_store([*keys(0, 1), *keys(10, 5)], RequestIdentity("r"), np.arange(6), NORMAL, 1.0)
    assert (answer.num_answered, answer.stored_at.tolist(), len(answer.slots)) == (3, [1, 2], 2)
    manager.abort_store(answer.slots)
    manager.unpin(pin)
    assert manager.counts().free == 2


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
    assert holds(manager, [first, second, third]) == [True, True, False]
    manager.operator_pins.expire(60.0)
    store(manager, keys(200, 8))
    assert holds(manager, [first, second]) == [True, False], "the later time counts"
    assert manager.operator_pins.unpin(first)
    assert not manager.operator_pins.unpin(first)
    store(manager, keys(300, 8))
    assert not Inventory(manager).find_block(first)
    assert manager.counts().pinned == 0


def test_a_dropped_block_that_is_pinned_or_loading_is_freed_when_the_last_lets_go() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 4))
    waiting, loading = pin_prefix(manager, keys(0, 1)), pin_prefix(manager, keys(0, 2))
    assert manager.prepare_load(loading, 1.0)
    manager.operator_pins.pin(keys(0, 1)[0], 99.0, 1.0)
    assert manager.drop_key(keys(0, 1)[0], 1.0)
    assert not manager.drop_key(keys(0, 1)[0], 1.0)
    counts = manager.counts()
    assert (counts.ready, counts.storing, counts.loading) == (3, 1, 1)
    assert not manager.complete_load(loading), "the load was disowned"
    assert manager.counts().storing == 1
    assert not manager.prepare_load(waiting, 2.0)
    manager.unpin(waiting)
    counts = manager.counts()
    assert (counts.free, counts.ready, counts.storing, counts.loading, counts.pinned) == (1, 3, 0, 0, 0)


def test_listings_walk_the_slots_and_the_map_shows_every_one() -> None:
    manager = OffloadManager(3000, 64)
    store(manager, keys(0, 2500))
    manager.drop_key(keys(7, 1)[0], 1.0)
    seen: list[bytes] = []
    start = 0
    while len((rows := Inventory(manager).list_blocks(start, 400)).slots):
        seen += rows.keys
        start = int(rows.slots[-1]) + 1
    assert sorted(seen) == sorted(set(keys(0, 2500)) - set(keys(7, 1)))
    states = Inventory(manager).slot_states()
    assert np.count_nonzero(states == SlotState.READY) == 2499
    assert np.count_nonzero(states == SlotState.FREE) == 501


def test_every_change_is_told_once_by_the_dirty_rows() -> None:
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
    Inventory(manager).mark_all_dirty()
    assert project() == 5000


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
    assert all(holds(manager, keys(0, 500)))
    manager.abort_store(np.array([3, 5]))
    assert manager.counts().free == num_slots - 500
    taken = manager.prepare_store(keys(10**6, num_slots), RequestIdentity("all"), np.arange(num_slots), NORMAL, 1.0)
    assert sorted(taken.slots.tolist()) == list(range(num_slots)), "every slot is given out, and once"


def test_a_slot_that_a_reset_disowned_while_it_was_loading_is_not_lent_out_pinned() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    old = pin_prefix(manager, keys(0, 1))
    assert manager.prepare_load(old, 1.0)
    manager.reset(old.slots, 2.0)
    store(manager, keys(10, 3))
    manager.complete_load(old)
    store(manager, keys(20, 1))
    loading = pin_prefix(manager, keys(20, 1))
    assert manager.prepare_load(loading, 3.0)
    answer = manager.prepare_store(keys(40, 4), ANYONE, np.arange(4), NORMAL, 4.0)
    assert not set(answer.slots.tolist()) & set(loading.slots.tolist())
    assert manager.complete_load(loading)


def test_a_pinned_block_that_was_dropped_is_free_after_a_reset() -> None:
    manager = OffloadManager(3, 64)
    store(manager, keys(0, 3))
    pin = pin_prefix(manager, keys(0, 2))
    manager.drop_key(keys(0, 1)[0], 1.0)
    manager.reset(np.empty(0, dtype=np.int64), 1.0)
    assert sorted(manager.prepare_store(keys(9, 3), ANYONE, np.arange(3), NORMAL, 1.0).slots.tolist()) == [0, 1, 2]
    manager.unpin(pin)
    assert manager.counts().storing == 3


def test_slots_of_an_offer_are_its_own_whatever_is_given_back_meanwhile() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 4))
    for key in keys(0, 4):
        manager.drop_key(key, 1.0)
    answer = manager.prepare_store(keys(10, 2), ANYONE, np.arange(2), NORMAL, 1.0)
    before = answer.slots.tolist()
    other = manager.prepare_store(keys(20, 2), ANYONE, np.arange(2), NORMAL, 1.0)
    manager.abort_store(other.slots)
    assert answer.slots.tolist() == before


def test_an_offer_does_not_evict_the_prefix_that_it_continues() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 2))
    answer = manager.prepare_store(keys(0, 6), ANYONE, np.arange(6), NORMAL, 1.0)
    assert (answer.num_answered, len(answer.slots)) == (4, 2)
    manager.complete_store(answer.slots, 1.0)
    assert len(manager.lookup(keys(0, 6))) == 4
    answer = manager.prepare_store(
        keys(4, 2), ANYONE, np.arange(4, 6), NORMAL, 1.0, prefix=Prefix({0: (keys(0, 4), 4)})
    )
    assert (answer.num_answered, len(answer.slots)) == (0, 0)
    store(manager, keys(50, 2))
    assert len(manager.lookup(keys(0, 6))) == 2


def test_what_was_stored_before_a_reset_is_told_as_gone() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 2))
    manager.reset(np.empty(0, dtype=np.int64), 1.0)
    rows = Inventory(manager).dirty_rows(10)
    assert rows is not None
    assert not rows.live.any()


def test_an_operator_pin_does_not_outlive_a_reset() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    manager.operator_pins.pin(keys(0, 1)[0], 50.0, 1.0)
    manager.reset(np.empty(0, dtype=np.int64), 1.0)
    store(manager, keys(0, 1))
    manager.operator_pins.expire(60.0)
    assert (manager.counts().pinned, manager.counts().ready) == (0, 1)
    assert manager.operator_pins.pin(keys(0, 1)[0], 90.0, 61.0) is PinOutcome.PINNED


def pinned_until(manager: OffloadManager, key: bytes) -> float | None:
    rows = Inventory(manager).find_block(key)
    assert rows is not None
    (hold,) = Inventory(manager).holds(rows)
    return None if hold is None else hold.pinned_until_s


def test_a_pin_that_was_moved_ends_at_its_new_time() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    for until_s in (50.0, 200.0):
        manager.operator_pins.pin(keys(0, 1)[0], until_s, 1.0)
    manager.operator_pins.expire(60.0)
    assert pinned_until(manager, keys(0, 1)[0]) == 200.0
    assert manager.counts().pinned == 1


def test_what_a_block_is_under_is_told_of_the_very_block_that_was_found() -> None:
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


def test_renewing_a_pin_for_ever_takes_no_memory_for_ever() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    for number in range(5000):
        manager.operator_pins.pin(keys(0, 1)[0], 1000.0 + number, 1.0)
    assert len(manager.operator_pins._until_s) < 1000
    assert pinned_until(manager, keys(0, 1)[0]) == 5999.0


def test_rows_tell_the_real_size_of_what_a_slot_holds() -> None:
    manager = OffloadManager(4, 64)
    small = manager.prepare_store(keys(0, 2), ANYONE, np.arange(2), NORMAL, 1.0, size_bytes=48)
    manager.complete_store(small.slots, 1.0)
    store(manager, keys(10, 2))
    rows = Inventory(manager).list_blocks(0, 10)
    sizes = dict(zip(rows.keys, rows.records["size"].tolist(), strict=True))
    assert sizes == dict.fromkeys(keys(0, 2), 48) | dict.fromkeys(keys(10, 2), 64)


def test_a_slot_under_two_loads_at_a_reset_is_free_when_the_second_ends() -> None:
    manager = OffloadManager(3, 64)
    store(manager, keys(0, 2))
    first, second = pin_prefix(manager, keys(0, 2)), pin_prefix(manager, keys(0, 1))
    waiting = pin_prefix(manager, keys(0, 2))
    assert manager.prepare_load(first, 1.0)
    assert manager.prepare_load(second, 1.0)
    assert manager.counts().loading == 2
    for now_s in (2.0, 3.0):
        manager.reset(first.slots, now_s)
    manager.unpin(waiting)
    assert (manager.counts().loading, manager.counts().free) == (0, 1)
    assert not manager.complete_load(first)
    assert manager.counts().free == 2
    assert not manager.complete_load(second)
    assert manager.counts().free == 3
    taken = manager.prepare_store(keys(5, 3), ANYONE, np.arange(3), NORMAL, 4.0)
    assert sorted(taken.slots.tolist()) == [0, 1, 2]


def test_a_prefix_ends_at_the_first_missing_key_however_long_it_is() -> None:
    manager = OffloadManager(300, 64)
    for length in (0, 1, 63, 64, 65, 128, 129, 300):
        manager.reset(np.empty(0, dtype=np.int64), 1.0)
        store(manager, keys(0, length))
        assert len(manager.lookup(keys(0, 300))) == length
        assert manager.lookup_each(keys(0, 300)).tolist() == [*manager.lookup(keys(0, 300)), *[-1] * (300 - length)]


def test_a_prefix_has_no_gap() -> None:
    manager = OffloadManager(300, 64)
    for missing in (1, 63, 64, 130):
        manager.reset(NO_SLOTS, 1.0)
        store(manager, keys(0, 200))
        manager.drop_key(keys(missing, 1)[0], 1.0)
        assert len(manager.lookup(keys(0, 200))) == missing


def test_a_pin_that_a_reset_voided_does_not_make_its_slots_candidates() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 4))
    pin = pin_prefix(manager, keys(0, 4))
    manager.reset(NO_SLOTS, 1.0)
    manager.unpin(pin)
    assert (manager.counts().pinned, len(manager.evictor.policy)) == (0, 0)
    taken = manager.prepare_store(keys(10, 6), ANYONE, np.arange(6), NORMAL, 1.0)
    assert sorted(taken.slots.tolist()) == [0, 1, 2, 3]


def test_a_slot_that_comes_back_after_a_reset_is_given_out_once() -> None:
    manager = OffloadManager(400, 64)
    store(manager, keys(0, 400))
    manager.reset(np.array([3, 5, 399]), 1.0)
    manager.abort_store(np.array([5, 399]))
    taken = manager.prepare_store(keys(1000, 400), ANYONE, np.arange(400), NORMAL, 1.0)
    assert sorted(taken.slots.tolist()) == sorted(set(range(400)) - {3})


def test_pins_that_are_over_end_in_batches_without_an_engine() -> None:
    manager = OffloadManager(6000, 64)
    manager.operator_pins.set_max_fraction(1.0)
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
    assert sum(holds(manager, keys(0, 2600))) == 100


def test_after_a_reset_a_pool_of_one_priority_is_one_of_one_priority_again() -> None:
    manager = OffloadManager(4, 64)
    for priority in (LOW, HIGH):
        store(manager, keys(10 * priority, 1), priority)
    assert manager.table.uniform_class is None
    manager.reset(np.empty(0, dtype=np.int64), 1.0)
    store(manager, keys(50, 4))
    assert manager.table.uniform_class == NORMAL
    store(manager, keys(60, 2))
    assert holds(manager, keys(50, 4)) == [True, True, False, False]


def test_a_slot_that_is_named_twice_in_a_pin_is_free_once_after_a_reset() -> None:
    manager = OffloadManager(4, 64)
    store(manager, keys(0, 1))
    pin = manager.pin(manager.lookup(keys(0, 1) * 2))
    assert manager.prepare_load(pin, 1.0)
    manager.reset(np.empty(0, dtype=np.int64), 2.0)
    store(manager, keys(10, 10))
    assert not manager.complete_load(pin)
    assert manager.table.pins.tolist() == [0] * 4
    store(manager, keys(30, 2))
    load = manager.pin(manager.lookup(keys(30, 1)))
    assert manager.prepare_load(load, 3.0)
    offer = manager.prepare_store(keys(40, 4), RequestIdentity("later"), np.arange(4), NORMAL, 4.0)
    assert not set(offer.slots.tolist()) & set(load.slots.tolist()), "a slot under a load is given out"


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_key_that_is_offered_twice_at_once_with_a_higher_priority_counts_once(policy: str) -> None:
    manager = OffloadManager(4, 64, policy)
    store(manager, keys(0, 2))
    manager.prepare_store(keys(0, 1) * 2, RequestIdentity("again"), np.arange(2), NORMAL + 1, 2.0)
    assert manager.counts().ready == 2
    assert len(manager.evictor.policy) == 2
    offers = [manager.prepare_store(keys(10 + n, 1), RequestIdentity("o"), np.arange(1), NORMAL, 3.0) for n in range(5)]
    assert [len(offer.slots) for offer in offers] == [
        1, 1, 1, 1, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_large_pool_takes_the_memory_of_its_tables_before_it_is_used(policy: str) -> None:
    """Pages of two megabytes that are cleared when they are first touched would stall the engine under the lock."""
    manager = OffloadManager(3_000_000, 64)
    while manager.switch_policy(policy):
        pass
    tables = [manager.index._cells, manager.history.evicted._table]
    if isinstance(manager.evictor.policy, ArcPolicy):
        tables.append(manager.evictor.policy._ghosts._table._cells)
    assert [resident_share(table) for table in tables] == [1.0] * len(tables)
    before = psutil.Process().memory_info().rss
    for first in range(0, 10_000, 100):
        store(manager, keys(first, 100))
    assert psutil.Process().memory_info().rss - before < tables[0].nbytes // 4
