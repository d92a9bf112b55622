"""Requests of a toy engine with one group of blocks."""

from __future__ import annotations

from kvferry.core.keys import make_keys
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest


def request(name: str, blocks: int, *, extra: int = 1, first: int = 0, max_tokens: int = 1, **fields) -> ToyRequest:
    """A prompt of so many blocks and `extra` tokens, which begins with token `first`."""
    tokens = list(range(first, first + blocks * BLOCK_SIZE + extra))
    return ToyRequest(name, tokens, len(tokens), max_tokens, **fields)


def answer(engine: ToyEngine, name: str, blocks: int, **fields) -> ToyRequest:
    """Run a request to its end, and check all invariants."""
    one = request(name, blocks, **fields)
    engine.add(one)
    engine.run()
    engine.check()
    return one


def store_and_turn_over(engine: ToyEngine) -> None:
    """Answer a request of five blocks, so that the host has them and the device has not."""
    answer(engine, "first", 5)
    engine.device.forget_all()


def findable(engine: ToyEngine, one: ToyRequest) -> int:
    """How many of a request's first blocks the pool has."""
    return len(engine.manager.lookup(make_keys(one.block_hashes, 0)))
