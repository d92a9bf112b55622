"""Which world a seed makes: a model, an engine with its habits, a pool, and how often what happens in it.

Every seed has some features and lacks others ("swarm testing"): what only goes wrong without, or only with, or only
often, has its seeds too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import lcm

from kvferry.core.cost_model import LoadDecision, LoadOrCompute, Rate
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.policy import Level, RequestPolicy
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.slots import BATCH_SLOTS
from tests.harness.toy_engine import Habits, ToyEngine
from tests.sim.picks import Picks

FULL, SLIDING, RECURRENT = GroupKind.FULL, GroupKind.SLIDING, GroupKind.RECURRENT
MODELS: tuple[tuple[GroupSpec, ...], ...] = (
    (GroupSpec(4, 64),),
    (GroupSpec(2, 64),),
    (GroupSpec(4, 64), GroupSpec(4, 64, SLIDING, 9)),
    (GroupSpec(4, 64, SLIDING, 6), GroupSpec(4, 64)),
    (GroupSpec(4, 64), GroupSpec(2, 32, SLIDING, 5), GroupSpec(4, 64, SLIDING, 16)),
    (GroupSpec(4, 64, SLIDING, 10),),
    (GroupSpec(2, 32), GroupSpec(4, 96, RECURRENT)),
    (GroupSpec(4, 64, RECURRENT),),
    (GroupSpec(4, 64), GroupSpec(4, 64, SLIDING, 7), GroupSpec(8, 256, RECURRENT)),
    (GroupSpec(6, 96), GroupSpec(4, 64, SLIDING, 1)),
)


@dataclass
class Weather:
    """How transfers fare: chances for each rank of each job in each step."""

    end: float = 1.0
    move_early: float = 0.0
    fail: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    shuffle: bool = False
    die: float = 0.0


@dataclass
class TierWeather:
    """How tiers fare: the chance of a job to end in each step once it is due, and of an earlier result to come again.

    `shuffle` says whether results come in any order.
    """

    end: float = 1.0
    shuffle: bool = False
    repeat: float = 0.0


@dataclass
class Swarm:
    """One world's make. `rates` are the moves that happen in it, how often a step; `budgets` the tokens of a step."""

    engine: ToyEngine
    rates: dict[str, float]
    weather: Weather = field(default_factory=Weather)
    arrival_rate: float = 0.3
    max_live: int = 6
    longest_prompt: int = 40
    longest_answer: int = 10
    budgets: tuple[int, int] = (1, 32)
    decline_rate: float = 0.0
    wrong_draft_rate: float = 0.0
    stop_rate: float = 0.0
    tier_weather: TierWeather = field(default_factory=TierWeather)
    num_tenants: int = 1
    num_families: int = 2
    session_rate: float = 0.0
    interferes: bool = False


def draw_swarm(picks: Picks, moves: Mapping[str, float], in_fewer: Container[str], *, interferes: bool) -> Swarm:
    """A world, in which some of `moves` happen, at rates in proportion. Its device holds any one request of it."""
    specs = picks.choice(MODELS)
    longest_prompt, longest_answer = picks.choice((8, 24, 24, 48)), picks.choice((1, 4, 12))
    longest = longest_prompt + longest_answer + 4
    num_needed = sum(-(-longest // spec.block_size) for spec in specs)
    num_blocks = 1 + num_needed + picks.choice((0, num_needed // 2, num_needed, 3 * num_needed))
    num_slots = picks.choice((1, 3, 6, 12, 20, 32, 32, 60, 100))
    extent_slots = max(num_slots // picks.choice((1, 3, 4, 10)), 1)
    engine = ToyEngine(
        num_slots=num_slots // extent_slots * extent_slots,
        extent_slots=extent_slots,
        max_slots=num_slots // extent_slots * extent_slots * picks.choice((1, 2, 4)),
        num_blocks=num_blocks,
        specs=specs,
        settings=RequestPolicy(offload_prompt_only=picks.chance(0.5)),
        num_workers=picks.choice((1, 1, 1, 2, 3)),
        blocks_per_slot=picks.choice((1, 1, 1, 2, 2, 3, 8)),
        hash_block_size=picks.choice((None, None, 1, 2)),
        skips_last_block=picks.chance(0.15),
        window_interval_tokens=picks.choice((0, 0, 0, None, 2 * lcm(*(spec.block_size for spec in specs)))),
        null_block=0,
        eviction_policy=picks.choice(sorted(EVICTION_POLICIES)),
        store_mode=picks.choice((StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY)),
        watermark_blocks=picks.choice((1, 4, 16)),
        cost_model=_draw_choice(picks),
        habits=_draw_habits(picks),
        tiers=picks.choice(((), (), ("fast",), ("fast", "slow"))),
        batch_slots=3 if interferes else BATCH_SLOTS,
    )
    if engine.tiers:
        # At one step a second nobody waits for a second one.
        engine.step_s = picks.choice((0.05, 0.05, 0.2, 1.0))
    for tier in engine.tiers.values():
        tier.level = picks.choice(list(Level))
        tier.latency_s = picks.choice((0.0, 0.0, 0.2, 2.0))
    chosen = [name for name in moves if picks.chance(0.3 if name in in_fewer else 0.6)]
    rates = {name: picks.choice((0.01, 0.03, 0.1)) * moves[name] for name in chosen}
    rates["turn_over"] = picks.choice((0.0, 0.05, 0.2, 0.5))
    fails = picks.chance(0.5)
    return Swarm(
        engine=engine,
        rates=rates,
        weather=Weather(
            end=picks.choice((1.0, 0.7, 0.4, 0.15)),
            move_early=picks.choice((0.0, 0.2, 0.5)),
            fail=picks.choice((0.02, 0.1, 0.4)) if fails else 0.0,
            repeat=picks.choice((0.0, 0.0, 0.1)),
            delay=picks.choice((0.0, 0.0, 0.3)),
            shuffle=picks.chance(0.5),
            die=picks.choice((0.003, 0.02)) if fails and picks.chance(0.5) else 0.0,
        ),
        arrival_rate=picks.choice((0.2, 0.5, 1.0)),
        max_live=picks.choice((2, 4, 7)),
        longest_prompt=longest_prompt,
        longest_answer=longest_answer,
        budgets=picks.choice(((1, 6), (1, 32), (16, 64), (16, 64))),
        decline_rate=picks.choice((0.0, 0.0, 0.2)),
        wrong_draft_rate=picks.choice((0.0, 0.5)),
        stop_rate=picks.choice((0.0, 0.5)),
        tier_weather=TierWeather(picks.choice((1.0, 1.0, 0.5)), picks.chance(0.5), picks.choice((0.0, 0.0, 0.1))),
        num_tenants=picks.integer(1, 3),
        num_families=picks.integer(1, 3),
        session_rate=picks.choice((0.0, 0.0, 0.3)),
        interferes=interferes,
    )


class _SlowRate(Rate):
    """The rate of an engine to which a step's tokens are worth so many times the step's time."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def estimate_s(self, amount: float) -> float | None:
        seconds = super().estimate_s(amount)
        return None if seconds is None else seconds * self._factor


def _draw_choice(picks: Picks) -> LoadOrCompute:
    cost_model = LoadOrCompute(picks.choice((LoadDecision.ALWAYS, LoadDecision.AUTO)))
    # A toy computes a whole prompt in a step or two, and tiers are to be waited for longer than that.
    cost_model.tokens_rate = _SlowRate(picks.choice((1.0, 20.0, 100.0)))
    return cost_model


def _draw_habits(picks: Picks) -> Habits:
    asynchronous = picks.chance(0.4)
    return Habits(
        asynchronous=asynchronous,
        max_drafts=picks.choice((0, 0, 1, 3)),
        drops_passed=picks.chance(0.6),
        every_state=picks.chance(0.5),
        allocates_ahead=picks.chance(0.5),
        caches_early=picks.chance(0.4),
        shares_tables=picks.chance(0.5),
        ends_chunks_at=picks.choice((1, 4, 8, 24)),
        commits_again=picks.chance(0.5),
        keeps_failed=picks.chance(0.3),
        fills_passed=picks.chance(0.2),
        hides_windows=picks.choice((0, 0, 2, 4)),
        max_running=picks.choice((1000, 1000, 2)),
    )
