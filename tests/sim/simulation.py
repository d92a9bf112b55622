"""Running worlds: one seed for so many steps, what came of it, and how to see it again."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

from tests.harness.watched_lock import watched_locks
from tests.sim.picks import Picks
from tests.sim.world import World

INTERFERES_EVERY = 3
"""In one of so many worlds operators act within the calls of others."""


@dataclass(frozen=True)
class Report:
    """How a seed's world fared: `error` is the traceback of what failed at step `num_steps`, None if all was well.

    `outcome` are core's counters in the end.
    """

    seed: int
    num_steps: int
    events: Counter[str]
    error: str | None = None
    outcome: str = ""

    def __str__(self) -> str:
        if self.error is None:
            return f"seed {self.seed}: {self.num_steps} steps, all well"
        again = f"make soak SEED={self.seed} STEPS={self.num_steps}"
        return f"{self.error}\nseed {self.seed} failed at step {self.num_steps}; to see it again:\n  {again}"


def simulate(seed: int, num_steps: int, check_every: int = 1) -> Report:
    """Run a seed's world, checked after every so many steps, and let it settle in the end."""
    done = 0
    world = None
    try:
        interferes = seed % INTERFERES_EVERY == 0
        with watched_locks() if interferes else nullcontext():
            world = World(Picks(seed), interferes=interferes)
            for done in range(1, num_steps + 1):
                world.step(check=done % check_every == 0)
            world.settle()
    except Exception:
        return Report(seed, done, world.engine.events if world else Counter(), traceback.format_exc())
    return Report(seed, num_steps, world.engine.events, outcome=str(world.engine.offload.snapshot()))
