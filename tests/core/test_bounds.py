"""What a step may cost, what is asked again and when, and other limits that only show when they are reached."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import RequestIdentity, make_keys
from kvferry.core.policy import Override, Priority, RequestPolicy
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Hit, Miss
from kvferry.core.stats import empty
from kvferry.core.transfers import Direction, TransferResult
from tests.harness.pool_blocks import keys, store
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest, blocks_of
from tests.harness.toy_requests import answer, findable, request, store_and_turn_over


def pin_all(engine: ToyEngine) -> list[bytes]:
    """Have operators pin all that is in the pool."""
    engine.manager.operator_pins.max_fraction = 1.0
    held = list(Inventory(engine.manager).list_blocks(0, 10_000).keys)
    for key in held:
        engine.manager.operator_pins.pin(key, engine.now_s + 1e6, engine.now_s)
    return held


# --- slots of several blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_slot", [1, 2, 3, 8])
def test_prompt_that_differs_within_a_slot_misses_it(blocks_per_slot: int) -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=blocks_per_slot)
    slot_tokens = blocks_per_slot * BLOCK_SIZE
    answer(engine, "first", 2 * blocks_per_slot)
    engine.device.forget_all()
    for shared, found in ((2 * slot_tokens - 1, slot_tokens), (slot_tokens, slot_tokens), (slot_tokens - 1, 0)):
        tokens = [*range(shared), *range(5000, 5000 + 3 * slot_tokens)]
        engine.add(ToyRequest(f"shares {shared}", tokens, len(tokens), 1))
        expected = Hit(found) if found else Miss()
        assert engine.offload.match(f"shares {shared}", 0, engine.now_s) == expected
    engine.run()
    engine.check_idle()


def test_request_that_parts_within_a_slot_being_stored_is_stored_whole() -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=2)
    prompts = [[*range(BLOCK_SIZE), *range(first, first + 61)] for first in (100, 200)]
    for number, tokens in enumerate(prompts):
        engine.add(ToyRequest(f"r{number}", list(tokens), len(tokens), 20))
        # Without an end of the first one's store, which has the block that the second one finds on the device.
        for _ in range(3):
            engine.step(70)
    assert engine.copies.open
    engine.run()
    for number, tokens in enumerate(prompts):
        engine.device.forget_all()
        engine.add(ToyRequest(f"again {number}", tokens, len(tokens), 1))
        engine.run()
        assert engine.offload.requests.find(f"again {number}", engine.now_s).prompt_tokens.host_hit == 64
    engine.check_idle()


@pytest.mark.parametrize("blocks_per_slot", [1, 2, 3, 8])
def test_only_complete_slots_are_stored(blocks_per_slot: int) -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=blocks_per_slot)
    answer(engine, "r", 3 * blocks_per_slot - 1, max_tokens=2)
    store = engine.offload.snapshot().store
    complete = (3 * blocks_per_slot - 1) // blocks_per_slot * blocks_per_slot
    assert (store.stored, store.offered) == (complete, complete)
    assert engine.offload.snapshot().pool.ready == complete // blocks_per_slot


# --- what a step may cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(StoreMode))
def test_blocks_outside_windows_and_boundaries_are_not_stored(mode: StoreMode) -> None:
    specs = (
        GroupSpec(BLOCK_SIZE, 64),
        GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 2 * BLOCK_SIZE),
        GroupSpec(BLOCK_SIZE, 64, GroupKind.RECURRENT),
    )
    engine = ToyEngine(100, 64, specs=specs, null_block=0, store_mode=mode, watermark_blocks=64)
    one = request("long", 10)
    engine.add(one)
    for _ in range(4):
        engine.step(10**6, copy=True)
    found = [engine.manager.lookup_each(make_keys(one.block_hashes, group)) >= 0 for group in range(3)]
    # Behind 40 tokens, a window of eight looks back to the 34th, which is in the ninth block. That the last state is
    # the one of its block's end only the device can tell, since the step went on behind it.
    last_state = {9} if mode is StoreMode.LAZY else set()
    assert [set(np.flatnonzero(each).tolist()) for each in found] == [set(range(10)), {8, 9}, last_state]


@pytest.mark.parametrize("mode", list(StoreMode))
@pytest.mark.parametrize("window_tokens", [1, 5, 8, 11])
@pytest.mark.parametrize(("blocks_per_slot", "cap"), [(1, None), (2, None), (3, None), (1, 22), (2, 22)])
def test_prompt_of_any_length_with_a_sliding_window_is_hit(
    mode: StoreMode, window_tokens: int, blocks_per_slot: int, cap: int | None
) -> None:
    specs = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, window_tokens))
    for num_tokens in range(40, 49):
        engine = ToyEngine(
            100,
            64,
            specs=specs,
            null_block=0,
            blocks_per_slot=blocks_per_slot,
            store_mode=mode,
            watermark_blocks=64,
            settings=RequestPolicy(max_offload_tokens=cap),
        )
        for name in ("first", "again"):
            engine.device.forget_all()
            engine.add(ToyRequest(name, list(range(num_tokens)), num_tokens, 2))
            for _ in range(6):
                engine.step(10**6, copy=True)
        hit = engine.offload.requests.find("again", engine.now_s).prompt_tokens.host_hit
        stored = min(num_tokens, cap or num_tokens) // (BLOCK_SIZE * blocks_per_slot) * BLOCK_SIZE * blocks_per_slot
        assert hit == min((num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, stored), f"a prompt of {num_tokens} tokens"


def test_a_step_offers_a_bounded_number_of_blocks_of_a_request() -> None:
    engine = ToyEngine(num_slots=3000, num_blocks=3000)
    engine.add(request("huge", 2300, max_tokens=50))
    planned = [sum(job.num_blocks for job in engine.step(10**6, copy=True).stores) for _ in range(4)]
    assert planned == [1000, 1000, 300, 0]


def test_blocks_without_space_are_offered_again_after_slots_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine(num_slots=4, num_blocks=64)
    asked = 0
    offer = engine.manager.prepare_store

    def counting(*args, **options):
        nonlocal asked
        asked += 1
        return offer(*args, **options)

    monkeypatch.setattr(engine.manager, "prepare_store", counting)
    engine.add(request("r", 6, max_tokens=60))
    plan = engine.step()
    before = asked
    for _ in range(10):
        engine.step(budget=1)
    assert asked == before, "nothing was freed"
    engine.end_job(plan.stores[0].job_id)
    engine.step(budget=1)
    assert asked == before + 1


def test_blocks_without_space_are_offered_again_64_a_step() -> None:
    engine = ToyEngine(num_slots=400, num_blocks=900)
    engine.add(request("holds", 400, first=10_000))
    engine.step(10**6, copy=True)
    held = pin_all(engine)
    engine.add(request("waits", 300, max_tokens=50))
    assert not engine.step(10**6).stores
    for key in held:
        engine.manager.operator_pins.unpin(key)
    (job,) = engine.step().stores
    assert job.num_blocks == 64
    engine.run()
    assert engine.offload.requests.find("waits", engine.now_s).store.stored == 300


def test_a_reset_by_match_looks_at_a_thousand_slots_at_a_time() -> None:
    manager = OffloadManager(2500, 64)
    store(manager, keys(0, 2500))
    dropped, start = [], 0
    while start is not None:
        count, start = manager.drop_matching(lambda origin: True, start, 1.0)
        dropped.append(count)
    assert dropped == [1000, 1000, 500]


@pytest.mark.parametrize("policy", ["arc", "lru"])
def test_eviction_work_depends_on_the_offer_and_not_on_the_pool(policy: str) -> None:
    """LMCache#418, vllm#45757: eviction walked all blocks."""
    num_slots = 100_000
    manager = OffloadManager(num_slots, 64, eviction_policy=policy)
    for _ in range(2):
        for first in range(0, num_slots, 1000):
            store(manager, keys(first, 1000))
    peaks = []
    for number in range(20):
        wanted = keys(10**7 + 64 * number, 64)
        tracemalloc.start()
        try:
            answer = manager.prepare_store(wanted, RequestIdentity("r"), np.arange(64), 1, 1.0)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(answer.slots) == 64
        manager.complete_store(answer.slots, 1.0)
    # A walk over all slots would make arrays of eight bytes for each. Now and then a dictionary grows.
    assert sorted(peaks)[-3] < 200_000


# --- lazy mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["arc", "lru"])
def test_residency_is_requested_for_bounded_victims_when_full(policy: str) -> None:
    manager = OffloadManager(5000, 64, eviction_policy=policy)
    asked: list[int] = []

    def residency(wanted: Sequence[bytes]) -> list[bool]:
        asked.append(len(wanted))
        return [False] * len(wanted)

    manager.evictor.residency = residency
    for first in range(0, 5000, 500):
        store(manager, keys(first, 500))
        manager.enter_device(manager.lookup(keys(first, 500)))
    assert not asked, "there was room"
    store(manager, keys(10_000, 1))
    assert 0 < sum(asked) <= 1000
    asked.clear()
    store(manager, keys(20_000, 900))
    assert 900 <= sum(asked) <= 1000


def test_lazy_mode_does_not_offer_blocks_in_flight() -> None:
    engine = ToyEngine(64, 8, blocks_per_slot=2, store_mode=StoreMode.LAZY, watermark_blocks=16)
    shared = list(range(BLOCK_SIZE))
    for name, first in (("a", 100), ("b", 200)):
        engine.add(ToyRequest(name, [*shared, *range(first, first + BLOCK_SIZE + 1)], 2 * BLOCK_SIZE + 1, 50))
        engine.step()
    a, b = engine.requests["a"], engine.requests["b"]
    assert a.tables[0][0] == b.tables[0][0], "both slots begin with the same device block"
    engine.finish(a)
    (first_job,) = engine.step(budget=1).stores
    engine.finish(b)
    later = [block for _ in range(3) for job in engine.step().stores for block in blocks_of(job)]
    assert not set(later) & set(blocks_of(first_job))
    engine.end_job(first_job.job_id)
    engine.run()
    engine.check_idle()


def test_lazy_mode_after_reset_stores_passed_blocks_again() -> None:
    engine = ToyEngine(64, 12, store_mode=StoreMode.LAZY, watermark_blocks=12)
    one = answer(engine, "r", 5)
    engine.step(copy=True)
    assert findable(engine, one) == 5
    engine.reset()
    assert findable(engine, one) == 0
    engine.step(copy=True)
    assert findable(engine, one) == 5


# --- workers --------------------------------------------------------------------------------------------------------


def load_on_two_ranks() -> tuple[ToyEngine, int]:
    engine = ToyEngine(64, 64, num_workers=2)
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    return engine, engine.step().loads[0].job_id


def test_bytes_and_errors_of_a_repeated_report_do_not_count() -> None:
    engine, job_id = load_on_two_ranks()
    for result in (
        TransferResult(job_id, 0, None, 100, 1.0),
        TransferResult(job_id, 0, "told twice", 100, 1.0),
        TransferResult(job_id, 1, None, 100, 1.0),
        TransferResult(job_id, 1, "told late", 100, 1.0),
    ):
        engine.offload.on_transfers_finished([result], engine.now_s)
    load = engine.offload.snapshot().load
    assert (load.bytes, load.failed, load.blocks) == (200, 0, 5)


def test_a_job_takes_as_long_as_its_slowest_rank() -> None:
    engine, job_id = load_on_two_ranks()
    for rank, seconds in ((0, 1.0), (1, 3.0)):
        engine.offload.on_transfers_finished([TransferResult(job_id, rank, None, 100, seconds)], engine.now_s)
    snapshot = engine.offload.snapshot()
    assert snapshot.load.seconds == 3.0
    jobs = snapshot.transfers[Direction.LOAD]
    assert (jobs.bytes.total, sum(jobs.bytes.counts)) == (200, 1)
    assert (jobs.seconds.total, sum(jobs.seconds.counts)) == (3.0, 1)


def test_failed_job_is_not_counted_in_copy_times() -> None:
    engine, job_id = load_on_two_ranks()
    before = sum(engine.offload.snapshot().transfers[Direction.LOAD].seconds.counts)
    for rank, error in ((0, None), (1, "no")):
        engine.offload.on_transfers_finished([TransferResult(job_id, rank, error, 100, 1.0)], engine.now_s)
    jobs = engine.offload.snapshot().transfers[Direction.LOAD]
    assert sum(jobs.seconds.counts) == sum(jobs.bytes.counts) == before


@given(values=st.lists(st.floats(0, 1e6)), bounds=st.sets(st.floats(0, 1e6)).map(sorted))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it(
    values: list[float], bounds: list[float]
) -> None:
    histogram = empty(tuple(bounds))
    for value in values:
        histogram = histogram.counting(value)
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=False):
        assert count == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)


# --- eviction -------------------------------------------------------------------------------------------------------


def test_an_operators_pin_ends_with_its_lease_in_a_step() -> None:
    engine = ToyEngine(64, 64)
    one = answer(engine, "r", 2)
    engine.manager.operator_pins.pin(make_keys(one.block_hashes, 0)[0], engine.now_s + 2.5, engine.now_s)
    pinned = []
    for _ in range(4):
        engine.step()
        pinned.append(engine.offload.snapshot().pool.pinned)
    assert pinned == [1, 1, 0, 0]


def test_blocks_of_a_request_of_low_priority_go_first() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    engine.set_override(Override("low", {"priority": Priority.LOW}, engine.now_s + 100))
    normal, low = request("normal", 4, first=500), request("low", 4)
    for one in (normal, low, request("new", 3, first=1000)):
        engine.add(one)
        engine.run()
    assert (findable(engine, normal), findable(engine, low)) == (4, 1)
