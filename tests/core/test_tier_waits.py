"""Promotions that begin when a request arrives, and how long it waits for them."""

from __future__ import annotations

import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.policy import Override, TierWait, TierWaitMode
from kvferry.core.tiers.base import HOST
from tests.core.test_demands import WINDOWED
from tests.core.test_tiers import engine_with, engine_with_stored, forget, prompt_tokens, request, serve, serve_on, use
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_tiers import TIMEOUT_S


def announced(blocks: int = 5, **options) -> ToyEngine:
    """An engine whose tier has the blocks of a request `s`, which has arrived and was not scheduled."""
    engine = engine_with_stored(blocks=blocks, **options)
    engine.add(request("s", blocks))
    return engine


def announce_families(engine: ToyEngine, families: range, blocks: int = 3) -> None:
    """Have the tier store a prompt of so many blocks of each family, and a request `s1` and so on for each arrive."""
    for family in families:
        serve(engine, request(f"r{family}", blocks, family=family))
    forget(engine)
    for family in families:
        engine.add(request(f"s{family}", blocks, family=family))


def pass_results(engine: ToyEngine) -> None:
    """Let results arrive twice, of a look-up and of a promotion, without scheduling anything."""
    for _ in range(2):
        engine.deliver([])


def set_wait(engine: ToyEngine, text: str, name: str = "s") -> None:
    engine.set_override(Override(name, {"tier_wait": TierWait.parse(text)}, 1e9))


def waiting(engine: ToyEngine, name: str = "s") -> bool:
    """Take a step without time for a tier, and return whether a request waits."""
    engine.step()
    return engine.requests[name].state == "waiting"


def compute_rate(engine: ToyEngine, seconds_per_token: float) -> None:
    for _ in range(8):
        engine.offload.cost_model.tokens_rate.observe(1000, 1000 * seconds_per_token)


# --- before the first match -----------------------------------------------------------------------------------------


def test_request_when_announced_is_promoted_before_it_is_scheduled() -> None:
    engine = announced()
    assert use(engine).looked_up == 10, "as it arrived, besides those of the request that stored"
    pass_results(engine)
    assert use(engine).promoted == 5
    engine.step()
    assert engine.requests["s"].state == "loading", "it did not wait"
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}
    assert engine.offload.snapshot().tier_waits.requests == 1, "that of the first request, which nothing was found for"


def test_request_when_announced_looks_up_what_the_device_lacks() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    engine.reset(places=[HOST])
    looked_up = use(engine).looked_up
    engine.add(request("s", 7))
    assert use(engine).looked_up == looked_up + 2


def test_request_when_its_device_prefix_left_is_looked_up_again() -> None:
    engine = engine_with()
    serve(engine, request("r", 5))
    engine.reset(places=[HOST])
    engine.add(request("s", 7))
    engine.device.forget_all()
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}


def test_long_prompt_is_promoted_early_in_parts() -> None:
    engine = announced(1400, num_slots=8000, num_blocks=3000)
    for _ in range(5):
        pass_results(engine)
    assert use(engine).promoted == 1400


def test_long_prompts_are_promoted_early_one_a_step() -> None:
    engine = engine_with(num_slots=40_000, num_blocks=4096)
    announce_families(engine, range(1, 5), blocks=1000)
    promoted = []
    for _ in range(6):
        engine.deliver([])
        promoted.append(use(engine).promoted)
    assert promoted == [0, 1000, 2000, 3000, 4000, 4000]
    forget(engine)
    tier = engine.tiers["disk"]
    tier.due = lambda number: not tier.is_load(number)
    for family in range(1, 5):
        engine.add(request(f"t{family}", 1000, family=family))
    for _ in range(6):
        engine.deliver([])
    assert len(engine.offload.tiers.loads.open) == 2, "the others begin when these end: a tier has a time limit"
    tier.due = lambda number: True
    for _ in range(5):
        engine.deliver([])
    assert use(engine).promoted == 8000


def test_early_promotions_of_a_slow_tier_do_not_delay_others() -> None:
    engine = engine_with("slow", "fast", num_slots=20_000, num_blocks=4096)
    for family, name in ((1, "slow"), (2, "slow"), (3, "slow"), (4, "fast")):
        engine.set_override(Override(f"r{family}", {"tiers": (name,)}, 1e9))
    slow = engine.tiers["slow"]
    slow.due = lambda number: not slow.is_load(number)
    announce_families(engine, range(1, 5), blocks=1000)
    for _ in range(8):
        engine.deliver([])
    assert [use(engine, name).promoted for name in ("slow", "fast")] == [0, 1000]
    assert len(engine.offload.tiers.loads.open) == 2


def test_early_promotions_take_a_quarter_of_the_pool() -> None:
    engine = engine_with(num_slots=24, num_blocks=64)
    announce_families(engine, range(1, 6))
    pass_results(engine)
    assert use(engine).promoted == 6
    engine.finish(engine.requests["s1"])
    engine.finish(engine.requests["s2"])
    serve_on(engine)
    assert prompt_tokens(engine, "s5").tier_hit == {"disk": 12}, "the others are promoted once they could run"


def test_requests_beyond_the_limit_are_looked_up_as_others_end() -> None:
    engine = engine_with(num_slots=256, num_blocks=256)
    for number in range(70):
        engine.add(request(f"r{number}", 1, family=number + 1))
    assert use(engine).looked_up == 64
    for _ in range(9):
        engine.deliver([])
    assert use(engine).looked_up == 70


@pytest.mark.parametrize("steps", [0, 1])
def test_reset_between_arrival_and_first_match_promotes_nothing(steps: int) -> None:
    engine = announced()
    for _ in range(steps):
        engine.deliver([])
    engine.reset()
    serve_on(engine)
    assert use(engine).promoted == 0
    assert prompt_tokens(engine, "s").recomputed == 21
    engine.check()


def test_follower_of_an_early_promotion_waits_until_it_ends() -> None:
    engine = announced()
    engine.deliver([])
    engine.add(request("t", 5))
    pass_results(engine)
    serve_on(engine)
    assert use(engine).promoted == 5, "each block came once"
    assert [prompt_tokens(engine, name).recomputed for name in "st"] == [1, 1]


# --- how long a request waits ---------------------------------------------------------------------------------------


def test_best_effort_request_never_waits() -> None:
    engine = engine_with_stored()
    set_wait(engine, "best_effort")
    engine.add(request("s", 5))
    assert not waiting(engine)
    assert prompt_tokens(engine, "s").tier_hit == {}
    assert engine.offload.snapshot().tier_waits.ended_early == 1


@pytest.mark.parametrize("text", ["best_effort", "timeout:0.001"])
def test_request_waits_for_its_early_promotion_no_longer_in_lazy_mode(text: str) -> None:
    engine = engine_with_stored(num_slots=128)
    engine.set_mode(StoreMode.LAZY)
    serve(engine, request("other", 5, family=2))
    set_wait(engine, text)
    engine.add(request("s", 5))
    engine.deliver([])
    assert engine.offload.tiers.loads.open
    engine.tiers["disk"].due = lambda number: False
    for _ in range(3):
        engine.step()
    assert "s" not in engine.requests, "it was computed"
    assert prompt_tokens(engine, "s").tier_hit == {}


def test_best_effort_request_waits_for_blocks_of_the_device_that_a_tier_loads_too() -> None:
    engine = engine_with(specs=WINDOWED[1:], num_slots=128, watermark_blocks=1)
    cache = engine.device.cache
    serve(engine, request("r", 5))
    forget(engine)
    engine.device.cache = lambda group, *block: None if engine.groups[group].reach_tokens else cache(group, *block)
    engine.set_mode(StoreMode.LAZY)
    engine.offload.tiers.enable("disk", is_enabled=False)
    serve(engine, request("t", 5))
    engine.offload.tiers.enable("disk", is_enabled=True)
    set_wait(engine, "best_effort")
    engine.add(request("s", 5))
    engine.deliver([])
    assert engine.offload.tiers.loads.open
    engine.tiers["disk"].due = lambda number: False
    engine.step()
    (job_id,) = engine.copies.open
    assert waiting(engine)
    engine.end_job(job_id)
    serve_on(engine)
    assert prompt_tokens(engine, "s").host_hit == 20


def test_best_effort_request_gets_what_has_arrived() -> None:
    engine = engine_with_stored()
    set_wait(engine, "best_effort")
    engine.add(request("s", 5))
    pass_results(engine)
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}


def test_best_effort_request_does_not_follow_a_promotion() -> None:
    engine = engine_with_stored()
    engine.tiers["disk"].latency_s = 0.05
    engine.add(request("s", 5))
    while not engine.offload.snapshot().pool.storing:
        engine.deliver([])
        engine.step()
    set_wait(engine, "best_effort", "t")
    engine.add(request("t", 5))
    assert not waiting(engine, "t")


@pytest.mark.parametrize(("text", "waits_s"), [("timeout", 1.0), ("timeout:0.5", 0.5), ("timeout:3", 3.0)])
def test_wait_ends_at_its_timeout(text: str, waits_s: float) -> None:
    engine = engine_with_stored()
    compute_rate(engine, 0.05)
    engine.tiers["disk"].dead = True
    set_wait(engine, text)
    engine.add(request("s", 5))
    engine.now_s += 100.0
    engine.tiers["disk"].timeout_s = 1000.0
    started_s = engine.now_s
    while waiting(engine):
        assert engine.now_s < started_s + 10
    elapsed_s = engine.now_s - started_s
    assert waits_s - engine.step_s <= elapsed_s <= waits_s + 2 * engine.step_s
    waits = engine.offload.snapshot().tier_waits
    assert waits.ended_early == 1
    assert waits.seconds == pytest.approx(elapsed_s, abs=3 * engine.step_s)


def test_complete_wait_lasts_longer_than_computing() -> None:
    engine = engine_with_stored()
    compute_rate(engine, 0.001)
    engine.tiers["disk"].latency_s = 2.0
    set_wait(engine, "wait_complete")
    engine.add(request("s", 5))
    serve_on(engine)
    assert prompt_tokens(engine, "s").tier_hit == {"disk": 20}
    snapshot = engine.offload.snapshot()
    assert snapshot.tier_waits.seconds >= 4.0
    assert snapshot.tier_waits.ended_early == 0
    assert snapshot.latencies.tier_wait.total == pytest.approx(snapshot.tier_waits.seconds)


@pytest.mark.parametrize("cannot_cancel", [False, True])
def test_complete_wait_for_a_dead_tier_ends_with_the_tiers_timeout(cannot_cancel: bool) -> None:
    engine = engine_with_stored()
    tier = engine.tiers["disk"]
    set_wait(engine, "wait_complete")
    engine.add(request("s", 5))
    engine.deliver([])
    tier.dead, tier.raises = True, {"cancel"} if cannot_cancel else set()
    started_s = engine.now_s
    engine.step_s = 1.0
    while waiting(engine):
        engine.deliver([])
        assert engine.now_s < started_s + TIMEOUT_S + 5
    serve_on(engine)
    assert prompt_tokens(engine, "s").recomputed == 21


@pytest.mark.parametrize(
    "text", ["best_effort", "wait_complete", "timeout", "timeout:0", "timeout:2.5", "timeout:0.001"]
)
def test_tier_wait_is_written_as_it_is_read(text: str) -> None:
    assert str(TierWait.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "Timeout", "timeout:", "timeout:-1", "timeout:1e9", "timeout:10000", "timeout:1.\n"]
)
def test_tier_wait_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be best_effort, wait_complete, timeout"):
        TierWait.parse(text)


def test_tier_wait_of_a_request_is_read_if_allowed() -> None:
    engine = engine_with(request_fields=("tier_wait",))
    for number, (given, mode) in enumerate(
        [("best_effort", TierWaitMode.BEST_EFFORT), (5, TierWaitMode.TIMEOUT), ("soon", TierWaitMode.TIMEOUT)]
    ):
        engine.add(request(f"r{number}", 2, kv_transfer_params={"tier_wait": given}))
        view = engine.offload.requests.find(f"r{number}", engine.now_s)
        assert view is not None
        assert view.policy.policy.tier_wait.mode is mode
