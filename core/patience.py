"""Patience: a request waits for what others bring at most as long as computing it again would take."""

from __future__ import annotations

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.requests import RequestState

UNKNOWN_S = 1.0
"""How long to wait while nobody knows how long recomputing takes."""


class Patience:
    """Waits of one request, one behind the other, have one end together: that of recomputing all of it."""

    def __init__(self, choice: LoadOrCompute) -> None:
        self._choice = choice

    def until(self, state: RequestState, num_tokens: int) -> float:
        """When a wait that begins now for `num_tokens` tokens has to end."""
        if state.waits_until_s is None:
            state.waits_until_s = state.now_s + self._compute_s(state.request.num_tokens)
        return min(state.waits_until_s, state.now_s + self._compute_s(num_tokens))

    def is_over(self, state: RequestState) -> bool:
        """Whether a request has waited for as long as it may."""
        return state.waits_until_s is not None and state.now_s >= state.waits_until_s

    def _compute_s(self, num_tokens: int) -> float:
        estimate_s = self._choice.tokens_rate.estimate_s(num_tokens)
        return UNKNOWN_S if estimate_s is None else estimate_s
