"""Any order of what can happen to an engine keeps the promises: hypothesis makes the simulator's moves, and shrinks."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.harness.effort import examples
from tests.sim.picks import DrawnPicks, SeededPicks
from tests.sim.world import MOVES, World

OFTEN = ("arrive", "step_engine", "step_engine", "get_on_with_transfers", "get_on_with_resize")


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
