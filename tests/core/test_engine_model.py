"""Any order of what can happen to an engine keeps the promises: hypothesis makes the simulator's moves, and shrinks."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.core.engine_api import StoreMode
from kvferry.core.scheduler import lazy
from tests.harness.effort import examples
from tests.harness.watched_lock import call_on_release, watched_locks
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


OPERATIONS = (
    "reset_all", "reset_some", "reset_tiers", "empty_pool", "drop_block", "pin_block", "switch_mode", "override",
    "set_runtime", "put_rule", "drop_rule", "switch_eviction_policy", "set_store_threshold", "resize", "look",
)  # fmt: skip
"""Moves that other threads than the engine's make."""


class BatchMachine(EngineMachine):
    """Operators act whenever a step in lazy mode releases the manager lock between its batches."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.undo = patch.object(lazy, "_BATCH_SLOTS", 2)
        self.undo.start()
        with watched_locks():
            super().start(data)
        self.world.engine.set_mode(StoreMode.LAZY)
        call_on_release(self.world.engine.offload, self.interfere)

    def interfere(self) -> None:
        if self.world.picks.chance(0.1):
            self.world.move(self.world.picks.choice(OPERATIONS))

    def teardown(self) -> None:
        try:
            # Fails where hypothesis has ended an example in the middle of a call.
            super().teardown()
        finally:
            if hasattr(self, "undo"):
                self.undo.stop()


TestBatchModel = BatchMachine.TestCase
TestBatchModel.settings = settings(TestEngineModel.settings, max_examples=examples(200))
