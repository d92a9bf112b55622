"""Any order of what can happen to an engine keeps the promises: hypothesis makes the simulator's moves, and shrinks."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.core.engine_api import StoreMode
from tests.harness.effort import examples
from tests.sim.operators import small_batches
from tests.sim.picks import DrawnPicks, SeededPicks
from tests.sim.world import MOVES, World

OFTEN = (
    "arrive",
    "step_engine",
    "step_engine",
    "get_on_with_transfers",
    "get_on_with_operations",
    "get_on_with_sessions",
)


class EngineMachine(RuleBasedStateMachine):
    """One rule, so that the moves are those of the simulator and no other."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.world = World(DrawnPicks(data))

    @rule(data=st.data(), move=st.sampled_from([*OFTEN * 3, *MOVES]))
    def happen(self, data: st.DataObject, move: str) -> None:
        self.world.picks = DrawnPicks(data)
        self.world.move(move)

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.picks = SeededPicks(0)
            self.world.settle()


TestEngineModel = EngineMachine.TestCase
TestEngineModel.settings = settings(
    max_examples=examples(150),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class BatchMachine(EngineMachine):
    """Operators act whenever a call releases the manager lock between its batches, in lazy mode at first."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        with ExitStack() as stack:
            stack.enter_context(small_batches())
            self.undo = stack.pop_all()
        self.world = World(DrawnPicks(data), interferes=True)
        self.world.engine.set_mode(StoreMode.LAZY)

    def teardown(self) -> None:
        try:
            # Fails where hypothesis has ended an example in the middle of a call.
            super().teardown()
        finally:
            if hasattr(self, "undo"):
                self.undo.close()


TestBatchModel = BatchMachine.TestCase
TestBatchModel.settings = settings(TestEngineModel.settings, max_examples=examples(200))
