"""What offloading costs and saves, through the real engine: storing is paused while it does not pay.

The engine's clock stands still but for the model, a second each forward pass. Hooks take 50 ms by theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from random import Random
from typing import Any

import pytest
import torch

from kvferry.app.telemetry.balance import Balance, BalanceWatch
from kvferry.app.telemetry.history import StatsHistory
from kvferry.core.auto_pause import NOISE_S, WINDOW_S
from kvferry.core.cost_model import MIN_SAMPLES
from tests.harness.embedded import ask_all, greedy, run, until
from tests.harness.offloading import MakeOffloaded, Offloaded

BLOCK_TOKENS, STEP_TOKENS, PROMPT_TOKENS = 4, 16, 64
SAVED_TOKENS = PROMPT_TOKENS - BLOCK_TOKENS
HOOK_S = 0.05
WINDOW = int(WINDOW_S)


class Balanced:
    """An engine with slow hooks, its balance, and a clock for the samples of it."""

    def __init__(self, make_offloaded: MakeOffloaded) -> None:
        self.engine_s = 1.0
        hooks = count()
        self.offloaded: Offloaded = make_offloaded(
            timer=lambda: HOOK_S * next(hooks),
            clock=lambda: self.engine_s,
            device_blocks=PROMPT_TOKENS // BLOCK_TOKENS + 1,
            block_size=BLOCK_TOKENS,
            max_batched_tokens=STEP_TOKENS,
            max_running=1,
        )
        self.engine = self.offloaded.engine
        self.engine.model.module.register_forward_pre_hook(self._compute)
        self.samples = StatsHistory(0.0)
        self.events: list[Mapping[str, Any]] = []
        self.watch = BalanceWatch(
            self.offloaded.scheduler, self.samples, lambda what, _: self.events.append(what), lambda: self.now_s
        )
        picks = Random(7)
        self.now_s = 1_800_000_000.0
        self.prompts = [[picks.randrange(3, 250) for _ in range(PROMPT_TOKENS)] for _ in range(150)]

    def _compute(self, module: torch.nn.Module, args: object) -> None:
        self.engine_s += 1.0

    def ask(self, first: int, end: int) -> None:
        """Answer prompts, each of which takes all of the device, until their blocks are stored."""
        for prompt in self.prompts[first:end]:
            ask_all(self.engine, [prompt], greedy(2))
            run(until(self.offloaded.settled, "all transfers have ended"))

    def wait(self, seconds: int) -> None:
        """Let the service run for this long, as its supervisor does."""
        for _ in range(seconds):
            self.now_s += 1
            self.samples.add(self.offloaded.stats, self.now_s)
            self.watch.check(self.now_s)

    def hurt(self, first: int, seconds: int = WINDOW) -> None:
        """Answer three prompts every five minutes, none of which was seen before: 3 s of hooks at least."""
        for start_s in range(0, seconds, WINDOW // 2):
            number = first + start_s // (WINDOW // 2) * 3
            self.ask(number, number + 3)
            self.wait(WINDOW // 2)

    def pause(self) -> None:
        """Have storing paused by the first six prompts."""
        self.watch.enable(True)
        self.hurt(0)
        assert not self.balance.paused
        self.wait(1)
        assert self.balance.paused

    @property
    def balance(self) -> Balance:
        return self.watch.balance(self.offloaded.stats)

    @property
    def skipped(self) -> int:
        return self.offloaded.stats.store.skipped["paused"]


@pytest.fixture
def balanced(make_offloaded: MakeOffloaded) -> Balanced:
    return Balanced(make_offloaded)


def test_balance_when_nothing_was_measured_is_zero(balanced: Balanced) -> None:
    found = balanced.balance
    assert (found.window_s, found.cost_s, found.gain_s, found.net_s) == (0, 0, 0, 0)
    assert found.prefill_tokens_per_s is None
    assert (found.paused, found.since, found.reason) == (False, None, None)


def test_gain_is_the_time_that_saved_tokens_would_have_taken(balanced: Balanced) -> None:
    balanced.ask(0, 4)
    unique = balanced.balance
    # Four steps compute a prompt, and the loads of these prompts are always decided without the rate.
    assert len(balanced.offloaded.scheduler.cost_model.tokens_rate) >= MIN_SAMPLES
    assert unique.prefill_tokens_per_s == STEP_TOKENS
    assert (unique.saved_tokens, unique.gain_s) == (0, 0)
    assert unique.net_s == -unique.cost_s == -unique.hook_s < 0
    balanced.ask(0, 2)
    both = balanced.balance
    assert both.saved_tokens == 2 * SAVED_TOKENS
    assert both.gain_s == 2 * SAVED_TOKENS / STEP_TOKENS
    assert both.hook_s > unique.hook_s
    assert both.loaded_bytes == 2 * SAVED_TOKENS // BLOCK_TOKENS * balanced.engine.block_bytes
    assert both.net_s == both.gain_s - both.cost_s > unique.net_s


def test_gain_before_a_prefill_rate_is_measured_is_null(balanced: Balanced) -> None:
    balanced.ask(0, 1)
    balanced.ask(1, 2)
    balanced.offloaded.scheduler.cost_model.tokens_rate._samples.clear()
    balanced.ask(0, 1)
    found = balanced.balance
    assert found.saved_tokens == SAVED_TOKENS
    assert (found.gain_s, found.net_s, found.total.gain_s) == (None, None, None)
    assert found.cost_s > 0
    balanced.ask(2, 6)
    assert balanced.balance.gain_s == SAVED_TOKENS / STEP_TOKENS


def test_balance_covers_the_last_window_and_the_total_all(balanced: Balanced) -> None:
    balanced.hurt(0)
    first = balanced.balance
    assert first.window_s == WINDOW_S
    assert first.cost_s == first.total.cost_s > NOISE_S
    # Else a hook may end between two samples below.
    balanced.engine.close()
    balanced.wait(1 + WINDOW)
    found = balanced.balance
    assert (found.cost_s, found.net_s, found.stored_bytes) == (0, 0, 0)
    assert found.total.cost_s >= first.total.cost_s
    assert found.total.stored_bytes == balanced.offloaded.stats.store.bytes > 0
    assert (found.auto_pause, found.paused, balanced.events) == (False, False, [])


def test_storing_that_hurts_is_paused_and_resumes_when_it_pays(balanced: Balanced) -> None:
    balanced.pause()
    found = balanced.balance
    assert found.since is not None
    assert "cost" in (found.reason or "")
    assert balanced.watch.degraded() == [f"storing is paused: {found.reason}"]
    assert [event["storing"] for event in balanced.events] == ["paused"]

    stored = balanced.offloaded.stats.store.stored
    balanced.ask(100, 101)
    assert balanced.offloaded.stats.store.stored == stored > 0
    assert balanced.skipped == PROMPT_TOKENS // BLOCK_TOKENS
    balanced.ask(0, 1)
    assert balanced.balance.total.saved_tokens == SAVED_TOKENS, "loads go on"
    balanced.ask(100, 101)
    missed = balanced.offloaded.stats.missed_tokens.not_stored
    assert missed["paused"] == SAVED_TOKENS

    balanced.wait(WINDOW)
    assert balanced.balance.storing == "probing"
    assert balanced.watch.degraded() == []
    skipped = balanced.skipped
    balanced.ask(100, 101)
    assert balanced.offloaded.stats.store.stored > stored
    balanced.ask(1, 5)
    balanced.wait(WINDOW)
    found = balanced.balance
    assert found.net_s > 0
    assert (found.storing, found.paused, found.since, found.reason) == ("on", False, None, None)
    assert [event["storing"] for event in balanced.events] == ["paused", "probing", "on"]
    assert balanced.skipped == skipped


def test_pause_when_a_trial_hurts_is_twice_as_long(balanced: Balanced) -> None:
    balanced.pause()
    balanced.wait(WINDOW)
    assert balanced.balance.storing == "probing"
    balanced.hurt(20)
    assert balanced.balance.paused
    balanced.wait(2 * WINDOW - 1)
    assert balanced.balance.paused
    balanced.wait(1)
    assert balanced.balance.storing == "probing"


@pytest.mark.parametrize("how", ["reset", "switched off"])
def test_pause_ends_at_once_by_operators(balanced: Balanced, how: str) -> None:
    balanced.pause()
    if how == "reset":
        balanced.offloaded.guard.reset(balanced.engine_s)
        balanced.wait(WINDOW - 1)
    else:
        balanced.watch.enable(False)
    assert balanced.balance.storing == "on"
    assert how in balanced.events[-1]["reason"]
    balanced.ask(100, 101)
    assert balanced.skipped == 0
