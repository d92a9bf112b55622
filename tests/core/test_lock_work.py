"""Work under one hold of the manager lock: keys looked up, slots moved and requests copied, counted."""

from __future__ import annotations

from collections import defaultdict
from threading import RLock
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

import pytest

from kvferry.core.engine_api import StepProgress
from kvferry.core.pool.index import BlockIndex
from kvferry.core.scheduler.requests import RequestTable
from kvferry.core.scheduler.scheduler import Hit
from kvferry.core.transfers import StepPlan, TransferResult
from tests.core.test_request_memory import BLOCK, Engine, FullTier, Request

STEP_BLOCKS = 64
BATCH = 1000


class CountingLock:
    """A re-entrant lock that sums up what is `counted` during each outermost hold."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0
        self.now: dict[str, int] = defaultdict(int)
        self.most: dict[str, int] = defaultdict(int)

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            for name, count in self.now.items():
                self.most[name] = max(self.most[name], count)
            self.now.clear()
        self._lock.release()

    def counted(self, name: str, count: int) -> None:
        if self._depth:
            self.now[name] += count


def make_engine(num_slots: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, CountingLock]:
    """An engine whose look-ups and moves in eviction order are counted."""
    with patch("kvferry.core.pool.manager.threading", SimpleNamespace(RLock=CountingLock)):
        engine = Engine(num_slots, **options)
    lock: Any = engine.scheduler.manager.lock
    find, reorder = BlockIndex.find_and_hash, type(engine.scheduler.manager.evictor.policy).reorder

    def counted_find(self: Any, keys: Any) -> Any:
        lock.counted("keys", len(keys))
        return find(self, keys)

    def counted_reorder(self: Any, slots: Any) -> None:
        lock.counted("moves", len(slots))
        reorder(self, slots)

    monkeypatch.setattr(BlockIndex, "find_and_hash", counted_find)
    monkeypatch.setattr(type(engine.scheduler.manager.evictor.policy), "reorder", counted_reorder)
    return engine, lock


def run_in_steps(engine: Engine, request: Request) -> None:
    """Compute a request `STEP_BLOCKS` blocks a step, and finish it."""
    scheduler, tables = engine.scheduler, [list(range(request.num_blocks + 1))]

    def finish(plan: StepPlan) -> None:
        scheduler.on_transfers_finished([TransferResult(job.job_id) for job in (*plan.loads, *plan.stores)], 1.0)

    scheduler.on_new_request(request, 1.0)
    found = scheduler.match(request.request_id, 0, 1.0)
    scheduler.commit(request.request_id, tables, 0, 1.0)
    assert not isinstance(found, Hit)
    for end in range(STEP_BLOCKS, request.num_blocks + 1, STEP_BLOCKS):
        finish(scheduler.plan_step([StepProgress(request.request_id, tables, end * BLOCK)], 1.0))
    scheduler.on_request_finished(request.request_id, 1.0)
    while scheduler.has_open_work():
        finish(scheduler.plan_step([], 1.0))


@pytest.mark.parametrize("num_slots", [2500, 5000, 30_000])
def test_long_request_in_steps_looks_up_a_batch_at_most(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(num_slots, monkeypatch, tiers={})
    for name in ("first", "second"):
        run_in_steps(engine, Request(name, 4096))
    assert 0 < lock.most["moves"] <= BATCH + STEP_BLOCKS
    # Each new block is looked up when it is offered; besides, a part of the request is put in order.
    assert 0 < lock.most["keys"] <= BATCH + 2 * STEP_BLOCKS


def test_long_request_when_finished_is_ordered_by_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(5000, monkeypatch, tiers={})
    manager, request = engine.scheduler.manager, Request("long", 4096)
    run_in_steps(engine, request)
    run_in_steps(engine, Request("other", 1024))
    found = manager.lookup([block_hash + b"\0" for block_hash in request.block_hashes])
    assert len(found) == 5000 - 1024


def test_list_of_requests_when_long_copies_few_per_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lock = make_engine(64, monkeypatch, tiers={})
    for number in range(1500):
        engine.scheduler.on_new_request(Request(f"r{number}", 1), 1.0)
        if number % 2:
            engine.scheduler.on_request_finished(f"r{number}", 1.0)
    some = RequestTable.some

    def counted_some(self: Any, sequences: Any) -> Any:
        found = some(self, sequences)
        lock.counted("requests", len(found))
        return found

    monkeypatch.setattr(RequestTable, "some", counted_some)
    views = engine.scheduler.requests.page(None, 1000, 1.0)
    assert [view.request_id for view in views] == [f"r{number}" for number in range(1499, 499, -1)]
    assert 0 < lock.most["requests"] <= 100
    rest = engine.scheduler.requests.page(views[-1].sequence, 1000, 1.0)
    assert [view.request_id for view in rest] == [f"r{number}" for number in range(499, -1, -1)]


class WatchedTier(FullTier):
    """A tier that notes which of its methods are called with the manager lock held."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = None
        self.locked: dict[str, set[bool]] = defaultdict(set)

    def __getattribute__(self, name: str) -> Any:
        if name in ("poll", "counts", "health", "look_up"):
            self.locked[name].add(self.lock._depth > 0)
        return super().__getattribute__(name)


def test_tier_when_polled_or_counted_is_called_without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = WatchedTier()
    engine, tier.lock = make_engine(64, monkeypatch, tiers={"disk": tier})
    engine.run(Request("tier", 4))
    assert engine.view("tier").prompt_tokens.tier_hit == {"disk": 4 * BLOCK}
    engine.scheduler.expire(engine.now_s)
    assert engine.scheduler.tiers.health() == []
    assert engine.scheduler.snapshot().tiers.keys() == {"disk"}
    assert {name: tier.locked[name] for name in ("poll", "counts", "health")} == {
        "poll": {False},
        "counts": {False},
        "health": {False},
    }
