"""Prefills: where the tokens of each prompt came from, counted once they are all there, and how fast computing them is.

An engine plans its next step once it has computed the last, so what a step was to do is known to be done by the next.
"""

from __future__ import annotations

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.requests import RequestState
from kvferry.core.stats import MissedTokens, Misses, PromptTokens

_MEASURED_TOKENS = 16
"""Fewer prefill tokens in a step say little about the speed of prefill."""


class Prefills:
    """Called under the manager's lock, on the engine's thread."""

    def __init__(self, layout: GroupLayout, choice: LoadOrCompute, prompt_tokens: PromptTokens) -> None:
        """`prompt_tokens` are counted here, for all requests together; `choice` learns how fast computing is."""
        self.prompt_tokens = prompt_tokens
        self.missed_tokens = MissedTokens()
        self._layout = layout
        self._choice = choice
        self._planned: list[RequestState] = []
        self._last_step: tuple[float, int] | None = None
        self._skips_step = False

    def plan(self, state: RequestState) -> None:
        """The step that is being planned comes to the end of a request's prompt."""
        state.prefill_planned = True
        self._planned.append(state)

    def begin_step(self, num_prefill_tokens: int, num_tokens: int, now_s: float) -> None:
        """A step of so many tokens begins; it says how fast prefill is if it is mostly that."""
        skips, self._skips_step = self._skips_step, False
        if not skips and num_prefill_tokens >= max(_MEASURED_TOKENS, num_tokens // 2):
            self._last_step = (now_s, num_tokens)

    def end_step(self, now_s: float) -> None:
        """What the last step was to do is done, and the time between is what it took."""
        for state in self._planned:
            self.count(state)
        self._planned.clear()
        if self._last_step is not None:
            then_s, num_tokens = self._last_step
            self._choice.tokens_rate.observe(num_tokens, now_s - then_s)
            self._last_step = None

    def fail_step(self) -> None:
        """What the last step was to do is not done."""
        self._last_step = None

    def abandon(self) -> None:
        """Measure neither the last step nor the next, which counts as new all tokens that requests have by then."""
        self._last_step = None
        self._skips_step = True

    def count(self, state: RequestState) -> None:
        """Say once where a request's prompt came from, if all of it is there."""
        if not state.prefill_planned or state.prefill_counted:
            return
        total = state.request.num_prompt_tokens
        device_hit = min(state.device_tokens, total)
        loaded = min(state.loaded_tokens, total - device_hit)
        tier_hit = self.tier_hit(state, device_hit, device_hit + loaded)
        host_hit = loaded - sum(tier_hit.values())
        lost_cause = state.why_hit_lost()
        # Nothing below may raise: a part of the counts would be missing.
        state.prefill_counted = True
        for counts in (self.prompt_tokens, state.prompt_tokens):
            counts.total += total
            counts.device_hit += device_hit
            counts.host_hit += host_hit
            counts.recomputed += total - device_hit - loaded
            for name, count in tier_hit.items():
                counts.tier_hit[name] = counts.tier_hit.get(name, 0) + count
        misses = state.misses or Misses.unexamined(total)
        served = device_hit + loaded
        misses.count(served, total, lost_cause, (self.missed_tokens, state.missed_tokens))
        state.evicted_between_s = misses.evicted_between_s
        state.promoted = []

    def tier_hit(self, state: RequestState, first_token: int, end_token: int) -> dict[str, int]:
        """By tier, how many of these loaded tokens it brought into the pool for this very request."""
        if not state.promoted:
            return {}
        step = self._layout.alignment_tokens
        hits: dict[str, int] = {}
        tiers = {piece: run.tier for run in state.promoted for piece in range(run.first, run.last + 1)}
        for start in range(first_token // step * step, end_token, step):
            name = tiers.get(start // step)
            if name is not None:
                hits[name] = hits.get(name, 0) + min(start + step, end_token) - max(start, first_token)
        return hits
