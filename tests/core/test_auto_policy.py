"""Automatic choices are those of a plain model: a lead has to be large, and not too soon after the last switch."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.auto_policy import LEAD_REQUESTS, MARGIN, MIN_REQUESTS, AutoPolicy, Choice
from kvferry.core.engine_api import StoreMode
from tests.harness.effort import examples

LRU, ARC, HAZARD = (Choice(name, StoreMode.EAGER) for name in ("lru", "arc", "hazard"))
LAZY = Choice("lru", StoreMode.LAZY)
CHOICES = (LRU, ARC, HAZARD, LAZY)
REQUEST_TOKENS = 1000

Batch = tuple[int, Mapping[Choice, float]]
"""Requests of `REQUEST_TOKENS` tokens each, and what each choice finds of a request."""

RATES = st.sampled_from([0, 100, 105, 106, 110, 150, 300, 1000])
BATCHES = st.lists(
    st.tuples(
        st.sampled_from([1, 25, 64, 200]),
        st.fixed_dictionaries({LRU: RATES}, optional={ARC: RATES, HAZARD: RATES, LAZY: RATES})
        | st.fixed_dictionaries({ARC: RATES}),
    ),
    max_size=40,
)


class Model:
    """The same decision from all batches since the last switch: the best end of them, for each choice."""

    def __init__(self) -> None:
        self.present, self.batches, self.num_known = LRU, list[Batch](), 0

    def lead(self, choice: Choice) -> tuple[float, int]:
        """The largest lead over the last batches, and how many requests these are."""
        best, total, num_requests, longest = 0.0, 0.0, 0, 0
        for num, rates in reversed(self.batches[self.num_known :]):
            if choice not in rates:
                break
            total += num * (rates[choice] - rates[self.present] - MARGIN * REQUEST_TOKENS)
            num_requests += num
            if total >= best:
                best, longest = total, num_requests
        return best, longest

    def observe(self, num: int, rates: Mapping[Choice, float]) -> Choice | None:
        self.batches.append((num, rates))
        if self.present not in rates:
            self.num_known = len(self.batches)
            return None
        if sum(one for one, _ in self.batches) < MIN_REQUESTS:
            return None
        leads = {choice: self.lead(choice)[0] for choice in rates if choice != self.present}
        large = {choice: lead for choice, lead in leads.items() if lead >= LEAD_REQUESTS * REQUEST_TOKENS}
        if not large:
            return None
        self.present = max(large, key=lambda choice: large[choice])
        self.batches, self.num_known = [], 0
        return self.present


@settings(max_examples=examples(2000), deadline=None)
@given(BATCHES)
def test_switches_of_any_observations_are_the_models(batches: list[Batch]) -> None:
    auto, model = AutoPolicy(LRU), Model()
    for num, rates in batches:
        leads = {choice: model.lead(choice) for choice in rates}
        before = auto.present
        switch = auto.observe(num, num * REQUEST_TOKENS, {choice: num * rate for choice, rate in rates.items()})
        assert (None if switch is None else switch.after) == model.observe(num, rates)
        assert auto.present == model.present
        if switch is not None:
            assert switch.before == before
            assert switch.rate_after > switch.rate_before + MARGIN
            assert switch.num_requests == leads[switch.after][1] + num


@given(st.lists(st.sampled_from([-5, 0, 5]), max_size=100))
def test_differences_within_the_margin_are_never_a_reason(differences: list[int]) -> None:
    auto = AutoPolicy(LRU)
    for difference in differences:
        assert auto.observe(100, 100_000, {LRU: 20_000, ARC: 20_000 + 100 * difference}) is None


def test_large_lead_switches_soon_and_small_one_late() -> None:
    def requests_until_switch(lead: float) -> int:
        auto, num = AutoPolicy(LRU), 0
        while auto.observe(1, 1000, {LRU: 200, HAZARD: 200 + 1000 * lead}) is None:
            num += 1
        return num + 1

    assert requests_until_switch(0.1) == MIN_REQUESTS
    assert requests_until_switch(0.015) == LEAD_REQUESTS / 0.01
    assert requests_until_switch(0.0075) == LEAD_REQUESTS / 0.0025


def test_alternating_leads_switch_no_sooner_than_allowed() -> None:
    auto, at = AutoPolicy(LRU), []
    for number in range(10_000):
        better, worse = (LRU, ARC) if number // 50 % 2 else (ARC, LRU)
        if auto.observe(1, 1000, {better: 900, worse: 100}):
            at.append(number + 1)
    assert at
    assert all(after - before >= MIN_REQUESTS for before, after in zip([0, *at], at, strict=False))


def test_restart_forgets_leads() -> None:
    auto = AutoPolicy(LRU)
    auto.observe(MIN_REQUESTS - 1, 1000.0 * (MIN_REQUESTS - 1), {LRU: 0, ARC: 500.0 * MIN_REQUESTS})
    auto.restart(HAZARD)
    assert auto.observe(1, 1000.0, {HAZARD: 0, ARC: 1000}) is None
    assert (auto.present, auto.num_since) == (HAZARD, 1)
