"""Whoever follows the events knows what the pool holds and which requests have ended."""

from __future__ import annotations

import random

from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.pool.events import CacheEvent, EvictionBatch, RequestEnd, ResetEvent, StoreBatch
from kvferry.core.pool.inventory import Inventory
from tests.harness.toy_engine import ToyEngine, ToyRequest


class Follower:
    """Knows the pool from its events alone."""

    def __init__(self) -> None:
        self.holders: dict[Key, RequestIdentity] = {}
        self.num_stored = 0
        self.ended: list[RequestEnd] = []

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, StoreBatch):
            assert event.keys
            self.num_stored += len(event.keys)
            for key in event.keys:
                assert key not in self.holders, "stored twice without leaving"
                self.holders[key] = event.origin
        elif isinstance(event, EvictionBatch):
            for key, origin in zip(event.rows.keys, event.rows.origins, strict=True):
                assert self.holders.pop(key) is origin
        elif isinstance(event, ResetEvent):
            assert event.dropped == len(self.holders)
            self.holders.clear()
        elif isinstance(event, RequestEnd):
            self.ended.append(event)


def test_events_when_followed_give_the_contents_of_the_pool() -> None:
    follower = Follower()
    engine = ToyEngine(24, 40, sink=follower)
    rng = random.Random(7)
    for number in range(60):
        tokens = [rng.randrange(3) * 1000 + at for at in range(rng.randrange(4, 40))]
        engine.add(ToyRequest(f"r{number}", tokens, len(tokens), rng.randrange(1, 6), lora=f"l{number % 2}"))
        for _ in range(rng.randrange(1, 6)):
            engine.step(rng.randrange(1, 30), copy=rng.random() < 0.7)
        if number % 20 == 19:
            engine.offload.resets.reset(engine.now_s)
        if number % 20 == 9:
            engine.offload.resets.reset(engine.now_s, RequestFilter(lora="l1"))
        held = Inventory(engine.manager).list_blocks(0, 100)
        assert follower.holders == dict(zip(held.keys, held.origins, strict=True))
    engine.run()
    snapshot = engine.offload.snapshot()
    assert follower.num_stored == snapshot.store.stored > 24
    assert snapshot.evictions.by_reason.keys() == {"capacity", "reset"}
    assert sorted(end.origin.request_id for end in follower.ended) == sorted(f"r{number}" for number in range(60))
