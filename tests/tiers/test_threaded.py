"""A tier on threads of its own: calls that hang, fail or end their thread cost their blocks, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvferry.app.tiers.block_store import BlockResult, Outcome
from kvferry.app.tiers.threaded import CopyHangs
from kvferry.core.keys import Key, RequestFilter
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.tier_rig import WAIT_S, Rig, threaded_rig
from tests.harness.tier_slots import ORIGIN, key_of, keys_of, length_of
from tests.harness.waiting import wait_until


@pytest.fixture
def rig(open_rig: Callable[..., Rig]) -> Rig:
    return open_rig()


def let_in(store: DictionaryStore, count: int) -> None:
    """Wait until so many calls stand at the gate."""
    for _ in range(count):
        assert store.entered.acquire(timeout=WAIT_S)


def hang(rig: Rig, store: DictionaryStore, number_of_blocks: int = 3) -> int:
    """Have every thread hang in a load of a block; the job's number."""
    store.gate.clear()
    number = rig.submit_load(keys_of(range(number_of_blocks)))
    let_in(store, min(number_of_blocks, 3))
    return number


def settled(rig: Rig, store: DictionaryStore) -> None:
    """Store three blocks, and forget that their calls came by."""
    assert rig.store(keys_of(range(3))) == [True] * 3
    let_in(store, 6)


class HeldArray(np.ndarray):
    """A slot whose copies begin, and end when the test says so."""

    began = threading.Event()
    may_end = threading.Event()

    def __array_function__(self, function, types, args, kwargs):
        plain = [np.asarray(arg) for arg in args]
        HeldArray.began.set()
        assert HeldArray.may_end.wait(WAIT_S)
        return function(*plain, **kwargs)


def copying(rig: Rig, store: DictionaryStore) -> int:
    """Have a thread hang in the copy of a block into its slot; the job's number."""
    settled(rig, store)
    HeldArray.began.clear()
    HeldArray.may_end.clear()
    rig.slots.wipe()
    rig.slots.parts[0] = rig.slots.parts[0].view(HeldArray)
    number = rig.submit_load(keys_of([1]))
    assert HeldArray.began.wait(WAIT_S)
    rig.slots.parts[0] = np.asarray(rig.slots.parts[0])
    return number


def test_close_when_a_copy_is_under_way_waits_for_its_end(rig: Rig, store: DictionaryStore) -> None:
    copying(rig, store)
    caller = threading.Thread(target=lambda: rig.tier.close(0.0))
    caller.start()
    caller.join(0.05)
    assert caller.is_alive(), "the slot is given up while bytes are copied into it"
    HeldArray.may_end.set()
    caller.join(WAIT_S)
    assert not caller.is_alive()


def test_job_when_canceled_in_a_copy_that_hangs_keeps_its_slots(rig: Rig, store: DictionaryStore) -> None:
    number = copying(rig, store)
    for _ in range(2):
        with pytest.raises(CopyHangs, match="its slots are in use"):
            rig.tier.cancel(number)
    assert not rig.has(number)
    HeldArray.may_end.set()
    assert not rig.wait(number).ok.any()
    assert rig.load(keys_of([1])) == [True]


def test_job_when_reset_in_a_copy_that_hangs_keeps_its_slots(rig: Rig, store: DictionaryStore) -> None:
    number = copying(rig, store)
    rig.tier.reset(reset := next(rig.numbers), None)
    assert not rig.has(number)
    with pytest.raises(CopyHangs):
        rig.tier.cancel(number)
    HeldArray.may_end.set()
    assert not rig.wait(number).ok.any()
    wait_until(lambda: rig.has(reset), "the reset", WAIT_S)


def test_job_when_canceled_does_not_wait_for_copies_of_others(rig: Rig, store: DictionaryStore) -> None:
    number = copying(rig, store)
    store.gate.clear()
    let_in(store, 1)
    other = rig.submit_load(keys_of([2]), first_slot=5)
    let_in(store, 1)
    rig.tier.cancel(other)
    store.gate.set()
    HeldArray.may_end.set()
    assert rig.wait(number).ok.all()
    assert other not in rig.results


def test_drop_when_its_removal_fails_is_repeated_until_it_succeeds(rig: Rig, store: DictionaryStore) -> None:
    keys = keys_of(range(3))
    assert rig.store(keys) == [True] * 3
    store.removal_gate.clear()
    number = rig.drop(keys[:1])
    for _ in range(2):
        store.maintained.clear()
        assert store.maintained.wait(WAIT_S)
        assert rig.find(keys) == rig.load(keys) == rig.store(keys) == [False, True, True]
        assert not rig.has(number)
    assert not rig.tier.counts().outages
    store.removal_gate.set()
    wait_until(lambda: rig.has(number), "the removal", WAIT_S)
    assert len(store.blocks) == 2
    assert rig.store(keys) == [True] * 3


def test_drop_when_one_key_cannot_be_removed_ends_for_the_others(
    rig: Rig, store: DictionaryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, drop = keys_of(range(3)), store.drop
    assert rig.store(keys) == [True] * 3

    def fail(some: list[Key]) -> None:
        if keys[1] in some:
            raise PermissionError("not this one")
        drop(some)

    monkeypatch.setattr(store, "drop", fail)
    numbers = [rig.drop([key]) for key in keys]
    wait_until(lambda: rig.has(numbers[0]) and rig.has(numbers[2]), "the removals", WAIT_S)
    assert not rig.has(numbers[1])
    assert rig.find(keys) == [False] * 3


def test_block_put_after_the_removal_of_its_drop_is_removed_again(rig: Rig, store: DictionaryStore) -> None:
    keys = keys_of(range(3))
    store.put_gate.clear()
    stored = rig.submit_store(keys)
    assert store.putting.acquire(timeout=WAIT_S)
    drop = rig.drop(keys[:1])
    for _ in range(2):
        store.maintained.clear()
        rig._maintain_now()
        assert store.maintained.wait(WAIT_S)
    assert not rig.has(drop), "a store of it is under way"
    store.put_gate.set()
    assert rig.wait(stored).ok.tolist() == [False, True, True]
    wait_until(lambda: rig.has(drop), "the removal", WAIT_S)
    assert len(store.blocks) == 2


@pytest.mark.parametrize("is_dropped_first", [True, False])
def test_block_dropped_and_removed_during_a_read_is_not_served(
    rig: Rig, store: DictionaryStore, is_dropped_first: bool
) -> None:
    keys = keys_of(range(2))
    assert rig.store(keys) == [True] * 2
    store.removal_gate.clear()
    drop = rig.drop(keys[:1]) if is_dropped_first else -1
    store.answer_gate.clear()
    reads = rig.submit_load(keys), next(rig.numbers)
    rig.tier.look_up(reads[1], keys)
    for _ in range(5):
        # Two blocks were stored; now two are loaded, and one look-up is under way.
        assert store.worked.acquire(timeout=WAIT_S)
    drop = drop if is_dropped_first else rig.drop(keys[:1])
    store.removal_gate.set()
    rig._maintain_now()
    wait_until(lambda: rig.has(drop), "the removal", WAIT_S)
    store.answer_gate.set()
    assert [rig.wait(number).ok.tolist() for number in reads] == [[False, True]] * 2
    assert rig.find(keys) == [False, True]


def test_look_up_and_load_do_not_wait_for_stores_that_hang(rig: Rig, store: DictionaryStore) -> None:
    settled(rig, store)
    store.put_gate.clear()
    stored = rig.submit_store(keys_of(range(10, 14)), first_slot=8)
    for _ in range(2):
        assert store.putting.acquire(timeout=WAIT_S)
    assert rig.find(keys_of(range(4))) == rig.load(keys_of(range(4))) == [True] * 3 + [False]
    store.put_gate.set()
    assert rig.wait(stored).ok.all()


def test_threads_when_hanging_are_reported_and_jobs_refused(
    open_rig: Callable[..., Rig], store: DictionaryStore
) -> None:
    rig = open_rig(timeout_s=0.01)
    settled(rig, store)
    hang(rig, store)
    wait_until(lambda: "3 of 3 threads have waited" in " ".join(rig.health()), "said so", WAIT_S)
    assert rig.find(keys_of(range(3))) == [False] * 3
    assert not any(rig.wait(rig.submit_store(keys_of([7]))).ok)
    assert not any(rig.wait(rig.submit_load(keys_of([0]), first_slot=9)).ok)
    assert rig.counts().dropped == 1
    store.gate.set()
    rig.wait_healthy()
    assert rig.find(keys_of(range(3))) == [True] * 3


def test_queue_when_full_drops_the_last_stores_and_no_load(
    open_rig: Callable[..., Rig], store: DictionaryStore
) -> None:
    rig = open_rig(threads=1, queue_blocks=4)
    store.gate.clear()
    first = rig.submit_store(keys_of([50]), first_slot=15)
    let_in(store, 1)
    second = rig.submit_store(keys_of(range(6)))
    third = rig.submit_store(keys_of(range(20, 22)), first_slot=8)
    assert list(rig.wait(third).ok) == [False, False]
    assert rig.counts().dropped == 4
    store.gate.set()
    assert list(rig.wait(second).ok) == [True] * 4 + [False] * 2
    assert list(rig.wait(first).ok) == [True]
    store.gate.clear()
    # Requests wait for them, and the pool bounds them.
    loads = [rig.submit_load(keys_of(range(4)), first_slot) for first_slot in (0, 4, 8)]
    store.gate.set()
    assert [list(rig.wait(load).ok) for load in loads] == [[True] * 4] * 3


@pytest.mark.parametrize(
    ("num_blocks", "batch_blocks", "batch_bytes", "batches"),
    [
        # These blocks have half a MB each, so that the three idle threads share them.
        (12, 32, "1GiB", [4, 4, 4]),
        (12, 2, "1GiB", [2] * 6),
        (12, 1, "1GiB", [1] * 12),
        (12, 32, 1, [1] * 12),
        (1, 32, "1GiB", [1]),
    ],
)
def test_a_job_is_divided_into_batches_of_limited_size(
    num_blocks: int, batch_blocks: int, batch_bytes: object, batches: list[int]
) -> None:
    store = DictionaryStore(batch_blocks=batch_blocks)
    store.gate.clear()
    with closing(threaded_rig(store, batch_bytes=batch_bytes)) as rig:
        number = rig.submit_load(keys_of(range(60, 60 + num_blocks)))
        let_in(store, min(len(batches), 3))
        store.gate.set()
        assert not rig.wait(number).ok.any()
        assert sorted(store.batches) == batches


def test_small_blocks_are_not_divided_between_idle_threads() -> None:
    small = [number for number in range(100) if length_of(key_of(number)) < 100_000][:5]
    store = DictionaryStore(batch_blocks=32)
    with closing(threaded_rig(store)) as rig:
        assert rig.store(keys_of(small)) == [True] * 5
        assert rig.load(keys_of(small)) == [True] * 5
        assert store.batches == [5, 5]


def test_blocks_of_one_batch_have_outcomes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictionaryStore(batch_blocks=32)
    with closing(threaded_rig(store, threads=1)) as rig:
        rig.store(keys_of([0, 2]))
        result = rig.wait(rig.submit_load(keys_of(range(4))))
        assert list(result.ok) == [True, False, True, False]
        assert list(result.origins) == [ORIGIN, None, ORIGIN, None]
        assert result.num_bytes == sum(length_of(key) for key in keys_of([0, 2]))
        monkeypatch.setattr(rig.slots, "views", _without_slot_1(rig.slots.views))
        assert list(rig.wait(rig.submit_load(keys_of([0, 2]))).ok) == [True, False]
        counts = rig.counts()
        assert (counts.loaded, counts.missing, counts.failed) == (3, 2, 1)


def _without_slot_1(views: Callable[..., Any]) -> Callable[..., Any]:
    def all_but_one(slot: int, num_bytes: int) -> Any:
        if slot == 1:
            raise OSError("the pool's file cannot be written")
        return views(slot, num_bytes)

    return all_but_one


@pytest.mark.parametrize("answers", ["raises", "is short"])
def test_a_call_that_fails_costs_its_whole_batch(monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    store = DictionaryStore(batch_blocks=4)
    with closing(threaded_rig(store, threads=1)) as rig:
        if answers == "raises":
            store.error = ConnectionError("refused")
        else:
            monkeypatch.setattr(store, "put_many", lambda keys, data, origins: [Outcome.STORED] * 3)
        assert rig.store(keys_of(range(8))) == [False] * 8
        assert rig.counts().failed == 8


def test_canceled_blocks_make_room_in_the_queue(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig(threads=1, queue_blocks=4)
    store.gate.clear()
    rig.submit_store(keys_of([50]), first_slot=15)
    let_in(store, 1)
    waiting = rig.submit_store(keys_of(range(4)))
    rig.tier.cancel(waiting)
    later = rig.submit_store(keys_of(range(4, 8)), first_slot=4)
    store.gate.set()
    assert list(rig.wait(later).ok) == [True] * 4
    assert waiting not in rig.results


def test_loads_overtake_stores_and_stores_leave_them_room(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig(threads=1, queue_blocks=4)
    assert rig.store(keys_of([0])) == [True]
    let_in(store, 1)
    store.gate.clear()
    stores = rig.submit_store(keys_of(range(10, 15)), first_slot=4)
    let_in(store, 1)
    load = rig.submit_load(keys_of([0]))
    ended: list[int] = []

    def poll() -> bool:
        ended.extend(result.number for result in rig.tier.poll())
        return len(ended) == 2

    store.gate.set()
    wait_until(poll, "both", WAIT_S)
    assert ended == [load, stores]


def test_calls_that_raise_cost_their_block_and_are_logged_once(
    rig: Rig, store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = ConnectionError("refused by redis://:hunter2@db")
    with caplog.at_level(logging.ERROR):
        assert rig.store(keys_of([0])) == [False]
        assert rig.load(keys_of([0, 1])) == [False] * 2
        assert rig.find(keys_of(range(5))) == [False] * 5
    assert rig.counts().failed == 3
    assert [record.getMessage() for record in caplog.records] == [
        "tier bench: a store failed: unexpected ConnectionError",
        "tier bench: a load failed: unexpected ConnectionError",
        "tier bench: a look-up failed: unexpected ConnectionError",
    ]
    assert "get_many" in caplog.text
    assert "hunter2" not in caplog.text
    store.error = None
    assert rig.store(keys_of(range(5))) == [True] * 5


def test_a_wrong_number_of_answers_finds_nothing(
    rig: Rig, store: DictionaryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find_many", lambda keys: [True])
    assert rig.find(keys_of(range(3))) == [False] * 3
    assert rig.health() == ["the latest look-up failed: unexpected ValueError"]


def test_a_block_longer_than_a_slot_fails_alone(rig: Rig, store: DictionaryStore) -> None:
    rig.slots.parts[0] = rig.slots.parts[0][:, :50]
    assert not rig.wait(rig.submit_load(keys_of([1]))).ok.any()


@pytest.mark.parametrize("data", [None, memoryview(b"too short")])
def test_a_loaded_block_of_another_length_fails(
    rig: Rig, store: DictionaryStore, monkeypatch: pytest.MonkeyPatch, data: memoryview | None
) -> None:
    assert rig.store(keys_of([1])) == [True]
    before = rig.slots.parts[0].copy()
    monkeypatch.setattr(store, "get_many", lambda keys, into: [BlockResult(Outcome.LOADED, ORIGIN, data)])
    assert not rig.wait(rig.submit_load(keys_of([1]))).ok.any()
    assert np.array_equal(rig.slots.parts[0], before)


@pytest.mark.parametrize("outcome", [Outcome.STORED, Outcome.PRESENT, Outcome.DROPPED, "present", "other", None])
def test_load_when_answered_with_an_outcome_of_others_fails(
    rig: Rig, store: DictionaryStore, monkeypatch: pytest.MonkeyPatch, outcome: object
) -> None:
    assert rig.store(keys_of([1])) == [True]
    monkeypatch.setattr(store, "get_many", lambda keys, into: [BlockResult(outcome, ORIGIN, into[0])])
    assert rig.load(keys_of([1])) == [False]
    monkeypatch.setattr(store, "put_many", lambda keys, data, origins: [Outcome.LOADED])
    assert rig.store(keys_of([2])) == [False]


def test_call_when_it_ends_its_thread_costs_its_blocks_only(
    rig: Rig, store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache#4817: a background thread died, and nobody noticed."""
    store.error = SystemExit()
    assert rig.store(keys_of(range(3))) == rig.load(keys_of(range(3))) == rig.find(keys_of(range(3))) == [False] * 3
    assert "tier bench: a store failed: unexpected SystemExit" in caplog.messages
    store.error = None
    rig.wait_healthy()
    assert rig.store(keys_of(range(3))) == [True] * 3
    assert rig.counts().failed == 6


def test_reset_when_it_ends_its_thread_is_tried_again(rig: Rig, store: DictionaryStore) -> None:
    rig.store(keys_of([1]))
    let_in(store, 2)
    store.error = SystemExit()
    rig.tier.reset(number := next(rig.numbers), None)
    let_in(store, 2)
    store.error = None
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    assert not store.blocks


def test_thread_when_its_work_is_interrupted_goes_on(
    rig: Rig, store: DictionaryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(rig.tier, "_count", fail)
        assert rig.store(keys_of(range(3))) == [False] * 3
    assert "tier bench: a thread failed and goes on: unexpected SystemExit" in caplog.messages
    assert rig.load(keys_of(range(3))) == [True] * 3


def test_a_reset_that_fails_is_tried_again(rig: Rig, store: DictionaryStore) -> None:
    rig.store(keys_of([1]))
    store.error = OSError("no disk")
    rig.tier.reset(number := next(rig.numbers), RequestFilter(request="*"))
    let_in(store, 2)
    assert rig.find(keys_of([1])) == [False]
    assert not rig.has(number)
    store.error = None
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    assert rig.results[number].dropped_blocks == 1
    assert rig.store(keys_of([1])) == [True]


def test_a_reset_waits_for_calls_under_way_and_shows_when_it_takes_long(
    open_rig: Callable[..., Rig], store: DictionaryStore
) -> None:
    rig = open_rig(timeout_s=0.05)
    store.gate.clear()
    kept = rig.submit_store(keys_of([1]))
    let_in(store, 1)
    rig.tier.reset(number := next(rig.numbers), None)
    assert not any(rig.wait(kept).ok)
    wait_until(lambda: any("a reset has been under way" in reason for reason in rig.health()), "said so", WAIT_S)
    assert not rig.has(number)
    store.gate.set()
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    assert not store.overlapped, "the reset is alone with the store"
    assert not store.blocks, "what hung meanwhile came in before the reset, and went with it"


def test_close_waits_no_longer_than_it_may_for_a_thread_that_hangs(
    open_rig: Callable[..., Rig], store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    settled(rig, store)
    hang(rig, store)
    rig.tier.close(0.05)
    assert not store.closed, "what a thread may still use stays open"
    assert "threads that did not end at shutdown: 3" in caplog.text
    rig.slots.wipe()
    store.gate.set()
    for thread in rig.tier._threads:
        thread.join(WAIT_S)
    assert all(rig.slots.is_wiped(slot) for slot in range(3))
    wait_until(lambda: store.closed, "the store is closed once its threads have ended", WAIT_S)


def test_close_ends_idle_threads_and_closes_the_store(rig: Rig, store: DictionaryStore) -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert "kvferry-tier-bench" in before
    rig.tier.close(WAIT_S)
    assert store.closed
    assert "kvferry-tier-bench" not in {thread.name for thread in threading.enumerate()}


def test_close_when_repeated_closes_the_store_once(
    rig: Rig, store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig.tier.close(WAIT_S)
    rig.tier.close(WAIT_S)
    assert store.closed
    assert "closing failed" not in caplog.text


def test_on_finished_is_called_for_loads_and_lookups_only(rig: Rig, store: DictionaryStore) -> None:
    rig.store(keys_of(range(3)))
    assert rig.told == 0
    rig.find(keys_of([1]))
    rig.load(keys_of([1]))
    wait_until(lambda: rig.told == 2, "told twice", WAIT_S)
