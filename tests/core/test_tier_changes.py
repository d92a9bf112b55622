"""Tiers that are attached, disabled and detached while requests run."""

from __future__ import annotations

import pytest

from kvferry.core.keys import RequestFilter
from kvferry.core.tiers.base import HOST
from tests.core.test_tiers import (
    engine_with,
    forget,
    keys,
    promoting,
    prompt_tokens,
    request,
    serve,
    serve_on,
    settle,
    start,
    use,
)
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_tiers import TIMEOUT_S, ToyTier
from tests.harness.watched_lock import call_on_release, watched_locks


def detach(engine: ToyEngine, name: str) -> bool:
    if not engine.offload.tiers.detach(name, engine.now_s):
        return False
    engine.tiers.pop(name).close(0.0)
    return True


def test_first_tier_when_attached_gets_blocks_stored_from_then_on() -> None:
    engine = ToyEngine(64, 64)
    engine.step_s = 0.01
    serve(engine, request("before", 3))
    tier = engine.attach_tier("disk")
    serve_on(engine, request("late", 3, family=2))
    settle(engine)
    assert tier.blocks.keys() == set(keys(3, family=2))
    forget(engine)
    assert serve(engine, request("again", 3, family=2)).tier_hit == {"disk": 12}
    assert not tier.wrongs


def test_tier_when_disabled_gets_no_jobs_and_resets_reach_it() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    serve(engine, request("r", 3))
    engine.offload.tiers.enable("disk", is_enabled=False)
    before = use(engine)
    forget(engine)
    assert serve(engine, request("s", 3)).recomputed == 13
    assert (use(engine).looked_up, use(engine).cascaded) == (before.looked_up, before.cascaded)
    assert "tier disk: is disabled by an operator" in engine.offload.tiers.health()
    engine.reset()
    settle(engine)
    assert not tier.blocks
    engine.offload.tiers.enable("disk", is_enabled=True)
    serve(engine, request("t", 3, family=2))
    assert tier.blocks.keys() == set(keys(3, family=2))


def test_tier_when_detached_in_a_promotion_publishes_nothing_of_it() -> None:
    engine = engine_with()
    promoting(engine)
    assert detach(engine, "disk")
    serve_on(engine)
    assert prompt_tokens(engine, "s").recomputed == 21
    engine.check()
    engine.check_idle()


def test_tier_when_detached_in_a_cascade_frees_its_slots() -> None:
    engine = engine_with()
    engine.tiers["disk"].latency_s = 5.0
    serve_on(engine, request("r", 3))
    assert engine.offload.snapshot().pool.pinned == 3
    assert detach(engine, "disk")
    assert engine.offload.snapshot().pool.pinned == 0
    serve_on(engine, request("s", 3, family=2))
    engine.check_idle()


def test_tier_when_detached_is_not_called_again_for_its_requests() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    start(engine, request("r", 3))
    assert detach(engine, "disk")
    tier.raises = {"store", "look_up"}
    serve_on(engine)
    engine.check()


def test_tier_that_may_touch_slots_cannot_be_detached_yet() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.dead, tier.raises = True, {"cancel"}
    serve_on(engine, request("r", 3))
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    assert not detach(engine, "disk")
    assert engine.offload.snapshot().pool.pinned == 3
    tier.dead, tier.raises = False, set()
    settle(engine)
    assert detach(engine, "disk")
    assert engine.offload.snapshot().pool.pinned == 0


def test_tier_that_could_not_be_detached_is_used_when_enabled_again() -> None:
    engine = engine_with()
    tier = engine.tiers["disk"]
    tier.dead, tier.raises = True, {"cancel"}
    serve_on(engine, request("r", 3))
    assert not detach(engine, "disk")
    tier.dead, tier.raises = False, set()
    settle(engine)
    engine.offload.tiers.enable("disk", is_enabled=True)
    serve(engine, request("s", 3, family=2))
    assert set(keys(3, family=2)) <= tier.blocks.keys()


def test_tier_with_an_open_reset_cannot_be_detached_yet() -> None:
    engine = engine_with()
    engine.tiers["disk"].dead = True
    engine.reset()
    assert not detach(engine, "disk")
    engine.tiers["disk"].dead = False
    settle(engine)
    assert detach(engine, "disk")


def test_changes_of_an_unknown_tier_are_refused() -> None:
    engine = engine_with()
    for change in (lambda: engine.offload.tiers.enable("tape", is_enabled=True), lambda: detach(engine, "tape")):
        with pytest.raises(ValueError, match="there is no tier called tape"):
            change()
    engine.reset(places=[HOST])


def test_last_tier_when_detached_is_shown_no_more() -> None:
    engine = engine_with()
    serve(engine, request("r", 3))
    assert "disk" in engine.offload.snapshot().tiers
    assert detach(engine, "disk")
    assert not engine.offload.snapshot().tiers


def test_tier_detached_within_a_reset_of_it_is_reset_once_attached() -> None:
    with watched_locks():
        engine = engine_with()
    serve_on(engine, request("r", 3))
    settle(engine)
    blocks = engine.tiers["disk"].blocks
    assert blocks
    tiers: list[ToyTier] = []

    def detach_once() -> None:
        if not tiers:
            tiers.append(engine.detach_tier("disk"))

    call_on_release(engine.offload, detach_once, (engine.offload.resets, "reset"))
    ticket = engine.offload.resets.reset(engine.now_s, RequestFilter(request="r"), [HOST, "disk"])
    assert (ticket.tiers, ticket.detached) == ({}, ("disk",))
    again = ToyTier(engine)
    again.blocks = blocks
    engine.attach_tier("disk", again)
    assert not again.blocks
