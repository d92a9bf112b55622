"""Exports and imports in a simulated world: one at a time, beside the engine, with a store that has its own troubles.

What was exported is imported again, after the pool has lost it by evictions and resets. The checks of the toy engine
see wrong bytes, pins and slots; here it is checked that no import brings what a reset has concerned since it began.
"""

from __future__ import annotations

from kvferry.core.keys import Key, RequestFilter
from kvferry.core.scheduler.exchange import Batch, BlockEntry, ChosenBlocks
from kvferry.core.tiers.base import TIER_METHODS
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_tiers import ToyTier
from tests.sim.picks import Picks
from tests.sim.swarm import TierWeather

NAME = "store"
_MAX_BATCHES = 2


class Exchanges:
    """The store of one world, which keeps its blocks from one export to the next import."""

    def __init__(self, engine: ToyEngine, picks: Picks, weather: TierWeather) -> None:
        self._engine = engine
        self._picks = picks
        self._weather = weather
        self._tier: ToyTier | None = None
        self._past: list[ToyTier] = []
        """Tiers of earlier exports and imports, of which a job may still be under way."""
        self._stored: dict[Key, BlockEntry] = {}
        self._content: dict = {}
        self._to_export: ChosenBlocks | None = None
        self._to_import: list[BlockEntry] = []
        self._may_evict = False
        self._batches: list[Batch] = []
        self._concerned: set[Key] = set()
        """Keys that resets have concerned which began since the store was opened."""
        self.num_opened = 0

    def open(self, match: RequestFilter | None) -> None:
        """An export or an import begins, unless one is under way."""
        engine, picks, exchange = self._engine, self._picks, self._engine.offload.tiers.exchange
        if self._tier is not None:
            return
        tier = ToyTier(engine)
        tier.blocks = self._content
        tier.due = lambda number: picks.chance(self._weather.end)
        tier.shuffle = lambda count: picks.integer(0, count - 1) if self._weather.shuffle else 0
        tier.repeats = lambda: picks.chance(self._weather.repeat)
        self._tier = engine.stores[NAME] = tier
        self.trouble()
        exchange.open(NAME, tier)
        self._concerned = set()
        self.num_opened += 1
        if self._stored and picks.chance(0.5):
            self._to_import = list(self._stored.values())
            self._may_evict = picks.chance(0.5)
            engine.events["an import began"] += 1
        else:
            size = engine.layout.slot_bytes
            self._to_export = exchange.choose(match, picks.choice((None, None, size, 5 * size)))
            engine.events["an export began"] += 1

    def trouble(self) -> None:
        """The store becomes slow, dies, fails at a call, loses blocks, or is well again."""
        tier, picks = self._tier, self._picks
        if tier is None:
            return
        loses = picks.chance(0.2)
        tier.latency_s = picks.choice((0.0, 0.0, 0.3, 20.0))
        tier.dead = picks.chance(0.15)
        tier.raises = {picks.choice(TIER_METHODS)} if picks.chance(0.15) else set()
        tier.loses = lambda key: loses and key[0] % 3 == 0

    def was_reset(self, match: RequestFilter | None) -> None:
        """A reset of the pool, of all blocks or of matching ones, has answered."""
        concerned = {key for key, entry in self._stored.items() if match is None or match.matches(entry.origin)}
        self._concerned |= concerned
        self._engine.events["a reset met an import"] += bool(concerned and self._to_import)

    def was_dropped(self, key: Key) -> None:
        """A block was dropped by an operator."""
        self._concerned.add(key)

    def get_on(self) -> None:
        """Submit another batch, take results, or end; a tier may be given up in mid-transfer."""
        engine, picks, exchange = self._engine, self._picks, self._engine.offload.tiers.exchange
        if self._tier is None:
            if exchange.clients:
                exchange.poll(engine.now_s)
            return
        if len(self._batches) < _MAX_BATCHES and picks.chance(0.5):
            self._submit()
        exchange.poll(engine.now_s)
        self._take()
        is_done = not (self._batches or self._to_import or self._to_export is not None)
        if picks.chance(0.3 if is_done else 0.01):
            self.close()

    def close(self) -> None:
        """Cancel what is open."""
        engine, exchange, tier = self._engine, self._engine.offload.tiers.exchange, self._tier
        if tier is None:
            return
        engine.events["an export or import was canceled"] += bool(self._batches)
        exchange.close(engine.now_s)
        is_stuck = any(client.has_stuck_jobs() for client in exchange.clients)
        assert is_stuck or not any(batch.is_open for batch in self._batches), "a batch is open whose store is closed"
        self._take()
        engine.events["a job of a closed store was stuck"] += bool(self._batches)
        self._batches = []
        self._to_import, self._to_export, self._tier = [], None, None
        self._past.append(tier)

    def settle(self) -> None:
        """End without trouble."""
        for tier in [*self._past, *([] if self._tier is None else [self._tier])]:
            tier.dead, tier.latency_s, tier.raises, tier.loses = False, 0.0, set(), lambda key: False
        self.close()
        exchange = self._engine.offload.tiers.exchange
        for _ in range(100):
            self._engine.now_s += 1.0
            exchange.poll(self._engine.now_s)
            if not exchange.open_jobs():
                break
        assert not exchange.open_jobs(), "a job of a store does not end"

    def check(self) -> None:
        """The store got right bytes, and touches no slot that was taken from it."""
        ours = {slot for job in self._engine.offload.tiers.exchange.open_jobs() for slot in job.slots.tolist()}
        for tier in [*self._past, *([] if self._tier is None else [self._tier])]:
            assert not tier.wrongs, tier.wrongs
            assert tier.holds_right_bytes(), "a store holds wrong bytes"
            assert tier.touched_slots <= ours, "a store may touch slots that were taken from it"

    def _submit(self) -> None:
        engine, exchange = self._engine, self._engine.offload.tiers.exchange
        if self._to_export is not None:
            batch, rest = exchange.store(self._to_export, engine.now_s)
            self._to_export = rest if len(rest.slots) else None
        elif self._to_import:
            some = self._to_import[: self._picks.integer(1, exchange.batch_blocks)]
            del self._to_import[: len(some)]
            batch = exchange.load(some, engine.now_s, may_evict=self._may_evict)
        else:
            return
        self._batches.append(batch)

    def _take(self) -> None:
        events = self._engine.events
        for batch in [one for one in self._batches if not one.is_open]:
            self._batches.remove(batch)
            done = [one for one, ok in zip(batch.entries, batch.ok.tolist(), strict=True) if ok]
            if batch.blocks is None:
                brought = {one.key for one in done}
                assert brought.isdisjoint(self._concerned), "an import brought what a reset had concerned"
                events["blocks imported"] += len(brought)
            else:
                assert {one.key for one in done} <= self._content.keys(), "a block counts as exported and is not"
                self._stored |= {one.key: one for one in done}
                events["blocks exported"] += len(done)
            events["blocks not copied by an export or import"] += len(batch.entries) - len(done)
