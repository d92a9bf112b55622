"""Worlds in which the service switches eviction policy and store mode by itself: none breaks a promise."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import nullcontext

import pytest

from kvferry.app.auto_switch import AutoSwitch
from kvferry.core.pool.events import CacheEvent, RequestBlocks
from kvferry.core.shadow.caches import ShadowCaches, ShadowSetup
from tests.harness.effort import LONG
from tests.sim.picks import SeededPicks
from tests.sim.world import World

SEEDS = range(3000, 3038 if LONG else 3002)
STEPS = 1500 if LONG else 300


class AutoWorld:
    """A world whose requests are simulated in shadow caches as they end, which it follows at once."""

    def __init__(self, seed: int) -> None:
        self.world = World(SeededPicks(seed))
        engine = self.world.engine
        self.inner, self.ended = engine.manager.sink, deque[RequestBlocks]()
        engine.manager.sink = self.receive
        engine.offload.block_readers.add(self)
        engine.ledger.was_lazy = True
        self.auto = AutoSwitch(engine.offload, lambda where: nullcontext(), lambda what, now_s: None)
        self.auto.apply(None, None)
        self.caches: ShadowCaches | None = None

    def receive(self, event: CacheEvent) -> None:
        if isinstance(event, RequestBlocks):
            self.ended.append(event)
        elif self.inner is not None:
            self.inner(event)

    def step(self) -> None:
        self.world.step(check=False)
        engine, num_ended = self.world.engine, len(self.ended)
        num_slots, group = engine.manager.table.target_slots, engine.layout.prefix_group
        if self.caches is None or self.caches.setup.num_slots != num_slots:
            device_slots = engine.device.num_usable // group.slot_blocks
            self.caches = ShadowCaches(ShadowSetup(num_slots, device_slots, group.slot_tokens))
        while self.ended:
            self.caches.record(self.ended.popleft())
        if num_ended:
            self.auto.follow(self.caches, num_ended)
        engine.check()


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small leads of few requests suffice."""
    monkeypatch.setattr("kvferry.core.auto_policy.MARGIN", 0.0)
    monkeypatch.setattr("kvferry.core.auto_policy.MIN_REQUESTS", 4)
    monkeypatch.setattr("kvferry.core.auto_policy.LEAD_REQUESTS", 0.2)
    monkeypatch.setattr("kvferry.app.auto_switch.CHECK_REQUESTS", 1)


def test_worlds_that_switch_by_themselves_break_no_promise() -> None:
    logging.disable(logging.CRITICAL)
    num_switches = 0
    try:
        for seed in SEEDS:
            one = AutoWorld(seed)
            for number in range(STEPS):
                try:
                    one.step()
                except Exception as error:
                    raise AssertionError(f"seed {seed}, step {number}") from error
            one.world.settle()
            num_switches += one.auto.state().num_switches
    finally:
        logging.disable(logging.NOTSET)
    assert num_switches >= (len(SEEDS) if LONG else 1), num_switches
