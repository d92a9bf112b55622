"""Limits of tenants: whose blocks are evicted, in which order, at a lowered limit, after a reset and a restart."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from kvferry.core.keys import RequestIdentity, make_keys
from kvferry.core.pool.admission import Reservation
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.index import Prefix
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.recovery import import_blocks
from kvferry.core.pool.slots import BATCH_SLOTS
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.stats import NotStored
from kvferry.core.transfers import NO_SLOTS
from tests.harness.pool_blocks import LOW, NORMAL, held, keys, load, store
from tests.harness.toy_engine import SLOT_BYTES, ToyEngine
from tests.harness.toy_requests import request

OWN, OTHER = RequestIdentity("own", "a"), RequestIdentity("other", "b")
POLICIES = sorted(EVICTION_POLICIES)


def limited(num_slots: int, max_slots: int, policy: str = "lru") -> tuple[OffloadManager, TenantLimits]:
    """Return a pool in which tenant `a` may have so many slots."""
    manager = OffloadManager(num_slots, SLOT_BYTES, eviction_policy=policy)
    limits = TenantLimits(manager)
    limits.set_limit("a", max_slots * SLOT_BYTES)
    return manager, limits


def apply(limits: TenantLimits) -> None:
    while limits.step(1.0):
        pass


def offered(manager: OffloadManager, first: int, count: int) -> Reservation:
    """Reserve slots for more blocks of a request whose earlier ones are the keys before `first`."""
    positions, prefix = np.arange(first, first + count), Prefix({0: (keys(0, first), first)})
    return manager.prepare_store(keys(first, count), OWN, positions, NORMAL, 1.0, prefix=prefix)


def continue_request(manager: OffloadManager, first: int, count: int) -> Reservation:
    """Store more blocks of such a request."""
    answer = offered(manager, first, count)
    manager.complete_store(answer.slots, 1.0)
    return answer


@pytest.mark.parametrize("policy", POLICIES)
def test_tenant_at_its_limit_loses_its_own_coldest_blocks(policy: str) -> None:
    manager, limits = limited(100, 10, policy)
    store(manager, keys(1000, 5), origin=OTHER)
    for first in (0, 5):
        store(manager, keys(first, 5), origin=OWN)
    load(manager, keys(0, 2))
    store(manager, keys(20, 6), origin=OWN)
    assert held(manager, keys(0, 5)) == [True, True, False, False, False]
    assert held(manager, keys(5, 5)) == [True, True, False, False, False]
    assert all(held(manager, [*keys(20, 6), *keys(1000, 5)]))
    assert limits.usage() == {"a": 10 * SLOT_BYTES, "b": 5 * SLOT_BYTES}
    assert manager.evictions.by_reason == {"tenant_limit": 6}
    assert manager.counts().free == 85


def test_low_priority_blocks_of_a_tenant_are_evicted_first() -> None:
    manager, _ = limited(100, 6)
    store(manager, keys(0, 3), NORMAL, OWN)
    store(manager, keys(10, 3), LOW, OWN)
    store(manager, keys(20, 4), NORMAL, OWN)
    assert held(manager, [*keys(0, 3), *keys(10, 3)]) == [True, True, False, False, False, False]


def test_request_beyond_the_limit_of_its_tenant_keeps_its_beginning() -> None:
    manager, _ = limited(100, 8)
    for first in (0, 4):
        assert len(continue_request(manager, first, 4).slots) == 4
    answer = continue_request(manager, 8, 4)
    assert (answer.num_decided, len(answer.slots), answer.refusal) == (0, 0, NotStored.TENANT_LIMIT)
    assert all(held(manager, keys(0, 8)))


def test_pinned_blocks_of_a_tenant_at_its_limit_stay() -> None:
    manager, _ = limited(100, 8)
    store(manager, keys(0, 8), origin=OWN)
    pin = manager.pin(manager.lookup(keys(0, 6)))
    answer = store(manager, keys(20, 4), origin=OWN)
    assert (len(answer.slots), answer.refusal) == (2, NotStored.TENANT_LIMIT)
    version = manager.space_version(answer.refusal, "a")
    manager.unpin(pin)
    assert manager.space_version(answer.refusal, "a") != version, "the scheduler offers the others again"
    assert len(store(manager, keys(22, 2), origin=OWN).slots) == 2


def test_full_pool_refuses_for_space_where_the_limit_allows_more() -> None:
    manager, _ = limited(8, 20)
    store(manager, keys(0, 8), origin=OTHER)
    pin = manager.pin(manager.lookup(keys(0, 6)))
    answer = store(manager, keys(20, 4), origin=OWN)
    assert (len(answer.slots), answer.refusal) == (2, NotStored.NO_SPACE)
    manager.unpin(pin)


def test_limit_of_nothing_stores_nothing_and_a_raised_one_does() -> None:
    manager, limits = limited(100, 0)
    refusal = store(manager, keys(0, 2), origin=OWN).refusal
    assert refusal is NotStored.TENANT_LIMIT
    version = manager.space_version(refusal, "a")
    limits.set_limit("a", SLOT_BYTES)
    assert manager.space_version(refusal, "a") != version
    assert len(store(manager, keys(0, 2), origin=OWN).slots) == 1
    limits.set_limit("a", None)
    assert len(store(manager, keys(1, 2), origin=OWN).slots) == 2


def test_default_limits_every_tenant_without_its_own_limit() -> None:
    manager, limits = limited(100, 7)
    limits.set_default(3 * SLOT_BYTES)
    for first, tenant in enumerate(("a", "b", None)):
        store(manager, keys(100 * first, 10), origin=RequestIdentity("r", tenant))
    assert limits.usage() == {"a": 7 * SLOT_BYTES, "b": 3 * SLOT_BYTES, None: 10 * SLOT_BYTES}
    assert limits.unset_limit("a")
    assert not limits.unset_limit("a")
    apply(limits)
    assert limits.usage_of("a") == 3 * SLOT_BYTES


@pytest.mark.parametrize("policy", POLICIES)
def test_lowered_limit_evicts_the_coldest_blocks_in_bounded_steps(policy: str) -> None:
    manager = OffloadManager(5000, SLOT_BYTES, eviction_policy=policy)
    limits = TenantLimits(manager)
    for number in range(40):
        store(manager, keys(100 * number, 100), origin=OWN, now_s=float(number))
    store(manager, keys(10_000, 500), origin=OTHER)
    limits.set_limit("a", 1000 * SLOT_BYTES)
    # Stored before the limit is applied: the latest of all.
    store(manager, keys(5000, 10), origin=OWN, now_s=50.0)
    removed = []
    while True:
        before = manager.counts().ready
        has_more = limits.step(60.0)
        removed.append(before - manager.counts().ready)
        if not has_more:
            break
    assert max(removed) <= BATCH_SLOTS
    assert limits.usage() == {"a": 1000 * SLOT_BYTES, "b": 500 * SLOT_BYTES}
    assert all(held(manager, [*keys(5000, 10), *keys(3100, 900), *keys(10_000, 500)]))
    assert held(manager, keys(3000, 100)) == [True] * 90 + [False] * 10, "a request is evicted from its end"
    assert not any(held(manager, keys(0, 3000)))


def test_blocks_beyond_a_lowered_limit_that_are_pinned_go_when_unpinned() -> None:
    manager, limits = limited(100, 50)
    store(manager, keys(0, 20), origin=OWN)
    pin = manager.pin(manager.lookup(keys(0, 20)))
    limits.set_limit("a", 5 * SLOT_BYTES)
    apply(limits)
    assert limits.usage_of("a") == 20 * SLOT_BYTES
    assert store(manager, keys(30, 1), origin=OWN).refusal is NotStored.TENANT_LIMIT
    manager.unpin(pin)
    apply(limits)
    assert limits.usage_of("a") == 5 * SLOT_BYTES
    assert held(manager, keys(0, 20)) == [True] * 5 + [False] * 15


def test_limits_when_the_pool_is_reset_hold_for_new_blocks() -> None:
    manager, limits = limited(40, 10)
    store(manager, keys(0, 10), origin=OWN)
    open_slots = manager.prepare_store(keys(100, 4), OWN, np.arange(4), NORMAL, 1.0).slots
    manager.reset(open_slots, 1.0)
    assert limits.usage() == {"a": 4 * SLOT_BYTES}, "a transfer still writes to these"
    store(manager, keys(200, 30), origin=OTHER)
    store(manager, keys(300, 8), origin=OWN)
    assert limits.usage_of("a") == 10 * SLOT_BYTES
    manager.abort_store(open_slots)
    store(manager, keys(320, 9), origin=OWN)
    assert limits.usage() == {"a": 10 * SLOT_BYTES, "b": 30 * SLOT_BYTES}
    manager.reset(NO_SLOTS, 1.0)
    assert limits.usage() == {}


def test_slots_queued_before_a_reset_are_not_queued_after_it() -> None:
    manager, limits = limited(8, 8)
    store(manager, keys(0, 8), origin=OWN)
    manager.reset(NO_SLOTS, 1.0)
    # In the same slots: stale neighbors of one tenant must not become those of another.
    store(manager, keys(100, 4), origin=OTHER)
    store(manager, keys(200, 4), origin=OWN)
    limits.set_limit("b", 4 * SLOT_BYTES)
    limits.set_limit("a", 4 * SLOT_BYTES)
    apply(limits)
    tenants = manager.table.tenants
    for tenant, first in (("a", 200), ("b", 100)):
        assert sorted(tenants.oldest(tenant, 8).tolist()) == sorted(manager.lookup(keys(first, 4)).tolist())


def test_recovered_blocks_count_and_are_evicted_by_their_use() -> None:
    manager, limits = limited(20, 4)
    count = 10
    import_blocks(
        manager,
        RecoveredBlocks(
            slots=np.arange(5, 5 + count),
            keys=keys(0, count),
            generations=np.arange(1, 1 + count),
            sizes=np.full(count, SLOT_BYTES),
            positions=np.full(count, 2**40),
            origins=[OWN, OTHER] * (count // 2),
            stored_s=np.zeros(count),
            hit_s=np.zeros(count),
            hits=np.zeros(count, dtype=np.int64),
            classes=np.full(count, NORMAL, dtype=np.uint8),
        ),
        NO_SLOTS,
    )
    assert limits.usage() == {"a": 5 * SLOT_BYTES, "b": 5 * SLOT_BYTES}
    apply(limits)
    assert held(manager, keys(0, count)) == [number != 8 for number in range(count)], "the one used longest ago is gone"


def test_numbers_of_tenants_are_used_again_when_they_have_no_slots() -> None:
    manager = OffloadManager(8, SLOT_BYTES)
    limits = TenantLimits(manager)
    for number in range(200):
        store(manager, keys(10 * number, 2), origin=RequestIdentity("r", f"tenant-{number}"))
    assert limits.usage() == {f"tenant-{number}": 2 * SLOT_BYTES for number in range(196, 200)}
    assert len(manager.table.tenants.names) <= 2 * 8 + 16


def test_usage_of_many_tenants_reads_all_of_them() -> None:
    manager = OffloadManager(4000, SLOT_BYTES)
    limits = TenantLimits(manager)
    sizes = {f"tenant-{number}": 1 + number * 7 % 3 for number in range(1500)} | {None: 5, "last": 4}
    for number, (tenant, num_slots) in enumerate(sizes.items()):
        store(manager, keys(10 * number, num_slots), origin=RequestIdentity("r", tenant))
    assert limits.usage() == {tenant: num_slots * SLOT_BYTES for tenant, num_slots in sizes.items()}


def test_store_at_a_limit_takes_as_many_calls_in_a_large_pool() -> None:
    calls = {}
    for num_slots in (300, 30_000):
        manager, _ = limited(2 * num_slots, num_slots)
        for first in range(0, num_slots, 300):
            store(manager, keys(first, 300), origin=OWN)
        counted: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, function, counted=counted: counted.update([event]))
        try:
            store(manager, keys(10**6, 64), origin=OWN)
        finally:
            sys.setprofile(None)
        assert manager.evictions.total == 64
        calls[num_slots] = counted.total()
    assert calls[300] == calls[30_000]


def count_offers(engine: ToyEngine) -> int:
    """Take a step and return how often it offered blocks to the pool."""
    counted: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, function: counted.update([frame.f_code.co_name] if event == "call" else []))
    try:
        engine.step(copy=True)
    finally:
        sys.setprofile(None)
    return counted["prepare_store"]


@pytest.mark.parametrize("change", ["limit", "drop", "publish"])
def test_blocks_beyond_a_limit_are_offered_again_once_that_changes(change: str) -> None:
    engine = ToyEngine(64, 64)
    limits = TenantLimits(engine.manager)
    limits.set_limit("a", 8 * SLOT_BYTES)
    engine.add(request("other", 4, first=1000))
    engine.run()
    engine.add(request("long", 12, max_tokens=100, tenant="a"))
    for _ in range(4):
        engine.step(copy=True)
    assert limits.usage_of("a") == 8 * SLOT_BYTES
    others = engine.manager.lookup(make_keys(request("other", 4, first=1000).block_hashes, 0))
    for _ in range(3):
        engine.manager.unpin(engine.manager.pin(others))
        assert count_offers(engine) == 0, "space for other tenants is none for this one"
    own = make_keys(engine.requests["long"].block_hashes, 0)
    if change == "limit":
        limits.set_limit("a", 11 * SLOT_BYTES)
    else:
        engine.offload.resets.drop_block(own[7], engine.now_s)
    if change == "publish":
        # A request of the same tenant takes the place, whose block may be evicted.
        store(engine.manager, keys(5000, 1), origin=OWN)
    assert count_offers(engine) > 0
    assert held(engine.manager, own[8:12]) == [True] * (3 if change == "limit" else 1) + [False] * (
        1 if change == "limit" else 3
    )
    count_offers(engine)
    assert count_offers(engine) == 0


@pytest.mark.parametrize("is_limited", [True, False])
def test_offer_behind_many_needed_blocks_is_repeated_only_with_others(is_limited: bool) -> None:
    """Otherwise a request that is longer than the pool or the limit would examine 1,000 blocks in every step."""
    manager = limited(6000, 3000)[0] if is_limited else OffloadManager(3000, SLOT_BYTES)
    for first in range(0, 2500, 500):
        continue_request(manager, first, 500)
    store(manager, keys(10_000, 500), origin=OWN)
    refusal = NotStored.TENANT_LIMIT if is_limited else NotStored.NO_SPACE

    def offer_next(first: int) -> tuple[int, bool]:
        """Return how many blocks are stored, and whether the rest is to be offered at once."""
        before = manager.space_version(refusal, "a")
        answer = offered(manager, first, 64)
        is_repeated = manager.space_version(refusal, "a") != before
        manager.complete_store(answer.slots, 1.0)
        return len(answer.slots), is_repeated

    assert offer_next(2500) == (0, True), "others are behind these"
    stored = 2500
    while stored < 3000:
        count, is_repeated = offer_next(stored)
        assert count or is_repeated
        stored += count
    assert not any(held(manager, keys(10_000, 500)))
    assert [offer_next(3000) for _ in range(4)] == [(0, False)] * 4
