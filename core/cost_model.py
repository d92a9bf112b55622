"""Cost model: whether loading a hit is faster than recomputing it, by measured rates."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

_SAMPLES = 64
_EXCEPTION = 10
"""How many times longer than the median sample one takes that does not count."""
MIN_SAMPLES = 8
EXPLORE_EVERY = 32
"""One decision in this many takes the slower side, as its rate would never be measured again otherwise."""


class LoadDecision(StrEnum):
    """`auto`: load when it beats recomputing, by measured rates; `always`: whenever there is a hit."""

    AUTO = "auto"
    ALWAYS = "always"


class Rate:
    """Rate over the latest samples, weighted by amount.

    Samples that took many times longer than others, in all and for their amount, do not count: the engine was paused,
    or the clock set forward.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._sums: tuple[float, float] | None = None
        """Sums of the samples' amounts and seconds; None if a sample was added since they were computed."""

    def __len__(self) -> int:
        return len(self._samples)

    def observe(self, amount: float, seconds: float) -> None:
        """Add a sample, unless its amount or duration is 0."""
        if amount > 0 and seconds > 0:
            self._samples.append((amount, seconds))
            self._sums = None

    def estimate_s(self, amount: float) -> float | None:
        """Return the expected seconds for an amount, None with fewer than `MIN_SAMPLES` samples."""
        if len(self._samples) < MIN_SAMPLES:
            return None
        if self._sums is None:
            self._sums = self._sum()
        amounts, seconds = self._sums
        return amount * seconds / amounts

    def shortest_s(self, amount: float) -> float | None:
        """Return the expected seconds, or at the rate of the latest sample if that was faster.

        What is slow is hardly measured again: that it was fast once counts for more than that it was not before.
        """
        expected_s = self.estimate_s(amount)
        if expected_s is None:
            return None
        latest, seconds = self._samples[-1]
        return min(expected_s, amount * seconds / latest)

    def _sum(self) -> tuple[float, float]:
        """Return the sums of the samples' amounts and seconds, without exceptions."""
        samples, middle = list(self._samples), len(self._samples) // 2
        times_s = sorted([seconds for _, seconds in samples])
        longest_s = _EXCEPTION * times_s[middle]
        if times_s[-1] > longest_s:
            slowest = _EXCEPTION * sorted([seconds / amount for amount, seconds in samples])[middle]
            samples = [sample for sample in samples if sample[1] <= longest_s or sample[1] <= slowest * sample[0]]
        return sum([amount for amount, _ in samples]), sum([seconds for _, seconds in samples])


class LoadOrCompute:
    """The decision per hit, all or nothing. Callers add their measurements to `bytes_rate` and `tokens_rate`."""

    def __init__(self, decision: LoadDecision = LoadDecision.AUTO) -> None:
        self.decision = decision
        self.bytes_rate = Rate()
        self.tokens_rate = Rate()
        self._num_decided = 0

    def should_load(self, num_bytes: int, queued_bytes: int, num_tokens: int, look_up_s: float = 0.0) -> bool:
        """Decide whether to look up and load `num_bytes` behind `queued_bytes` instead of computing `num_tokens`."""
        is_faster = self._is_faster(num_bytes + queued_bytes, num_tokens, look_up_s)
        if is_faster is None:
            return True
        self._num_decided += 1
        explore = self._num_decided % EXPLORE_EVERY == 0
        return is_faster != explore

    def may_load(self, num_bytes: int, num_tokens: int, look_up_s: float = 0.0) -> bool:
        """Return whether loading is expected to be faster than computing, without a decision."""
        return self._is_faster(num_bytes, num_tokens, look_up_s) is not False

    def _is_faster(self, num_bytes: int, num_tokens: int, look_up_s: float = 0.0) -> bool | None:
        """Return whether loading is faster by the measured rates; None if it is to be done whatever they are."""
        if self.decision is LoadDecision.ALWAYS:
            return None
        load_s, compute_s = self.bytes_rate.shortest_s(num_bytes), self.tokens_rate.estimate_s(num_tokens)
        return None if load_s is None or compute_s is None else look_up_s + load_s <= compute_s
