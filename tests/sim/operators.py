"""What operators do to a simulated world: resets, policies, modes, sizes, tiers, limits, prefetches, flushes.

They act between two steps, and in some worlds between the batches of a step or of each other's calls.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import Key, RequestFilter, SessionKey
from kvferry.core.policy import Level, Override, TierWait, TierWaitMode
from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.resize import Todo
from kvferry.core.rules import Rule, RuleMatch, Span
from kvferry.core.scheduler.prefix_query import PrefixQuery
from kvferry.core.tiers.base import HOST, CascadeWhen
from tests.harness.reference_tier import FALLIBLE
from tests.harness.toy_engine import ToyEngine, ToyRequest
from tests.harness.toy_tiers import ToyTier
from tests.harness.watched_lock import call_on_release
from tests.sim.flushes import FlushDriver
from tests.sim.picks import Picks
from tests.sim.swarm import Swarm

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
    {"max_load_tokens": 8},
    {"max_load_tokens": None},
    {"retain_s": 5.0},
    {"retain_s": 500.0},
    {"retain_s": 0.0},
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
    RuleMatch(priority=Span(min=1)),
    RuleMatch(prompt_tokens=Span(max=16)),
)
ENGINE_CALL = "a call of the engine"


class Operators:
    """Moves of operators, and of what works for them beside the engine."""

    engine: ToyEngine
    picks: Picks
    swarm: Swarm
    flushes: FlushDriver
    known: list[ToyRequest]
    num_arrived: int
    _some_request: Callable[..., ToyRequest | None]

    def begin_to_operate(self) -> None:
        """Watch the engine's calls, if others may act within them, and set the tiers up."""
        self.queries: list[PrefixQuery] = []
        self.detached: dict[str, tuple[ToyTier, set[Key]]] = {}
        """Detached tiers, with the keys that resets have concerned since."""
        self.within: list[str] = []
        """Calls that are under way, the innermost last."""
        engine, offload = self.engine, self.engine.offload
        for tier in engine.tiers.values():
            self._set_up(tier)
        self._draw_when()
        if not self.swarm.interferes:
            return
        others: list[tuple[object, str]] = [
            (offload, "on_request_finished"),
            (offload.tiers.prefetches, "begin"),
            (offload.retention, "retain"),
            (offload.resets, "reset"),
            (offload.tiers.flushes, "choose"),
            (engine.limits, "step"),
            (engine.resize, "step"),
        ]
        for owner, name in ((offload, "plan_step"), *others):
            is_of_engine = name in ("plan_step", "on_request_finished")
            called = ENGINE_CALL if is_of_engine else f"{type(owner).__name__}.{name}"
            setattr(owner, name, self._noting(called, getattr(owner, name)))
        call_on_release(offload, self._interfere, *others)

    def _noting(self, name: str, method: Callable) -> Callable:
        def noting(*args, **fields):
            self.within.append(name)
            try:
                return method(*args, **fields)
            finally:
                self.within.pop()

        return noting

    def _interfere(self) -> None:
        """The manager lock was released within a call: another thread may act."""
        picks, within = self.picks, self.within
        if not self.swarm.interferes or len(within) > 2 or not picks.chance(0.05):
            return
        engine = self.engine
        engine.events["an operator interfered"] += 1
        engine.events[f"interfered with {within[-1]}"] += 1
        if ENGINE_CALL not in within and picks.chance(0.5):
            engine.events["the engine went on within an operator's call"] += 1
            self.get_on_with_transfers()
            self.step_engine()
            return
        name = picks.choice(OPERATIONS)
        if name in _ALONE and any(each in _ALONE[name] for each in within):
            return
        self.move(name)

    def get_on_with_operations(self) -> None:
        """What works beside the engine takes some steps: a resize, limits, queries, flushes."""
        self.get_on_with_resize()
        self.get_on_with_limits()
        self.get_on_with_queries()
        self.flushes.get_on()

    def settle_operations(self) -> None:
        """Let all that operators have begun come to its end."""
        engine = self.engine
        engine.offload.pause_stores(False)
        for name, tier in engine.tiers.items():
            engine.offload.tiers.enable(name, is_enabled=True)
            tier.dead, tier.latency_s, tier.raises, tier.loses = False, 0.0, set(), lambda key: False
        for tier, _ in self.detached.values():
            assert not tier.wrongs, tier.wrongs
        self.flushes.settle()

    def check_limits(self) -> None:
        """Apply the limits of tenants in an idle pool: none has more than it may."""
        engine, tenants = self.engine, self.engine.manager.table.tenants
        for _ in range(1000):
            if not engine.limits.step(engine.now_s):
                break
        else:
            raise AssertionError("the limits of tenants are never applied")
        for tenant in tenants.names[1:]:
            limit = tenants.limit_of(tenant)
            assert limit is None or tenants.slots_of(tenant) <= limit, f"{tenant} has more than its limit {limit}"

    # --- tenants ----------------------------------------------------------------------------------------------------

    def limit_tenant(self) -> None:
        """Set or remove the limit of a tenant, or of all others."""
        picks, limits = self.picks, self.engine.limits
        size = self.engine.manager.slot_bytes
        max_bytes = picks.choice((None, None, 0, size, 3 * size, 8 * size, 8 * size + 1))
        tenant = f"tenant{picks.integer(1, 2)}"
        match picks.integer(0, 3):
            case 0:
                limits.set_default(picks.choice((None, 8 * size)))
            case 1:
                limits.unset_limit(tenant)
            case _:
                limits.set_limit(tenant, max_bytes)
        self.engine.events["a tenant was limited"] += max_bytes is not None

    def get_on_with_limits(self) -> None:
        """Limits are applied, a batch at a time."""
        for _ in range(self.picks.integer(0, 3)):
            if not self.engine.limits.step(self.engine.now_s):
                break

    # --- prefetches -------------------------------------------------------------------------------------------------

    def query(self) -> None:
        """A router asks for a prompt that it knows."""
        held = {key[:-1] for tier in self.engine.tiers.values() for key in tier.blocks}
        known = [one for one in self.known if not held.isdisjoint(one.block_hashes)] or self.known
        if known and len(self.queries) < 3 and (held or self.picks.chance(0.1)):
            if held and self.picks.chance(0.2):
                self.empty_pool()
            hashes = self.picks.choice(known).block_hashes
            query = self.engine.offload.query_prefix(hashes[: self.picks.integer(0, 2 * len(hashes))])
            query.ask_tiers(self.engine.now_s)
            self.queries.append(query)

    def get_on_with_queries(self) -> None:
        """Queries are answered, or end before that, and what they found is prefetched, or not."""
        engine, picks = self.engine, self.picks
        for query in list(self.queries):
            has_answers = query.has_answers()
            if query not in self.queries:
                # An operator who interfered has taken it.
                continue
            if not has_answers and not picks.chance(0.02):
                continue
            self.queries.remove(query)
            held = query.close()
            assert held.anywhere >= max(held.device, held.pool)
            names = [name for name in held.tiers if picks.chance(0.8)]
            if names and picks.chance(0.8):
                num_loading = engine.offload.tiers.prefetches.begin(query, names, engine.now_s)
                engine.events["a prefetch was too long"] += num_loading is None
                engine.events["blocks being prefetched"] += num_loading or 0

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
                tier.raises = {picks.choice(FALLIBLE)} if picks.chance(0.5) else set()
            case 3:
                loses = picks.chance(0.5)
                tier.loses = lambda key: loses and key[0] % 3 == 0
            case 4:
                tier.level = picks.choice(list(Level))
            case _:
                tier.dead, tier.latency_s, tier.raises = False, 0.0, set()

    def _set_up(self, tier: ToyTier) -> None:
        tier.due = lambda number: self.picks.chance(self.swarm.tier_weather.end)
        tier.shuffle = self._shuffle_results
        tier.repeats = lambda: self.picks.chance(self.swarm.tier_weather.repeat)

    def change_tiers(self) -> None:
        """Disable or enable a tier, detach it, or attach one, perhaps with what it had when it was detached."""
        engine, picks = self.engine, self.picks
        name = picks.choice(("fast", "slow"))
        if name not in engine.tiers:
            if engine.tiers or self.detached:
                self._attach(name)
        elif picks.chance(0.5):
            engine.offload.tiers.enable(name, is_enabled=picks.chance(0.6))
        else:
            tier = engine.detach_tier(name)
            engine.events["a tier could not be detached"] += tier is None
            if tier is not None:
                engine.events["a tier was detached"] += 1
                self.detached[name] = tier, set()

    def _attach(self, name: str) -> None:
        engine = self.engine
        tier, (before, concerned) = ToyTier(engine), self.detached.pop(name, (None, set()))
        if before is not None:
            engine.events["a tier was attached again"] += 1
            tier.blocks, tier.level, tier.latency_s = before.blocks, before.level, before.latency_s
        self._set_up(tier)
        engine.attach_tier(name, tier)
        assert concerned.isdisjoint(tier.blocks), "a tier has what a reset concerned while it was detached"

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
        detached, flushes = dict(self.detached), self.flushes.running()
        self.engine.reset(match, places)
        for flush in flushes:
            is_concerned = places is None or HOST in places or flush.client.name in places
            assert not (is_concerned and flush.is_running), "a flush goes on after a reset"
        self.was_reset(match, places)
        # Those that were detached meanwhile had it, or will have it.
        new = {n: one for n, one in self.detached.items() if detached.get(n) is not one and n in (places or ())}
        self.engine.events["a tier was detached within a reset of it"] += bool(new)
        self._concern(new, match)

    def was_reset(self, match: RequestFilter | None, places: list[str] | None) -> None:
        """A reset has answered."""
        self._concern(self.detached if places is None else {}, match)

    def _concern(self, detached: dict[str, tuple[ToyTier, set[Key]]], match: RequestFilter | None) -> None:
        for tier, concerned in detached.values():
            meant = {key for key, (_, origin) in tier.blocks.items() if match is None or match.matches(origin)}
            self.engine.events["a reset concerned a detached tier"] += bool(meant)
            concerned |= meant

    def flush(self) -> None:
        """Copy the pool's blocks to a tier."""
        match = self.picks.choice(_RESETS) if self.picks.chance(0.3) else RequestFilter()
        self.flushes.begin(self.picks.choice(("fast", "slow")), match)

    def end_flush(self) -> None:
        """End a flush."""
        self.flushes.cancel()

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

    def pause(self) -> None:
        """Store nothing for a time, or again."""
        is_paused = self.picks.chance(0.4)
        self.engine.events["storing was paused with stores in flight"] += is_paused and bool(self.engine.copies.open)
        self.engine.offload.pause_stores(is_paused)

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
            if not self.within:
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
            for _, concerned in self.detached.values():
                concerned.add(key)

    def retain(self) -> None:
        """Begin, replace or end the leases of a session."""
        engine, picks = self.engine, self.picks
        known = [one for one in self.known if one.session is not None]
        if not known:
            return
        one = picks.choice(known)
        session = SessionKey(one.tenant, one.session)
        if picks.chance(0.7):
            seconds = picks.choice((0.0, 3.0, 60.0))
            engine.offload.retention.retain(session, one.block_hashes, seconds, engine.now_s)
        else:
            engine.offload.retention.release(session, one.block_hashes[picks.integer(0, 5) :])

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


OPERATIONS = (
    "reset_all", "reset_some", "reset_tiers", "empty_pool", "drop_block", "pin_block", "retain", "switch_mode",
    "override", "set_runtime", "put_rule", "drop_rule", "switch_eviction_policy", "set_store_threshold", "resize",
    "look", "pause", "limit_tenant", "change_tiers", "query", "get_on_with_queries", "get_on_with_resize",
    "get_on_with_limits", "flush", "end_flush",
)  # fmt: skip
"""Moves that other threads than the engine's make."""
_ALONE = {
    "get_on_with_resize": ("PoolResize.step",),
    "get_on_with_limits": ("TenantLimits.step",),
}
"""Moves that one thread makes, so that they are not made within these calls."""
