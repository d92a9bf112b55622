"""Flushes: what is copied to a tier in which order, what ends one, and what it leaves as it was.

The toy engine compares every block that it reads with what it has to hold, and its tier what it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.policy import RequestPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.recovery import begin_verification_of, end_verification, import_blocks
from kvferry.core.scheduler.flushes import Flush, FlushRefused, FlushState
from kvferry.core.tiers.base import HOST, TierCounts
from kvferry.core.transfers import NO_SLOTS
from tests.core.test_tiers import forget, keys, request, serve
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest
from tests.harness.toy_tiers import TIMEOUT_S, ToyTier

ANY = RequestFilter()


class LimitedTier(ToyTier):
    """A tier with a limit of blocks, which keeps those that it was given last."""

    max_blocks = 0
    order: list[Key]

    def counts(self) -> TierCounts:
        size = self._engine.layout.slot_bytes
        return TierCounts(len(self.blocks), len(self.blocks) * size, self.max_blocks * size)


def engine_of(num_slots: int = 64, num_blocks: int = 64, **options) -> ToyEngine:
    """An engine whose tier is attached once its pool is filled."""
    engine = ToyEngine(num_slots, num_blocks, **options)
    engine.step_s = 0.01
    return engine


def all_tiers(origin: RequestIdentity) -> Collection[str] | None:
    return None


def begin(engine: ToyEngine, match: RequestFilter = ANY, name: str = "disk") -> Flush:
    flushes = engine.offload.tiers.flushes
    flush = flushes.begin(name, match, engine.now_s)
    flushes.choose(flush, all_tiers)
    return flush


def drive(engine: ToyEngine, flush: Flush, rounds: int = 200) -> Flush:
    """Do what the driver does until the flush has ended, and its jobs have."""
    flushes = engine.offload.tiers.flushes
    for _ in range(rounds):
        step(engine, flush)
        if not flush.is_running and not flushes.num_held:
            return flush
    raise AssertionError(f"the flush does not end: {flush}")


def step(engine: ToyEngine, flush: Flush) -> None:
    flushes, manager = engine.offload.tiers.flushes, engine.manager
    while (batch := flushes.take(flush, engine.now_s)) is not None:
        assert flushes.num_held <= flushes.max_held == max(manager.num_slots // 8, 1)
        unverified = flushes.unverified(batch)
        if len(unverified):
            pin = begin_verification_of(manager, unverified)
            assert manager.counts().pinned <= flushes.max_held
            end_verification(manager, pin, NO_SLOTS, engine.now_s)
        flushes.submit(flush, batch, engine.now_s)
        assert manager.counts().pinned <= flushes.max_held
        engine.check()
    engine.now_s += 0.5
    engine.offload.tiers.poll(engine.now_s)
    engine.check()


def flushed(engine: ToyEngine, match: RequestFilter = ANY) -> Flush:
    return drive(engine, begin(engine, match))


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_blocks_stored_before_a_tier_came_are_flushed_to_it(blocks_per_slot: int) -> None:
    engine = engine_of(blocks_per_slot=blocks_per_slot)
    serve(engine, request("one", 6), request("two", 8, family=2))
    num_ready = engine.manager.counts().ready
    tier = engine.attach_tier("disk")
    assert not tier.blocks
    flush = flushed(engine)
    assert (flush.state, flush.num_stored, flush.num_left) == (FlushState.DONE, num_ready, 0)
    assert flush.num_blocks == len(tier.blocks) == num_ready
    engine.check_idle()
    forget(engine)
    assert serve(engine, request("again", 8, family=2)).tier_hit == {"disk": 8 * BLOCK_SIZE}


def test_blocks_that_the_tier_has_count_as_stored() -> None:
    engine = engine_of()
    engine.attach_tier("disk")
    serve(engine, request("one", 6))
    assert flushed(engine).num_stored == flushed(engine).num_stored == 6


def test_empty_pool_is_flushed_at_once() -> None:
    engine = engine_of()
    engine.attach_tier("disk")
    flush = flushed(engine)
    assert (flush.state, flush.num_blocks) == (FlushState.DONE, 0)


def test_flush_begins_with_the_beginnings_of_all_prompts() -> None:
    engine = engine_of(num_slots=16)
    serve(engine, request("one", 6), request("two", 8, family=2))
    tier = engine.attach_tier("disk")
    flushed(engine)
    number = {key: i % 8 for family in (1, 2) for i, key in enumerate(keys(8, family))}
    given = [number[key] for key in tier.blocks]
    # Two slots of sixteen at a time, so that the order is that of the batches.
    assert given == sorted(given)


def test_tier_that_is_too_small_gets_the_beginnings_alone() -> None:
    engine = engine_of()
    serve(engine, *(request(f"r{family}", 6, family=family) for family in range(1, 5)))
    tier = LimitedTier(engine)
    tier.max_blocks = 9
    engine.attach_tier("disk", tier)
    flush = flushed(engine)
    assert (flush.state, flush.num_blocks, flush.num_stored) == (FlushState.DONE, 9, 9)
    heads = {key for family in range(1, 5) for key in keys(2, family)}
    assert heads < tier.blocks.keys()


def test_tier_whose_blocks_take_more_than_their_bytes_is_not_overfilled() -> None:
    class Wasteful(LimitedTier):
        def counts(self) -> TierCounts:
            size = 2 * self._engine.layout.slot_bytes
            return TierCounts(len(self.blocks), len(self.blocks) * size, self.max_blocks * size)

    engine = engine_of()
    serve(engine, *(request(f"r{family}", 6, family=family) for family in range(1, 5)))
    tier = Wasteful(engine)
    tier.max_blocks = 8
    engine.attach_tier("disk", tier)
    flush = flushed(engine)
    assert (flush.state, flush.num_stored, flush.num_left) == (FlushState.DONE, 8, flush.num_blocks - 8)
    assert "is full" in (flush.reason or "")
    assert tier.blocks.keys() == {key for family in range(1, 5) for key in keys(2, family)}


@pytest.mark.parametrize("had_tier", [False, True])
def test_block_whose_request_excluded_the_tier_is_left_out(had_tier: bool) -> None:
    engine = engine_of()
    if had_tier:
        engine.attach_tier("other")
    engine.set_runtime({"tiers": ("other",)}, ())
    serve(engine, request("excluded", 4))
    engine.set_runtime({"tiers": ("other", "disk")}, ())
    serve(engine, request("named", 3, family=2))
    engine.set_runtime({"tiers": None}, ())
    serve(engine, request("any", 2, family=3))
    tier = engine.attach_tier("disk")
    flush = flushed(engine)
    assert flush.num_blocks == 5
    assert tier.blocks.keys() == {*keys(3, 2), *keys(2, 3)}


def test_block_that_todays_rules_exclude_is_left_out() -> None:
    engine = engine_of()
    serve(engine, request("one", 4), request("two", 3, family=2))
    tier = engine.attach_tier("disk")
    flushes = engine.offload.tiers.flushes
    flush = flushes.begin("disk", ANY, engine.now_s)
    assert flushes.choose(flush, lambda origin: () if origin.request_id == "one" else ("disk",)) == 3
    drive(engine, flush)
    assert tier.blocks.keys() == {*keys(3, 2)}


def recovered_engine(num_blocks: int) -> ToyEngine:
    """An engine with the blocks of an earlier process, which are not verified."""
    engine = engine_of()
    serve(engine, request("known", num_blocks))
    forget(engine)
    group, slots = engine.groups[0], np.arange(num_blocks)
    names = keys(num_blocks)
    for slot, name in enumerate(names):
        engine.copies.host[0][slot] = engine.truth.of(name)
    ones = np.ones(num_blocks, dtype=np.int64)
    blocks = RecoveredBlocks(
        slots=slots,
        keys=names,
        generations=100 * ones,
        sizes=ones * group.slot_bytes,
        positions=slots,
        origins=[RequestIdentity("earlier")] * num_blocks,
        stored_s=np.full(num_blocks, engine.now_s),
        hit_s=np.zeros(num_blocks),
        hits=ones * 0,
        classes=np.ones(num_blocks, dtype=np.uint8),
    )
    import_blocks(engine.manager, blocks, NO_SLOTS)
    return engine


def test_recovered_blocks_are_verified_and_flushed() -> None:
    engine = recovered_engine(6)
    tier = engine.attach_tier("disk")
    assert engine.manager.counts().unverified == 6
    flush = flushed(engine)
    assert (flush.num_stored, engine.manager.counts().unverified) == (6, 0)
    assert tier.blocks.keys() == {*keys(6)}


def test_recovered_block_that_was_not_verified_is_left_out() -> None:
    engine = recovered_engine(3)
    tier = engine.attach_tier("disk")
    flushes, flush = engine.offload.tiers.flushes, begin(engine)
    while (batch := flushes.take(flush, engine.now_s)) is not None:
        flushes.submit(flush, batch, engine.now_s)
    assert (flush.state, flush.num_stored, flush.num_left) == (FlushState.DONE, 0, 3)
    assert not tier.blocks


# --- what ends a flush ------------------------------------------------------------------------------------------------


def under_way(num_blocks: int = 20, **options) -> tuple[ToyEngine, ToyTier, Flush]:
    """A flush whose first jobs are open."""
    engine = engine_of(**options)
    serve(engine, request("r", num_blocks))
    tier = engine.attach_tier("disk")
    tier.due = lambda number: False
    flush = begin(engine)
    step(engine, flush)
    assert flush.num_jobs
    tier.due = lambda number: True
    return engine, tier, flush


@pytest.mark.parametrize(
    ("match", "places"),
    [(None, None), (None, [HOST]), (None, ["disk"]), (RequestFilter(request="other"), None), (ANY, None)],
)
def test_reset_during_a_flush_ends_it(match: RequestFilter | None, places: Sequence[str] | None) -> None:
    engine, tier, flush = under_way()
    num_given = len(tier._open) and flush.num_taken
    engine.reset(match, places)
    assert (flush.state, flush.is_running) == (FlushState.RESET, False)
    drive(engine, flush)
    assert flush.num_taken == num_given, "nothing is submitted after the reset"
    engine.check_idle()
    assert flushed(engine).state is FlushState.DONE


def test_reset_of_another_tier_lets_the_flush_go_on() -> None:
    engine, tier, flush = under_way()
    engine.attach_tier("other")
    engine.reset(None, ["other"])
    assert drive(engine, flush).state is FlushState.DONE
    assert len(tier.blocks) == 20


def test_flush_that_is_canceled_submits_nothing_more() -> None:
    engine, tier, flush = under_way()
    flushes = engine.offload.tiers.flushes
    with pytest.raises(FlushRefused, match="disk is being flushed"):
        flushes.begin("disk", ANY, engine.now_s)
    assert flushes.cancel(flush, engine.now_s)
    assert not flushes.cancel(flush, engine.now_s)
    drive(engine, flush)
    assert flush.state is FlushState.CANCELED
    assert len(tier.blocks) == flush.num_stored == flush.num_taken < 20
    engine.check_idle()
    assert flushed(engine).num_stored == 20


def test_tier_that_gives_no_answer_fails_the_flush_and_holds_nothing() -> None:
    engine, tier, flush = under_way()
    tier.dead = True
    for _ in range(10):
        engine.now_s += TIMEOUT_S
        step(engine, flush)
    assert (flush.state, flush.num_stored) == (FlushState.FAILED, 0)
    assert "gave no answer to a job" in (flush.reason or "")
    assert not engine.offload.tiers.flushes.num_held
    assert engine.manager.counts().pinned == 0


@pytest.mark.parametrize("num_lost", [2, 3])
def test_block_that_a_tier_does_not_store_is_tried_three_times(num_lost: int) -> None:
    engine = engine_of()
    serve(engine, request("one", 20))
    tier, tries = engine.attach_tier("disk"), Counter[Key]()

    def loses(key: Key) -> bool:
        tries[key] += 1
        return key in keys(3) and tries[key] <= num_lost

    tier.loses = loses
    flush = flushed(engine)
    num_left = 3 * (num_lost == 3)
    assert (flush.state, flush.num_stored, flush.num_left) == (FlushState.DONE, flush.num_blocks - num_left, num_left)
    assert max(tries.values()) == 3
    engine.check_idle()


def test_tier_that_is_disabled_fails_the_flush() -> None:
    engine, _, flush = under_way()
    engine.offload.tiers.enable("disk", is_enabled=False)
    drive(engine, flush)
    assert (flush.state, "disk is disabled" in (flush.reason or "")) == (FlushState.FAILED, True)


def test_tier_that_is_detached_fails_the_flush_at_once() -> None:
    engine, _, flush = under_way()
    engine.detach_tier("disk")
    assert engine.offload.tiers.flushes.latest("disk") is None
    assert (flush.state, flush.reason) == (FlushState.FAILED, "tier disk was detached")
    drive(engine, flush)
    engine.check_idle()


def test_unexpected_error_during_a_flush_ends_it() -> None:
    engine, _, flush = under_way()
    engine.discard()
    assert (flush.state, "unexpected error" in (flush.reason or "")) == (FlushState.FAILED, True)
    assert not engine.offload.tiers.flushes.num_held
    assert flushed(engine).state is FlushState.DONE
    engine.check_idle()


@pytest.mark.parametrize(("trouble", "text"), [("disabled", "enable it first"), ("stuck", "could not be canceled")])
def test_tier_that_cannot_be_used_refuses_a_flush(trouble: str, text: str) -> None:
    engine, tier, flush = under_way()
    engine.offload.tiers.flushes.cancel(flush, engine.now_s)
    if trouble == "disabled":
        engine.offload.tiers.enable("disk", is_enabled=False)
    else:
        tier.dead, tier.raises = True, {"cancel"}
        engine.offload.tiers.poll(engine.now_s + TIMEOUT_S + 1)
    with pytest.raises(FlushRefused, match=text):
        begin(engine)
    with pytest.raises(ValueError, match="no tier called none"):
        begin(engine, name="none")


def test_blocks_that_leave_the_pool_before_their_turn_are_left_out() -> None:
    engine = engine_of()
    serve(engine, request("one", 10))
    tier = engine.attach_tier("disk")
    flush = begin(engine)
    for key in keys(10)[:3]:
        engine.offload.resets.drop_block(key, engine.now_s)
    drive(engine, flush)
    assert (flush.state, flush.num_stored, flush.num_left) == (FlushState.DONE, 7, 3)
    assert tier.blocks.keys() == {*keys(10)[3:]}


def test_flushes_of_two_tiers_together_hold_an_eighth_of_the_pool() -> None:
    engine = engine_of()
    serve(engine, request("one", 40))
    tiers = [engine.attach_tier(name) for name in ("disk", "other")]
    flushes = [begin(engine), begin(engine, name="other")]
    for _ in range(100):
        for flush in flushes:
            step(engine, flush)
    assert [flush.state for flush in flushes] == [FlushState.DONE] * 2
    assert [len(tier.blocks) for tier in tiers] == [40, 40]


# --- eviction ---------------------------------------------------------------------------------------------------------


def victims(engine: ToyEngine) -> list[int]:
    evictor = engine.manager.evictor
    return [*evictor._on_device.peek_oldest(1000).tolist(), *evictor.policy.peek_victims(1000).tolist()]


def some_requests() -> list[ToyRequest]:
    first = [request(f"r{family}", 3 + family, family=family, priority=family) for family in range(1, 6)]
    return [*first, request("again", 5, family=2), request("longer", 7, family=1)]


@pytest.mark.parametrize("policy", list(EVICTION_POLICIES))
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_flush_leaves_the_order_of_eviction_as_it_was(policy: str, mode: str) -> None:
    from kvferry.core.engine_api import StoreMode

    engine = engine_of(eviction_policy=policy, store_mode=StoreMode(mode), num_blocks=40)
    serve(engine, *some_requests())
    before = victims(engine)
    assert len(before) > 10
    engine.attach_tier("disk")
    assert flushed(engine).state is FlushState.DONE
    assert victims(engine) == before
    engine.check_idle()


def test_blocks_that_are_used_while_they_are_flushed_count_as_used() -> None:
    engine = engine_of(settings=RequestPolicy(offload_prompt_only=True))
    serve(engine, request("one", 3), request("two", 3, family=2))
    tier = engine.attach_tier("disk")
    tier.due = lambda number: False
    flush = begin(engine)
    step(engine, flush)
    engine.device.forget_all()
    serve(engine, request("again", 3))
    tier.due = lambda number: True
    drive(engine, flush)
    slots = engine.manager.lookup_each([*keys(3, 2), *keys(3, 1)]).tolist()
    assert set(victims(engine)[:3]) == set(slots[:3])
    engine.check_idle()
