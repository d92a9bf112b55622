"""Leases against an obvious model, and what begins and ends the lease of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupSpec
from kvferry.core.keys import Key, RequestFilter, RequestIdentity, SessionKey, hash_of
from kvferry.core.policy import Override, RequestPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.leases import Lease, LeaseOutcome, LeaseReceipt
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import PinOutcome
from kvferry.core.pool.recovery import recover
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.stats import EvictionReason, LeaseEnd
from kvferry.core.transfers import NO_SLOTS
from tests.harness.effort import examples
from tests.harness.pool_blocks import Recorder, held, key, keys, load, offer, store
from tests.harness.toy_engine import BLOCK_SIZE, SLOT_BYTES, ToyEngine
from tests.harness.toy_requests import answer, findable, request

SLOTS = 40
CHAINS, CHAIN = 4, 12
TENANTS = (None, "a", None, "b")
SESSIONS = [SessionKey(None, "one"), SessionKey(None, "two")]


@dataclass
class Modelled:
    """A lease as the model knows it."""

    lease: Lease
    tenant: str | None
    keys: list[Key] = field(default_factory=list)


class LeaseMachine(RuleBasedStateMachine):
    """Blocks of a few chains, each of one tenant, are stored, leased, pinned, dropped and evicted in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = Recorder()
        self.manager = OffloadManager(SLOTS, SLOT_BYTES, sink=self.sink)
        self.limits = TenantLimits(self.manager)
        self.resize = PoolResize(self.manager, 1)
        self.leases = self.manager.leases
        self.now_s, self.sequence = 1000.0, 0
        self.live: list[Modelled] = []
        self.pinned: set[Key] = set()
        self.storing: list[np.ndarray] = []

    # --- what the model knows ---------------------------------------------------------------------------------------

    @property
    def leased(self) -> set[Key]:
        return {each for one in self.live for each in one.keys}

    def num_leased(self, tenant: str | None) -> int:
        """A key counts for the tenant of its first lease; here all of a key's leases are of one tenant."""
        return len({each for one in self.live if one.tenant == tenant for each in one.keys})

    def forget(self, lost: set[Key]) -> None:
        for one in self.live:
            one.keys = [each for each in one.keys if each not in lost]

    def end(self, ended: list[Modelled]) -> None:
        self.live = [one for one in self.live if one not in ended]

    def dropped(self) -> None:
        """Blocks that left the pool leave their leases; none of them was evicted for space."""
        for batch in self.sink.batches:
            if batch.reason in (EvictionReason.CAPACITY, EvictionReason.TENANT_LIMIT):
                lost = (self.leased | self.pinned).intersection(batch.rows.keys)
                assert not lost, "a block was evicted under a lease or pin"
            self.forget(set(batch.rows.keys))
            self.pinned.difference_update(batch.rows.keys)
        self.sink.batches.clear()

    # --- what happens -----------------------------------------------------------------------------------------------

    @rule(chain=st.integers(0, CHAINS - 1), count=st.integers(1, CHAIN), ends=st.booleans())
    def store(self, chain: int, count: int, ends: bool) -> None:
        origin = RequestIdentity("r", TENANTS[chain])
        answer = offer(self.manager, keys(chain * 100, count), origin=origin, now_s=self.now_s)
        if len(answer.slots):
            self.storing.append(answer.slots)
        if ends:
            self.end_stores()
        self.dropped()

    @rule(first=st.integers(1000, 9000), count=st.integers(1, 30))
    def flood(self, first: int, count: int) -> None:
        store(self.manager, keys(first, count), now_s=self.now_s)
        self.dropped()

    @rule()
    def end_stores(self) -> None:
        for slots in self.storing:
            self.manager.complete_store(slots, self.now_s)
        self.storing.clear()

    @rule(chain=st.integers(0, CHAINS - 1), count=st.integers(1, CHAIN), session=st.sampled_from([None, *SESSIONS]),
          seconds=st.integers(1, 20))  # fmt: skip
    def lease(self, chain: int, count: int, session: SessionKey | None, seconds: int) -> None:
        wanted, tenant, table = keys(chain * 100, count), TENANTS[chain], self.manager.table
        self.sequence += 1
        lease = self.leases.begin(session, tenant, self.sequence, self.now_s, self.now_s + seconds)
        share = int(self.manager.operator_pins.max_fraction * table.num_slots) - len(self.pinned) - len(self.leased)
        limit = table.tenants.limit_of(tenant)
        left = share if limit is None else min(share, limit // 2 - self.num_leased(tenant))
        expected: list[Key] = []
        for each in wanted:
            if each not in self.leased and left <= 0:
                break
            left -= each not in self.leased
            expected.append(each)
        num_added, reason = self.leases.extend(lease, wanted, self.manager.lookup_each(wanted))
        assert num_added == len(expected)
        assert (reason is None) == (len(expected) == len(wanted))
        self.live.append(Modelled(lease, tenant, expected))
        if not expected:
            self.leases.end(lease, None)
            self.live.pop()

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.manager.operator_pins.expire(self.now_s)
        self.leases.expire(self.now_s)
        self.end([one for one in self.live if one.lease.until_s <= self.now_s])

    @rule(session=st.sampled_from(SESSIONS), behind=st.integers(-2, 1))
    def next_request(self, session: SessionKey, behind: int) -> None:
        sequence = self.sequence + behind
        ended = [one for one in self.live if one.lease.session == session and one.lease.sequence < sequence]
        self.leases.end_session(session, LeaseEnd.NEXT_REQUEST, sequence)
        self.leases.release_ended()
        self.end(ended)

    @rule(chain=st.integers(0, CHAINS - 1), number=st.integers(0, CHAIN - 1))
    def pin(self, chain: int, number: int) -> None:
        wanted = key(chain * 100 + number)
        share = int(self.manager.operator_pins.max_fraction * self.manager.num_slots)
        outcome = self.manager.operator_pins.pin(wanted, self.now_s + 1e6, self.now_s)
        if outcome is PinOutcome.LIMIT:
            assert len(self.pinned) >= share
        if outcome is not PinOutcome.PINNED or wanted in self.pinned:
            return
        if len(self.pinned) + 1 + len(self.leased) > share:
            having = [one for one in self.live if one.keys]
            # One whose blocks have all left ends when its turn would have come.
            first = min(having, key=lambda one: (one.lease.until_s, one.lease.number))
            self.end([one for one in self.live if one.lease not in self.leases])
            self.forget({first.keys[-1]})
        self.pinned.add(wanted)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        some = data.draw(st.sampled_from(sorted(self.pinned)))
        assert self.manager.operator_pins.unpin(some)
        self.pinned.discard(some)

    @rule(chain=st.integers(0, CHAINS - 1), number=st.integers(0, CHAIN - 1))
    def drop(self, chain: int, number: int) -> None:
        self.manager.drop_key(key(chain * 100 + number), self.now_s)
        self.dropped()

    @rule(chain=st.integers(0, CHAINS - 1))
    def expend(self, chain: int) -> None:
        self.leases.expend(self.manager.lookup(keys(chain * 100, CHAIN))[::-1])

    @rule(chain=st.integers(0, CHAINS - 1))
    def load(self, chain: int) -> None:
        load(self.manager, keys(chain * 100, CHAIN))

    @rule(fraction=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
    def set_fraction(self, fraction: float) -> None:
        self.manager.operator_pins.max_fraction = fraction

    @rule(max_slots=st.sampled_from([None, 0, 4, 9, 20]))
    def limit_tenant(self, max_slots: int | None) -> None:
        self.limits.set_limit("a", None if max_slots is None else max_slots * SLOT_BYTES)
        while self.limits.step(self.now_s):
            pass
        self.dropped()

    @rule(num_slots=st.integers(SLOTS // 4, SLOTS))
    def shrink_and_grow(self, num_slots: int) -> None:
        self.end_stores()
        for target in (num_slots, SLOTS):
            at_risk = set(self.manager.table.keys[self.manager.table.ready_in(target, SLOTS)].tolist()) - self.pinned
            self.resize.request(target)
            for _ in range(100):
                todo = self.resize.step(self.now_s)
                if todo is Todo.MEMORY:
                    self.resize.acknowledge(self.resize.memory_slots)
                elif todo is Todo.LATER:
                    # Blocks that operators have pinned go after a time; no lease is waited for.
                    self.now_s += 10.0
                elif todo is Todo.NOTHING:
                    break
            left = [
                each
                for each, is_held in zip(sorted(at_risk), held(self.manager, sorted(at_risk)), strict=True)
                if is_held
            ]
            assert target == SLOTS or not left, "a lease held a shrinking pool up"
            self.dropped()

    @rule(whole=st.booleans())
    def reset(self, whole: bool) -> None:
        if whole:
            filled = np.concatenate(self.storing) if self.storing else NO_SLOTS
            self.manager.reset(filled, self.now_s)
            self.live.clear()
            self.pinned.clear()
            for slots in self.storing:
                self.manager.abort_store(slots)
            self.storing.clear()
        else:
            unstored = {each for slots in self.storing for each in self.manager.table.keys[slots].tolist()}
            assert not recover(self.manager, NO_SLOTS, (), (), self.now_s)
            self.storing.clear()
            self.forget({each for each in unstored if self.manager.index.get(each) is None})
        self.sink.batches.clear()

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def counts_and_pins_are_those_of_the_model(self) -> None:
        leases, table, index = self.leases, self.manager.table, self.manager.index
        leased = self.leased
        present = {each for each in leased if index.get(each) is not None}
        assert leases.num_blocks == len(leased)
        assert (leases.counts.slots, leases.counts.pending) == (len(present), len(leased) - len(present))
        assert sorted(leases.slots().tolist()) == sorted(index.get(each) for each in present)
        owned = np.zeros(table.end_slot, dtype=np.int64)
        for each in (*present, *self.pinned):
            owned[index.get(each)] += 1
        ready = table.ready_in(0, table.end_slot)
        assert (table.pins[ready] == owned[ready]).all(), "a pin without an owner, or the reverse"
        assert len(self.manager.evictor) == np.count_nonzero(owned[ready] == 0)
        for session in SESSIONS:
            until = [one.lease.until_s for one in self.live if one.lease.session == session and one.keys]
            assert leases.until_s(session) == max(until, default=None)

    def teardown(self) -> None:
        self.end_stores()
        self.now_s += 100.0
        self.leases.expire(self.now_s)
        for each in sorted(self.pinned):
            self.manager.operator_pins.unpin(each)
        self.live.clear()
        self.pinned.clear()
        self.counts_and_pins_are_those_of_the_model()
        assert (len(self.leases), self.leases.next_s) == (0, float("inf"))
        assert not self.leases._num_of


TestLeaseModel = LeaseMachine.TestCase
TestLeaseModel.settings = settings(max_examples=examples(400), stateful_step_count=60, deadline=None, derandomize=True)


# --- leases of requests ---------------------------------------------------------------------------------------------


def make_engine(num_slots: int = 64, retain_s: float = 50.0, fraction: float = 0.5, **options) -> ToyEngine:
    engine = ToyEngine(num_slots, 64, settings=RequestPolicy(retain_s=retain_s), **options)
    engine.manager.operator_pins.max_fraction = fraction
    return engine


def receipt_of(engine: ToyEngine, request_id: str) -> LeaseReceipt:
    view = engine.offload.requests.find(request_id, engine.now_s)
    assert view is not None
    assert view.lease is not None
    return view.lease


def flood(engine: ToyEngine, count: int = 12, blocks: int = 10) -> None:
    """Answer prompts that nothing else shares, without a lease."""
    for _ in range(count):
        number = engine.ledger.num_seen
        engine.set_override(Override(f"flood{number}", {"retain_s": 0.0}, engine.now_s + 1e4))
        answer(engine, f"flood{number}", blocks, first=100_000 + 1000 * number)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("mode", list(StoreMode))
def test_blocks_of_a_lease_outlast_a_flood_and_then_leave(mode: StoreMode, policy: str) -> None:
    engine = make_engine(retain_s=1e6, store_mode=mode, eviction_policy=policy)
    one = answer(engine, "one", 20, session="s")
    receipt = receipt_of(engine, "one")
    assert (receipt.outcome, receipt.num_blocks, receipt.reason) == (LeaseOutcome.ACCEPTED, 20, None)
    assert receipt.num_pending == (20 if mode is StoreMode.LAZY else receipt.num_pending)
    assert receipt.num_bytes == 20 * SLOT_BYTES
    flood(engine)
    assert findable(engine, one) == 20
    counts = engine.offload.snapshot().leases
    assert (counts.slots, counts.pending, counts.outcomes["accepted"]) == (20, 0, 1)
    engine.now_s += 1e6
    engine.step()
    flood(engine)
    assert findable(engine, one) == 0
    assert engine.offload.snapshot().leases.ended["time"] == 1
    engine.check_idle()


def test_leased_blocks_go_first_where_a_step_cannot_store_all_that_it_takes() -> None:
    ahead = 4
    engine = ToyEngine(
        64, 20, settings=RequestPolicy(retain_s=1e6), store_mode=StoreMode.LAZY, watermark_blocks=1,
        specs=[GroupSpec(BLOCK_SIZE, (256 << 20) // ahead)],
    )  # fmt: skip
    for name in ("other", "another", "large"):
        engine.set_override(Override(name, {"retain_s": 0.0}, engine.now_s + 1e4))
    answer(engine, "other", 5, first=1000)
    answer(engine, "another", 5, first=2000)
    leased = answer(engine, "leased", 6)
    assert receipt_of(engine, "leased").num_pending == 6
    answer(engine, "large", 18, first=3000)
    assert findable(engine, leased) >= ahead
    counts = engine.offload.snapshot().leases
    assert (counts.slots, counts.pending) == (findable(engine, leased), 0), "what is lost leaves the lease"


def test_blocks_whose_stores_fail_leave_the_lease() -> None:
    engine = make_engine(retain_s=1e6)
    engine.add(request("one", 8))
    engine.living_ranks = list
    while engine.requests:
        engine.step()
    assert engine.manager.leases.counts.pending == 8
    for job_id in list(engine.copies.open):
        engine.end_job(job_id, error="injected")
    assert engine.offload.snapshot().store.failed == 8
    assert (engine.manager.leases.counts.pending, engine.manager.leases.num_blocks) == (0, 0)


def test_lease_ends_with_the_next_request_of_its_session_only() -> None:
    engine = make_engine(retain_s=1e6)
    answer(engine, "one", 5, session="s")
    engine.add(request("parallel", 6, session="s"))
    engine.step()
    assert engine.manager.leases.num_blocks in (0, 5), "it is released in the next step"
    engine.add(request("later", 6, session="s"))
    engine.finish(engine.requests["parallel"])
    ended = engine.offload.snapshot().leases.ended
    assert ended["next_request"] == 1
    # The request was announced before the lease of `parallel` began.
    engine.run()
    assert engine.offload.snapshot().leases.ended["next_request"] == 1
    answer(engine, "of another", 6, session="t")
    answer(engine, "of none", 6)
    answer(engine, "of another tenant", 6, session="s", tenant="a")
    assert engine.offload.snapshot().leases.ended["next_request"] == 1
    assert len(engine.manager.leases) == 5
    answer(engine, "next", 7, session="s")
    assert engine.offload.snapshot().leases.ended["next_request"] == 3


def test_aborted_and_preempted_requests_get_no_lease() -> None:
    engine = make_engine()
    engine.add(request("aborted", 8, max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.preempt(engine.requests["aborted"])
    assert not len(engine.manager.leases)
    engine.step()
    engine.finish(engine.requests["aborted"], is_aborted=True)
    view = engine.offload.requests.find("aborted", engine.now_s)
    assert view is not None
    assert view.lease is None
    assert not len(engine.manager.leases)
    assert sum(engine.offload.snapshot().leases.outcomes.values()) == 0


def test_lease_when_a_limit_is_met_is_clipped_from_its_end_or_rejected() -> None:
    engine = make_engine(fraction=0.25)
    first = answer(engine, "first", 10)
    second = answer(engine, "second", 10, first=1000)
    answer(engine, "third", 10, first=2000)
    receipts = [receipt_of(engine, name) for name in ("first", "second", "third")]
    assert [one.outcome for one in receipts] == [LeaseOutcome.ACCEPTED, LeaseOutcome.CLIPPED, LeaseOutcome.REJECTED]
    assert [one.num_blocks for one in receipts] == [10, 6, 0]
    assert [one.until_s is None for one in receipts] == [False, False, True]
    assert all("KVFERRY_MAX_PINNED_FRACTION" in (one.reason or "") for one in receipts[1:])
    flood(engine)
    assert (findable(engine, first), findable(engine, second)) == (10, 6)
    # The same blocks need no more space.
    answer(engine, "again", 10)
    assert receipt_of(engine, "again").outcome is LeaseOutcome.ACCEPTED


def test_leases_take_half_of_what_a_tenant_may_have() -> None:
    engine = make_engine(fraction=1.0)
    engine.limits.set_limit("a", 20 * SLOT_BYTES)
    one = answer(engine, "one", 15, tenant="a")
    receipt = receipt_of(engine, "one")
    assert (receipt.outcome, receipt.num_blocks) == (LeaseOutcome.CLIPPED, 10)
    assert "tenant" in (receipt.reason or "")
    for number in range(5):
        engine.set_override(Override(f"more{number}", {"retain_s": 0.0}, engine.now_s + 1e4))
        answer(engine, f"more{number}", 9, first=1000 * (number + 1), tenant="a")
    assert findable(engine, one) == 10
    engine.limits.set_limit("a", 4 * SLOT_BYTES)
    while engine.limits.step(engine.now_s):
        pass
    assert findable(engine, one) == 10, "a lease outlasts a lower limit"


def test_blocks_with_a_gap_are_leased_up_to_it() -> None:
    engine = make_engine()
    one = request("one", 10, max_tokens=3)
    engine.add(one)
    while one.num_outputs < 1:
        engine.step(budget=64, copy=True)
    engine.offload.resets.drop_block(one.block_hashes[6] + b"\0", engine.now_s)
    engine.run()
    receipt = receipt_of(engine, "one")
    assert (receipt.outcome, receipt.num_blocks) == (LeaseOutcome.CLIPPED, 6)
    assert receipt.reason == "of 10 blocks only the first 6 are in the pool or about to be stored"


def test_request_whose_policy_stores_nothing_is_rejected_or_leases_what_it_found() -> None:
    engine = make_engine()
    for name in ("unstored", "finds"):
        engine.set_override(Override(name, {"store": False}, engine.now_s + 1e4))
    answer(engine, "unstored", 4)
    assert receipt_of(engine, "unstored").outcome is LeaseOutcome.REJECTED
    answer(engine, "short", 0)
    assert receipt_of(engine, "short").reason == "none of its blocks is in the pool or about to be stored"
    answer(engine, "stored", 4, first=500)
    engine.device.forget_all()
    answer(engine, "finds", 8, first=500)
    assert (receipt_of(engine, "finds").outcome, receipt_of(engine, "finds").num_blocks) == (LeaseOutcome.ACCEPTED, 4)


def test_operators_pin_takes_the_last_block_of_the_lease_that_ends_first() -> None:
    engine = make_engine(fraction=0.25, retain_s=3000.0)
    later = answer(engine, "later", 8)
    engine.set_override(Override("sooner", {"retain_s": 2000.0}, engine.now_s + 1e4))
    sooner = answer(engine, "sooner", 8, first=1000)
    flood(engine, 1, 4)
    pinned = engine.manager.table.keys[engine.manager.next_victims(4)].tolist()
    pins = engine.manager.operator_pins
    outcomes = [pins.pin(each, engine.now_s + 1e6, engine.now_s) for each in pinned]
    assert outcomes == [PinOutcome.PINNED] * 4
    assert engine.manager.leases.num_blocks == 12
    flood(engine)
    assert (findable(engine, later), findable(engine, sooner)) == (8, 4)
    engine.check()


def test_resets_end_leases_and_dropped_blocks_leave_them() -> None:
    engine = make_engine()
    answer(engine, "one", 6, tenant="a")
    answer(engine, "two", 6, first=1000, tenant="b")
    engine.reset(RequestFilter(tenant="a"))
    assert engine.manager.leases.num_blocks == 6
    engine.check()
    engine.reset()
    assert (len(engine.manager.leases), engine.manager.leases.num_blocks) == (0, 0)
    assert engine.offload.snapshot().leases.ended["reset"] == 2
    answer(engine, "one again", 6, tenant="a")
    engine.check()


def test_leases_survive_an_exception_outside_the_pool() -> None:
    engine = make_engine(retain_s=1e6)
    one = answer(engine, "one", 6, session="s")
    assert not engine.discard()
    engine.check()
    flood(engine)
    assert findable(engine, one) == 6


def test_operator_begins_replaces_and_ends_the_lease_of_a_session() -> None:
    engine = make_engine(retain_s=0.0)
    session = SessionKey(None, "s")
    one = answer(engine, "one", 12, session="s")
    offload, hashes = engine.offload, one.block_hashes
    assert offload.manager.leases.until_s(session) is None
    receipt = offload.retention.retain(session, hashes[:8], 1e6, engine.now_s)
    assert (receipt.outcome, receipt.num_blocks, receipt.num_pending) == (LeaseOutcome.ACCEPTED, 8, 0)
    assert offload.retention.retain(session, hashes, 100.0, engine.now_s).until_s == engine.now_s + 100.0
    assert offload.manager.leases.until_s(session) == engine.now_s + 100.0
    assert len(engine.manager.leases) == 1
    assert offload.retention.retain(session, hashes, 1e9, engine.now_s).until_s == engine.now_s + 3600.0
    flood(engine)
    assert findable(engine, one) == 12
    nothing = offload.retention.retain(session, [b"unknown"] * 3, 10.0, engine.now_s)
    assert (nothing.outcome, nothing.until_s) == (LeaseOutcome.REJECTED, None)
    assert offload.manager.leases.until_s(session) is None
    assert offload.retention.retain(session, hashes, 50.0, engine.now_s).outcome is LeaseOutcome.ACCEPTED
    assert offload.retention.retain(session, hashes, 0.0, engine.now_s).until_s is None
    offload.retention.release(session, [])
    offload.retention.retain(session, hashes, 50.0, engine.now_s)
    offload.retention.release(session, hashes[5:])
    assert engine.manager.leases.num_blocks == 0
    victims = engine.manager.table.keys[engine.manager.next_victims(7)].tolist()
    assert victims == [each + b"\0" for each in reversed(hashes[5:12])]
    engine.check()


def test_lease_of_many_blocks_begins_and_ends_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 4
    num_blocks = 3 * step + 3
    engine = ToyEngine(4 * num_blocks, 16, batch_slots=2 * step)
    leases, session = engine.manager.leases, SessionKey(None, "s")
    engine.manager.operator_pins.max_fraction = 1.0
    store(engine.manager, keys(0, num_blocks))
    extend, sizes = leases.extend, []

    def extending(lease: Lease, some: list[Key], slots: np.ndarray) -> object:
        sizes.append(len(some))
        return extend(lease, some, slots)

    monkeypatch.setattr(leases, "extend", extending)
    hashes = [hash_of(each) for each in keys(0, num_blocks)]
    assert engine.offload.retention.retain(session, hashes, 10.0, engine.now_s).num_blocks == num_blocks
    assert sizes == [step] * 3 + [3]
    left = []
    while leases.next_s <= engine.now_s + 11.0:
        leases.expire(engine.now_s + 11.0)
        left.append(leases.num_blocks)
    assert left == [num_blocks - step * n for n in (1, 2, 3)] + [0]
    # The blocks are as recently used as any, so that their end is evicted first.
    assert engine.manager.table.keys[engine.manager.next_victims(3)].tolist() == keys(num_blocks - 3, 3)[::-1]


def test_request_without_retain_s_takes_no_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(retain_s=0.0)
    calls: list[object] = []
    monkeypatch.setattr(engine.offload.retention, "begin", lambda *args: calls.append(args))
    answer(engine, "one", 10, session="s")
    assert not calls
    assert len(engine.manager.leases) == 0


def test_rule_and_client_set_the_lease_within_the_limit() -> None:
    engine = make_engine(retain_s=0.0, request_fields=("retain_s",))
    engine.offload.retention.max_retain_s = 60.0
    for given, seconds in (
        (30, 30.0),
        (1.5, 1.5),
        (60.0, 60.0),
        (61, None),
        (True, None),
        ("5", None),
        (-1, None),
        (float("nan"), None),
    ):
        name = f"asks for {given}"
        answer(engine, name, 4, kv_transfer_params={"retain_s": given})
        view = engine.offload.requests.find(name, engine.now_s)
        assert view is not None
        assert view.policy.policy.retain_s == (0.0 if seconds is None else seconds)
        assert (view.lease is None) == (seconds is None)
    engine.set_override(Override("longer", {"retain_s": 500.0}, engine.now_s + 1e4))
    answer(engine, "longer", 4)
    finished_s = engine.offload.requests.find("longer", engine.now_s).times.finished_s
    assert receipt_of(engine, "longer").until_s == finished_s + 60.0
