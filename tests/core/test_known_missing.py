"""The negative cache of a tier, against a model and around a scheduler."""

from __future__ import annotations

import random

from kvferry.core.tiers.base import HOST
from kvferry.core.tiers.known_missing import MAX_KEYS, MISSING_S, KnownMissing
from tests.core.test_tiers import engine_with, keys, request, serve, serve_on, use


def test_cache_agrees_with_a_model_of_answers_and_stores() -> None:
    """The model keeps every answer and every store, and derives from all of them what may be skipped."""
    for seed in range(40):
        picks = random.Random(seed)
        cache, names = KnownMissing(), [bytes([number]) for number in range(6)]
        answers: list[tuple[bytes, float, float, bool]] = []
        stores: list[tuple[bytes, float]] = []
        now_s = 0.0
        for _ in range(200):
            now_s += picks.choice((0.0, 0.125, 0.5, 1.5, 2.5))
            some = picks.sample(names, picks.randint(0, 3))
            kind = picks.randint(0, 2)
            if kind == 0:
                began_s = max(now_s - picks.choice((0.0, 0.125, 3.0)), 0.0)
                cache.add(some, began_s, now_s)
                # An answer that a store has overtaken says nothing.
                answers += [
                    (key, began_s, now_s, False)
                    for key in some
                    if not any(stored == key and stored_s >= began_s for stored, stored_s in stores)
                ]
            elif kind == 1:
                cache.discard(some)
                answers += [(key, now_s, now_s, True) for key in some]
            else:
                cache.record_stored(some, now_s)
                stores += [(key, now_s) for key in some]
                answers += [(key, now_s, now_s, True) for key in some]
            for key in names:
                latest = next((one for one in reversed(answers) if one[0] == key), None)
                is_missing = latest is not None and not latest[3] and now_s < latest[2] + MISSING_S
                assert cache.holds(key, now_s) is is_missing, f"seed {seed}, key {key!r} at {now_s}"


def test_cache_when_full_forgets_the_oldest_key() -> None:
    cache = KnownMissing()
    names = [number.to_bytes(4, "big") for number in range(MAX_KEYS + 5)]
    cache.add(names, 1.0, 1.0)
    assert len(cache) == MAX_KEYS
    assert [cache.holds(names[i], 1.0) for i in (4, 5, -1)] == [False, True, True]


def test_cache_when_the_clock_is_set_back_holds_nothing() -> None:
    cache = KnownMissing()
    cache.add([b"k"], 1000.0, 1000.0)
    assert not cache.holds(b"k", 10.0)


def test_missing_keys_are_not_looked_up_again_for_a_while() -> None:
    engine = engine_with()
    engine.set_runtime({"tiers": ("disk",), "offload_prompt_only": True, "max_offload_tokens": 0})
    serve_on(engine, request("r", 3))
    engine.device.forget_all()
    serve_on(engine, request("s", 3))
    assert (use(engine).looked_up, use(engine).known_missing) == (3, 3)
    engine.device.forget_all()
    engine.now_s += MISSING_S
    serve_on(engine, request("t", 3))
    assert (use(engine).looked_up, use(engine).known_missing) == (6, 3)


def test_keys_stored_by_another_engine_are_found_after_a_while() -> None:
    engine, other = engine_with(), engine_with()
    serve(other, request("r", 3))
    engine.tiers["disk"].loses = lambda key: True
    serve(engine, request("r", 3))
    engine.tiers["disk"].loses = lambda key: False
    engine.tiers["disk"].blocks |= other.tiers["disk"].blocks
    engine.device.forget_all()
    engine.reset(places=[HOST])
    engine.now_s += MISSING_S
    assert serve(engine, request("s", 3)).tier_hit == {"disk": 12}
    assert set(keys(3)) <= engine.tiers["disk"].blocks.keys()
