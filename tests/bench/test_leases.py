"""Replayed sessions with pauses: leases keep their hits beside a flood, and cost nothing once they are over."""

from __future__ import annotations

import pytest

from bench.leases import FLOOD_BLOCKS, run_after, run_sessions, session_trace
from kvferry.app.replay.core_replay import Setup, count_blocks
from kvferry.core.engine_api import StoreMode

NUM_SESSIONS = 8
RETAIN_S = 150.0
POINTS = 2.0


@pytest.mark.parametrize(
    ("mode", "policy"), [(StoreMode.EAGER, "lru"), (StoreMode.LAZY, "lru"), (StoreMode.EAGER, "hazard")]
)
def test_sessions_with_leases_find_what_they_find_without_a_flood(mode: StoreMode, policy: str) -> None:
    trace = session_trace(7, NUM_SESSIONS)
    pool = 2 * count_blocks(trace)
    setup = Setup(160, pool, policy, mode, 24, trace[0].block_size)
    # The pool is filled three times within a lease.
    interval_s = RETAIN_S * FLOOD_BLOCKS / (3 * pool)
    quiet = run_sessions(trace, setup, 0.0, 0.5, None)
    flooded = run_sessions(trace, setup, 0.0, 0.5, interval_s)
    leased = run_sessions(trace, setup, RETAIN_S, 0.5, interval_s)
    assert len(leased.accepted) > len(leased.by_request) / 2
    alone = quiet.hit_percent(leased.accepted)
    assert leased.hit_percent(leased.accepted) >= alone - POINTS
    assert policy != "lru" or flooded.hit_percent(leased.accepted) < alone - 20.0


@pytest.mark.parametrize("mode", list(StoreMode))
def test_leases_of_sessions_that_do_not_return_cost_others_nothing_afterwards(mode: StoreMode) -> None:
    trace = session_trace(7, NUM_SESSIONS)
    setup = Setup(160, count_blocks(trace) // 2, "lru", mode, 24, trace[0].block_size)
    without, over = (run_after(trace, setup, retain_s, 0.5) for retain_s in (0.0, RETAIN_S))
    assert over >= without - 0.5
