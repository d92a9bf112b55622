"""Recovery from exceptions in the scheduler's collaborators: every single call raises once, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry.app.guard import ErrorLog, OffloadGuard
from kvferry.core.engine_api import StoreMode
from kvferry.core.errors import RequestFailed
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import RequestPolicy
from kvferry.core.scheduler.loads import LoadPlanner
from kvferry.core.scheduler.lookup import RequestKeys
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.scheduler.stores import StoreJobs
from kvferry.core.transfers import LoadOutcome, TransferResult
from tests.harness import toy_checks, toy_requests
from tests.harness.effort import LONG, SHARE
from tests.harness.faults import CORE, Faults, InjectedError
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_ledger import NoLedger

NUM_SLOTS, NUM_BLOCKS = 10, 16
SEED = int(os.environ.get("FAULT_SEED", "1"))
NUM_RUNS = int(os.environ.get("FAULT_RUNS", "10"))


class Fault:
    """Counts calls of collaborators and raises at one of them, before or after it has done its work."""

    def __init__(self, at: int = 0, *, after: bool = False, forever: bool = False) -> None:
        self.at = at
        self.after = after
        self.forever = forever
        self.num_calls = 0
        self.num_raised = 0

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict, *, atomic: bool) -> Any:
        self.num_calls += 1
        due = self.at and (self.num_calls == self.at or (self.forever and self.num_calls > self.at))
        if due and not (self.after and not atomic):
            self._raise()
        result = function(*args, **kwargs)
        if due:
            self._raise()
        return result

    def _raise(self) -> None:
        self.num_raised += 1
        raise InjectedError(f"call {self.num_calls}")


class Faulty:
    """A collaborator whose methods go through a `Fault`."""

    def __init__(self, inner: Any, fault: Fault, *, atomic: tuple[str, ...] = ()) -> None:
        self._inner = inner
        self._fault = fault
        self._atomic = atomic

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._fault.call(found, args, kwargs, atomic=name in self._atomic)


class NullQueue:
    """A `HeaderQueue` that writes nothing."""

    epoch = 0

    def invalidate(self, slots: Any, generations: Any) -> None: ...
    def invalidate_before(self, epoch: int) -> None: ...
    def begin_tier_write(self, labels: Any) -> None: ...
    def end_tier_write(self, labels: Any) -> None: ...


def findable(engine: ToyEngine) -> dict[bytes, int]:
    """The slot of each key that can be found."""
    table = engine.manager.table
    slots = table.is_ready(np.arange(table.end_slot)).nonzero()[0]
    return {table.keys[slot]: slot for slot in slots.tolist() if engine.manager.index.get(table.keys[slot]) == slot}


def abandon(engine: ToyEngine, abandon_all: Callable[..., list[Exception]], *args: Any) -> bool:
    """Recover, and check that all blocks stay unless a change of the pool was interrupted; whether they stayed."""
    before, stays = findable(engine), not engine.manager.changing.is_torn
    stays &= not abandon_all(*args)
    assert findable(engine) == (before if stays else {})
    assert not engine.manager.changing.is_torn
    check(engine)
    return stays


class GuardedScheduler:
    """The scheduler behind the guard that engines use; `faults` raise in its hooks only."""

    def __init__(self, engine: ToyEngine, faults: Faults, num_workers: int = 1) -> None:
        self._engine = engine
        self._faults = faults
        self._scheduler = engine.offload
        self._plain = self._scheduler.abandon_all
        self._scheduler.abandon_all = self._abandon_all
        self.guard = OffloadGuard(self._scheduler, num_workers, ErrorLog(), clock=lambda: engine.now_s)
        self.num_kept = self.num_dropped = 0

    @property
    def has_to_discard(self) -> bool:
        return self.guard._must_discard or self.guard._is_unusable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(OffloadGuard):
            return getattr(self._scheduler, name)
        hook = getattr(self.guard, name)

        def call(*args: Any, **fields: Any) -> Any:
            if not self.guard.status.is_on:
                self.guard.resume()
            with self._faults.on():
                answer = hook(*args, **fields)
            return list(map(self._completed, answer)) if name == "on_transfers_finished" else answer

        return call

    def _completed(self, outcome: LoadOutcome) -> LoadOutcome:
        """The guard leaves out the tokens of a load that failed for lack of an outcome."""
        if outcome.ok or outcome.num_tokens:
            return outcome
        request = self._engine.requests[outcome.request_id]
        return LoadOutcome(outcome.request_id, False, request.num_computed, request.num_loading)

    def _abandon_all(self, *args: Any) -> list[Exception]:
        had = len(findable(self._engine))
        errors: list[Exception] = []

        def plain(*args: Any) -> list[Exception]:
            with self._faults.on():
                errors.extend(self._plain(*args))
            return errors

        self._faults.enabled = False
        stays = abandon(self._engine, plain, *args)
        self._faults.enabled = True
        self.num_kept += had > 0 and stays
        self.num_dropped += had > 0 and not stays
        return errors


def check(engine: ToyEngine) -> None:
    """All that does not depend on a prediction, unless the recovery itself failed and is still to be repeated."""
    if not engine.offload.guard.status.is_on:
        return
    toy_checks._check_counts(engine, engine.offload.snapshot())
    toy_checks._check_slots(engine)
    toy_checks._check_pins(engine)
    held = list(engine.device.held)
    for blocks in engine.offload._jobs.unowned:
        for block in blocks:
            engine.device.held[block] -= 1
    toy_checks._check_holds(engine)
    engine.device.held = held
    check_bytes(engine)


def check_bytes(engine: ToyEngine) -> None:
    """What can be found holds the right values."""
    table = engine.manager.table
    for slot in table.is_ready(np.arange(table.end_slot)).nonzero()[0].tolist():
        values = engine.truth.of(table.keys[slot])
        assert engine.copies.host[0][slot][: len(values)] == values, "a block can be found and holds something else"


request = partial(toy_requests.request, max_tokens=3)


def make_engine(fault: Fault, faults: Faults | None = None, **options: Any) -> ToyEngine:
    engine = ToyEngine(
        NUM_SLOTS,
        NUM_BLOCKS,
        sink=lambda event: fault.call(lambda: None, (), {}, atomic=False),
        settings=RequestPolicy(offload_prompt_only=False),
        **options,
    )
    manager, scheduler = engine.manager, engine.offload
    device = Faulty(engine.device, fault, atomic=("hold", "release"))
    scheduler._device = scheduler._jobs._device = scheduler._lazy._device = device
    manager.evictor.policy = Faulty(manager.evictor.policy, fault)
    manager.admission = Faulty(manager.admission, fault)
    manager._header_queue = Faulty(NullQueue(), fault)
    engine.ledger = NoLedger(engine)
    engine.offload = GuardedScheduler(engine, faults or Faults(pytest.MonkeyPatch(), SEED, probability=0.0, most=0))
    return engine


def drive(engine: ToyEngine) -> None:
    """Fill the pool, evict, hit, preempt, abort, fail copies, reset; with jobs open across steps."""
    for i in range(3):
        engine.add(request(f"fill{i}", 4, first=1000 * i))
        engine.run()
    engine.device.forget_all()
    engine.add(request("hit", 4, first=2000))
    engine.add(request("same", 4, first=2000))
    engine.step(copy=False)
    check(engine)
    for job_id in list(engine.copies.open)[:1]:
        engine.end_job(job_id, error="the copy failed")
    engine.run()
    engine.device.forget_all()
    engine.add(request("loads", 4, first=2000))
    engine.run()
    engine.device.forget_all()
    engine.add(request("preempted", 4, first=2000))
    engine.add(request("aborted", 5, first=5000))
    engine.step(copy=False)
    engine.step(copy=False)
    for name in ("preempted", "aborted"):
        if name in engine.requests:
            act = engine.preempt if name == "preempted" else engine.finish
            act(engine.requests[name])
    check(engine)
    engine.step(copy=False)
    try:
        engine.offload.resets.reset(engine.now_s)
    except InjectedError as error:
        engine.offload.fail("reset", error, engine.now_s)
    check(engine)
    engine.run()


MODES = {
    "eager": {},
    "lazy": {"store_mode": StoreMode.LAZY, "watermark_blocks": 8},
    "arc": {"eviction_policy": "arc"},
    "hazard": {"eviction_policy": "hazard"},
    "tiers": {"tiers": ("disk",)},
}


def num_calls(mode: str) -> int:
    fault = Fault()
    engine = make_engine(fault, **MODES[mode])
    drive(engine)
    snapshot = engine.offload.snapshot()
    assert snapshot.evictions.by_reason["capacity"], "the scenario never makes room"
    assert snapshot.load.blocks or mode == "lazy", "the scenario never loads"
    return fault.num_calls


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mode", "after"), [("eager", False), ("eager", True), ("lazy", True), ("arc", True), ("tiers", False)]
)
def test_exception_at_any_collaborator_call_loses_nothing(mode: str, after: bool) -> None:
    for at in range(1, num_calls(mode) + 1, 1 if LONG else SHARE):
        fault = Fault(at, after=after)
        engine = make_engine(fault, **MODES[mode])
        drive(engine)
        assert fault.num_raised == 1
        check(engine)
        check_still_useful(engine)
        toy_checks.check_idle(engine)


@pytest.mark.parametrize("mode", MODES)
def test_blocks_stay_when_no_change_of_the_pool_is_interrupted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_kept = num_dropped = num_runs = 0
    faults = Faults(monkeypatch, SEED, probability=0.006, most=100_000)
    for cls in CORE:
        faults.patch(cls)
    # Few exceptions interrupt a change of the pool.
    while num_runs < NUM_RUNS or ((num_kept <= 10 or not num_dropped) and num_runs < 10 * NUM_RUNS):
        num_runs += 1
        engine = make_engine(Fault(), faults, **MODES[mode])
        guard = engine.offload
        drive(engine)
        guard.guard.resume()
        faults.left, left = 0, faults.left
        # A hook discards the state if the recovery itself has failed last; an idle engine calls none.
        engine.step()
        engine.run()
        check(engine)
        check_still_useful(engine)
        toy_checks.check_idle(engine)
        assert not any(isinstance(one, RequestState) for one in engine.offload.requests.all_known())
        faults.left = left
        num_kept += guard.num_kept
        num_dropped += guard.num_dropped
    assert num_kept > 10
    assert num_dropped > 0


def test_stored_blocks_are_hit_after_an_exception_outside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, first=0))
    engine.run()
    (key,) = list(findable(engine))[:1]
    engine.manager.operator_pins.pin(key, 1e9, engine.now_s)
    engine.device.forget_all()
    with monkeypatch.context() as patch:
        patch.setattr(LoadPlanner, "match", lambda *args: Fault(1).call(list, (), {}, atomic=True))
        engine.add(request("b", 4, first=0))
        engine.run()
    assert engine.offload.snapshot().prompt_tokens.host_hit == 0
    assert engine.manager.epoch == 0
    assert engine.offload.snapshot().pool.pinned == 1
    engine.device.forget_all()
    engine.add(request("c", 4, first=0))
    engine.run()
    assert engine.offload.snapshot().prompt_tokens.host_hit == 4 * BLOCK_SIZE
    assert engine.manager.operator_pins.unpin(key)
    check(engine)
    toy_checks.check_idle(engine)


def test_failed_reset_drops_all_blocks_at_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, first=0))
    engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(StoreJobs, "disown", lambda *args: Fault(1).call(list, (), {}, atomic=True))
        with pytest.raises(InjectedError):
            engine.offload.resets.reset(engine.now_s, RequestFilter(request="a"))
    engine.discard()
    assert not findable(engine)
    check(engine)


def check_still_useful(engine: ToyEngine) -> None:
    """Later requests are stored and found again."""
    before = engine.offload.snapshot().load.blocks
    # Lazy mode stores what will have to give its blocks next.
    for name, first in (("new", 20000), ("other", 30000), ("third", 40000)):
        engine.add(request(name, 5, first=first))
        engine.run()
    engine.device.forget_all()
    engine.add(request("again", 5, first=30000 if engine.offload.store_mode is StoreMode.LAZY else 40000))
    engine.run()
    assert engine.offload.snapshot().load.blocks > before


def test_policy_that_always_raises_is_replaced_by_default() -> None:
    fault = Fault(1, forever=True)
    engine = make_engine(Fault(), eviction_policy="arc")
    engine.manager.evictor.policy = Faulty(engine.manager.evictor.policy._inner, fault)
    drive(engine)
    assert fault.num_raised == 2, "once in a hook, once while it was emptied"
    assert engine.offload.snapshot().pool.eviction_policy == "lru"
    check_still_useful(engine)
    toy_checks.check_idle(engine)


def test_sent_jobs_keep_slots_and_blocks_until_reported() -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, first=0))
    engine.step(copy=False)
    (job_id,) = engine.copies.open
    slots = set(engine.offload._jobs._open[job_id].slots.tolist())
    for _ in range(2):
        engine.discard()
        pool = engine.offload.snapshot().pool
        assert (pool.ready, pool.storing) == (0, len(slots))
        assert sum(engine.device.held) == len(slots)
        check(engine)
    engine.end_job(job_id)
    pool = engine.offload.snapshot().pool
    assert (pool.ready, pool.storing, pool.free) == (0, 0, NUM_SLOTS)
    assert not any(engine.device.held)
    engine.run()
    toy_checks.check_idle(engine)


def test_committed_load_fails_when_abandoned_before_its_step() -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, first=0))
    engine.run()
    engine.device.forget_all()
    again = request("b", 4, first=0)
    engine.add(again)
    assert engine.admit(again)
    assert again.state == "loading"
    engine.discard()
    assert engine.offload.has_open_work()
    assert not engine.offload.plan_step([], engine.now_s)
    assert not any(engine.device.held)
    outcomes = engine.offload.on_transfers_finished([], engine.now_s)
    assert outcomes == [LoadOutcome("b", False, 0, again.num_loading)]
    assert not engine.offload.has_open_work()
    check(engine)


def test_load_under_way_fails_when_abandoned_and_reported_ok() -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, first=0))
    engine.run()
    engine.device.forget_all()
    engine.add(request("b", 4, first=0))
    engine.step(copy=False)
    (job_id,) = engine.copies.open
    engine.discard()
    check(engine)
    outcomes = engine.offload.on_transfers_finished([TransferResult(job_id)], engine.now_s)
    assert [outcome.ok for outcome in outcomes] == [False]
    pool = engine.offload.snapshot().pool
    assert (pool.ready, pool.free, pool.loading, pool.pinned) == (5, NUM_SLOTS - 5, 0, 0)


@pytest.mark.parametrize("options", [{"store_mode": StoreMode.LAZY}, {"eviction_policy": "hazard"}], ids=str)
def test_request_whose_keys_cannot_be_made_fails_no_later_hook(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(64, 64, **options)
    engine.ledger = NoLedger(engine)
    engine.add(request("a", 4, first=0))
    engine.run()
    bad = request("b", 4, first=0)
    extend = RequestKeys.extend

    def fail(self: RequestKeys, *args: Any) -> int:
        if self.request is bad:
            raise InjectedError("no such hash")
        return extend(self, *args)

    monkeypatch.setattr(RequestKeys, "extend", fail)
    engine.add(bad)
    with pytest.raises(RequestFailed):
        engine.offload.match("b", 0, engine.now_s)
    engine.run()
    assert engine.offload.snapshot().requests.excluded == 1
