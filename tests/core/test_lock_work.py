"""Work under one hold of the manager lock: keys looked up, slots moved and requests copied, counted."""

from __future__ import annotations

from collections import defaultdict
from threading import RLock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.index import BlockIndex
from kvferry.core.pool.slots import SlotTable
from kvferry.core.scheduler import lazy
from kvferry.core.scheduler.requests import RequestTable, RequestView
from kvferry.core.tiers.known_missing import KnownMissing
from tests.core.test_demands import WINDOWED
from tests.harness.toy_device import ToyDevice
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest
from tests.harness.toy_ledger import NoLedger
from tests.harness.toy_requests import findable, request

STEP_BLOCKS = 64
BATCH = 1000


class CountingLock:
    """A re-entrant lock that sums up what is `counted` during each outermost hold."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0
        self.now: dict[str, int] = defaultdict(int)
        self.most: dict[str, int] = defaultdict(int)
        self.num_holds = 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.num_holds += 1
            for name, count in self.now.items():
                self.most[name] = max(self.most[name], count)
            self.now.clear()
        self._lock.release()

    def counted(self, name: str, count: int) -> None:
        if self._depth:
            self.now[name] += count


def make_engine(
    num_slots: int, monkeypatch: pytest.MonkeyPatch, num_blocks: int = 2100, **options: Any
) -> tuple[ToyEngine, CountingLock]:
    """An engine whose look-ups and moves in eviction order are counted."""
    with patch("kvferry.core.pool.manager.threading", SimpleNamespace(RLock=CountingLock)):
        engine = ToyEngine(num_slots, num_blocks, **options)
    engine.ledger = NoLedger(engine)
    lock: Any = engine.offload.manager.lock
    find, reorder = BlockIndex.find_hashed, type(engine.offload.manager.evictor.policy).reorder
    contents, begin_storing = ToyDevice.contents, SlotTable.begin_storing
    are_in_flight, find_recorded = SlotTable.are_in_flight, lazy.LazyPlanner.find_recorded

    def counted_find(self: Any, keys: Any, hashes: Any) -> Any:
        lock.counted("keys", len(keys))
        return find(self, keys, hashes)

    def counted_reorder(self: Any, slots: Any) -> None:
        lock.counted("moves", len(slots))
        reorder(self, slots)

    def counted_contents(self: Any, block_ids: Any) -> Any:
        lock.counted("blocks", len(block_ids))
        return contents(self, block_ids)

    def counted_stores(self: Any, slots: Any, *args: Any) -> None:
        lock.counted("stores", len(slots))
        begin_storing(self, slots, *args)

    def counted_flights(self: Any, hashes: Any) -> Any:
        lock.counted("flights", len(hashes))
        return are_in_flight(self, hashes)

    def counted_records(self: Any, keys: Any) -> Any:
        lock.counted("records", len(keys))
        return find_recorded(self, keys)

    monkeypatch.setattr(SlotTable, "are_in_flight", counted_flights)
    monkeypatch.setattr(lazy.LazyPlanner, "find_recorded", counted_records)
    monkeypatch.setattr(ToyDevice, "contents", counted_contents)
    monkeypatch.setattr(SlotTable, "begin_storing", counted_stores)
    monkeypatch.setattr(BlockIndex, "find_hashed", counted_find)
    monkeypatch.setattr(type(engine.offload.manager.evictor.policy), "reorder", counted_reorder)
    return engine, lock


def run_in_steps(engine: ToyEngine, one: ToyRequest) -> None:
    """Compute a request `STEP_BLOCKS` blocks a step, and forget its device blocks."""
    engine.add(one)
    while not engine.is_idle():
        engine.step(STEP_BLOCKS * BLOCK_SIZE, copy=True)
        engine.deliver([])
    engine.device.forget_all()


@pytest.mark.parametrize("num_slots", [1500, 3000, 30_000])
def test_long_request_in_steps_looks_up_a_batch_at_most(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(num_slots, monkeypatch)
    for number in range(2):
        run_in_steps(engine, request(f"r{number}", 2048, first=10**6 * number))
    assert 0 < lock.most["moves"] <= BATCH + STEP_BLOCKS
    # Each new block is looked up when it is offered; besides, a part of the request is put in order.
    assert 0 < lock.most["keys"] <= BATCH + 2 * STEP_BLOCKS


def test_long_request_when_finished_is_ordered_by_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(2500, monkeypatch)
    long = request("long", 2048)
    run_in_steps(engine, long)
    run_in_steps(engine, request("other", 1024, first=10**6))
    assert findable(engine, long) == 2500 - 1024


@pytest.mark.parametrize("mode", list(StoreMode))
def test_request_when_finished_with_undecided_slots_works_in_batches(
    mode: StoreMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, num_blocks = 500, 1600
    engine, lock = make_engine(6000, monkeypatch, num_blocks=num_blocks + 8, store_mode=mode, watermark_blocks=8)
    one = request("r", num_blocks, max_tokens=10)
    engine.add(one)
    engine.step(num_blocks * BLOCK_SIZE)
    lock.most.clear()
    engine.finish(one)
    assert lock.most["stores"] <= batch
    # Besides, its slots are put in order.
    assert lock.most["keys"] <= num_blocks + batch
    engine.run()
    engine.add(request("other", num_blocks, first=10**6))
    engine.step(num_blocks * BLOCK_SIZE, copy=True)
    store = engine.offload.snapshot().store
    assert store.stored >= num_blocks - 8
    assert store.skipped["left_device"] == 0


@pytest.mark.parametrize("watermark_blocks", [8, 300])
@pytest.mark.parametrize("blocks_per_slot", [1, 4])
def test_lazy_step_when_it_takes_many_blocks_works_in_batches(
    watermark_blocks: int, blocks_per_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, num_blocks = 256, 1600
    options = {"store_mode": StoreMode.LAZY, "watermark_blocks": watermark_blocks, "blocks_per_slot": blocks_per_slot}
    engine, lock = make_engine(3000, monkeypatch, num_blocks=num_blocks + 8, **options)
    for number in range(3):
        engine.add(request(f"r{number}", num_blocks, first=10**6 * number))
        engine.step(num_blocks * BLOCK_SIZE, copy=True)
        engine.run()
    assert engine.offload.snapshot().store.stored >= 2 * (num_blocks - 8)
    assert 0 < lock.most["stores"] <= batch
    # Besides, the misses of a request are explained, and its slots put in order once, not once for each batch.
    assert 0 < lock.most["keys"] <= num_blocks // blocks_per_slot + 2 * batch
    assert 0 < lock.most["blocks"] <= batch * blocks_per_slot


@pytest.mark.parametrize("has_window", [True, False])
def test_waiting_request_examines_few_blocks_per_hold(has_window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, num_blocks = 1000, 2100
    options = {"specs": WINDOWED, "store_mode": StoreMode.LAZY, "watermark_blocks": 1}
    engine, lock = make_engine(3 * num_blocks, monkeypatch, num_blocks=4 * num_blocks, **options)
    engine.step_s, cache = 0.01, engine.device.cache
    engine.device.cache = lambda group, *block: None if engine.groups[group].reach_tokens else cache(group, *block)
    one = request("first", num_blocks)
    engine.add(one)
    while not engine.is_idle():
        engine.step(num_blocks * BLOCK_SIZE, copy=True)
        engine.deliver([])
    if not has_window:
        for block in [block for block, slot in engine.offload._lazy.recorded.items() if slot.group.reach_tokens]:
            del engine.offload._lazy.recorded[block]
    lock.most.clear()
    engine.add(request("again", num_blocks))
    while not engine.is_idle():
        engine.step(num_blocks * BLOCK_SIZE, copy=True)
        engine.deliver([])
    found = engine.offload.requests.find("again", engine.now_s).prompt_tokens
    assert found.host_hit == (num_blocks * BLOCK_SIZE if has_window else 0)
    assert 0 < lock.most["flights"] <= batch
    assert 0 < lock.most["records"] <= 2 * batch
    assert 0 < lock.most["blocks"] <= 2 * batch
    # The hit is looked up, the boundary behind it, and the longer hit that the examined blocks make possible.
    assert 0 < lock.most["keys"] <= 6 * num_blocks + batch


def test_list_of_requests_when_long_copies_few_per_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(64, monkeypatch)
    for number in range(1500):
        engine.offload.on_new_request(request(f"r{number}", 1), 1.0)
        if number % 2:
            engine.offload.on_request_finished(f"r{number}", 1.0)
    some = RequestTable.some

    def counted_some(self: Any, sequences: Any) -> Any:
        found = some(self, sequences)
        lock.counted("requests", len(found))
        return found

    monkeypatch.setattr(RequestTable, "some", counted_some)
    views = engine.offload.requests.page(None, 1000, 1.0)
    assert [view.request_id for view in views] == [f"r{number}" for number in range(1499, 499, -1)]
    assert 0 < lock.most["requests"] <= 100
    rest = engine.offload.requests.page(views[-1].sequence, 1000, 1.0)
    assert [view.request_id for view in rest] == [f"r{number}" for number in range(499, -1, -1)]


def test_requests_when_filtered_are_each_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(64, monkeypatch)
    for number in range(1000):
        engine.offload.on_new_request(request(f"r{number}", 1), 1.0)
    num_holds, num_tried = lock.num_holds, 0

    def fits(view: RequestView) -> bool:
        nonlocal num_tried
        num_tried += 1
        return view.request_id == "r3"

    (view,) = engine.offload.requests.page(None, 1, 1.0, fits)
    assert view.request_id == "r3"
    assert num_tried == 997
    assert lock.num_holds - num_holds < 30


def test_requests_that_wait_to_be_looked_up_are_examined_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(64, monkeypatch, tiers=("disk",))
    resident = ToyDevice.resident

    def counted_resident(self: Any, keys: Any) -> Any:
        lock.counted("resident", len(keys))
        return resident(self, keys)

    monkeypatch.setattr(ToyDevice, "resident", counted_resident)
    for number in range(300):
        engine.add(request(f"r{number}", 1, first=1000 * number))
    engine.offload.tiers.enable("disk", is_enabled=False)
    lock.most.clear()
    for _ in range(30):
        engine.deliver([])
    assert 0 < lock.most["resident"] <= 16


def test_answers_of_a_tier_when_many_are_processed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(64, monkeypatch, tiers=("disk",))
    add = KnownMissing.add

    def counted_add(self: Any, keys: Any, *times: float) -> None:
        lock.counted("missing", len(keys))
        add(self, keys, *times)

    monkeypatch.setattr(KnownMissing, "add", counted_add)
    for number in range(10):
        engine.add(request(f"r{number}", 600, first=1000 * number))
    for _ in range(10):
        engine.deliver([])
    assert lock.most["missing"] == 4200
    assert not engine.offload.tiers.clients[0].open_jobs
