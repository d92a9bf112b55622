"""What the scheduler decides, seen by an engine: policies, hits, failures, resets, lifecycles."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.core.cost_model import MIN_SAMPLES
from kvferry.core.engine_api import StepProgress
from kvferry.core.keys import RequestFilter, RequestIdentity, make_keys
from kvferry.core.policy import Override, RequestPolicy
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.inventory import Inventory
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.stats import EvictionReason
from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import NO_SLOTS, TransferResult
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest, blocks_of, slots_of


def request(name: str, blocks: int, *, extra: int = 1, first: int = 0, max_tokens: int = 1, **fields) -> ToyRequest:
    tokens = list(range(first, first + blocks * BLOCK_SIZE + extra))
    return ToyRequest(name, tokens, len(tokens), max_tokens, **fields)


def turn_over(engine: ToyEngine) -> None:
    """Make the device forget every cached block."""
    engine.device.forget_all()


def store_and_turn_over(engine: ToyEngine) -> None:
    """Have a request of five blocks answered, so that the host has them and the device has not."""
    engine.add(request("first", 5))
    engine.run()
    turn_over(engine)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(num_slots=64, num_blocks=64)


def test_a_prefix_that_left_the_device_comes_back_from_the_host(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    engine.add(request("second", 5))
    engine.run()
    prompt = engine.offload.requests.find("second", engine.now_s).prompt_tokens
    assert (prompt.total, prompt.device_hit, prompt.host_hit, prompt.recomputed) == (21, 0, 20, 1)
    assert engine.offload.snapshot().load.blocks == 5
    engine.check_idle()


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(engine: ToyEngine) -> None:
    engine.add(request("first", 5, extra=0))
    engine.run()
    turn_over(engine)
    engine.add(request("second", 5, extra=0))
    answer = engine.offload.match("second", 0, engine.now_s)
    assert answer == Hit(4 * BLOCK_SIZE)


def test_a_hit_continues_behind_the_device_prefix_and_not_inside_a_block(engine: ToyEngine) -> None:
    engine.add(request("first", 5))
    engine.run()
    engine.add(request("second", 5))
    assert engine.offload.match("second", 2 * BLOCK_SIZE, engine.now_s) == Hit(3 * BLOCK_SIZE)
    assert engine.offload.match("second", 2 * BLOCK_SIZE + 1, engine.now_s) == Miss()


def test_decode_blocks_are_kept_back_by_default_and_stored_when_asked_for() -> None:
    for prompt_only, stored in ((True, 2), (False, 5)):
        engine = ToyEngine(64, 64, settings=RequestPolicy(offload_prompt_only=prompt_only))
        engine.add(request("r", 2, extra=3, max_tokens=10))
        engine.run()
        store = engine.offload.snapshot().store
        assert store.stored == stored
        assert store.skipped["prompt_only"] == 5 - stored
        assert store.offered == 5


@pytest.mark.parametrize(("cap", "stored"), [(0, 0), (3, 0), (4, 1), (9, 2), (1000, 5)])
def test_a_cap_excludes_the_block_it_falls_into(engine: ToyEngine, cap: int, stored: int) -> None:
    engine.add(request("r", 5, kv_transfer_params={"max_offload_tokens": cap}))
    engine.run()
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["token_cap"]) == (stored, 5 - stored)


@pytest.mark.parametrize("value", [True, "5", 5.0, -1, [5], {"n": 5}, "unlimited"])
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
    assert repr(value) in said[0]


def test_what_is_ignored_is_logged_once_a_minute_a_field(engine: ToyEngine, caplog) -> None:
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


def test_what_end_users_may_not_set_is_passed_over_silently(engine: ToyEngine, caplog) -> None:
    engine.add(request("r", 2, kv_transfer_params={"priority": "high", "remote_host": "elsewhere", "tiers": 7}))
    assert engine.offload.requests.find("r", engine.now_s).policy.policy == RequestPolicy()
    assert not caplog.records


def test_store_and_load_can_be_switched_off_for_a_request(engine: ToyEngine) -> None:
    engine.add(request("quiet", 5, kv_transfer_params={"store": False}))
    engine.run()
    assert engine.offload.snapshot().store.skipped["disabled"] == 5
    engine.add(request("stores", 5))
    engine.run()
    turn_over(engine)
    engine.add(request("declines", 5, kv_transfer_params={"load": False}))
    engine.run()
    load = engine.offload.snapshot().load
    assert (load.blocks, load.declined) == (0, 5)


def test_an_override_before_arrival_wins_until_its_time_is_over(engine: ToyEngine) -> None:
    engine.set_override(Override("r", {"max_offload_tokens": 8}, engine.now_s + 1.5))
    engine.add(request("r", 5, kv_transfer_params={"max_offload_tokens": 4, "store": True}))
    view = engine.offload.requests.find("r", engine.now_s)
    assert view.policy.sources["max_offload_tokens"] == "override"
    assert view.policy.sources["store"] == "request"
    engine.step(budget=2 * BLOCK_SIZE)
    engine.step(budget=BLOCK_SIZE)
    assert engine.offload.requests.find("r", engine.now_s).policy.sources["max_offload_tokens"] == "request"
    engine.run()
    # Two blocks under the override; by the time of the third the request's own cap of one block holds again.
    assert engine.offload.requests.find("r", engine.now_s).store.stored == 2


def test_an_override_of_a_running_request_holds_for_blocks_not_yet_answered(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.step(budget=2 * BLOCK_SIZE)
    engine.set_override(Override("r", {"store": False}, engine.now_s + 100))
    engine.run()
    store = engine.offload.requests.find("r", engine.now_s).store
    assert (store.stored, store.skipped["disabled"]) == (2, 3)


def test_an_override_reaches_a_request_by_an_alias(engine: ToyEngine) -> None:
    engine.set_override(Override("mine", {"store": False}, engine.now_s + 100))
    engine.add(request("cmpl-mine-0-12345678", 5, aliases=("mine",)))
    engine.run()
    assert engine.offload.requests.find("mine", engine.now_s).store.skipped["disabled"] == 5


def test_runtime_defaults_lie_over_settings_and_can_be_taken_away(engine: ToyEngine) -> None:
    engine.set_runtime({"max_offload_tokens": 4})
    assert engine.offload.policies.defaults().sources["max_offload_tokens"] == "runtime"
    engine.add(request("capped", 5))
    engine.run()
    engine.set_runtime({}, ["max_offload_tokens"])
    engine.add(request("free", 5, first=900))
    engine.run()
    assert engine.offload.requests.find("capped", engine.now_s).store.stored == 1
    assert engine.offload.requests.find("free", engine.now_s).store.stored == 5


def test_a_full_pool_is_a_normal_answer_and_is_asked_again_when_room_appears() -> None:
    """vllm#26329, LMCache#1330: a full pool led to an index error or an assertion."""
    engine = ToyEngine(num_slots=4, num_blocks=64)
    for name in ("stores", "loads"):
        engine.add(request(f"{name}-a", 2))
        engine.add(request(f"{name}-b", 2, first=300))
        if name == "stores":
            engine.run()
            turn_over(engine)
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


def test_what_never_found_space_is_counted_when_the_request_is_over() -> None:
    engine = ToyEngine(num_slots=2, num_blocks=64)
    engine.add(request("r", 6))
    engine.step()
    assert engine.offload.snapshot().store.offered == 2, "the others may still find space"
    engine.step()
    store = engine.offload.snapshot().store
    assert (store.in_flight, store.skipped["no_space"], store.offered) == (2, 4, 6)


def test_hit_blocks_are_pinned_from_match_until_the_request_goes_away() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    engine.add(request("first", 4))
    engine.run()
    turn_over(engine)
    engine.add(request("waiting", 4))
    assert engine.offload.match("waiting", 0, engine.now_s) == Hit(4 * BLOCK_SIZE)
    engine.requests["waiting"].state = "blocked"
    for i in range(5):
        engine.add(request(f"filler{i}", 4, first=1000 * (i + 1)))
        for _ in range(8):
            engine.step(copy=True)
    assert engine.offload.match("waiting", 0, engine.now_s) == Hit(4 * BLOCK_SIZE)
    assert engine.offload.snapshot().pool.pinned == 4
    engine.finish(engine.requests["waiting"])
    assert engine.offload.snapshot().pool.pinned == 0


def test_pins_of_waiting_requests_are_capped_at_half_the_pool() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    for name, first in (("a", 0), ("b", 1000)):
        engine.add(request(name, 4, first=first))
        engine.run()
    turn_over(engine)
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


def test_a_failed_step_stores_nothing_of_its_requests(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.fail_step(budget=8)
    assert not engine.requests
    store = engine.offload.snapshot().store
    assert (store.offered, store.failed, store.stored) == (2, 2, 0)
    engine.check_idle()


@pytest.mark.parametrize("emitted", [False, True])
def test_a_reset_publishes_nothing_that_was_under_way(engine: ToyEngine, emitted: bool) -> None:
    """vllm#37160: a reset with transfers in flight was not implemented."""
    engine.add(request("stored", 3, first=700))
    engine.run()
    victim = request("r", 5, max_tokens=50)
    if emitted:
        engine.add(victim)
        plan = engine.step()
    else:
        # Offered when it finishes, since the device had it all, and not yet part of any plan.
        engine.add(request("before", 5, kv_transfer_params={"store": False}))
        engine.run()
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


def reset_before_commit(engine: ToyEngine) -> None:
    """Have the next hit voided between `match` and `commit`."""

    def reset_once(num_tokens: int) -> int:
        engine.take_hit = lambda num_tokens: num_tokens
        engine.reset()
        return num_tokens

    engine.take_hit = reset_once


def test_a_hit_voided_by_a_reset_before_commit_is_a_failed_load(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    second = request("second", 5)
    engine.add(second)
    reset_before_commit(engine)
    assert engine.admit(second)
    assert second.num_loading == 20
    assert engine.offload.has_open_work()
    engine.deliver([])
    assert second.state == "waiting"
    engine.run()
    engine.check_idle()


def test_a_reset_by_match_takes_what_matches_and_nothing_else(engine: ToyEngine) -> None:
    engine.add(request("a1", 3, tenant="aaaa"))
    engine.add(request("b1", 4, first=500, tenant="bbbb"))
    engine.run()
    engine.add(request("a2", 2, first=900, tenant="aaaa"))
    engine.add(request("b2", 2, first=1300, tenant="bbbb"))
    plan = engine.step()
    ticket = engine.reset(RequestFilter(tenant="a*", request="*"))
    assert (ticket.dropped_blocks, ticket.job_ids) == (3, (plan.stores[0].job_id,))
    engine.run()
    left = set(Inventory(engine.manager).list_blocks(0, 100).keys)
    expected = [*request("", 4, first=500).block_hashes, *request("", 2, first=1300).block_hashes]
    assert left == set(make_keys(expected, 0))
    assert engine.offload.snapshot().store.skipped["reset"] == 2


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


def test_the_same_id_may_come_again(engine: ToyEngine) -> None:
    engine.add(request("r", 5))
    engine.run()
    turn_over(engine)
    again = request("r", 5)
    engine.add(again)
    engine.step()
    assert again.state == "loading"
    engine.finish(again)
    engine.add(request("r", 3, first=4000))
    engine.run()
    assert engine.offload.requests.find("r", engine.now_s).prompt_tokens.recomputed == 13
    assert engine.offload.snapshot().requests.finished == 3
    engine.check_idle()


def test_nothing_of_a_forgotten_request_is_stored_when_its_id_comes_again() -> None:
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


def test_an_evicted_key_that_is_asked_for_again_is_a_regret() -> None:
    engine = ToyEngine(num_slots=4, num_blocks=64)
    engine.add(request("first", 4))
    engine.run()
    engine.add(request("other", 4, first=500))
    engine.run()
    turn_over(engine)
    engine.add(request("again", 4))
    engine.run()
    evictions = engine.offload.snapshot().evictions
    assert evictions.by_reason["capacity"] == evictions.total == 8
    assert evictions.regretted == 4


def test_prefixes_die_from_their_end() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    engine.add(request("long", 8))
    engine.run()
    engine.add(request("other", 3, first=500))
    engine.run()
    left = set(Inventory(engine.manager).list_blocks(0, 100).keys)
    assert set(make_keys(request("", 5).block_hashes, 0)) <= left


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
def test_what_a_reset_meets_before_it_is_in_a_plan_is_in_none(match: RequestFilter | None) -> None:
    """What found no space before is offered as its request ends, between two plans; another has the same blocks."""
    engine = ToyEngine(8, 64)
    engine.manager.operator_pins.set_max_fraction(1.0)
    engine.add(request("other", 8, first=900))
    engine.run()
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


def test_views_of_requests_are_paged_from_the_latest(engine: ToyEngine) -> None:
    for i in range(7):
        engine.add(request(f"r{i}", 1, first=100 * i))
    engine.run()
    first = engine.offload.requests.page(None, 3, 1.0)
    rest = engine.offload.requests.page(first[-1].sequence, 10, 1.0)
    assert [view.request_id for view in first + rest] == [f"r{i}" for i in reversed(range(7))]
    assert engine.offload.requests.find("nobody", 1.0) is None


def test_one_load_serves_all_who_wait_for_it(engine: ToyEngine) -> None:
    """vllm#44294: requests that share a prefix queued behind one load."""
    store_and_turn_over(engine)
    for _ in range(MIN_SAMPLES):
        engine.offload.choice.tokens_rate.observe(1, 10.0)
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
def test_nobody_waits_for_a_load_that_takes_too_long_or_comes_to_nothing(engine: ToyEngine, how: str) -> None:
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
        engine.offload.choice.tokens_rate.observe(1, 100.0)
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


def findable(engine: ToyEngine, one: ToyRequest) -> int:
    return len(engine.manager.lookup(make_keys(one.block_hashes, 0)))


@pytest.mark.parametrize("budget", [8, 32])
def test_a_prefix_that_was_stored_in_several_steps_dies_from_its_end(budget: int) -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    long = request("long", 8)
    engine.add(long)
    run_with(engine, budget)
    engine.add(request("other", 3, first=5000))
    run_with(engine, 32)
    assert findable(engine, long) == 5


def test_a_prompt_longer_than_the_pool_keeps_its_head() -> None:
    engine = ToyEngine(num_slots=8, num_blocks=64)
    long = request("long", 20)
    engine.add(long)
    run_with(engine, 8)
    assert findable(engine, long) == 8
    assert engine.offload.snapshot().store.skipped["no_space"] == 12


def test_the_second_turn_of_a_conversation_dies_from_its_end_too() -> None:
    engine = ToyEngine(num_slots=12, num_blocks=64)
    engine.add(request("turn1", 6))
    run_with(engine, 64)
    second = request("turn2", 10)
    engine.add(second)
    run_with(engine, 64)
    engine.add(request("other", 3, first=7000))
    run_with(engine, 64)
    assert findable(engine, second) == 9


def test_a_prompt_offered_in_several_batches_dies_from_its_end() -> None:
    engine = ToyEngine(num_slots=1024, num_blocks=1100)
    huge = request("huge", 1024)
    engine.add(huge)
    run_with(engine, 10**6)
    engine.add(request("other", 1, first=10**6))
    run_with(engine, 64)
    assert findable(engine, huge) == 1023


def test_nothing_that_a_failed_step_had_decided_is_published(engine: ToyEngine) -> None:
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


def test_what_found_no_space_in_a_step_that_failed_is_not_offered_again() -> None:
    engine = ToyEngine(num_slots=4, num_blocks=64)
    engine.add(request("x", 4))
    engine.run()
    held = make_keys(request("x", 4).block_hashes, 0)
    engine.manager.operator_pins.set_max_fraction(1.0)
    for key in held:
        engine.manager.operator_pins.pin(key, 9e9, 1.0)
    victim = request("victim", 3, first=500)
    engine.add(victim)
    engine.admit(victim)
    assert not engine.offload.plan_step([StepProgress("victim", victim.tables, 13)], 1.0)
    engine.offload.on_step_failed(["victim"], 1.0)
    engine.ledger.step_failed([victim])
    for key in held:
        engine.manager.operator_pins.unpin(key)
    engine.finish(victim)
    assert not engine.offload.plan_step([], 2.0)


def test_a_failed_step_is_no_measurement_and_no_prefill(engine: ToyEngine) -> None:
    engine.add(request("victim", 10))
    engine.fail_step(budget=100)
    engine.offload.plan_step([], engine.now_s + 0.0001)
    assert len(engine.offload.choice.tokens_rate) == 0
    assert engine.offload.snapshot().prompt_tokens.total == 0


def test_loaded_tokens_do_not_count_as_computed_ones(engine: ToyEngine) -> None:
    engine.add(request("first", 40))
    engine.run()
    turn_over(engine)
    engine.offload.choice.tokens_rate._samples.clear()
    engine.add(request("second", 40))
    engine.run()
    assert engine.offload.requests.find("second", 1.0).prompt_tokens.host_hit == 32 * BLOCK_SIZE
    assert sum(amount for amount, _ in engine.offload.choice.tokens_rate._samples) <= 33


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_that_a_reset_disowned_keeps_nobody_else_from_storing(engine: ToyEngine, whole: bool) -> None:
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


def test_a_pool_of_one_slot_can_be_hit() -> None:
    engine = ToyEngine(num_slots=1, num_blocks=64)
    engine.add(request("first", 1))
    engine.run()
    turn_over(engine)
    engine.add(request("second", 1))
    assert engine.offload.match("second", 0, 1.0) == Hit(BLOCK_SIZE)


def test_a_request_that_was_preempted_while_loading_hears_nothing_of_that_load(engine: ToyEngine) -> None:
    store_and_turn_over(engine)
    second = request("second", 5)
    engine.add(second)
    load = engine.step().loads[0]
    engine.preempt(second)
    second.state = "held back"
    assert engine.offload.snapshot().requests.waiting_for_load == 0
    engine.end_job(load.job_id)
    assert second.state == "held back"
    second.state = "waiting"
    engine.run()
    engine.check_idle()


def test_a_lost_load_is_told_to_nobody_who_came_after(engine: ToyEngine) -> None:
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


def test_what_a_finished_request_still_had_to_store_falls_to_a_reset_by_match() -> None:
    engine = ToyEngine(num_slots=2, num_blocks=64)
    engine.add(request("first", 4, tenant="t"))
    store = engine.step().stores[0]
    engine.end_job(store.job_id)
    engine.manager.drop(np.array(slots_of(store)), EvictionReason.OPERATOR, 1.0)
    engine.finish(engine.requests["first"])
    assert engine.offload.has_open_work()
    engine.reset(RequestFilter(tenant="t"))
    assert not engine.offload.plan_step([], engine.now_s)
    assert engine.offload.snapshot().pool.ready == 0
    engine.check_idle()


def test_a_device_block_can_be_stored_again_for_another_key(engine: ToyEngine) -> None:
    first = request("first", 3)
    engine.add(first)
    engine.run()
    second = request("second", 3, first=700)
    engine.add(second)
    second.tables = [[0, 1, 2, 3]]
    engine.device.keep(second.tables[0])
    engine.offload.match("second", 0, 1.0)
    engine.offload.commit("second", second.tables, 0, 1.0)
    second.state = "running"
    engine.step()
    assert engine.offload.requests.find("second", 1.0).store.skipped["in_flight"] == 0
    engine.run()


def test_a_number_too_long_to_print_is_ignored_like_any_other(engine: ToyEngine) -> None:
    engine.add(request("r", 5, kv_transfer_params={"max_offload_tokens": -(10**5000)}))
    engine.run()
    assert engine.offload.snapshot().store.stored == 5


def test_what_a_decode_block_costs_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine(num_slots=4100, num_blocks=600, settings=RequestPolicy(offload_prompt_only=False))
    fillers = [number.to_bytes(16, "big") + b"\0" for number in range(4100)]
    filling = engine.manager.prepare_store(fillers, RequestIdentity("filler"), np.arange(4100), 1, 1.0)
    engine.manager.complete_store(filling.slots, 1.0)
    long = request("long", 400, max_tokens=400)
    engine.add(long)
    engine.step(10**6, copy=True)
    looked_up = 0
    find = BlockIndex.find

    def counting(index: BlockIndex, keys: Sequence[bytes], marks: np.ndarray | None = None) -> np.ndarray:
        nonlocal looked_up
        looked_up += len(keys)
        return find(index, keys, marks)

    monkeypatch.setattr(BlockIndex, "find", counting)
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


def test_what_a_request_sent_is_read_once_when_it_is_announced(engine: ToyEngine) -> None:
    sent: dict[str, object] = {"max_offload_tokens": 2 * BLOCK_SIZE}
    engine.add(request("r", 5, kv_transfer_params=sent))
    sent["max_offload_tokens"] = 5 * BLOCK_SIZE
    engine.set_runtime({"priority": "high"})
    engine.run()
    store = engine.offload.requests.find("r", engine.now_s).store
    assert (store.stored, store.skipped["token_cap"]) == (2, 3)


@pytest.mark.parametrize(
    ("cap", "prompt_only", "stored", "by_prompt_only", "by_cap"),
    [(100, True, 2, 3, 0), (4, True, 1, 3, 1), (13, False, 3, 0, 2)],
)
def test_cap_and_prompt_only_combine_by_the_smaller(cap, prompt_only, stored, by_prompt_only, by_cap) -> None:
    engine = ToyEngine(64, 64, settings=RequestPolicy(offload_prompt_only=prompt_only))
    engine.add(request("r", 2, extra=3, max_tokens=10, kv_transfer_params={"max_offload_tokens": cap}))
    engine.run()
    store = engine.offload.snapshot().store
    assert (store.stored, store.skipped["prompt_only"], store.skipped["token_cap"]) == (stored, by_prompt_only, by_cap)


@pytest.mark.parametrize("wanted", [24, 400, 5, 1])
def test_an_engine_that_takes_more_than_the_hit_or_part_of_a_block_gets_a_failed_load(
    engine: ToyEngine, wanted: int
) -> None:
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
