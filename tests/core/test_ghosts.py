"""Why a block is missing, and which evictions are regretted."""

from __future__ import annotations

import numpy as np

from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.pool.events import CacheEvent, RegretBatch
from kvferry.core.pool.index import Ghosts, hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.stats import EvictionReason, MissCause, NotStored
from tests.harness.pool_blocks import keys, store

NOBODY = np.empty(0, dtype=np.int64)


class Regrets:
    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, RegretBatch):
            self.keys += event.keys


def test_each_missing_block_has_its_reason() -> None:
    """vllm-ascend#9261: 'only stores, never a load': the GPU still had it all."""
    manager = OffloadManager(8, 64)
    store(manager, keys(0, 4), origin=RequestIdentity("old"))
    store(manager, keys(10, 4), origin=RequestIdentity("dropped"))
    manager.drop_matching(RequestFilter(request="dropped").matches, 0, 1.0)
    store(manager, keys(20, 4))
    store(manager, keys(30, 1))
    manager.drop_key(keys(20, 1)[0], 1.0)
    manager.drop(manager.lookup(keys(21, 1)), EvictionReason.LOAD_FAILED, 1.0)
    asked = [*keys(0, 5), *keys(10, 1), *keys(20, 3), *keys(99, 1)]
    found = dict(zip(asked, manager.history.explain(asked, 1.0)[0], strict=True))
    assert found == {
        keys(0, 1)[0]: MissCause.GAP,
        keys(1, 1)[0]: MissCause.GAP,
        keys(2, 1)[0]: MissCause.GAP,
        keys(3, 1)[0]: EvictionReason.CAPACITY,
        keys(4, 1)[0]: MissCause.NEW,
        keys(10, 1)[0]: EvictionReason.RESET,
        keys(20, 1)[0]: EvictionReason.OPERATOR,
        keys(21, 1)[0]: EvictionReason.LOAD_FAILED,
        keys(22, 1)[0]: MissCause.GAP,
        keys(99, 1)[0]: MissCause.NEW,
    }
    assert manager.history.explain([], 1.0)[0] == []


def test_evicted_block_is_regretted_once() -> None:
    sink = Regrets()
    manager = OffloadManager(4, 64, sink=sink)
    store(manager, keys(0, 4))
    manager.drop_key(keys(0, 1)[0], 1.0)
    store(manager, keys(10, 2))
    told = manager.history.explain(keys(0, 4), 1.0)[0]
    assert told == [EvictionReason.OPERATOR, MissCause.GAP, MissCause.GAP, EvictionReason.CAPACITY]
    assert manager.history.explain(keys(0, 4), 1.0)[0] == told, "the reason stays"
    assert sink.keys == [*keys(0, 1), *keys(3, 1)]
    assert manager.evictions.regretted == 2


def test_a_block_that_was_stored_again_is_no_regret() -> None:
    manager = OffloadManager(2, 64)
    store(manager, keys(0, 2))
    store(manager, keys(10, 2))
    store(manager, keys(0, 2))
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [MissCause.GAP] * 2
    assert manager.evictions.regretted == 0
    manager.drop_key(keys(0, 1)[0], 1.0)
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [EvictionReason.OPERATOR, MissCause.GAP]
    assert manager.evictions.regretted == 1, "it left once more"
    manager.reset(NOBODY, 1.0)
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [MissCause.NEW] * 2, "what left by the reset is forgotten"
    assert manager.evictions.regretted == 1


def test_key_of_two_stores_is_in_flight_until_the_last_one_ends() -> None:
    manager = OffloadManager(4, 64)
    first, second = (
        manager.prepare_store(keys(0, 1), RequestIdentity(name), np.arange(1), 1, 1.0).slots for name in "ab"
    )
    manager.abort_store(first)
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [MissCause.IN_FLIGHT, MissCause.NEW]
    manager.abort_store(second)
    assert manager.history.explain(keys(0, 1), 1.0)[0] == [MissCause.NEW]


def test_key_is_in_flight_however_many_were_stored_meanwhile() -> None:
    manager = OffloadManager(100, 64)
    slots = manager.prepare_store(keys(0, 1), RequestIdentity("slow"), np.arange(1), 1, 1.0).slots
    for first in range(100, 20_100, 50):
        store(manager, keys(first, 50))
    assert manager.history.explain(keys(0, 1), 1.0)[0] == [MissCause.IN_FLIGHT]
    manager.reset(slots, 1.0)
    assert manager.history.explain(keys(0, 1), 1.0)[0] == [MissCause.NEW]


def test_miss_cause_is_eviction_before_not_stored() -> None:
    manager = OffloadManager(2, 64)
    for number, reason in enumerate(NotStored):
        manager.history.record_not_stored(keys(number, 1), reason)
    assert manager.history.explain(keys(0, len(NotStored)), 1.0)[0] == list(NotStored)
    store(manager, keys(0, 1))
    manager.drop_key(keys(0, 1)[0], 1.0)
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [EvictionReason.OPERATOR, list(NotStored)[1]]
    manager.reset(NOBODY, 1.0)
    assert manager.history.explain(keys(0, 2), 1.0)[0] == [MissCause.NEW] * 2


def test_ghosts_take_the_same_memory_however_many_there_were() -> None:
    num_slots = 40_000
    ghosts = Ghosts(2 * num_slots, EvictionReason)
    assert len(ghosts._table) <= 2 * num_slots
    for first in range(0, 10 * num_slots, 1000):
        ghosts.add(hash_keys(keys(first, 1000)), EvictionReason.CAPACITY)
    assert len(ghosts._table) <= 2 * num_slots
    latest = ghosts.reasons(hash_keys(keys(10 * num_slots - 1000, 1000)))
    assert latest.count(EvictionReason.CAPACITY) > 950
    assert ghosts.reasons(hash_keys(keys(10**8, 1000))).count(None) == 1000


def test_ghosts_with_room_left_forget_none() -> None:
    ghosts = Ghosts(10, EvictionReason, is_dated=True)
    for first in range(0, 5000, 1000):
        ghosts.add(hash_keys(keys(first, 1000)), EvictionReason.CAPACITY, 1.0)
    marks = hash_keys(keys(0, 5000))
    assert ghosts.reasons(marks).count(None) == 0
    ghosts.plan_size(500_000)()
    assert ghosts.reasons(marks).count(None) == 0
    assert set(ghosts.regret(marks)[2].tolist()) == {1.0}


def test_miss_of_evicted_blocks_has_the_time_range_of_eviction() -> None:
    manager = OffloadManager(8, 64)
    store(manager, keys(0, 8))
    for number, now_s in ((0, 100.25), (1, 300.5), (2, 200.0), (3, 500.0)):
        manager.drop_key(keys(number, 1)[0], now_s)
    assert manager.history.explain(keys(0, 3), 600.0)[1] == (100.25, 300.5)
    assert manager.history.explain(keys(2, 4), 600.0)[1] == (200.0, 500.0)
    assert manager.history.explain(keys(4, 9), 600.0)[1] is None


def test_ghosts_do_not_come_back_when_the_number_of_their_epoch_does() -> None:
    ghosts = Ghosts(10, EvictionReason, is_dated=True)
    marks = hash_keys(keys(0, 500))
    ghosts.add(marks, EvictionReason.CAPACITY, 1.0)
    assert ghosts.reasons(marks).count(None) < 10, "hardly any two fall on one place"
    for number in range(1000):
        ghosts.reset()
        assert not any(ghosts.reasons(marks)), f"known again after {number + 1} resets"
