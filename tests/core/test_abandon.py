"""Recovery from exceptions in the scheduler's collaborators: every single call raises once, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.engine import StoreMode
from core.events import NullSink
from core.policy import RequestPolicy
from core.scheduler import Miss
from core.transfers import LoadOutcome, StepPlan, TransferResult
from tests.core import toy_checks
from tests.core.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest

NUM_SLOTS, NUM_BLOCKS = 10, 16


class InjectedError(Exception):
    """An exception that no code of the project raises."""


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


class NullRecord:
    """A `PoolRecord` that writes nothing."""

    def void(self, slots: Any, generations: Any) -> None: ...
    def void_before(self, epoch: int) -> None: ...
    def begin_filling(self, labels: Any) -> None: ...
    def end_filling(self, labels: Any) -> None: ...


class Guard:
    """The scheduler behind a wrapper as an engine has it: an exception empties the pool, and the hook misses."""

    def __init__(self, engine: ToyEngine, scheduler: Any) -> None:
        self._engine = engine
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._scheduler, name)
        defaults: dict[str, Any] = {"match": Miss(), "plan_step": StepPlan(), "on_transfers_finished": []}
        hooks = {*defaults, "on_new_request", "commit", "on_preempted", "on_request_finished", "on_step_failed"}
        if name not in {*hooks, "expire"}:
            return found

        def guarded(*args: Any) -> Any:
            try:
                return found(*args)
            except InjectedError:
                self._scheduler.abandon_all(self._engine.now_s)
                check(self._engine)
                return defaults.get(name)

        return guarded


class NoLedger:
    """Stands in for the ledger, which predicts what happens without exceptions."""

    was_lazy = True

    def __init__(self, engine: ToyEngine) -> None:
        self._scheduler = engine.offload
        self.arrived = self.learn = engine.truth.learn

    @property
    def live(self) -> dict[int, Any]:
        return {state.sequence: SimpleNamespace(state=state) for state in self._scheduler._requests}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def check(engine: ToyEngine) -> None:
    """All that does not depend on a prediction."""
    toy_checks._check_counts(engine, engine.offload.snapshot())
    toy_checks._check_slots(engine)
    toy_checks._check_pins(engine)
    held = list(engine.device.held)
    for blocks in engine.offload._holds._orphans:
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


def make_engine(fault: Fault, **options: Any) -> ToyEngine:
    engine = ToyEngine(
        NUM_SLOTS,
        NUM_BLOCKS,
        sink=Faulty(NullSink(), fault),
        settings=RequestPolicy(offload_prompt_only=False),
        **options,
    )
    manager, scheduler = engine.manager, engine.offload
    device = Faulty(engine.device, fault, atomic=("hold", "release"))
    scheduler._holds._device = scheduler._lazy._device = device
    manager.room.policy = Faulty(manager.room.policy, fault)
    manager.admission = Faulty(manager.admission, fault)
    manager._record = manager.leaving._record = Faulty(NullRecord(), fault)
    engine.ledger = NoLedger(engine)
    engine.offload = Guard(engine, scheduler)
    return engine


def request(name: str, blocks: int, first: int, max_tokens: int = 3) -> ToyRequest:
    tokens = list(range(first, first + blocks * BLOCK_SIZE + 1))
    return ToyRequest(name, tokens, len(tokens), max_tokens)


def drive(engine: ToyEngine) -> None:
    """Fill the pool, evict, hit, preempt, abort, fail copies, reset; with jobs open across steps."""
    for i in range(3):
        engine.add(request(f"fill{i}", 4, 1000 * i))
        engine.run()
    engine.device.forget_all()
    engine.add(request("hit", 4, 2000))
    engine.add(request("same", 4, 2000))
    engine.step(copy=False)
    check(engine)
    for job_id in list(engine.copies.open)[:1]:
        engine.end_job(job_id, error="the copy failed")
    engine.run()
    engine.device.forget_all()
    engine.add(request("loads", 4, 2000))
    engine.run()
    engine.device.forget_all()
    engine.add(request("preempted", 4, 2000))
    engine.add(request("aborted", 5, 5000))
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
    except InjectedError:
        engine.offload.abandon_all(engine.now_s)
    check(engine)
    engine.run()


MODES = {
    "eager": {},
    "lazy": {"store_mode": StoreMode.LAZY, "watermark_blocks": 8},
    "arc": {"eviction_policy": "arc"},
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


@pytest.mark.parametrize(
    ("mode", "after"), [("eager", False), ("eager", True), ("lazy", True), ("arc", True), ("tiers", False)]
)
def test_exception_at_any_collaborator_call_loses_nothing(mode: str, after: bool) -> None:
    for at in range(1, num_calls(mode) + 1):
        fault = Fault(at, after=after)
        engine = make_engine(fault, **MODES[mode])
        drive(engine)
        assert fault.num_raised == 1
        check(engine)
        check_still_useful(engine)
        toy_checks.check_idle(engine)


def check_still_useful(engine: ToyEngine) -> None:
    """Later requests are stored and found again."""
    before = engine.offload.snapshot().load.blocks
    # Lazy mode stores what it has to give the third request's blocks for.
    for name, first in (("new", 20000), ("other", 30000), ("third", 40000)):
        engine.add(request(name, 5, first))
        engine.run()
    engine.device.forget_all()
    engine.add(request("again", 5, 20000 if engine.offload.store_mode is StoreMode.LAZY else 40000))
    engine.run()
    assert engine.offload.snapshot().load.blocks > before


def test_policy_that_always_raises_is_replaced_by_default() -> None:
    fault = Fault(1, forever=True)
    engine = make_engine(Fault(), eviction_policy="arc")
    engine.manager.room.policy = Faulty(engine.manager.room.policy._inner, fault)
    drive(engine)
    assert fault.num_raised == 2, "once in a hook, once while it was emptied"
    assert engine.offload.snapshot().pool.eviction_policy == "lru"
    check_still_useful(engine)
    toy_checks.check_idle(engine)


def test_sent_jobs_keep_slots_and_blocks_until_reported() -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, 0))
    engine.step(copy=False)
    (job_id,) = engine.copies.open
    slots = set(engine.offload._jobs._open[job_id].slots.tolist())
    for _ in range(2):
        engine.offload.abandon_all(engine.now_s)
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
    engine.add(request("a", 4, 0))
    engine.run()
    engine.device.forget_all()
    again = request("b", 4, 0)
    engine.add(again)
    assert engine.admit(again)
    assert again.state == "loading"
    engine.offload.abandon_all(engine.now_s)
    assert engine.offload.has_open_work()
    assert any(engine.device.held), "released on the engine's thread only"
    outcomes = engine.offload.on_transfers_finished([], engine.now_s)
    assert outcomes == [LoadOutcome("b", False, 0, again.num_loading)]
    assert not any(engine.device.held)
    check(engine)


def test_load_under_way_fails_when_abandoned_and_reported_ok() -> None:
    engine = make_engine(Fault())
    engine.add(request("a", 4, 0))
    engine.run()
    engine.device.forget_all()
    engine.add(request("b", 4, 0))
    engine.step(copy=False)
    (job_id,) = engine.copies.open
    engine.offload.abandon_all(engine.now_s)
    check(engine)
    outcomes = engine.offload.on_transfers_finished([TransferResult(job_id)], engine.now_s)
    assert [outcome.ok for outcome in outcomes] == [False]
    assert engine.offload.snapshot().pool.free == NUM_SLOTS
