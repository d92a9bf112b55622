"""Flushes in a simulated world, beside the engine: what the driver does, with operators between any two of its steps.

The checks of the toy engine see wrong bytes, pins and slots; here it is checked that a flush holds no more than it may,
and that it submits nothing once a reset has ended it.
"""

from __future__ import annotations

from collections.abc import Collection

from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.rules import RuleSubject
from kvferry.core.scheduler.flushes import Flush, FlushBatch, FlushRefused, FlushState
from tests.harness.toy_engine import ToyEngine
from tests.sim.picks import Picks


class FlushDriver:
    """The driver of all flushes of one world."""

    def __init__(self, engine: ToyEngine, picks: Picks) -> None:
        self._engine = engine
        self._picks = picks
        self._open: list[tuple[Flush, FlushBatch | None]] = []
        """Flushes that the driver has not seen the end of, with the batch that it has taken."""

    def begin(self, name: str, match: RequestFilter) -> None:
        """An operator flushes a tier, which may not be possible."""
        engine, flushes = self._engine, self._engine.offload.tiers.flushes
        try:
            flush = flushes.begin(name, match, engine.now_s)
        except (ValueError, FlushRefused):
            engine.events["a flush was refused"] += 1
            return
        flushes.choose(flush, self._names_of)
        self._open.append((flush, None))
        engine.events["a flush began"] += 1

    def _names_of(self, origin: RequestIdentity) -> Collection[str] | None:
        policies = self._engine.policies
        with policies.lock:
            return policies.resolve(RuleSubject(origin), {}, self._engine.now_s).policy.tiers

    def cancel(self) -> None:
        """An operator ends a flush."""
        if self._open:
            flush, _ = self._picks.choice(self._open)
            was_running = self._engine.offload.tiers.flushes.cancel(flush, self._engine.now_s)
            self._engine.events["a flush was canceled"] += was_running

    def running(self) -> list[Flush]:
        """The flushes that run."""
        return [flush for flush, _ in self._open if flush.is_running]

    def get_on(self) -> None:
        """Take a batch, or submit one that was taken."""
        for i, (flush, batch) in enumerate(self._open):
            if self._picks.chance(0.5):
                self._open[i] = flush, self._step(flush, batch)
        for flush, batch in [one for one in self._open if one[1] is None and not one[0].is_running]:
            self._open.remove((flush, batch))
            self._engine.events[f"a flush ended: {flush.state}"] += 1
            self._engine.events["blocks flushed"] += flush.num_stored
            self._engine.events["blocks left by a flush"] += flush.num_left

    def _step(self, flush: Flush, batch: FlushBatch | None) -> FlushBatch | None:
        flushes, now_s = self._engine.offload.tiers.flushes, self._engine.now_s
        if batch is None:
            return flushes.take(flush, now_s)
        num_jobs, was_running = flush.num_jobs, flush.is_running
        flushes.submit(flush, batch, now_s)
        assert was_running or flush.num_jobs <= num_jobs, "a flush submits after its end"
        return None

    def settle(self) -> None:
        """Let all flushes come to their end."""
        for _ in range(1000):
            if not self._open:
                return
            self.get_on()
            self._engine.now_s += 0.5
            self._engine.offload.tiers.poll(self._engine.now_s)
        raise AssertionError(f"flushes do not end: {self._open}")

    def check(self) -> None:
        """Flushes hold a bounded part of the pool, and those that are done have copied all that was here."""
        flushes, table = self._engine.offload.tiers.flushes, self._engine.manager.table
        assert 0 <= flushes.num_held <= max(table.last_end_slot // 8, 1), "flushes hold too much"
        for flush, _ in self._open:
            assert flush.num_stored + flush.num_left <= flush.num_blocks
            assert flush.state is not FlushState.DONE or flush.num_stored + flush.num_left == flush.num_blocks
