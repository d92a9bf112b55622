"""Samples of the counters over time, so that a page that is opened now can draw the last minutes and the last day.

Rows of minutes are handed on to be kept in the database, and those of the last day are restored at the next start.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, TypeVar

from kvferry.core.stats import EvictionReason, MissCause, NotStored, PromptLength, PromptSource, Snapshot

T = TypeVar("T")

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


def _first_tokens(source: PromptSource, lengths: Collection[PromptLength], now: Snapshot) -> float:
    return sum(sum(now.latencies.first_token[source, length].counts) for length in lengths)


def _first_token_s(source: PromptSource, lengths: Collection[PromptLength], now: Snapshot) -> float:
    return sum(now.latencies.first_token[source, length].total for length in lengths)


_KINDS = [
    *((source, f"{source}", "", tuple(PromptLength)) for source in PromptSource),
    *(
        (source, f"{source}.{length}", f", of {length} prompt tokens", (length,))
        for source in PromptSource
        for length in PromptLength
    ),
]
"""Columns of first tokens: the source, how name and description end, and the lengths of prompts that are counted."""


def _missed(part: str, cause: str, now: Snapshot) -> float:
    counts: dict[str, int] = getattr(now.missed_tokens, part)
    return counts.get(cause, 0)


_CAUSES = [
    (part, cause.value)
    for part, causes in (("causes", MissCause), ("evicted", EvictionReason), ("not_stored", NotStored))
    for cause in causes
]
"""Fields of missed tokens and their keys."""

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
    "load_wait_s": (
        "seconds of these for which requests waited for loads and tiers",
        lambda now: now.balance.load_wait_s,
    ),
    "tier_wait_s": ("seconds for which requests waited for tiers", lambda now: now.tier_waits.seconds),
    "gain_s": ("seconds of computing that loaded tokens have saved", lambda now: now.balance.gain_s),
    "finished": ("requests finished or aborted", lambda now: now.requests.finished),
    "preempted": ("preemptions", lambda now: now.requests.preempted),
    **{
        f"first_tokens_{name}": (_FIRST_TOKENS[source] + text, partial(_first_tokens, source, lengths))
        for source, name, text, lengths in _KINDS
    },
    **{
        f"first_token_s_{name}": ("seconds to first token of these, in all", partial(_first_token_s, source, lengths))
        for source, name, _, lengths in _KINDS
    },
    **{
        f"missed_tokens.{part}.{cause}": ("prompt tokens computed, by this cause", partial(_missed, part, cause))
        for part, cause in _CAUSES
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
    """Increases in the last `span_s`, in the order of `COUNTERS`, and values at `time_s`, in the order of `GAUGES`.

    The process whose counters these are started at `started_s`.
    """

    time_s: float
    span_s: float
    started_s: float
    increases: tuple[float, ...]
    values: tuple[float, ...]

    def to_json(self) -> dict[str, float]:
        """Return the row as its JSON in the database: columns that are 0 are left out."""
        numbers = zip((*COUNTERS, *GAUGES), (*self.increases, *self.values), strict=True)
        return {"span_s": round(self.span_s, 3), **{name: round(number, 6) for name, number in numbers if number}}

    @classmethod
    def of_json(cls, time_s: Any, started_s: Any, given: Any) -> Row:
        """Return the row that `to_json` was called on. Raises `ValueError` if its columns or values are others."""
        if not isinstance(given, dict) or not given.keys() <= _NAMES:
            raise ValueError("columns of another version, or no JSON object")
        numbers = (time_s, started_s, *given.values())
        if not all(isinstance(number, (int, float)) and abs(number) < _MAX_NUMBER for number in numbers):
            raise ValueError("a value is not a number")
        increases, values = (tuple(given.get(name, 0) for name in names) for names in (COUNTERS, GAUGES))
        return cls(time_s, given.get("span_s", MINUTE_S), started_s, increases, values)


_NAMES = {"span_s", *COUNTERS, *GAUGES}
_MAX_NUMBER = 1e18
"""Bound of what is accepted from the database, above all counts; neither infinity nor NaN is below it."""


class StatsHistory:
    """The latest samples, by the second and by the minute. Memory is bounded. Thread: any.

    Rows are counted, not timed, so that a clock that is set back hides none; `Row.time_s` shows a delayed sample. Those
    of earlier processes are timed, as there may be none between.
    """

    def __init__(self, started_s: float, on_minute: Callable[[Row], None] = lambda row: None) -> None:
        """`on_minute` receives the row of each minute of the process, which started at the Unix time `started_s`."""
        self._on_minute = on_minute
        self.started_s = started_s
        self._lock = threading.Lock()
        self._minute_began = _Sample(started_s, (0,) * len(COUNTERS), ())
        # One more than the rows: the first one only is what the first row has increased from.
        self._seconds = deque([self._minute_began], maxlen=NUM_SECONDS + 1)
        self._minutes: deque[Row] = deque(maxlen=NUM_MINUTES)
        self._num_samples = 0

    def restore(self, rows: Iterable[Row]) -> None:
        """Put rows of earlier processes, oldest first, before those of this one. Called before the first sample."""
        self._minutes.extend(rows)

    def add(self, now: Snapshot, now_s: float) -> None:
        """Add the sample of one second. Called once per `SAMPLE_S`.

        The first one ends the row of the start, so that a process that is killed soon has one too.
        """
        sample = _sample(now, now_s)
        with self._lock:
            self._seconds.append(sample)
        if self._num_samples % (MINUTE_S // SAMPLE_S) == 0:
            self._end_minute(sample)
        self._num_samples += 1

    def end(self, now: Snapshot, now_s: float) -> None:
        """End the row under way, as the process stops. No sample is added after this."""
        if self._num_samples:
            self._end_minute(_sample(now, now_s))

    def _end_minute(self, sample: _Sample) -> None:
        with self._lock:
            row = self._row(self._minute_began, sample)
            self._minute_began = sample
            self._minutes.append(row)
        self._on_minute(row)

    def _row(self, before: _Sample, sample: _Sample) -> Row:
        increases = tuple(now - then for now, then in zip(sample.counters, before.counters, strict=True))
        return Row(sample.time_s, max(0.0, sample.time_s - before.time_s), self.started_s, increases, sample.gauges)

    def increases(self, now: Snapshot, window_s: float) -> tuple[float, dict[str, float]]:
        """Return how much each counter has increased in the last `window_s` seconds, and the seconds sampled of them.

        While there are fewer samples, the values are those since the start.
        """
        with self._lock:
            num_samples = min(int(window_s // SAMPLE_S), len(self._seconds) - 1)
            before = self._seconds[-num_samples - 1].counters
        increases = {name: value - then for (name, value), then in zip(totals(now).items(), before, strict=True)}
        return float(num_samples * SAMPLE_S), increases

    def rows(self, window_s: float) -> tuple[int, list[Row]]:
        """Return the interval in seconds and the rows of the last `window_s` seconds, oldest first.

        The interval is a second for windows that samples by the second cover, which are those of this process, else a
        minute.
        """
        if window_s <= NUM_SECONDS * SAMPLE_S:
            with self._lock:
                samples = list(_latest(self._seconds, int(window_s // SAMPLE_S) + 1))
            return SAMPLE_S, [self._row(before, sample) for before, sample in pairwise(samples)]
        with self._lock:
            rows = list(_latest(self._minutes, int(window_s // MINUTE_S)))
        after_s = rows[-1].time_s - window_s if rows else 0.0
        return MINUTE_S, [row for row in rows if row.started_s == self.started_s or row.time_s > after_s]

    def starts(self) -> set[float]:
        """Return when this process and those of the last day started."""
        with self._lock:
            return {self.started_s, *(row.started_s for row in self._minutes)}


def _sample(now: Snapshot, now_s: float) -> _Sample:
    counters, gauges = (tuple(read(now) for _, read in reads.values()) for reads in (COUNTERS, GAUGES))
    return _Sample(now_s, counters, gauges)


def _latest(items: deque[T], number: int) -> Iterable[T]:
    return islice(items, max(0, len(items) - number), None)
