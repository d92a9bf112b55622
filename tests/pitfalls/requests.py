"""Requests of a toy engine that the tests of known failures have in common."""

from __future__ import annotations

from kvferry.core.keys import make_keys
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest


def request(name: str, blocks: int, *, first: int = 0, max_tokens: int = 1, **fields) -> ToyRequest:
    """A prompt of so many blocks and one token more, which begins with token `first`."""
    tokens = list(range(first, first + blocks * BLOCK_SIZE + 1))
    return ToyRequest(name, tokens, len(tokens), max_tokens, **fields)


def answer(engine: ToyEngine, name: str, blocks: int, **fields) -> ToyRequest:
    """Have a request answered, and all that must hold checked."""
    one = request(name, blocks, **fields)
    engine.add(one)
    engine.run()
    engine.check()
    return one


def findable(engine: ToyEngine, one: ToyRequest) -> int:
    """How many of a request's first blocks the pool has."""
    return len(engine.manager.lookup(make_keys(one.block_hashes, 0)))
