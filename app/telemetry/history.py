"""Samples of the counters over time, so that a page that is opened now can draw the last minutes and the last day."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from kvferry.core.stats import PromptSource, Snapshot

SAMPLE_S = 1
NUM_SECONDS = 900
"""Samples kept at an interval of one second: 15 minutes."""
MINUTE_S = 60
NUM_MINUTES = 1440
"""Samples kept at an interval of one minute: a day."""

_FIRST_TOKENS = {
    PromptSource.LOADED: "requests that loaded blocks and had their first token",
    PromptSource.DEVICE: "requests that found blocks on the device only, and had their first token",
    PromptSource.NONE: "requests that found no blocks, and had their first token",
}


def _first_tokens(source: PromptSource, now: Snapshot) -> float:
    return sum(now.latencies.first_token[source].counts)


def _first_token_s(source: PromptSource, now: Snapshot) -> float:
    return now.latencies.first_token[source].total


COUNTERS: dict[str, tuple[str, Callable[[Snapshot], float]]] = {
    "device_hit": ("prompt tokens found on the device", lambda now: now.prompt_tokens.device_hit),
    "host_hit": ("prompt tokens loaded from the pool", lambda now: now.prompt_tokens.host_hit),
    "tier_hit": ("prompt tokens loaded from tiers", lambda now: sum(now.prompt_tokens.tier_hit.values())),
    "recomputed": ("prompt tokens computed", lambda now: now.prompt_tokens.recomputed),
    "stored_bytes": ("bytes stored", lambda now: now.store.bytes),
    "stored": ("blocks stored", lambda now: now.store.stored),
    "store_failed": ("blocks whose store failed", lambda now: now.store.failed),
    "loaded_bytes": ("bytes loaded", lambda now: now.load.bytes),
    "loaded": ("blocks loaded", lambda now: now.load.blocks),
    "load_failed": ("blocks whose load failed", lambda now: now.load.failed),
    "evicted": ("blocks that left the pool", lambda now: now.evictions.total),
    "regretted": ("evicted blocks that were requested again", lambda now: now.evictions.regretted),
    "cost_s": ("seconds that offloading has cost", lambda now: now.balance.cost_s),
    "load_wait_s": ("seconds of these for which requests waited for loads", lambda now: now.balance.load_wait_s),
    "gain_s": ("seconds of computing that loaded tokens have saved", lambda now: now.balance.gain_s),
    "finished": ("requests finished or aborted", lambda now: now.requests.finished),
    "preempted": ("preemptions", lambda now: now.requests.preempted),
    **{f"first_tokens_{one}": (_FIRST_TOKENS[one], partial(_first_tokens, one)) for one in PromptSource},
    **{
        f"first_token_s_{one}": ("seconds to first token of these, in all", partial(_first_token_s, one))
        for one in PromptSource
    },
}
"""Columns with the increase of a counter since the row before: description, and value since the start."""
GAUGES: dict[str, tuple[str, Callable[[Snapshot], float]]] = {
    "slots": ("slots of the pool", lambda now: now.pool.slots),
    "free": ("free slots", lambda now: now.pool.free),
    "ready": ("slots that can be loaded", lambda now: now.pool.ready),
    "storing": ("slots neither free nor loadable", lambda now: now.pool.storing),
    "pinned": ("pinned slots", lambda now: now.pool.pinned),
    "running": ("requests announced and not finished", lambda now: now.requests.running),
    "waiting_for_load": ("requests waiting for a load", lambda now: now.requests.waiting_for_load),
}
"""Columns with the value at the row's time."""


def totals(now: Snapshot) -> dict[str, float]:
    """Return each counter's value since the start."""
    return {name: read(now) for name, (_, read) in COUNTERS.items()}


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    counters: tuple[float, ...]
    gauges: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Increases since the row before, in the order of `COUNTERS`, and values at `time_s`, in the order of `GAUGES`."""

    time_s: float
    increases: tuple[float, ...]
    values: tuple[float, ...]


class StatsHistory:
    """The latest samples, by the second and by the minute. Memory is bounded. Thread: any.

    Rows are counted, not timed, so that a clock that is set back hides none; `Row.time_s` shows a delayed sample.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One more than the rows: the first sample only is what the first row has increased from.
        self._seconds: deque[_Sample] = deque(maxlen=NUM_SECONDS + 1)
        self._minutes: deque[_Sample] = deque(maxlen=NUM_MINUTES + 1)
        self._num_samples = 0

    def add(self, now: Snapshot, now_s: float) -> None:
        """Add the sample of one second. Called once per `SAMPLE_S`."""
        sample = _Sample(
            now_s,
            tuple(read(now) for _, read in COUNTERS.values()),
            tuple(read(now) for _, read in GAUGES.values()),
        )
        with self._lock:
            self._seconds.append(sample)
            if self._num_samples % (MINUTE_S // SAMPLE_S) == 0:
                self._minutes.append(sample)
            self._num_samples += 1

    def increases(self, now: Snapshot, window_s: float) -> tuple[float, dict[str, float]]:
        """Return how much each counter has increased in the last `window_s` seconds, and the seconds sampled of them.

        While there are fewer samples, the values are those since the start.
        """
        num_samples = int(window_s // SAMPLE_S)
        with self._lock:
            num_known = len(self._seconds)
            before = self._seconds[-num_samples - 1].counters if num_known > num_samples else (0.0,) * len(COUNTERS)
        increases = {name: value - then for (name, value), then in zip(totals(now).items(), before, strict=True)}
        return float(min(num_known, num_samples) * SAMPLE_S), increases

    def rows(self, window_s: float) -> tuple[int, list[Row]]:
        """Return the interval in seconds and the rows of the last `window_s` seconds, oldest first.

        The interval is a second for windows that samples by the second cover, else a minute.
        """
        by_second = window_s <= NUM_SECONDS * SAMPLE_S
        interval_s, samples = (SAMPLE_S, self._seconds) if by_second else (MINUTE_S, self._minutes)
        num_samples = int(window_s // interval_s) + 1
        with self._lock:
            latest = list(islice(samples, max(0, len(samples) - num_samples), None))
        return interval_s, [
            Row(
                sample.time_s,
                tuple(now - then for now, then in zip(sample.counters, before.counters, strict=True)),
                sample.gauges,
            )
            for before, sample in pairwise(latest)
        ]
