"""A simulated world: an engine under traffic, whose transfers end well or badly, and whose operators interfere.

One step is: perhaps some moves, then transfers get on, then the engine takes a step, and then everything that must hold
is checked. Every decision comes from the world's picks, so a seed says all.
"""

from __future__ import annotations

from kvferry.core.tiers.base import HOST
from kvferry.core.transfers import TransferResult
from tests.harness.toy_copies import OpenCopy
from tests.harness.toy_engine import ToyRequest
from tests.harness.toy_tokens import BLOCK_SIZE
from tests.sim.flushes import FlushDriver
from tests.sim.operators import ENGINE_CALL, Operators
from tests.sim.picks import Picks
from tests.sim.swarm import Swarm, TierWeather, Weather, draw_swarm

_PARAMS = (
    None,
    {},
    {"max_offload_tokens": 9},
    {"max_offload_tokens": 0},
    {"max_offload_tokens": True},
    {"store": False},
    {"load": False},
    {"load": "no"},
    {"offload_prompt_only": False},
    {"offload_prompt_only": True, "max_offload_tokens": 16},
)
_TENANT_TOKENS = 1_000_000
_FAMILY_TOKENS = 10_000


class World(Operators):
    """`moves` are what may happen to it, by name."""

    def __init__(self, picks: Picks, *, interferes: bool = False) -> None:
        """If it `interferes`, make it within `watched_locks`: its calls release the manager lock often."""
        self.picks = picks
        self.swarm: Swarm = draw_swarm(picks, MOVES, IN_FEWER_WORLDS, interferes=interferes)
        self.engine = self.swarm.engine
        self.engine.take_hit = self._take_hit
        self.engine.choose = self._choose
        self.num_arrived = 0
        self.known: list[ToyRequest] = []
        self.reports: list[TransferResult] = []
        self.past: list[TransferResult] = []
        self.dead: dict[int, int] = {}
        self.engine.living_ranks = lambda: [rank for rank in range(self.engine.num_workers) if rank not in self.dead]
        self.flushes = FlushDriver(self.engine, picks)
        self.begin_to_operate()

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, check: bool = True) -> None:
        """Do everything that happens in one step of a simulation, and check all that must hold after it."""
        picks, rates = self.picks, self.swarm.rates
        for name, rate in rates.items():
            if picks.chance(rate):
                self.move(name)
        if picks.chance(self.swarm.arrival_rate):
            self.arrive()
        self.get_on_with_transfers()
        self.get_on_with_operations()
        self.get_on_with_sessions()
        self.step_engine()
        if check:
            self.engine.check()
            self.flushes.check()

    def move(self, name: str) -> None:
        """Have something happen, if it can."""
        getattr(self, name)()

    def step_engine(self) -> None:
        """One step of the engine, with some budget."""
        self.engine.step(self.picks.integer(*self.swarm.budgets))

    def settle(self) -> None:
        """Let everything come to its end, with no more trouble, and see that nothing is left."""
        self.swarm.weather = Weather()
        self.swarm.tier_weather = TierWeather()
        self.dead.clear()
        if self.engine.tiers:
            # What waits for a tier waits for time to pass.
            self.engine.step_s = 1.0
        self.swarm.interferes = False
        self.settle_operations()
        self._run_dry()
        # Leases run out; in lazy mode that may make room for what waited to be stored.
        self.engine.now_s += 10_000.0
        while self.engine.manager.leases.next_s <= self.engine.now_s:
            self.engine.step(32)
        self.engine.step(32)
        self._run_dry()
        self.engine.finish_resize()
        self.check_limits()
        self.engine.check()
        self.engine.check_idle()
        for tier in self.engine.offload.snapshot().tiers.values():
            for name in tier.use.__slots__:
                self.engine.events[f"tiers: {name}"] += getattr(tier.use, name) or 0
        leases = self.engine.offload.snapshot().leases
        for name, count in (*leases.outcomes.items(), *leases.ended.items()):
            self.engine.events[f"leases: {name}"] += count
        for count in self.engine.offload.snapshot().prompt_tokens.tier_hit.values():
            self.engine.events["tokens hit in a tier"] += count
        self.engine.close()

    def _run_dry(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle() and not (self.reports or self.queries):
                return
            self.get_on_with_transfers()
            self.get_on_with_queries()
            for request in [one for one in self.engine.requests.values() if one.state == "idle"]:
                self.engine.finish(request)
            self.engine.step(32)
        raise AssertionError(f"not idle after 2000 quiet steps: {self.engine.requests}")

    # --- traffic ----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request comes: a prompt that shares a prefix, one that was there before, or the next turn of another."""
        if len(self.engine.requests) < self.swarm.max_live:
            self.num_arrived += 1
            self._announce(f"r{self.num_arrived}")

    def _announce(self, request_id: str) -> None:
        request = self._new_request(request_id)
        self.known = [*self.known[-9:], request]
        self.engine.add(request)

    def _new_request(self, request_id: str) -> ToyRequest:
        picks, swarm = self.picks, self.swarm
        tenant = picks.integer(0, swarm.num_tenants - 1)
        kind = picks.integer(0, 3) if self.known else 0
        if kind <= 1:
            base = tenant * _TENANT_TOKENS + picks.integer(1, swarm.num_families) * _FAMILY_TOKENS
            tokens = list(range(base, base + picks.integer(0, swarm.longest_prompt)))
            tokens += [_FAMILY_TOKENS * 10 + self.num_arrived] * picks.integer(0, 9)
        else:
            tokens = list(picks.choice(self.known).tokens)
            if kind == 3:
                tokens += [picks.integer(1, 3)] * picks.integer(1, 9)
        tokens = tokens[: swarm.longest_prompt] or [7]
        return ToyRequest(
            request_id,
            tokens,
            len(tokens),
            picks.integer(0, swarm.longest_answer),
            tenant=f"tenant{tenant}" if tenant else None,
            session=f"s{picks.integer(1, 3)}" if picks.chance(0.5) else None,
            lora="lora" if tenant == 1 else None,
            kv_transfer_params=picks.choice(_PARAMS) if picks.chance(0.4) else None,
            aliases=(f"alias{self.num_arrived % 3}",) if picks.chance(0.2) else (),
            hash_block_size=self.engine.layout.hash_block_size,
            stop_after=picks.integer(1, 6) if picks.chance(swarm.stop_rate) else None,
            priority=picks.choice((None, None, 0, 5)),
            num_turns=picks.integer(1, 3) if picks.chance(swarm.session_rate) else 0,
        )

    def get_on_with_sessions(self) -> None:
        """Clients of sessions send more, or end them."""
        swarm, picks = self.swarm, self.picks
        for request in [one for one in self.engine.requests.values() if one.state == "idle"]:
            if self.engine.under_way(request):
                continue
            room = swarm.longest_prompt - request.num_tokens
            if room < 1 or picks.chance(0.1):
                self.engine.finish(request)
            elif picks.chance(0.5):
                tokens = [picks.integer(1, 3) for _ in range(picks.integer(1, min(room, 9)))]
                self.engine.continue_session(request, tokens)

    def abort(self) -> None:
        """A client goes away."""
        request = self._some_request()
        if request is not None:
            self.engine.finish(request, is_aborted=True)

    def preempt(self) -> None:
        """The engine takes a request's blocks."""
        request = self._some_request("running", "loading")
        if request is not None:
            self.engine.preempt(request)

    def come_again(self) -> None:
        """An id is announced again, while its request is still there or after it."""
        request = self._some_request()
        if request is not None:
            self._announce(request.request_id)

    def ask_again(self) -> None:
        """The engine asks for a hit, and does not act on the answer."""
        request = self._some_request("waiting")
        if request is not None:
            prefix = self.picks.integer(0, request.num_tokens)
            answer = self.engine.offload.match(request.request_id, prefix, self.engine.now_s)
            self.engine.ledger.matched(request, prefix, answer)

    def ask_for_nobody(self) -> None:
        """Calls for a request that core never heard of."""
        engine = self.engine
        engine.offload.match("nobody", 0, engine.now_s)
        engine.offload.commit("nobody", [[1]], BLOCK_SIZE, engine.now_s)
        engine.offload.on_preempted("nobody", engine.now_s)
        engine.offload.on_request_finished("nobody", engine.now_s)
        engine.offload.on_step_failed(["nobody"], engine.now_s)

    def sleep(self) -> None:
        """The engine gives its memory up; the pool is reset with it, as what its weights are may change."""
        places, open_copies = self.picks.choice((None, [HOST])), self.engine.copies.open.values()
        self.engine.events["slept with stores in flight"] += any(one.is_store for one in open_copies)
        self.engine.events["slept with loads in flight"] += any(not one.is_store for one in open_copies)
        self.within.append(ENGINE_CALL)
        try:
            self.engine.sleep(places)
        finally:
            self.within.pop()
        self.was_reset(None, places)

    def turn_over(self) -> None:
        """The device forgets every block that it could find."""
        self.engine.device.forget_all()

    def fail_step(self) -> None:
        """A step's compute fails, and its requests with it."""
        self.engine.fail_step(self.picks.integer(*self.swarm.budgets))

    def _some_request(self, *states: str) -> ToyRequest | None:
        found = [r for r in self.engine.requests.values() if not states or r.state in states]
        loading = [r for r in found if r.state == "loading"]
        if loading and self.picks.chance(0.5):
            found = loading
        return self.picks.choice(found) if found else None

    def _take_hit(self, num_tokens: int) -> int:
        """How much of a hit the engine takes."""
        if self.swarm.decline_rate and self.picks.chance(self.swarm.decline_rate):
            step = self.engine.layout.alignment_tokens
            return self.picks.integer(0, num_tokens // step) * step
        return num_tokens

    def _choose(self, low: int, high: int) -> int:
        """How many drafts there are, and how many of them are right."""
        if self.swarm.wrong_draft_rate and self.picks.chance(self.swarm.wrong_draft_rate):
            return self.picks.integer(low, high)
        return high

    # --- transfers --------------------------------------------------------------------------------------------------

    def get_on_with_transfers(self) -> None:
        """Ranks copy, end, fail or die, each at its own pace; some of what they report is told to the engine."""
        picks, weather = self.picks, self.swarm.weather
        copies = list(self.engine.copies.open.values())
        if weather.die and self.engine.num_workers > len(self.dead) and picks.chance(weather.die):
            self.dead[picks.integer(0, self.engine.num_workers - 1)] = picks.integer(1, 12)
            self.engine.events["a worker died"] += 1
        if weather.shuffle and len(copies) > 1:
            copies.insert(0, copies.pop(picks.integer(0, len(copies) - 1)))
        for copy in copies:
            for rank in list(copy.missing):
                self._get_on(copy, rank)
        for rank in list(self.dead):
            self.dead[rank] -= 1
            if self.dead[rank] <= 0:
                # It has provably stopped: nothing it was at touches a byte from now on.
                for copy in list(self.engine.copies.open.values()):
                    if rank in copy.missing:
                        self.reports.append(self.engine.copies.report(copy, rank, "the worker died", 0.0))
                del self.dead[rank]
        self._tell()

    def _get_on(self, copy: OpenCopy, rank: int) -> None:
        picks, weather = self.picks, self.swarm.weather
        if rank in self.dead:
            return
        if weather.move_early and rank not in copy.moved and picks.chance(weather.move_early):
            self.engine.copies.move(copy, rank)
        if weather.end < 1.0 and not picks.chance(weather.end):
            return
        error = "injected" if weather.fail and picks.chance(weather.fail) else None
        self.reports.append(self.engine.copies.report(copy, rank, error, picks.integer(1, 8) / 64))

    def _tell(self) -> None:
        """Tell the engine what was reported, all of it or late, and some of it again."""
        picks, weather = self.picks, self.swarm.weather
        if weather.delay and self.reports and picks.chance(weather.delay):
            return
        results, self.reports = self.reports, []
        if weather.shuffle and len(results) > 1:
            results.insert(0, results.pop())
        if weather.repeat and self.past and picks.chance(weather.repeat):
            results.insert(picks.integer(0, len(results)), picks.choice(self.past))
        if results:
            self.past = [*self.past[-20:], *results]
        self.engine.deliver(results)

    def report_nonsense(self) -> None:
        """A report by a rank, or on a job, that never was."""
        self.reports.append(TransferResult(self.picks.integer(-1, 99), self.picks.choice((-1, 7)), None, 5, 5.0))

    # --- time ---------------------------------------------------------------------------------------------------------

    def jump(self) -> None:
        """The clock is set, forwards or backwards."""
        seconds = self.picks.choice((0.0, 30.0, 4000.0, -1.0, -50.0))
        self.engine.now_s += seconds
        self.engine.ledger.clock_changed()

    def change_pace(self) -> None:
        """Steps take another time from now on."""
        self.engine.step_s = self.picks.choice((0.0, 0.001, 0.1, 1.0))


MOVES: dict[str, float] = {
    move.__name__: weight
    for move, weight in (
        (World.abort, 0.5),
        (World.preempt, 0.5),
        (World.come_again, 0.2),
        (World.ask_again, 1.0),
        (World.ask_for_nobody, 0.3),
        (World.turn_over, 1.0),
        (World.sleep, 0.15),
        (World.fail_step, 0.1),
        (World.report_nonsense, 0.3),
        (World.reset_all, 0.3),
        (World.reset_some, 0.4),
        (World.reset_tiers, 0.2),
        (World.empty_pool, 0.5),
        (World.trouble_tier, 0.3),
        (World.change_tiers, 0.3),
        (World.query, 3.0),
        (World.limit_tenant, 0.3),
        (World.pause, 0.5),
        (World.override, 0.5),
        (World.drop_override, 0.5),
        (World.set_runtime, 0.5),
        (World.put_rule, 0.5),
        (World.drop_rule, 0.5),
        (World.switch_mode, 0.5),
        (World.switch_eviction_policy, 0.5),
        (World.set_store_threshold, 0.2),
        (World.pin_block, 0.5),
        (World.drop_block, 0.5),
        (World.retain, 0.5),
        (World.resize, 0.5),
        (World.flush, 2.0),
        (World.end_flush, 0.3),
        (World.look, 0.5),
        (World.jump, 0.3),
        (World.change_pace, 0.3),
    )
}
"""What can happen to a world besides arrivals, transfers and steps, and how often in proportion."""
IN_FEWER_WORLDS = frozenset({"sleep", "change_tiers", "limit_tenant", "pause"})
"""Moves that keep others from coming to much."""
