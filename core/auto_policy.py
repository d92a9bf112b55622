"""Automatic choice of eviction policy and store mode, by what the shadow caches of the pool's size find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.engine_api import StoreMode

MARGIN = 0.005
"""Share of the prompt tokens by which another choice has to be better, before anything of its lead counts."""
LEAD_REQUESTS = 8
"""A lead is large enough once it adds up to the prompt tokens of as many mean requests."""
MIN_REQUESTS = 400
"""Requests between two switches, and before the first one."""


class Choice(NamedTuple):
    """How the pool decides."""

    eviction_policy: str
    store_mode: StoreMode


class Switch(NamedTuple):
    """A change to another choice. Rates are shares of the prompt tokens of the last `num_requests`, by simulation."""

    before: Choice
    after: Choice
    num_requests: int
    rate_before: float
    rate_after: float


@dataclass(slots=True)
class _Lead:
    """What another choice has found more than the present one, since it began to be better."""

    tokens: float = 0.0
    """Beyond the margin."""
    num_requests: int = 0
    prompt_tokens: float = 0.0
    found: float = 0.0
    found_at_present: float = 0.0


@dataclass(slots=True)
class AutoPolicy:
    """State of the decision.

    Of each other choice the lead is summed up: the prompt tokens that its shadow cache has found more than that of the
    present choice, less `MARGIN` of all. A sum that falls below zero begins anew, so that it covers the time since the
    other choice became better. The choice with the largest sum becomes the present one, once that is as large as
    `LEAD_REQUESTS` mean prompts, `MIN_REQUESTS` after the last switch. So a small lead has to last, and a large one
    counts soon; what is lost before a switch is bounded by both numbers.
    """

    present: Choice
    num_since: int = 0
    """Requests since the last switch."""
    prompt_tokens_since: float = 0.0
    leads: dict[Choice, _Lead] = field(default_factory=dict)

    def restart(self, present: Choice) -> None:
        """Begin anew with a choice, whatever was observed."""
        self.present, self.num_since, self.prompt_tokens_since, self.leads = present, 0, 0.0, {}

    def observe(self, num_requests: int, prompt_tokens: float, found: Mapping[Choice, float]) -> Switch | None:
        """Count requests, and return the switch that follows, whose choice is the present one from now on.

        Args:
            num_requests: Their number.
            prompt_tokens: All their prompt tokens.
            found: The prompt tokens that each choice's cache, or the device, would have served; only the choices in it
                are switched to. Nothing is decided without the present choice.
        """
        self.num_since += num_requests
        self.prompt_tokens_since += prompt_tokens
        if self.present not in found:
            self.leads = {}
            return None
        at_present = found[self.present]
        leads = {}
        for choice, tokens in found.items():
            before = self.leads.get(choice, _Lead())
            lead = before.tokens + tokens - at_present - MARGIN * prompt_tokens
            if choice != self.present and lead > 0:
                leads[choice] = _Lead(
                    lead,
                    before.num_requests + num_requests,
                    before.prompt_tokens + prompt_tokens,
                    before.found + tokens,
                    before.found_at_present + at_present,
                )
        self.leads = leads
        if not leads or self.num_since < MIN_REQUESTS:
            return None
        best = max(leads, key=lambda choice: leads[choice].tokens)
        lead_of_best = leads[best]
        if lead_of_best.tokens * self.num_since < LEAD_REQUESTS * self.prompt_tokens_since:
            return None
        switch = Switch(
            self.present,
            best,
            lead_of_best.num_requests,
            lead_of_best.found_at_present / lead_of_best.prompt_tokens,
            lead_of_best.found / lead_of_best.prompt_tokens,
        )
        self.restart(best)
        return switch
