"""Replays through the core find what the engine would."""

from __future__ import annotations

import random

import pytest

from kvferry.app.replay.core_replay import Replay, ReplayedRequest, Setup
from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import make_keys

BLOCK = 16


@pytest.mark.parametrize("mode", list(StoreMode))
def test_a_replay_finds_each_prefix_that_pool_and_device_have_together(mode: StoreMode) -> None:
    """In lazy mode the device alone may have the middle of a prefix, which the request waits for until it is stored."""
    for seed in range(5):
        rng, replay = random.Random(seed), Replay(Setup(24, 40, "lru", mode, 2, BLOCK))
        chains = [[rng.randbytes(8) for _ in range(14)] for _ in range(5)]
        for number in range(60):
            hashes = [*rng.choice(chains)[: rng.randrange(4, 14)], *(rng.randbytes(8) for _ in range(rng.randrange(5)))]
            keys = make_keys(hashes, 0)
            is_there = [
                bool(replay.device.find_prefix([one])) or bool(replay.offload.manager.lookup([key]).size)
                for one, key in zip(hashes, keys, strict=True)
            ]
            before, tokens = replay.tokens.device + replay.tokens.pool, BLOCK * len(hashes) + 1
            replay.run([(float(number), ReplayedRequest(f"r{number}", tokens, tokens + 2, hashes))])
            num_found = replay.tokens.device + replay.tokens.pool - before
            assert num_found == BLOCK * [*is_there, False].index(False)
