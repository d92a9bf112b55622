"""Lazy mode: what leaves the device is in the host first, and what the device holds is the first to leave the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import RequestFilter, make_keys
from kvferry.core.policy import RequestPolicy
from kvferry.core.pool.eviction.history import MissHistory
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.slots import SlotState
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.stats import NotStored
from kvferry.core.transfers import NO_SLOTS, StepPlan
from tests.core.test_bounds import pin_all
from tests.harness.toy_engine import BLOCK_SIZE, Habits, ToyEngine, ToyRequest
from tests.harness.toy_requests import answer, findable, request
from tests.harness.watched_lock import call_on_release, watched_locks


def lazy_engine(num_slots: int, num_blocks: int, *, watermark: int = 8, **options) -> ToyEngine:
    return ToyEngine(num_slots, num_blocks, store_mode=StoreMode.LAZY, watermark_blocks=watermark, **options)


def answer_each(engine: ToyEngine, numbers: Iterable[int], blocks: int = 5, **fields) -> None:
    """Answer requests that share nothing."""
    for number in numbers:
        answer(engine, f"r{number}", blocks, first=1000 * number, **fields)


def hit_again(engine: ToyEngine) -> int:
    """Answer a request whose five blocks were stored before, and return how many of its tokens came from the pool."""
    answer(engine, "again", 5)
    return engine.offload.requests.find("again", engine.now_s).prompt_tokens.host_hit


def test_block_about_to_leave_the_device_is_stored_and_loaded() -> None:
    engine = lazy_engine(64, 16)
    answer_each(engine, range(8))
    stored = engine.offload.snapshot().store.stored
    assert stored >= 5 * 8 - 16
    assert hit_again(engine) == 5 * BLOCK_SIZE
    engine.check_idle()


def test_a_request_that_never_ends_does_not_keep_others_from_being_stored() -> None:
    engine = lazy_engine(64, 24)
    engine.add(request("endless", 4, first=90_000, max_tokens=10_000))
    for number in range(6):
        engine.add(request(f"r{number}", 4, first=1000 * number))
        for _ in range(4):
            engine.step(copy=True)
    assert "endless" in engine.requests
    assert engine.offload.snapshot().store.stored >= 4
    engine.finish(engine.requests["endless"])
    engine.run()
    engine.check_idle()


def test_lazy_blocks_skipped_by_policy_are_never_stored() -> None:
    engine = lazy_engine(64, 16)
    answer(engine, "quiet", 5, kv_transfer_params={"store": False})
    assert engine.offload.snapshot().store.skipped["disabled"] == 5
    answer_each(engine, range(1, 8), kv_transfer_params={"max_offload_tokens": 2 * BLOCK_SIZE})
    store = engine.offload.snapshot().store
    assert store.skipped["token_cap"] == 7 * 3
    assert 0 < store.stored <= 7 * 2
    assert hit_again(engine) == 0


def test_lazy_block_of_several_requests_follows_the_most_permissive() -> None:
    engine = lazy_engine(64, 16)
    answer(engine, "quiet", 5, kv_transfer_params={"store": False})
    answer(engine, "open", 5)
    answer(engine, "quiet again", 5, kv_transfer_params={"store": False})
    answer_each(engine, range(1, 4))
    assert hit_again(engine) == 5 * BLOCK_SIZE


def test_block_when_given_to_another_group_is_not_stored() -> None:
    specs = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 9))
    engine = lazy_engine(64, 16, specs=specs)
    answer(engine, "first", 3)
    device = engine.device
    mine, other = (device.cached[group, request("", 1).block_hashes[0]] for group in (0, 1))
    names = {mine: device.names[other], other: device.names[mine]}
    for block in names:
        device.forget(block)
    for block, name in names.items():
        device.cache(*name, block)
    for values in device.values:
        values[mine], values[other] = values[other], values[mine]
    answer_each(engine, range(1, 4), blocks=2)


def test_vllm_42085_slots_that_share_a_block_are_not_in_one_plan() -> None:
    """vllm#42085, vllm#42903: sliding-window tables repeat a block, and its reference count went wrong."""
    engine = lazy_engine(64, 16, watermark=16, blocks_per_slot=3)
    shared = list(range(4 * BLOCK_SIZE))
    requests = [ToyRequest(f"r{i}", [*shared, *range(1000 * i, 1000 * i + 9)], 25, 5) for i in (1, 2)]
    for one in requests:
        engine.add(one)
        engine.step()
    assert requests[0].tables[0][:4] == requests[1].tables[0][:4]
    for one in requests:
        engine.finish(one)
    engine.step(copy=True)
    assert engine.offload.snapshot().store.stored >= 2 * 3
    engine.check()


def test_full_pool_evicts_copies_of_device_blocks_first() -> None:
    engine = ToyEngine(10, 64, watermark_blocks=64)
    cold, held = request("cold", 5), request("held", 5, first=1000, max_tokens=1000)
    engine.add(cold)
    engine.run()
    engine.add(held)
    engine.step(copy=True)
    for block_hash in cold.block_hashes:
        engine.device.forget(engine.device.cached[0, block_hash])
    engine.set_mode(StoreMode.LAZY)
    engine.add(request("again", 5, first=1000, max_tokens=1000))
    engine.step(copy=True)
    engine.add(request("new", 5, first=2000))
    for _ in range(4):
        engine.step(copy=True)
    assert engine.offload.snapshot().evictions.total == 5
    held_keys, cold_keys = make_keys(held.block_hashes, 0), make_keys(cold.block_hashes, 0)
    assert all(Inventory(engine.manager).find_block(key) is None for key in held_keys)
    assert all(Inventory(engine.manager).find_block(key) is not None for key in cold_keys)
    engine.check()


def test_lazy_mode_recomputes_less_than_half_of_eager_mode() -> None:
    recomputed = {}
    for mode in StoreMode:
        engine = ToyEngine(18, 18, store_mode=mode, watermark_blocks=6)
        for turn in range(24):
            answer(engine, f"r{turn}", 5, first=1000 * (turn % 4))
        recomputed[mode] = engine.offload.snapshot().prompt_tokens.recomputed
        engine.check_idle()
    assert recomputed[StoreMode.LAZY] < recomputed[StoreMode.EAGER] / 2


def test_blocks_recomputed_after_preemption_are_stored_when_leaving() -> None:
    engine = lazy_engine(64, 32, watermark=8)
    engine.add(request("r", 5, max_tokens=40))
    engine.step(copy=True)
    engine.preempt(engine.requests["r"])
    engine.device.forget_all()
    engine.step(copy=True)
    engine.finish(engine.requests["r"])
    answer_each(engine, range(1, 9))
    assert hit_again(engine) == 5 * BLOCK_SIZE
    assert engine.offload.requests.find("r", engine.now_s).store.stored == 5
    engine.check()


def test_blocks_without_space_are_counted_when_leaving_the_device() -> None:
    engine = lazy_engine(num_slots=2, num_blocks=12, settings=RequestPolicy(), watermark=4)
    answer(engine, "first", 2)
    for number in range(4):
        answer(engine, f"r{number}", 5, first=1000 * (number + 1))
    pin_all(engine)
    answer_each(engine, range(10, 20))
    assert engine.offload.snapshot().store.skipped["no_space"] > 0
    engine.check()


def test_block_evicted_from_the_pool_is_stored_when_leaving_again() -> None:
    engine = lazy_engine(num_slots=14, num_blocks=26, watermark=6)
    keys = make_keys(request("", 5).block_hashes, 0)
    answer(engine, "first", 5)
    answer_each(engine, range(1, 6))
    assert hit_again(engine) == 5 * BLOCK_SIZE
    held = []
    for number in range(6, 14):
        held.append(sum(Inventory(engine.manager).find_block(key) is not None for key in keys))
        answer(engine, f"r{number}", 5, first=1000 * number)
    assert held[0] == 5
    gone = held.index(0)
    assert 5 in held[gone:], held


def two_rounds(engine: ToyEngine, count: int, blocks: int = 5) -> int:
    """Answer the same prompts twice, all at once; the prompt tokens that did not have to be computed again."""
    for turn in range(2):
        for number in range(count):
            engine.add(request(f"r{turn}-{number}", blocks, first=1000 * number))
        engine.run()
        engine.check()
    prompt = engine.offload.snapshot().prompt_tokens
    return prompt.device_hit + prompt.host_hit


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
@pytest.mark.parametrize("caches_early", [False, True])
def test_blocks_taken_beyond_the_watermark_are_stored_in_that_step(caches_early, blocks_per_slot) -> None:
    engine = lazy_engine(64, 16, watermark=1, blocks_per_slot=blocks_per_slot, habits=Habits(caches_early=caches_early))
    whole = 5 // blocks_per_slot * blocks_per_slot
    assert two_rounds(engine, 8) >= 8 * whole * BLOCK_SIZE
    snapshot = engine.offload.snapshot()
    assert engine.events["stored ahead of a step"] > 0
    assert snapshot.store.skipped["left_device"] == 0
    engine.check_idle()


@pytest.mark.parametrize("max_tokens", [1, 8, 24])
def test_blocks_of_a_full_device_are_stored_while_requests_use_them(max_tokens: int) -> None:
    """One slot fits ahead of a step, and a request that ends frees what the next one takes."""
    engine = lazy_engine(64, 16, specs=[GroupSpec(BLOCK_SIZE, 200 << 20)])
    for turn in range(2):
        for number in range(8):
            engine.add(request(f"r{turn}-{number}", 5, first=1000 * number, max_tokens=max_tokens))
        while not engine.is_idle():
            engine.step(copy=True)
            engine.check()
    snapshot = engine.offload.snapshot()
    assert snapshot.store.skipped["left_device"] == 0
    assert snapshot.prompt_tokens.host_hit == 8 * 5 * BLOCK_SIZE
    engine.check_idle()


def test_a_full_device_stores_early_no_more_than_a_step_could_not_store_ahead() -> None:
    """Those that filled first; the others stay on the device alone, and what only the pool has stays in it."""
    engine = ToyEngine(8, 16, watermark_blocks=10, specs=[GroupSpec(BLOCK_SIZE, 200 << 20)])
    cold = answer(engine, "cold", 5)
    engine.device.forget_all()
    engine.set_mode(StoreMode.LAZY)
    requests = [request(f"r{number}", 5, first=1000 * number, max_tokens=1000) for number in (1, 2)]
    for one in requests:
        engine.add(one)
        engine.step(copy=True)
    for _ in range(6):
        engine.step(copy=True)
        first, second = (findable(engine, one) for one in requests)
        assert first == 5
        assert first + second == 10 - len(list(engine.device.free_blocks())) - 1
        assert findable(engine, cold) == 8 - first - second
    engine.check()


def test_a_walk_of_a_short_queue_leaves_half_of_it_free() -> None:
    """An engine without free blocks preempts requests."""
    engine = lazy_engine(64, 20, watermark=20)
    for number in range(4):
        engine.add(request(f"r{number}", 4, first=1000 * number, max_tokens=1000))
    for _ in range(4):
        engine.step()
    for number in range(3):
        engine.finish(engine.requests[f"r{number}"])
    engine.step()
    num_free = len(list(engine.device.free_blocks()))
    num_held = 20 - len(engine.requests["r3"].tables[0]) - num_free
    assert num_free >= num_held > 0
    engine.finish(engine.requests["r3"])
    engine.run()
    engine.check_idle()


def test_blocks_overwritten_by_a_load_are_stored_first() -> None:
    engine = lazy_engine(64, 8, watermark=1, cost_model=LoadOrCompute(LoadDecision.ALWAYS))
    for turn in range(3):
        for number in (1, 2):
            answer(engine, f"r{turn}-{number}", 5, first=1000 * number)
    assert engine.events["loads that came"] >= 3
    assert engine.events["stored ahead of a step"] > 0
    assert engine.offload.snapshot().missed_tokens.causes["new"] == 2 * 5 * BLOCK_SIZE
    engine.check_idle()


def test_blocks_beyond_the_bound_of_a_step_are_counted_as_left_device() -> None:
    engine = lazy_engine(64, 8, watermark=1, specs=[GroupSpec(BLOCK_SIZE, 200 << 20)])
    for number in (1, 2, 1):
        answer(engine, f"r{number}-{engine.now_s}", 5, first=1000 * number)
    snapshot = engine.offload.snapshot()
    assert snapshot.store.skipped["left_device"] > 0
    assert snapshot.missed_tokens.not_stored["left_device"] > 0


def test_lost_blocks_of_a_request_are_recorded_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    record = MissHistory.record_not_stored

    def counted_record(self: MissHistory, keys: Sequence[bytes], reason: NotStored) -> None:
        batches.append(len(keys))
        record(self, keys, reason)

    monkeypatch.setattr(MissHistory, "record_not_stored", counted_record)
    engine = lazy_engine(64, 40, watermark=1, specs=[GroupSpec(BLOCK_SIZE, 200 << 20)])
    for number, blocks in enumerate((18, 36)):
        engine.add(request(f"r{number}", blocks, first=1000 * number))
        while not engine.is_idle():
            engine.step(10**6, copy=True)
            engine.deliver([])
    assert sum(batches) == engine.offload.snapshot().store.skipped["left_device"] > 10
    assert len(batches) <= 2


def test_blocks_whose_copy_ahead_of_the_step_fails_are_not_found() -> None:
    engine = lazy_engine(64, 8, watermark=1)
    engine.living_ranks = list
    for number in (1, 2):
        engine.add(request(f"r{number}", 5, first=1000 * number))
        while engine.requests:
            engine.step()
            for job_id in list(engine.copies.open):
                engine.end_job(job_id, error="injected")
            engine.check()
    assert engine.offload.snapshot().store.failed > 0
    assert engine.offload.snapshot().store.stored == 0
    engine.check_idle()


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_blocks_forgotten_by_the_device_are_not_stored_when_taken(blocks_per_slot) -> None:
    """As after vLLM's reset of its prefix cache: what the blocks hold may be of other weights."""
    engine = lazy_engine(64, 8, watermark=1, blocks_per_slot=blocks_per_slot)
    answer(engine, "first", 4)
    engine.device.forget_all()
    answer(engine, "second", 5, first=1000)
    store = engine.offload.snapshot().store
    assert store.stored == 0
    assert store.skipped["left_device"] >= 3


def test_blocks_taken_from_a_preempted_request_are_stored_when_taken() -> None:
    engine = lazy_engine(64, 9, watermark=1, habits=Habits(allocates_ahead=False))
    engine.add(request("old", 2, max_tokens=20))
    engine.add(request("new", 2, first=1000, max_tokens=2 * BLOCK_SIZE))
    for _ in range(60):
        engine.step(copy=True)
        engine.check()
    assert engine.events["resumed after preemption"] > 0
    assert engine.offload.snapshot().missed_tokens.causes["new"] == 2 * 2 * BLOCK_SIZE
    engine.check_idle()


def test_reset_drops_blocks_copied_ahead_of_a_step() -> None:
    engine = lazy_engine(64, 8, watermark=1)
    answer(engine, "first", 5)
    engine.add(request("second", 5, first=1000))
    (job,) = engine.step().stores_ahead
    engine.reset()
    engine.end_job(job.job_id)
    engine.check()
    assert engine.offload.snapshot().pool.ready == 0


def test_windows_that_the_device_cannot_find_are_stored_when_taken() -> None:
    """vLLM's prefix cache has windows at some places only, and frees the other blocks without their hash."""
    specs = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 9))
    engine = lazy_engine(256, 24, watermark=1, specs=specs, cost_model=LoadOrCompute(LoadDecision.ALWAYS))
    cache = engine.device.cache
    engine.device.cache = lambda group, *block: None if group else cache(group, *block)
    for turn in range(2):
        for number in range(4):
            answer(engine, f"r{turn}-{number}", 5, first=1000 * number)
    assert engine.offload.snapshot().prompt_tokens.host_hit == 4 * 5 * BLOCK_SIZE


def test_windows_that_the_device_cannot_find_are_not_stored_after_a_reset() -> None:
    """vLLM clears its prefix cache and resets its connectors before it sleeps, or after its weights were updated."""
    specs = (GroupSpec(BLOCK_SIZE, 64), GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 9))
    engine = lazy_engine(256, 24, watermark=1, specs=specs)
    cache = engine.device.cache
    engine.device.cache = lambda group, *block: None if group else cache(group, *block)
    answer_each(engine, range(3))
    engine.reset()
    engine.device.forget_all()
    engine.device.spoil(range(24))
    answer_each(engine, range(10, 20))
    assert engine.offload.snapshot().store.stored > 0
    before = [key for number in range(3) for key in make_keys(request("", 5, first=1000 * number).block_hashes, 1)]
    assert all(Inventory(engine.manager).find_block(key) is None for key in before)
    engine.check()


def test_blocks_behind_free_blocks_without_hash_stay_on_the_device() -> None:
    """vLLM frees blocks without a hash to the head of its free queue: a long answer takes and frees the same ones."""
    engine = lazy_engine(64, 64, watermark=4, specs=(GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 9),))
    answer_each(engine, range(4))
    on_device = dict(engine.device.names)
    engine.device.cache = lambda *block: None
    answer(engine, "long", 2, first=90_000, max_tokens=60 * BLOCK_SIZE, kv_transfer_params={"store": False})
    assert engine.device.names == on_device
    assert engine.offload.snapshot().store.stored == 0


def test_lazy_block_when_refilled_unnoticed_counts_as_left_device() -> None:
    """An engine that does not report given-out blocks: what a block holds by now decides."""
    engine = lazy_engine(64, 8, watermark=1)
    engine.device.take_allocated = lambda among: {}
    answer_each(engine, range(4))
    assert engine.offload.snapshot().store.skipped["left_device"] > 0


def act_in_step(at: int, act: str) -> tuple[ToyEngine, StepPlan]:
    """Do something at a release of the lock within a step that stores seven blocks ahead of it."""
    with watched_locks():
        engine = lazy_engine(64, 24, watermark=2, batch_slots=8)
    answer_each(engine, range(2), blocks=10)
    releases = iter(range(1000))

    def do() -> None:
        if next(releases) == at:
            match act:
                case "reset":
                    engine.reset()
                case "reset some":
                    engine.reset(RequestFilter(request="r*"))
                case "pause":
                    engine.offload.pause_stores(True)

    call_on_release(engine.offload, do)
    engine.add(request("new", 20, first=9000))
    plan = engine.step(1000)
    assert next(releases) > at
    return engine, plan


@pytest.mark.parametrize("act", ["reset", "reset some"])
@pytest.mark.parametrize("at", range(0, 30, 3))
def test_step_when_reset_between_batches_plans_no_dropped_slot(at: int, act: str) -> None:
    engine, plan = act_in_step(at, act)
    slots = np.concatenate([NO_SLOTS, *(run.slots for job in plan.jobs for run in job.runs)])
    # A store into a dropped slot would write a header of the new epoch.
    assert (engine.manager.table.current_states(0, 64)[slots] == SlotState.STORING).all()
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("at", range(9, 13))
def test_lazy_blocks_when_paused_between_batches_are_counted(at: int) -> None:
    engine, plan = act_in_step(at, "pause")
    stored = sum(job.num_blocks for job in plan.stores_ahead)
    assert stored == 2 * (at - 9)
    assert engine.offload.snapshot().store.skipped["paused"] == 7 - stored


@pytest.mark.parametrize("at", range(1, 8))
def test_walk_when_reset_between_batches_is_repeated(at: int) -> None:
    with watched_locks():
        engine = lazy_engine(64, 12, watermark=12, batch_slots=8)
    answer_each(engine, range(2))
    engine.reset()
    releases = iter(range(1000))
    call_on_release(engine.offload, lambda: engine.reset() if next(releases) == at else None)
    for _ in range(5):
        engine.step(copy=True)
    assert next(releases) > at
    assert engine.offload.snapshot().pool.ready == 10
    engine.check_idle()


def test_tenant_at_its_limit_does_not_keep_others_from_being_stored() -> None:
    engine = lazy_engine(64, 16)
    limits = TenantLimits(engine.manager)
    limits.set_limit("full", 3 * engine.manager.slot_bytes)
    for number in range(6):
        answer(engine, f"full{number}", 5, first=1000 * number, tenant="full")
        answer(engine, f"other{number}", 4, first=1000 * number + 500, tenant="other")
    answer_each(engine, range(20, 24))
    usage, store = limits.usage(), engine.offload.snapshot().store
    assert usage["full"] == 3 * engine.manager.slot_bytes
    assert usage["other"] == 6 * 4 * engine.manager.slot_bytes
    assert store.skipped["tenant_limit"] > 0
    assert store.skipped["no_space"] == 0
    assert store.offered == store.stored + sum(store.skipped.values()) + store.failed + store.in_flight
    engine.check_idle()
