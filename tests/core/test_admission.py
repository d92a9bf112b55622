"""Admission: offers are what is counted, in fixed memory, and only what is offered often enough is stored."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.pool.admission import Admission
from kvferry.core.pool.manager import OffloadManager
from tests.harness.pool_blocks import ANYONE, keys, store


def marks(numbers: list[int]) -> np.ndarray:
    """Marks as spread as those of hashes."""
    return np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], dtype=np.uint64)


def test_a_block_is_stored_from_its_third_offer_on() -> None:
    manager = OffloadManager(100, 64)
    manager.admission.set_threshold(3)
    for expected in (0, 0, 4):
        answer = store(manager, keys(1, 4))
        assert len(answer.slots) == expected
        assert answer.num_decided == 4
        assert len(answer.not_admitted_at) == 4 - expected
    assert manager.counts().ready == 4


def test_offer_returns_stored_and_refused_positions() -> None:
    manager = OffloadManager(100, 64)
    store(manager, keys(2, 2))
    manager.admission.set_threshold(2)
    store(manager, keys(4, 1))
    answer = store(manager, keys(0, 6))
    assert answer.num_decided == 6
    assert answer.stored_at.tolist() == [4]
    assert answer.not_admitted_at.tolist() == [0, 1, 5]


def test_lookups_are_no_offers() -> None:
    """vllm#52022: reuse was counted by look-ups, which stop at the first miss."""
    manager = OffloadManager(100, 64)
    manager.admission.set_threshold(2)
    for _ in range(5):
        manager.lookup(keys(0, 3))
        manager.lookup_each(keys(0, 3))
        manager.history.explain(keys(0, 3), 1.0)
    assert len(store(manager, keys(0, 3)).not_admitted_at) == 3


def test_offer_without_space_is_not_counted() -> None:
    manager = OffloadManager(2, 64)
    store(manager, keys(50, 2))
    pin = manager.pin(manager.lookup(keys(50, 2)))
    manager.admission.set_threshold(2)
    store(manager, keys(1, 1))
    answer = manager.prepare_store(keys(0, 4), ANYONE, np.arange(4), 1, 1.0)
    assert (answer.num_decided, answer.not_admitted_at.tolist()) == (1, [0]), (
        "the second key is due, and finds no space"
    )
    for _ in range(3):
        answer = manager.prepare_store(keys(1, 3), ANYONE, np.arange(3), 1, 1.0)
        assert (answer.num_decided, answer.not_admitted_at.tolist()) == (0, [])
    manager.unpin(pin)
    answer = manager.prepare_store(keys(1, 3), ANYONE, np.arange(3), 1, 1.0)
    assert answer.not_admitted_at.tolist() == [1, 2], "asking again for room was no further offer of these"
    assert answer.stored_at.tolist() == [0]


@pytest.mark.parametrize("threshold", [0, -1, 64])
def test_a_threshold_out_of_range_is_refused_by_name(threshold: int) -> None:
    with pytest.raises(ValueError, match=f"store_threshold={threshold} has to be between 1 and 63"):
        Admission(10, threshold)


@given(batches=st.lists(st.lists(st.integers(0, 50), max_size=30, unique=True), max_size=30))
def test_offer_count_within_memory_is_never_too_low(batches: list[list[int]]) -> None:
    counted = Admission(1000, 2)
    true: Counter[int] = Counter()
    for batch in batches:
        counted.count(marks(batch))
        true.update(batch)
    numbers = list(true)
    assert (counted.counts(marks(numbers)) >= [true[number] for number in numbers]).all()


def test_counts_stop_at_their_limit() -> None:
    counted = Admission(10_000, 2)
    for _ in range(400):
        counted.count(marks([7]))
    assert int(counted.counts(marks([7]))[0]) == 63


def test_offer_count_of_new_keys_is_rarely_positive() -> None:
    num_slots = 8000  # 2**16 counters: as few a slot as there ever are
    counted = Admission(num_slots, 2)
    size = counted._rows.nbytes
    rng = np.random.default_rng(1)
    false = asked = 0
    for step in range(2000):
        fresh = rng.integers(0, 2**63, 64, dtype=np.uint64) * np.uint64(2)
        if step > 300:
            false += int(np.count_nonzero(counted.counts(fresh)))
            asked += len(fresh)
        counted.count(fresh)
    assert asked * 0.005 < false < asked * 0.035
    assert counted._rows.nbytes == size <= 32 * num_slots


def test_offer_is_counted_until_slots_to_twice_slots_others_came() -> None:
    num_slots = 2000
    counted = Admission(num_slots, 2)
    rng = np.random.default_rng(2)

    def others(count: int) -> None:
        for start in range(0, count, 50):
            some = rng.integers(0, 2**63, min(50, count - start), dtype=np.uint64) * np.uint64(2)
            counted.count(some)

    for first in range(7):
        others(first * 300)
        counted.count(marks([7]))
        others(num_slots - 1)
        assert int(counted.counts(marks([7]))[0]) == 1
        others(num_slots + 1)
        assert int(counted.counts(marks([7]))[0]) == 0


def test_counters_of_a_period_are_cleared_before_its_number_comes_again() -> None:
    counted = Admission(500, 2)
    counted.count(marks(list(range(400))))
    for _ in range(500 * 4 // 100):
        counted.count(marks(list(range(1000, 1100))))
    assert not counted.counts(marks(list(range(400)))).any()
