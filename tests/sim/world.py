"""A simulated world: an engine under traffic, whose transfers end well or badly, and whose operators interfere.

One step is: perhaps some moves, then transfers get on, then the engine takes a step, and then everything that must hold
is checked. Every decision comes from the world's picks, so a seed says all.
"""

from __future__ import annotations

from itertools import pairwise

from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import Level, Override, TierWait, TierWaitMode
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.resize import Todo
from kvferry.core.rules import Rule, RuleMatch, Span
from kvferry.core.tiers.base import HOST, TIER_METHODS, CascadeWhen
from kvferry.core.transfers import TransferResult
from tests.harness.toy_copies import OpenCopy
from tests.harness.toy_engine import ToyRequest
from tests.harness.toy_tokens import BLOCK_SIZE
from tests.sim.exchanges import Exchanges
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
_PATCHES = (
    {"offload_prompt_only": False},
    {"offload_prompt_only": True},
    {"max_offload_tokens": 0},
    {"max_offload_tokens": 10},
    {"max_offload_tokens": None},
    {"store": False},
    {"store": True, "load": True},
    {"load": False},
    {"priority": "high"},
    {"priority": "low"},
    {"level": Level.REQUEST},
    {"level": Level.BLOCK},
    {"tiers": ("fast",)},
    {"tier_wait": TierWait(TierWaitMode.BEST_EFFORT)},
    {"tier_wait": TierWait(TierWaitMode.WAIT_COMPLETE)},
    {"tier_wait": TierWait(TierWaitMode.TIMEOUT, 0.5)},
    {"tier_wait": TierWait(TierWaitMode.TIMEOUT, 5.0)},
    {"tiers": ()},
    {"tiers": None},
)
_RESETS = (
    RequestFilter(tenant="tenant*"),
    RequestFilter(tenant="tenant1"),
    RequestFilter(lora="lora"),
    RequestFilter(request="r*1"),
    RequestFilter(request="alias1", tenant=""),
    RequestFilter(request="nobody"),
)
_RULES = (
    RuleMatch(request="r*2"),
    RuleMatch(tenant="tenant*"),
    RuleMatch(request="alias*", prompt_tokens=Span(min=9)),
    RuleMatch(lora=""),
    RuleMatch(prompt_tokens=Span(max=16)),
)
_TENANT_TOKENS = 1_000_000
_FAMILY_TOKENS = 10_000


class World:
    """`moves` are what may happen to it, by name; the simulator and the hypothesis machine pick among the same."""

    def __init__(self, picks: Picks) -> None:
        self.picks = picks
        self.swarm: Swarm = draw_swarm(picks, MOVES)
        self.engine = self.swarm.engine
        self.engine.take_hit = self._take_hit
        self.engine.choose = self._choose
        self.num_arrived = 0
        self.known: list[ToyRequest] = []
        self.reports: list[TransferResult] = []
        self.past: list[TransferResult] = []
        self.dead: dict[int, int] = {}
        self.engine.living_ranks = lambda: [rank for rank in range(self.engine.num_workers) if rank not in self.dead]
        for tier in self.engine.tiers.values():
            tier.due = lambda number: self.picks.chance(self.swarm.tier_weather.end)
            tier.shuffle = self._shuffle_results
            tier.repeats = lambda: self.picks.chance(self.swarm.tier_weather.repeat)
        self.exchanges = Exchanges(self.engine, picks, self.swarm.tier_weather)
        self._draw_when()

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
        self.get_on_with_resize()
        self.exchanges.get_on()
        self.step_engine()
        if check:
            self.engine.check()
            self.exchanges.check()

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
        for tier in self.engine.tiers.values():
            tier.dead, tier.latency_s, tier.raises, tier.loses = False, 0.0, set(), lambda key: False
        self.exchanges.settle()
        self._run_dry()
        # Leases run out; in lazy mode that may make room for what waited to be stored.
        self.engine.now_s += 10_000.0
        self.engine.step(32)
        self._run_dry()
        self.engine.finish_resize()
        self.engine.check()
        self.engine.check_idle()
        for tier in self.engine.offload.snapshot().tiers.values():
            for name in tier.use.__slots__:
                self.engine.events[f"tiers: {name}"] += getattr(tier.use, name)
        for tier in self.engine.tiers.values():
            announced = [name for name in tier.announced if name.startswith("evicted-")]
            self.engine.events["given before an eviction"] += len(announced)
        for count in self.engine.offload.snapshot().prompt_tokens.tier_hit.values():
            self.engine.events["tokens hit in a tier"] += count
        self.engine.close()

    def _run_dry(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle() and not self.reports:
                return
            self.get_on_with_transfers()
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
            lora="lora" if tenant == 1 else None,
            kv_transfer_params=picks.choice(_PARAMS) if picks.chance(0.4) else None,
            aliases=(f"alias{self.num_arrived % 3}",) if picks.chance(0.2) else (),
            hash_block_size=self.engine.layout.hash_block_size,
            stop_after=picks.integer(1, 6) if picks.chance(swarm.stop_rate) else None,
        )

    def abort(self) -> None:
        """A client goes away."""
        request = self._some_request()
        if request is not None:
            self.engine.finish(request)

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

    # --- tiers ------------------------------------------------------------------------------------------------------

    def trouble_tier(self) -> None:
        """A tier becomes slow, dies, is well again, fails at a call, loses blocks, or wants something else or later."""
        picks = self.picks
        if not self.engine.tiers:
            return
        tier = self.engine.tiers[picks.choice(list(self.engine.tiers))]
        match picks.integer(0, 6):
            case 6:
                self._draw_when()
            case 0:
                tier.latency_s = picks.choice((0.0, 0.3, 2.0, 20.0))
            case 1:
                tier.dead = picks.chance(0.5)
            case 2:
                tier.raises = {picks.choice(TIER_METHODS)} if picks.chance(0.5) else set()
            case 3:
                loses = picks.chance(0.5)
                tier.loses = lambda key: loses and key[0] % 3 == 0
            case 4:
                tier.level = picks.choice(list(Level))
            case _:
                tier.dead, tier.latency_s, tier.raises = False, 0.0, set()

    def _draw_when(self) -> None:
        """Tiers receive blocks when they are stored, or, less often, before they are evicted."""
        for name in self.engine.tiers:
            when = CascadeWhen.EVICT if self.picks.chance(0.25) else CascadeWhen.STORE
            self.engine.offload.tiers.cascade_when(name, when)

    def _shuffle_results(self, count: int) -> int:
        return self.picks.integer(0, count - 1) if self.swarm.tier_weather.shuffle else 0

    # --- operators --------------------------------------------------------------------------------------------------

    def reset_tiers(self) -> None:
        """Forget everything, or what matches, in some of the places."""
        picks = self.picks
        names = [HOST, *self.engine.tiers]
        places = [name for name in names if picks.chance(0.5)] or [picks.choice(names)]
        self._reset(picks.choice((None, *_RESETS)), places)

    def empty_pool(self) -> None:
        """The pool forgets everything and the tiers keep it, so that it has to come from them."""
        if self.engine.tiers:
            self._reset(None, [HOST])

    def reset_all(self) -> None:
        """Forget everything, most often while something is under way."""
        if not self.engine.copies.open and self.picks.chance(0.8):
            return
        self._reset(None)
        assert self.engine.offload.snapshot().pool.ready == 0

    def reset_some(self) -> None:
        """Forget what matches."""
        if not self.engine.copies.open and self.picks.chance(0.8):
            return
        self._reset(self.picks.choice(_RESETS))

    def _reset(self, match: RequestFilter | None, places: list[str] | None = None) -> None:
        self.engine.reset(match, places)
        if places is None or HOST in places:
            self.exchanges.was_reset(match)

    def copy_out_or_in(self) -> None:
        """An operator exports blocks of the pool, or imports what was exported."""
        self.exchanges.open(self.picks.choice(_RESETS) if self.picks.chance(0.3) else None)

    def trouble_store(self) -> None:
        """The store of the export or import under way gets into trouble, or is well again."""
        self.exchanges.trouble()

    def override(self) -> None:
        """Set the policy of a request: one that is there, one that will come, or one that goes by an alias."""
        some = self._some_request()
        name = self.picks.choice((some.request_id if some else "r1", f"r{self.num_arrived + 1}", "alias1"))
        expires_s = self.engine.now_s + self.picks.choice((0.5, 5.0, 60.0))
        self.engine.set_override(Override(name, self.picks.choice(_PATCHES), expires_s))

    def drop_override(self) -> None:
        """Take a request's policy away."""
        known = sorted(self.engine.ledger.policies.overrides)
        self.engine.drop_override(self.picks.choice(known) if known else "nobody")

    def set_runtime(self) -> None:
        """Set or unset runtime defaults."""
        patch = self.picks.choice(_PATCHES)
        self.engine.set_runtime(patch, ()) if self.picks.chance(0.4) else self.engine.set_runtime({}, tuple(patch))

    def put_rule(self) -> None:
        """Set or change a rule."""
        picks = self.picks
        rule = Rule(picks.choice(("a", "b")), picks.integer(0, 2), picks.choice(_RULES), picks.choice(_PATCHES))
        self.engine.put_rule(rule)

    def drop_rule(self) -> None:
        """Take a rule away."""
        self.engine.drop_rule(self.picks.choice(("a", "b")))

    def switch_mode(self) -> None:
        """Offer blocks as they fill from now on, or as they leave the device."""
        self.engine.set_mode(self.picks.choice(list(StoreMode)))

    def switch_eviction_policy(self) -> None:
        """Exchange the eviction policy, by one step: the next may be to yet another."""
        self.engine.manager.switch_policy(self.picks.choice(tuple(EVICTION_POLICIES)))

    def set_store_threshold(self) -> None:
        """Store blocks from another offer on."""
        self.engine.manager.admission.set_threshold(self.picks.choice((1, 2, 2, 3)))

    def resize(self) -> None:
        """The pool is to be larger or smaller, whatever was wanted before."""
        resize, manager = self.engine.resize, self.engine.manager
        num_extents = self.picks.integer(1, manager.table.max_slots // resize.extent_slots)
        num_slots = num_extents * resize.extent_slots
        kind = "grow" if num_slots > manager.num_slots else "shrink"
        if num_slots != manager.num_slots:
            self.engine.events[f"asked to {kind}"] += 1
            self.engine.events["another size was wanted before that one came"] += resize.is_open
            self.engine.events["asked to grow again while shrinking"] += manager.table.is_shrinking and kind == "grow"
        resize.request(num_slots)

    def get_on_with_resize(self) -> None:
        """Whoever drives a resize takes some steps; ranks add memory, or free it, at their own pace, or cannot."""
        engine, picks = self.engine, self.picks
        if not engine.resize.is_open:
            return
        for _ in range(picks.integer(0, 6)):
            todo = engine.drive_resize(lambda rank: picks.chance(0.7))
            engine.events["a resize waited for slots in use"] += todo is Todo.LATER
            if todo is Todo.MEMORY and picks.chance(0.05):
                engine.events["memory could not be had"] += 1
                engine.resize.fail()
            engine.check()

    def pin_block(self) -> None:
        """Keep a block from eviction for a time, or let it go."""
        key = self._some_key()
        if key is not None:
            if self.picks.chance(0.7):
                now_s = self.engine.now_s
                self.engine.manager.operator_pins.pin(key, now_s + self.picks.integer(1, 20), now_s)
            else:
                self.engine.manager.operator_pins.unpin(key)

    def drop_block(self) -> None:
        """Take a block out, whatever is being done with it."""
        key = self._some_key()
        if key is not None:
            assert self.engine.offload.resets.drop_block(key, self.engine.now_s).dropped_blocks
            assert Inventory(self.engine.manager).find_block(key) is None
            self.exchanges.was_dropped(key)

    def _some_key(self) -> bytes | None:
        rows = Inventory(self.engine.manager).list_blocks(0, 100)
        return self.picks.choice(rows.keys) if len(rows.keys) else None

    def look(self) -> None:
        """Operators look at everything there is to see."""
        engine, offload = self.engine, self.engine.offload
        views = offload.requests.page(None, 5, engine.now_s)
        assert all(view.sequence > after.sequence for view, after in pairwise(views))
        for request_id in engine.requests:
            assert offload.requests.find(request_id, engine.now_s) is not None
        assert all(isinstance(reason, str) for reason in offload.tiers.health())
        engine.expire()
        assert offload.overdue_jobs(engine.now_s, 0.0) <= offload.snapshot().open_jobs
        Inventory(engine.manager).dirty_rows(5)
        Inventory(engine.manager).slot_states()

    def jump(self) -> None:
        """The clock is set, forwards or backwards."""
        seconds = self.picks.choice((0.0, 30.0, 4000.0, -1.0, -50.0))
        self.engine.now_s += seconds
        self.engine.ledger.clock_went_back_s += max(-seconds, 0.0)

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
        (World.fail_step, 0.1),
        (World.report_nonsense, 0.3),
        (World.reset_all, 0.3),
        (World.reset_some, 0.4),
        (World.reset_tiers, 0.2),
        (World.empty_pool, 0.5),
        (World.trouble_tier, 0.3),
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
        (World.resize, 0.5),
        (World.copy_out_or_in, 2.0),
        (World.trouble_store, 0.3),
        (World.look, 0.5),
        (World.jump, 0.3),
        (World.change_pace, 0.3),
    )
}
"""What can happen to a world besides arrivals, transfers and steps, and how often in proportion."""
