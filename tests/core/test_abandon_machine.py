"""Exceptions at any call, with copies open on several ranks, hung tiers and open resets: three guarantees still hold.

Bytes are right or missed, no device block is released under a copy, and each request that waits gets one outcome.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import RequestPolicy
from kvferry.core.transfers import LoadOutcome
from tests.core.test_abandon import MODES, NUM_BLOCKS, NUM_SLOTS, GuardedScheduler, check, check_still_useful, request
from tests.harness import toy_checks
from tests.harness.effort import examples
from tests.harness.faults import CORE, Faults, InjectedError
from tests.harness.toy_copies import blocks_of
from tests.harness.toy_engine import ToyEngine, ToyRequest
from tests.harness.toy_ledger import NoLedger

Fault = tuple[list[int], bool] | None
FAULTS = st.none() | st.tuples(st.lists(st.integers(1, 150), min_size=1, max_size=2), st.booleans())
"""In which calls the next exceptions are raised, counted as `NextCalls` does, and whether after their effect."""


class NextCalls(Faults):
    """Raises in calls that are so many calls ahead, each counted from the one before, before or after their effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, 0, 0.0, 0)
        self.distances: list[int] = []
        self.is_after = False

    def _draw(self, name: str, *, after: bool) -> str | None:
        if not self.enabled or not self.distances:
            return None
        self.distances[0] -= 1
        if self.distances[0] > 0:
            return None
        del self.distances[0]
        when = "after" if after and self.is_after else "before"
        self.raised[f"{name}, {when}"] += 1
        return when


class Engine(ToyEngine):
    """Sees that a load ends for its request only once no rank touches its blocks any more."""

    def _end_load(self, outcome: LoadOutcome) -> None:
        waiting = self.requests[outcome.request_id]
        copied = {block for copy in self.copies.open.values() if not copy.is_store for block in blocks_of(copy.job)}
        assert copied.isdisjoint(block for table in waiting.tables for block in table), "it ended under a copy"
        super()._end_load(outcome)


class FaultyEngine(RuleBasedStateMachine):
    """An engine behind its guard, whose operators and transfers go on whatever raises."""

    @initialize(
        num_workers=st.integers(1, 2), mode=st.sampled_from(sorted(MODES)), has_tier=st.booleans(), keeps=st.booleans()
    )
    def start(self, num_workers: int, mode: str, has_tier: bool, keeps: bool) -> None:
        self.engine = engine = Engine(
            NUM_SLOTS,
            NUM_BLOCKS,
            settings=RequestPolicy(offload_prompt_only=False),
            num_workers=num_workers,
            cost_model=LoadOrCompute(LoadDecision.ALWAYS),
            **{**MODES[mode], "tiers": ("disk",) if has_tier else ()},
        )
        engine.habits.__dict__["keeps_failed"] = keeps
        engine.ledger = NoLedger(engine)
        self.monkeypatch = pytest.MonkeyPatch()
        self.faults = NextCalls(self.monkeypatch)
        for cls in CORE:
            self.faults.patch(cls)
        engine.offload = self.hooks = GuardedScheduler(engine, self.faults, num_workers)
        self.num_added = 0
        for family in range(3):
            self.add(family, 4)
            engine.run()
        engine.device.forget_all()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.faults.distances.clear()
            self.let_tier_work()
            self.settle()
            check(self.engine)
            check_still_useful(self.engine)
            toy_checks.check_idle(self.engine)
        finally:
            self.monkeypatch.undo()

    def settle(self) -> None:
        engine = self.engine
        for _ in range(3):
            self.hooks.guard.resume()
            # Time passes: jobs of tiers are canceled, and what could not be discarded is tried again.
            engine.now_s += 20.0
            engine.step()
            engine.run()

    # --- what may happen --------------------------------------------------------------------------------------------

    def arm(self, fault: Fault) -> None:
        if fault is not None:
            self.faults.distances, self.faults.is_after = list(fault[0]), fault[1]

    @rule(family=st.integers(0, 3), num_blocks=st.integers(1, 5))
    def add(self, family: int, num_blocks: int) -> None:
        if len(self.engine.requests) < 4:
            self.num_added += 1
            self.engine.add(request(f"r{self.num_added}", num_blocks, first=1000 * family))

    @rule(copy=st.booleans(), num_steps=st.integers(1, 3), fault=FAULTS)
    def step(self, copy: bool, num_steps: int, fault: Fault) -> None:
        self.arm(fault)
        for _ in range(num_steps):
            self.engine.step(copy=copy)

    @rule(data=st.data(), error=st.sampled_from([None, None, "the copy failed"]), fault=FAULTS)
    def end_job(self, data: st.DataObject, error: str | None, fault: Fault) -> None:
        self.arm(fault)
        copies = self.engine.copies.open
        if copies:
            job_id = data.draw(st.sampled_from(sorted(copies)), "job")
            rank = data.draw(st.sampled_from(sorted(copies[job_id].missing)), "rank")
            self.engine.end_job(job_id, error=error, worker=rank)

    @rule()
    def deliver_nothing(self) -> None:
        self.engine.deliver([])

    @rule()
    def forget_device(self) -> None:
        self.engine.device.forget_all()

    @rule(data=st.data(), is_preempted=st.booleans(), fault=FAULTS)
    def take_away(self, data: st.DataObject, is_preempted: bool, fault: Fault) -> None:
        self.arm(fault)
        name = data.draw(st.sampled_from([*sorted(self.engine.requests), ""]), "request")
        victim: ToyRequest | None = self.engine.requests.get(name)
        if victim is not None and is_preempted and victim.state in ("running", "loading"):
            self.engine.preempt(victim)
        elif victim is not None and not is_preempted:
            self.engine.finish(victim)

    @rule(match=st.sampled_from([None, RequestFilter(request="r1*")]), is_of_engine=st.booleans(), fault=FAULTS)
    def reset(self, match: RequestFilter | None, is_of_engine: bool, fault: Fault) -> None:
        self.arm(fault)
        now_s = self.engine.now_s
        if is_of_engine:
            self.hooks.reset(now_s)
            return
        with suppress(InjectedError), self.faults.on(), self.hooks.guard.guarding("reset"):
            self.hooks.resets.reset(now_s, match)

    @precondition(lambda self: self.engine.tiers)
    @rule(raises=st.sampled_from(["", "cancel", "store", "look_up"]), dead=st.booleans())
    def trouble_tier(self, raises: str, dead: bool) -> None:
        tier: Any = self.engine.tiers["disk"]
        tier.raises, tier.dead = {raises} - {""}, dead

    @rule()
    def let_tier_work(self) -> None:
        for tier in self.engine.tiers.values():
            tier.raises, tier.dead = set(), False

    @rule(seconds=st.sampled_from([0.5, 11.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now_s += seconds

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        for copy in self.engine.copies.open.values():
            held = copy.ahead or all(self.engine.device.held[block] for block in blocks_of(copy.job))
            assert held, "a block was released under a copy"
        for tier in self.engine.tiers.values():
            assert not tier.wrongs, tier.wrongs
            assert tier.holds_right_bytes()
        if not self.hooks.has_to_discard:
            check(self.engine)


TestFaultyEngine = FaultyEngine.TestCase
TestFaultyEngine.settings = settings(max_examples=examples(400), stateful_step_count=60)
