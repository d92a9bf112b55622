"""Measured rates, and what follows from them: is it faster to load a hit than to compute it again?"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

_SAMPLES = 64
MIN_SAMPLES = 8
EXPLORE_EVERY = 32
"""One decision in so many takes the other side, or the side not taken would never be measured again."""


class LoadDecision(StrEnum):
    """`auto`: load when it beats recomputing, by measured rates; `always`: whenever there is a hit."""

    AUTO = "auto"
    ALWAYS = "always"


class Rate:
    """Amount a second over the latest samples, weighted by amount."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def observe(self, amount: float, seconds: float) -> None:
        """Take a sample; one without duration says nothing."""
        if amount > 0 and seconds > 0:
            self._samples.append((amount, seconds))

    def estimate_s(self, amount: float) -> float | None:
        """Seconds that this amount will take, or None with too few samples to say."""
        if len(self._samples) < MIN_SAMPLES:
            return None
        return amount * sum(seconds for _, seconds in self._samples) / sum(amount for amount, _ in self._samples)


class LoadOrCompute:
    """The decision per hit, all or nothing. `bytes_rate` and `tokens_rate` may be fed by whoever measures."""

    def __init__(self, decision: LoadDecision = LoadDecision.AUTO) -> None:
        self.decision = decision
        self.bytes_rate = Rate()
        self.tokens_rate = Rate()
        self._num_decided = 0

    def should_load(self, num_bytes: int, queued_bytes: int, num_tokens: int) -> bool:
        """Whether loading `num_bytes` behind `queued_bytes` beats computing `num_tokens`."""
        if self.decision is LoadDecision.ALWAYS:
            return True
        load_s = self.bytes_rate.estimate_s(queued_bytes + num_bytes)
        compute_s = self.tokens_rate.estimate_s(num_tokens)
        if load_s is None or compute_s is None:
            return True
        self._num_decided += 1
        explore = self._num_decided % EXPLORE_EVERY == 0
        return (load_s <= compute_s) != explore
