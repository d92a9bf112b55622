"""What the scheduler decides, seen by an engine: policies, hits, failures, resets, lifecycles."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.core.cost_model import MIN_SAMPLES
from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.keys import RequestFilter, RequestIdentity, make_keys
from kvferry.core.policy import Override, RequestPolicy, bounded_repr
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.inventory import Inventory
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import NO_SLOTS, TransferResult
from tests.harness.toy_engine import BLOCK_SIZE, Habits, ToyEngine, ToyRequest, blocks_of
from tests.harness.toy_ledger import NoLedger
from tests.harness.toy_requests import answer, findable, request, store_and_turn_over


def test_a_hit_continues_behind_the_device_prefix_and_not_inside_a_block(engine: ToyEngine) -> None:
    answer(engine, "first", 5)
    engine.add(request("second", 5))
    assert engine.offload.match("second", 2 * BLOCK_SIZE, engine.now_s) == Hit(3 * BLOCK_SIZE)
    assert engine.offload.match("second", 2 * BLOCK_SIZE + 1, engine.now_s) == Miss()


@pytest.mark.parametrize(
    ("prompt_only", "cap", "stored", "by_prompt_only", "by_cap"),
    [
        (True, None, 2, 3, 0),
        (False, None, 5, 0, 0),
        (False, 0, 0, 0, 5),
        (False, 3, 0, 0, 5),
        (False, 4, 1, 0, 4),
        (False, 13, 3, 0, 2),
        (False, 1000, 5, 0, 0),
        (True, 100, 2, 3, 0),
        (True, 4, 1, 3, 1),
    ],
)
def test_blocks_beyond_cap_or_prompt_are_skipped(prompt_only, cap, stored, by_prompt_only, by_cap) -> None:
    engine = ToyEngine(64, 64, settings=RequestPolicy(offload_prompt_only=prompt_only))
    engine.add(
        request(
            "r", 2, extra=3, max_tokens=10, kv_transfer_params={"max_offload_tokens": cap} if cap is not None else {}
        )
    )
    engine.run()
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["prompt_only"], store.skipped["token_cap"]) == (stored, by_prompt_only, by_cap)
    assert store.offered == 5


@pytest.mark.parametrize("mode", list(StoreMode))
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_answer_that_becomes_prompt_of_a_session_is_stored(mode: StoreMode, blocks_per_slot: int) -> None:
    # In lazy mode all blocks are within the watermark once the session has ended.
    engine = ToyEngine(64, 64, blocks_per_slot=blocks_per_slot, store_mode=mode)
    # It expects each slot to be offered once.
    engine.ledger = NoLedger(engine)
    session = ToyRequest("session", list(range(8)), 8, 1000)
    engine.add(session)
    for turn in range(3):
        for _ in range(12):
            engine.step(copy=True)
            engine.deliver([])
        session.continue_with(range(1000 * turn, 1000 * turn + 16))
        engine.truth.learn(session)
    session.max_tokens = 5
    engine.run()
    engine.step(copy=True)
    num_slots = session.num_prompt_tokens // (blocks_per_slot * BLOCK_SIZE)
    assert engine.manager.counts().ready == num_slots
    engine.device.forget_all()
    again = ToyRequest("again", session.tokens[: session.num_prompt_tokens], session.num_prompt_tokens, 1)
    engine.add(again)
    engine.run()
    hit_tokens = (session.num_prompt_tokens - 1) // (blocks_per_slot * BLOCK_SIZE) * blocks_per_slot * BLOCK_SIZE
    assert engine.offload.requests.find("again", engine.now_s).prompt_tokens.host_hit == hit_tokens


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
@pytest.mark.parametrize("num_prompt_tokens", range(4, 12))
def test_block_that_accepted_drafts_complete_at_the_end_is_stored(num_prompt_tokens: int, blocks_per_slot: int) -> None:
    settings = RequestPolicy(offload_prompt_only=False)
    engine = ToyEngine(64, 24, settings=settings, blocks_per_slot=blocks_per_slot, habits=Habits(max_drafts=3))
    engine.add(ToyRequest("r", list(range(num_prompt_tokens)), num_prompt_tokens, 40, stop_after=9))
    engine.run()
    num_full_slots = len(engine.device.cached) // blocks_per_slot
    assert engine.offload.snapshot().store.stored == num_full_slots * blocks_per_slot


@pytest.mark.parametrize(
    "value", [True, "5", 5.0, -1, [5], {"n": 5}, "unlimited", pytest.param(-(10**5000), id="long")]
)
def test_a_cap_of_a_wrong_type_is_logged_once_and_ignored(engine: ToyEngine, value: object, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ("r1", "r2"):
            engine.add(request(name, 5, kv_transfer_params={"max_offload_tokens": value}))
    engine.run()
    assert engine.offload.snapshot().store.stored == 5
    assert engine.offload.requests.find("r1", engine.now_s).policy.sources["max_offload_tokens"] == "default"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "max_offload_tokens" in said[0]
    assert bounded_repr(value) in said[0]


def test_ignored_values_are_logged_once_a_minute_per_field(engine: ToyEngine, caplog) -> None:
    def said(**params: object) -> int:
        caplog.clear()
        engine.add(request("again", 1, kv_transfer_params=params))
        return len(caplog.records)

    with caplog.at_level(logging.WARNING):
        assert said(store="yes") == 1
        engine.now_s += 59.0
        assert said(store="no") == 0
        assert said(load="no", store=0) == 1, "another field has a minute of its own"
        engine.now_s += 1.0
        assert said(store="no", load=1) == 1
        assert "store" in caplog.records[0].getMessage()


def test_fields_not_allowed_for_clients_are_ignored_silently(engine: ToyEngine, caplog) -> None:
    engine.add(request("r", 2, kv_transfer_params={"priority": "high", "remote_host": "elsewhere", "tiers": 7}))
    assert engine.offload.requests.find("r", engine.now_s).policy.policy == RequestPolicy()
    assert not caplog.records


def test_override_of_a_running_request_applies_to_later_blocks(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.step(budget=2 * BLOCK_SIZE)
    engine.set_override(Override("r", {"store": False}, engine.now_s + 100))
    engine.run()
    store = engine.offload.requests.find("r", engine.now_s).store
    assert (store.stored, store.skipped["disabled"]) == (2, 3)


def test_full_pool_stores_blocks_when_slots_are_freed() -> None:
    """vllm#26329, LMCache#1330: a full pool led to an index error or an assertion."""
    engine = ToyEngine(num_slots=4, num_blocks=64)
    for name in ("stores", "loads"):
        engine.add(request(f"{name}-a", 2))
        engine.add(request(f"{name}-b", 2, first=300))
        if name == "stores":
            engine.run()
            engine.device.forget_all()
    engine.step()
    assert engine.offload.snapshot().pool.loading == 4
    engine.add(request("waits", 3, first=500, max_tokens=4))
    engine.step()
    engine.step()
    assert engine.offload.snapshot().store.in_flight == 0
    engine.run()
    store = engine.offload.requests.find("waits", engine.now_s).store
    assert store.stored == 3
    assert store.skipped["no_space"] == 0


def test_pins_of_waiting_requests_are_capped_at_half_the_pool() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    for name, first in (("a", 0), ("b", 1000)):
        answer(engine, name, 4, first=first)
    engine.device.forget_all()
    for name, first in (("a2", 0), ("b2", 1000)):
        engine.add(request(name, 4, first=first))
    assert engine.offload.match("a2", 0, 1.0) == Hit(4 * BLOCK_SIZE)
    assert engine.offload.match("b2", 0, 1.0) == Miss()
    assert engine.offload.match("a2", 0, 1.0) == Hit(4 * BLOCK_SIZE), "asking again replaces the pin"
    assert engine.offload.match("a2", 2 * BLOCK_SIZE, 1.0) == Hit(2 * BLOCK_SIZE)
    assert engine.offload.match("b2", 0, 1.0) == Hit(2 * BLOCK_SIZE), "what is left to pin makes a shorter hit"


def test_a_failed_store_publishes_nothing(engine: ToyEngine) -> None:
    """dynamo#15079: a failed transfer counted as done, and a request got another's KV."""
    engine.add(request("r", 5))
    plan = engine.step()
    engine.end_job(plan.stores[0].job_id, error="injected")
    assert engine.offload.snapshot().store.failed == 5
    assert engine.offload.snapshot().pool.free == 64


def test_a_failed_load_drops_its_entries_and_the_request_recomputes(engine: ToyEngine) -> None:
    """dynamo#15079: a failed transfer counted as done, and a request got another's KV."""
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    plan = engine.step()
    engine.end_job(plan.loads[0].job_id, error="injected")
    assert engine.offload.snapshot().pool.ready == 0
    engine.run()
    prompt = engine.offload.requests.find("second", engine.now_s).prompt_tokens
    assert (prompt.host_hit, prompt.recomputed) == (0, 21)
    assert engine.offload.snapshot().evictions.by_reason == {"load_failed": 5}
    assert engine.offload.snapshot().store.stored == 10, "recomputed blocks are stored again"
    engine.check_idle()


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_load_when_a_slot_is_corrupt_counts_its_blocks(blocks_per_slot: int) -> None:
    engine = ToyEngine(64, 64, blocks_per_slot=blocks_per_slot)
    store_and_turn_over(engine)
    engine.add(request("second", 4))
    job = engine.step().loads[0]
    engine.deliver([TransferResult(job.job_id, error="corrupt", corrupt=(int(job.runs[0].slots[0]),))])
    snapshot = engine.offload.snapshot()
    assert (snapshot.load.failed, snapshot.load.corrupt) == (4, blocks_per_slot)
    assert snapshot.evictions.by_reason == {"failed_verification": 1}


def test_no_block_of_a_request_that_is_loading_is_stored(engine: ToyEngine) -> None:
    """vllm#45704: a store began before the kernel that computes its block was done."""
    store_and_turn_over(engine)
    second = request("second", 8)
    engine.add(second)
    engine.step()
    assert second.state == "loading"
    assert len(second.tables[0]) == 9
    plan = engine.offload.plan_step([StepProgress("second", second.tables, second.num_tokens)], engine.now_s)
    assert not plan


def test_failed_step_stores_and_counts_nothing_of_its_requests(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.fail_step(budget=8)
    assert not engine.requests
    store = engine.offload.snapshot().store
    assert (store.offered, store.failed, store.stored) == (2, 2, 0)
    engine.check_idle()
    engine.offload.plan_step([], engine.now_s + 0.0001)
    assert len(engine.offload.cost_model.tokens_rate) == 0, "it is no measurement"
    assert engine.offload.snapshot().prompt_tokens.total == 0


@pytest.mark.parametrize("emitted", [False, True])
def test_a_reset_publishes_nothing_that_was_under_way(engine: ToyEngine, emitted: bool) -> None:
    """vllm#37160: a reset with transfers in flight was not implemented."""
    answer(engine, "stored", 3, first=700)
    victim = request("r", 5, max_tokens=50)
    if emitted:
        engine.add(victim)
        plan = engine.step()
    else:
        # Offered when it finishes, since the device had it all, and not yet part of any plan.
        answer(engine, "before", 5, kv_transfer_params={"store": False})
        engine.add(victim)
        engine.admit(victim)
        engine.finish(victim)
    ticket = engine.reset()
    assert (ticket.epoch, ticket.dropped_blocks) == (1, 3)
    assert engine.offload.snapshot().pool.storing == 5
    if not emitted:
        assert not engine.offload.plan_step([], 1.0), "nothing is copied for nobody"
    else:
        assert engine.offload.resets.count_open(ticket) == 1
        engine.end_job(plan.stores[0].job_id)
    assert engine.offload.resets.count_open(ticket) == 0
    snapshot = engine.offload.snapshot()
    assert (snapshot.pool.ready, snapshot.pool.free, snapshot.store.skipped["reset"]) == (0, 64, 5)


def test_requests_that_were_loading_recompute_after_a_reset(engine: ToyEngine) -> None:
    """vllm#37160: a reset with transfers in flight was not implemented."""
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    plan = engine.step()
    engine.reset()
    assert engine.offload.snapshot().pool.storing == 5, "slots under a copy are not given out"
    engine.end_job(plan.loads[0].job_id)
    engine.run()
    assert engine.offload.requests.find("second", engine.now_s).prompt_tokens.recomputed == 21
    assert engine.offload.snapshot().pool.ready == 5, "the same keys can be stored again"
    engine.check_idle()


def test_a_job_waits_for_all_its_workers_and_fails_if_any_fails() -> None:
    engine = ToyEngine(64, 64, num_workers=3)
    engine.add(request("r", 5))
    job = engine.step().stores[0]
    for result in (TransferResult(job.job_id, 0), TransferResult(job.job_id, 0), TransferResult(job.job_id, 7)):
        engine.deliver([result])
    assert engine.offload.snapshot().store.in_flight == 5, "late, repeated and unknown reports are harmless"
    engine.deliver([TransferResult(job.job_id, 1, "broken")])
    assert engine.offload.snapshot().store.in_flight == 5, "a worker that is not there has no say"
    engine.deliver([TransferResult(job.job_id, 2)])
    assert engine.offload.snapshot().store.failed == 5
    engine.deliver([TransferResult(job.job_id, 2)])
    assert engine.offload.snapshot().store.failed == 5


def test_request_when_its_id_is_reused_is_not_stored_any_more() -> None:
    engine = ToyEngine(num_slots=4, num_blocks=64)
    forgotten = request("r", 6, max_tokens=50)
    engine.add(forgotten)
    plan = engine.step()
    assert plan.stores[0].num_blocks == 4, "two blocks found no space, and would be offered again at the end"
    engine.device.spoil(range(64))
    engine.offload.on_new_request(request("r", 1, first=900), engine.now_s)
    assert engine.offload.snapshot().store.offered == 4
    assert not engine.offload.plan_step([], engine.now_s).stores
    assert engine.offload.snapshot().requests.running == 1


def test_a_request_that_was_never_scheduled_finishes_all_the_same(engine: ToyEngine) -> None:
    """vllm#49118: a request was aborted that had never been scheduled."""
    engine.add(request("r", 5))
    engine.finish(engine.requests["r"])
    engine.offload.on_request_finished("r", 1.0)
    engine.offload.on_request_finished("unheard-of", 1.0)
    assert engine.offload.snapshot().requests.finished == 1
    engine.check_idle()


def test_blocks_in_flight_are_not_offered_twice(engine: ToyEngine) -> None:
    engine.add(request("first", 3, max_tokens=30))
    first = engine.step()
    engine.add(request("second", 3, max_tokens=30))
    plan = engine.step()
    assert not plan.stores
    assert engine.offload.snapshot().store.skipped["in_flight"] == 3
    engine.end_job(first.stores[0].job_id)
    engine.check()


@pytest.mark.parametrize("match", [None, RequestFilter(request="first")])
def test_stores_pending_at_a_reset_are_in_no_plan(match: RequestFilter | None) -> None:
    """What found no space before is offered as its request ends, between two plans; another has the same blocks."""
    engine = ToyEngine(8, 64)
    engine.manager.operator_pins.max_fraction = 1.0
    answer(engine, "other", 8, first=900)
    keys = Inventory(engine.manager).list_blocks(0, 8).keys
    for key in keys:
        engine.manager.operator_pins.pin(key, 1e9, engine.now_s)
    for name in ("first", "second"):
        engine.add(request(name, 3, max_tokens=30))
        engine.step()
    for key in keys:
        engine.manager.operator_pins.unpin(key)
    engine.finish(engine.requests["first"])
    assert engine.offload.has_open_work()
    engine.reset(match)
    engine.check()
    plan = engine.step()
    assert sum(job.num_blocks for job in plan.stores) == 3, "those of the other request, once"
    assert engine.offload.snapshot().store.skipped["reset"] == 3
    engine.check()
    engine.run()
    engine.check_idle()


def test_two_device_blocks_of_one_key_race_and_one_wins(engine: ToyEngine) -> None:
    for name in ("first", "second"):
        engine.add(request(name, 3))
    plan = engine.step(budget=100)
    assert plan.stores[0].num_blocks == 6
    engine.run()
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["already_stored"]) == (3, 3)
    assert engine.offload.snapshot().pool.ready == 3


@pytest.mark.parametrize("index", [0, 2])
def test_block_dropped_while_it_is_stored_again_does_not_return(engine: ToyEngine, index: int) -> None:
    for name in ("first", "second"):
        engine.add(request(name, 3))
    engine.step(budget=100)
    dropped = make_keys(engine.requests["first"].block_hashes, 0)[index]
    engine.offload.resets.drop_block(dropped, engine.now_s)
    engine.run()
    assert Inventory(engine.manager).find_block(dropped) is None
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["already_stored"], store.skipped["reset"]) == (2, 2, 2)
    engine.check_idle()


def test_one_load_serves_all_waiting_requests(engine: ToyEngine) -> None:
    """vllm#44294: requests that share a prefix queued behind one load."""
    store_and_turn_over(engine)
    for _ in range(MIN_SAMPLES):
        engine.offload.cost_model.tokens_rate.observe(1, 10.0)
    for i in range(4):
        engine.add(request(f"convoy{i}", 5, extra=1 + i))
    plan = engine.step()
    assert len(plan.loads) == 1
    assert engine.offload.match("convoy2", 0, engine.now_s) == Later()
    assert engine.offload.snapshot().requests.waiting_for_load == 1
    engine.run()
    assert engine.offload.snapshot().load.blocks == 5
    served = [engine.offload.requests.find(f"convoy{i}", 1.0).prompt_tokens for i in range(4)]
    assert [(prompt.device_hit, prompt.host_hit) for prompt in served] == [(0, 20), (20, 0), (20, 0), (20, 0)]


@pytest.mark.parametrize("how", ["too long", "failed", "gone"])
def test_follower_does_not_wait_for_a_slow_or_failed_load(engine: ToyEngine, how: str) -> None:
    """vllm#44294: requests that share a prefix queued behind one load."""
    store_and_turn_over(engine)
    for name in ("leader", "follower"):
        engine.add(request(name, 5))
    load = engine.step().loads[0]
    assert engine.offload.match("follower", 0, engine.now_s) == Later()
    if how == "too long":
        assert engine.offload.match("follower", 0, engine.now_s + 1.5) == Hit(20)
        assert engine.offload.match("follower", 0, engine.now_s) == Later(), "the same wait, not a new one"
    elif how == "failed":
        engine.end_job(load.job_id, error="injected")
        assert engine.offload.match("follower", 0, engine.now_s) == Miss()
    else:
        engine.finish(engine.requests["leader"])
        assert engine.offload.match("follower", 0, engine.now_s) == Hit(20)
    engine.run()
    engine.check_idle()
    assert engine.offload.requests.find("follower", engine.now_s).prompt_tokens.total == 21


def test_a_follower_waits_for_one_leader_only(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    for _ in range(MIN_SAMPLES):
        engine.offload.cost_model.tokens_rate.observe(1, 100.0)
    engine.add(request("leader", 5))
    engine.step()
    follower, second = request("follower", 5), request("second", 5)
    for one in (follower, second):
        engine.add(one)
        one.state = "held back"
    assert engine.offload.match("follower", 0, engine.now_s) == Later()
    engine.finish(engine.requests["leader"])
    second.state = "waiting"
    engine.step()
    assert second.state == "loading"
    assert engine.offload.match("follower", 0, engine.now_s) == Hit(20)
    follower.state = "waiting"
    engine.run()
    engine.check_idle()


def run_with(engine: ToyEngine, budget: int) -> None:
    for _ in range(500):
        if engine.is_idle():
            return
        engine.step(budget, copy=True)
    raise AssertionError("not done")


@pytest.mark.parametrize(
    ("num_slots", "turns", "budget", "others", "left"),
    [(8, [8], 32, 3, 5), (8, [8], 8, 3, 5), (12, [6, 10], 64, 3, 9), (1024, [1024], 10**6, 1, 1023)],
)
def test_prefix_when_stored_in_several_steps_is_evicted_from_its_end(
    num_slots: int, turns: list[int], budget: int, others: int, left: int
) -> None:
    engine = ToyEngine(num_slots, num_blocks=num_slots + 76)
    for blocks in turns:
        long = request(f"turn of {blocks}", blocks)
        engine.add(long)
        run_with(engine, budget)
    engine.add(request("other", others, first=10**6))
    run_with(engine, 64)
    assert findable(engine, long) == left


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    long = request("long", 20)
    engine.add(long)
    run_with(engine, 8)
    assert findable(engine, long) == 8
    assert engine.offload.snapshot().store.skipped["no_space"] == 12


def test_step_that_failed_publishes_nothing(engine: ToyEngine) -> None:
    first, second = request("first", 3), request("second", 3, first=900)
    for one in (first, second):
        engine.add(one)
        engine.admit(one)
    second.block_hashes.append(None)
    progress = [StepProgress("first", first.tables, 13), StepProgress("second", ([*second.tables[0], 60],), 17)]
    with pytest.raises(TypeError):
        engine.offload.plan_step(progress, engine.now_s)
    engine.offload.on_step_failed(["first", "second"], 1.0)
    engine.ledger.step_failed([first, second])
    for one in (first, second):
        engine.finish(one)
    assert not engine.offload.plan_step([], engine.now_s).stores
    assert engine.offload.snapshot().pool.free == 64
    engine.check_idle()


def test_loaded_tokens_do_not_count_as_computed_ones(engine: ToyEngine) -> None:
    answer(engine, "first", 40)
    engine.device.forget_all()
    engine.offload.cost_model.tokens_rate._samples.clear()
    answer(engine, "second", 40)
    assert engine.offload.requests.find("second", 1.0).prompt_tokens.host_hit == 32 * BLOCK_SIZE
    assert sum(amount for amount, _ in engine.offload.cost_model.tokens_rate._samples) <= 33


@pytest.mark.parametrize("whole", [True, False])
def test_store_after_a_reset_is_not_skipped_as_in_flight(engine: ToyEngine, whole: bool) -> None:
    engine.add(request("first", 10, max_tokens=30, tenant="t"))
    engine.step(budget=100)
    engine.reset(None if whole else RequestFilter(tenant="t"))
    engine.add(request("second", 10, max_tokens=30, tenant="u"))
    engine.step(budget=100)
    assert engine.offload.requests.find("second", 1.0).store.skipped["in_flight"] == 0
    engine.run()
    engine.check_idle()
    assert findable(engine, request("", 10)) == 10


def test_a_plan_names_a_device_block_once_though_a_table_repeats_it(engine: ToyEngine) -> None:
    """vllm#42085, vllm#42903: sliding-window tables repeat a block, and its reference count went wrong."""
    victim = request("r", 3)
    engine.add(victim)
    engine.admit(victim)
    (store,) = engine.offload.plan_step([StepProgress("r", ([5, 5, 7, 8],), 13)], 1.0).stores
    assert blocks_of(store) == [5, 7]


def reset_before_commit(engine: ToyEngine) -> None:
    """Have the next hit voided between `match` and `commit`."""

    def reset_once(num_tokens: int) -> int:
        engine.take_hit = lambda num_tokens: num_tokens
        engine.reset()
        return num_tokens

    engine.take_hit = reset_once


def test_lost_load_is_not_reported_to_a_later_request_of_its_id(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    second = request("second", 5)
    engine.add(second)
    reset_before_commit(engine)
    assert engine.admit(second)
    engine.finish(second)
    engine.add(request("second", 5))
    engine.deliver([])
    assert engine.offload.snapshot().requests.waiting_for_load == 0
    engine.run()
    engine.check_idle()


def test_work_per_decode_block_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine(num_slots=4100, num_blocks=600, settings=RequestPolicy(offload_prompt_only=False))
    fillers = [number.to_bytes(16, "big") + b"\0" for number in range(4100)]
    filling = engine.manager.prepare_store(fillers, RequestIdentity("filler"), np.arange(4100), 1, 1.0)
    engine.manager.complete_store(filling.slots, 1.0)
    long = request("long", 400, max_tokens=400)
    engine.add(long)
    engine.step(10**6, copy=True)
    looked_up = 0
    find = BlockIndex.find_hashed

    def counting(index: BlockIndex, keys: Sequence[bytes], hashes: np.ndarray) -> tuple[np.ndarray, int]:
        nonlocal looked_up
        looked_up += len(keys)
        return find(index, keys, hashes)

    monkeypatch.setattr(BlockIndex, "find_hashed", counting)
    for _ in range(320):
        engine.step(copy=True)
    stored = engine.offload.requests.find("long", 1.0).store.stored - 400
    assert stored >= 79
    assert looked_up < 40 * stored
    engine.finish(long)
    engine.run()
    monkeypatch.undo()
    whole = findable(engine, long)
    assert whole >= 479
    others = [number.to_bytes(16, "big") + b"\0" for number in range(10_000, 13_650)]
    engine.manager.prepare_store(others, RequestIdentity("other"), np.arange(len(others)), 1, 1.0)
    assert whole - 40 < findable(engine, long) < whole, "its end goes first"


def test_request_fields_are_parsed_when_announced(engine: ToyEngine) -> None:
    sent: dict[str, object] = {"max_offload_tokens": 2 * BLOCK_SIZE}
    engine.add(request("r", 5, kv_transfer_params=sent))
    sent["max_offload_tokens"] = 5 * BLOCK_SIZE
    engine.set_runtime({"priority": "high"})
    engine.run()
    store = engine.offload.requests.find("r", engine.now_s).store
    assert (store.stored, store.skipped["token_cap"]) == (2, 3)


@pytest.mark.parametrize("wanted", [24, 400, 5, 1])
def test_commit_of_more_than_the_hit_is_a_failed_load(engine: ToyEngine, wanted: int) -> None:
    store_and_turn_over(engine)
    second = request("second", 8)
    engine.add(second)
    assert engine.offload.match("second", 0, engine.now_s) == Hit(20)
    engine.offload.commit("second", [list(range(9))], wanted, engine.now_s)
    assert engine.offload.snapshot().pool.pinned == 0
    (outcome,) = engine.offload.on_transfers_finished([], engine.now_s)
    assert (outcome.ok, outcome.first_token, outcome.num_tokens) == (False, 0, wanted)
    assert not engine.offload.plan_step([], engine.now_s)


def test_epoch_when_reset_is_the_pools_and_only_a_whole_one_raises_it(engine: ToyEngine) -> None:
    offload = engine.offload
    assert offload.resets.reset(1.0, RequestFilter(request="r")).epoch == offload.snapshot().epoch == 0
    assert offload.resets.reset(2.0).epoch == offload.snapshot().epoch == engine.manager.epoch == 1
    engine.manager.reset(NO_SLOTS, 3.0)
    assert offload.snapshot().epoch == engine.manager.epoch == 2
    assert offload.resets.reset(4.0, places=[HOST]).epoch == 3


@pytest.mark.parametrize(
    ("given", "session", "ignored"),
    [
        ("x" * 256, "x" * 256, 0),
        ("x" * 257, None, 1),
        ("\ud800", None, 1),
        ("a\nb", None, 1),
        ("a\u202eb", None, 1),
        ("..", None, 1),
        (7, None, 1),
        ("", None, 0),
        (None, None, 0),
    ],
)
def test_session_that_no_path_can_name_is_ignored_and_counted(
    engine: ToyEngine, given: object, session: str | None, ignored: int
) -> None:
    answer(engine, "r", 3, session=given)
    view = engine.offload.requests.find("r", engine.now_s)
    assert (view.session, view.subject().origin.session) == (session, session)
    assert engine.offload.snapshot().requests.ignored_sessions == ignored
    assert {origin.session for origin in Inventory(engine.manager).list_blocks(0, 100).origins} == {session}
