"""Results of a replay: client-side times, and what served prompt tokens by the server's counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.app.client import Json, KVFerryClient
from kvferry.app.replay.runner import Outcome
from kvferry.app.replay.sender import Answer

QUANTILES = (50, 90, 99)
MAX_ERRORS_NAMED = 5
SETTLE_S = 10.0
SETTLE_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Changes of the server's counters during the replay, which include other clients' requests."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    tier_tokens: dict[str, int]
    recomputed_tokens: int
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one replay. Tokens and rates are those of successful requests; rates are per second of total time.

    `tokens_per_s` counts prompt and output tokens, `first_token_s` is by percentile, and `cache` is None if the server
    restarted.
    """

    requests: int
    failed: int
    truncated: int
    prompt_tokens: int
    output_tokens: int
    total_s: float
    requests_per_s: float
    tokens_per_s: float
    first_token_s: dict[str, float]
    errors: dict[str, int]
    cache: CacheUse | None


def make_report(outcomes: Sequence[Outcome], total_s: float, before: Json, after: Json) -> Report:
    """Combine outcomes with the difference of two stats snapshots."""
    worked = [outcome for outcome in outcomes if outcome.answer.error is None]
    prompt_tokens = sum(len(outcome.request.prompt) for outcome in worked)
    output_tokens = sum(outcome.answer.output_tokens for outcome in worked)
    answers = [outcome.answer for outcome in outcomes]
    return Report(
        requests=len(outcomes),
        failed=len(outcomes) - len(worked),
        truncated=sum(outcome.request.truncated for outcome in outcomes),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        total_s=total_s,
        requests_per_s=len(worked) / total_s if total_s else 0.0,
        tokens_per_s=(prompt_tokens + output_tokens) / total_s if total_s else 0.0,
        first_token_s=first_token_times(answers, QUANTILES),
        errors=named_errors(answers),
        cache=cache_use(before, after),
    )


def first_token_times(answers: Iterable[Answer], quantiles: Sequence[int]) -> dict[str, float]:
    """Return quantiles of the times to the first token of complete answers; empty if there are none."""
    times = sorted(one.first_token_s for one in answers if one.error is None and one.first_token_s is not None)
    return {f"p{q}": percentile(times, q) for q in quantiles} if times else {}


def named_errors(answers: Iterable[Answer]) -> dict[str, int]:
    """Return how often each of the most frequent errors occurred."""
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    return dict(errors.most_common(MAX_ERRORS_NAMED))


def settled_stats(admin: KVFerryClient) -> Json:
    """Return stats once no request runs and nothing is being stored, or after a time limit."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        stats = admin.get("stats")
        if not (stats["requests"]["running"] or stats["store"]["in_flight"]) or time.monotonic() > deadline_s:
            return stats
        time.sleep(SETTLE_POLL_S)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of the ordered values that `percent` of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def cache_use(before: Json, after: Json) -> CacheUse | None:
    """Return the difference of two stats snapshots; None if the server restarted in between."""
    if after["uptime_s"] < before["uptime_s"]:
        return None

    def grown(part: str, name: str) -> int:
        return int(after[part][name]) - int(before[part][name])

    tiers_before = before["prompt_tokens"]["tier_hit"]
    return CacheUse(
        prompt_tokens=grown("prompt_tokens", "total"),
        device_tokens=grown("prompt_tokens", "device_hit"),
        host_tokens=grown("prompt_tokens", "host_hit"),
        tier_tokens={tier: hit - tiers_before.get(tier, 0) for tier, hit in after["prompt_tokens"]["tier_hit"].items()},
        recomputed_tokens=grown("prompt_tokens", "recomputed"),
        stored_blocks=grown("store", "stored"),
        stored_bytes=grown("store", "bytes"),
        loaded_blocks=grown("load", "blocks"),
        loaded_bytes=grown("load", "bytes"),
        evicted_blocks=grown("evictions", "total"),
    )
