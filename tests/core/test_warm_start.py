"""A manager that begins with what an earlier process left, and what it says so that nothing dropped comes back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.core.keys import RequestFilter, RequestIdentity, make_keys
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.recovery import begin_verification, end_verification, import_blocks
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.core.stats import EvictionReason
from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots
from tests.harness.pool_blocks import Recorder, key
from tests.harness.pool_blocks import store as store_keys
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_requests import answer, request


class QueuedHeaders:
    """Keeps what is invalidated."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.voided: set[tuple[int, int]] = set()
        self.epochs: list[int] = []

    def invalidate(self, slots: Slots, generations: np.ndarray) -> None:
        self.voided |= set(zip(slots.tolist(), generations.tolist(), strict=True))

    def invalidate_before(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def num_invalidations(self) -> int:
        return len(self.voided) + len(self.epochs)

    def are_flushed(self, count: int) -> bool:
        return True

    def begin_tier_write(self, labels: SlotLabels) -> None: ...
    def end_tier_write(self, labels: SlotLabels) -> None: ...


def kept(
    slots: Sequence[int], origins: Sequence[RequestIdentity] | None = None, classes: Sequence[int] | None = None
) -> RecoveredBlocks:
    """Blocks `key(slot)` in these slots, of generation 100 + slot, the latest used first."""
    count = len(slots)
    return RecoveredBlocks(
        np.array(slots, dtype=np.int64),
        [key(slot) for slot in slots],
        np.array([100 + slot for slot in slots], dtype=np.int64),
        np.full(count, 64),
        np.arange(count),
        [RequestIdentity("before")] * count if origins is None else origins,
        np.full(count, 5.0),
        np.zeros(count),
        np.zeros(count, dtype=np.int64),
        np.ones(count, dtype=np.uint8) if classes is None else np.array(classes, dtype=np.uint8),
    )


def store(manager: OffloadManager, numbers: Sequence[int]) -> Slots:
    return store_keys(manager, [key(number) for number in numbers]).slots


def present(manager: OffloadManager, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if Inventory(manager).find_block(key(number)) is not None]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_recovered_blocks_are_found_and_evicted_in_order_of_use(policy: str) -> None:
    manager = OffloadManager(8, 64, policy, header_queue=QueuedHeaders(epoch=3))
    import_blocks(manager, kept([5, 0, 7, 2]), NO_SLOTS)
    counts = manager.counts()
    assert (counts.free, counts.ready, counts.storing, counts.unverified) == (4, 4, 0, 4)
    assert manager.lookup([key(5), key(0), key(1)]).tolist() == [5, 0]
    assert sorted(store(manager, [20, 21, 22, 23]).tolist()) == [1, 3, 4, 6], "free slots are those that nobody has"
    store(manager, [30])
    assert present(manager, [5, 0, 7, 2]) == [5, 0, 7]
    assert manager.counts().unverified == 3
    store(manager, [31])
    assert present(manager, [5, 0, 7, 2]) == [5, 0]


def test_generations_and_epochs_go_on_where_they_were() -> None:
    queue = QueuedHeaders(epoch=3)
    manager = OffloadManager(8, 64, header_queue=queue)
    import_blocks(manager, kept([5, 0]), NO_SLOTS)
    slots = store(manager, [20])
    labels = manager.labels(slots)
    assert labels is not None
    assert labels.generations.tolist() == [106]
    assert labels.epochs.tolist() == [3]
    assert labels.keys == [key(20)]
    manager.reset(NO_SLOTS, 1.0)
    assert queue.epochs == [4]
    assert manager.counts().unverified == 0
    assert manager.epoch == 4


def test_only_an_empty_pool_takes_over() -> None:
    manager = OffloadManager(8, 64)
    store(manager, [1])
    with pytest.raises(RuntimeError, match="empty"):
        import_blocks(manager, kept([5]), NO_SLOTS)


def test_rows_that_do_not_fit_are_written_again() -> None:
    manager = OffloadManager(8, 64)
    import_blocks(manager, kept([5, 0]), np.array([0, 3]))
    rows = Inventory(manager).dirty_rows(10)
    assert rows is not None
    assert (rows.slots.tolist(), rows.live.tolist()) == ([0, 3], [True, False])
    assert Inventory(manager).dirty_rows(10) is None, "a row that fits is not written"


def test_dropped_blocks_are_invalidated_in_the_header_queue_at_once() -> None:
    queue = QueuedHeaders()
    manager = OffloadManager(4, 64, header_queue=queue)
    import_blocks(manager, kept([0, 1, 2, 3]), NO_SLOTS)
    store(manager, [20])
    assert queue.voided == {(3, 103)}, "evicted"
    manager.drop_key(key(1), 1.0)
    assert queue.voided == {(3, 103), (1, 101)}, "dropped"
    offer = manager.prepare_store([key(21)], RequestIdentity("new"), np.arange(1), 1, 9.0)
    manager.abort_store(offer.slots)
    assert (int(offer.slots[0]), 105) in queue.voided, "never stored"
    first = manager.prepare_store([key(30)], RequestIdentity("new"), np.arange(1), 1, 9.0)
    second = manager.prepare_store([key(30)], RequestIdentity("new"), np.arange(1), 1, 9.0)
    manager.complete_store(first.slots, 9.0)
    manager.complete_store(second.slots, 9.0)
    assert (int(second.slots[0]), 107) in queue.voided, "lost the race for its key"
    assert (int(first.slots[0]), 106) not in queue.voided


def test_recovered_block_without_origin_matches_every_reset() -> None:
    manager = OffloadManager(8, 64)
    import_blocks(
        manager,
        kept([0, 1, 2], [RequestIdentity("a", "t1"), RequestIdentity("b", "t2"), RequestIdentity("")]),
        NO_SLOTS,
    )
    manager.drop_matching(RequestFilter(tenant="t1").matches, 0, 1.0)
    assert present(manager, [0, 1, 2]) == [1]


@pytest.mark.parametrize("position", [-(2**31), -1, 2**31])
def test_recovered_block_at_an_impossible_position_can_be_evicted(position: int) -> None:
    engine = ToyEngine(12, 32)
    import_blocks(engine.manager, kept([0, 1])._replace(positions=np.full(2, position)), NO_SLOTS)
    # In several steps, the last of which has to evict.
    answer(engine, "r", 12)
    assert not present(engine.manager, [0, 1])
    assert engine.offload.snapshot().store.stored == 12


def test_verification_drops_damaged_blocks_and_ends() -> None:
    sink = Recorder()
    manager = OffloadManager(8, 64, sink=sink)
    import_blocks(manager, kept([0, 1, 2, 3, 4]), NO_SLOTS)
    loading = manager.pin(manager.lookup([key(1), key(2)]))
    assert manager.prepare_load(loading, 1.0)
    assert manager.unverified(loading.slots).tolist() == [1, 2]
    pin = begin_verification(manager, 0)
    assert pin.slots.tolist() == [0, 1, 2, 3, 4]
    store(manager, [20, 21, 22, 23, 24, 25])
    assert present(manager, [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4], "nothing goes while it is looked at"
    end_verification(manager, pin, np.array([1, 3]), 2.0)
    assert present(manager, [0, 1, 2, 3, 4]) == [0, 2, 4]
    assert not manager.complete_load(loading), "one of its slots is gone"
    assert manager.counts().unverified == 0
    assert not len(begin_verification(manager, 0))
    failed = [batch for batch in sink.batches if batch.reason is EvictionReason.FAILED_VERIFICATION]
    assert [batch.rows.keys for batch in failed] == [[key(1), key(3)]]
    assert manager.evictions.by_reason == {"failed_verification": 2}
    assert manager.counts().free == 8 - manager.counts().ready


def test_verification_of_a_large_pool_takes_bounded_memory() -> None:
    count = 200_000
    manager = OffloadManager(count, 64)
    import_blocks(manager, kept(range(count)), NO_SLOTS)
    begin_verification(manager, 0)
    tracemalloc.start()
    try:
        pin = begin_verification(manager, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pin.slots.tolist() == list(range(1000, 2000))
    assert peak < 100_000, "what there is to verify was looked for in the whole pool at once, under the lock"


def test_slots_to_verify_are_found_however_far_apart_they_are() -> None:
    manager = OffloadManager(10_000, 64)
    import_blocks(manager, kept([3, 4500, 4501, 9999]), NO_SLOTS)
    seen, start = [], 0
    while len(pin := begin_verification(manager, start)):
        seen += pin.slots.tolist()
        start = seen[-1] + 1
        end_verification(manager, pin, NO_SLOTS, 1.0)
    assert seen == [3, 4500, 4501, 9999]
    assert manager.counts().unverified == 0


def test_slots_under_verification_stay_pinned_after_recovery() -> None:
    engine = ToyEngine(8, 8)
    manager = engine.manager
    import_blocks(manager, kept([0, 1]), NO_SLOTS)
    pin = begin_verification(manager, 0)
    engine.discard()
    store(manager, range(20, 28))
    assert present(manager, [0, 1]) == [0, 1]
    end_verification(manager, pin, NO_SLOTS, 2.0)
    store(manager, range(30, 38))
    assert present(manager, [0, 1]) == []


def test_a_reset_while_slots_are_verified_voids_the_verification() -> None:
    manager = OffloadManager(8, 64)
    import_blocks(manager, kept([0, 1]), NO_SLOTS)
    pin = begin_verification(manager, 0)
    manager.reset(NO_SLOTS, 1.0)
    slots = store(manager, [20, 21])
    end_verification(manager, pin, pin.slots, 2.0)
    assert present(manager, [20, 21]) == [20, 21]
    assert len(slots) == 2
    assert manager.counts().free == 6


def test_open_store_matched_by_a_reset_is_invalidated_at_once() -> None:
    engine, queue, jobs = ToyEngine(8, 32), QueuedHeaders(), []
    engine.manager._header_queue = queue
    for number in range(2):
        engine.add(request(f"r{number}", 3, first=1000 * number, max_tokens=9, tenant=f"tenant{number}"))
        jobs += engine.step().stores
    labels = jobs[0].labels
    assert labels is not None
    assert labels.keys == make_keys(engine.requests["r0"].block_hashes[:3], 0)
    engine.reset(RequestFilter(tenant="tenant0"))
    assert queue.voided == set(zip(labels.slots.tolist(), labels.generations.tolist(), strict=True))
    for job in jobs:
        engine.end_job(job.job_id)
    assert engine.manager.counts().ready == 3


def test_slots_under_verification_at_a_reset_are_held_until_done() -> None:
    """Freed at once, they could leave the pool with their memory while somebody reads it."""
    manager = OffloadManager(8, 64)
    import_blocks(manager, kept([0, 1, 4, 5]), NO_SLOTS)
    loading = manager.pin(manager.lookup([key(1)]))
    assert manager.prepare_load(loading, 1.0)
    pin = begin_verification(manager, 0)
    resize = PoolResize(manager, 4)
    manager.reset(loading.slots, 1.0)
    manager.reset(loading.slots, 1.0)
    resize.request(4)
    now_s = 2.0
    for _ in range(40):
        now_s += 1.0
        assert resize.step(now_s) is not Todo.MEMORY
    assert not set(store(manager, range(20, 28))) & set(pin.slots.tolist())
    end_verification(manager, pin, pin.slots, now_s)
    while resize.step(now_s) is not Todo.MEMORY:
        continue
    assert resize.memory_slots == 4
    assert manager.counts().free == 1, "two are stored, and one is being loaded"
    manager.complete_load(loading)
    assert manager.counts().free == 2
