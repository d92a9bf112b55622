"""What other pools would find: shadow caches of live requests on a thread of their own, and the answer made of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from kvferry.app.auto_switch import AutoState
from kvferry.app.threads import WatchedThread
from kvferry.app.times import rfc3339_or_none
from kvferry.core.engine_api import StoreMode
from kvferry.core.pool.events import CacheEvent, RequestBlocks
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.shadow.caches import Estimate, ShadowCaches, ShadowSetup

_log = logging.getLogger(__name__)

MAX_QUEUED_KEYS = 1 << 16
"""Keys that may wait for the thread, or one longer request; requests beyond that are dropped and counted."""
CLOSE_S = 5.0
_POLL_S = 0.5
_BATCH_REQUESTS = 64
"""Requests that are simulated in one hold of the lock, which an answer waits for."""
_GIB = 1 << 30
_KNEE_RATE = 0.01
_MIN_SPAN_S = 60.0
"""Time over which requests were recorded, before which there are no figures an hour."""
BIAS = (
    "requests are replayed one after another as they end; priorities, pins, admission, resets and tiers are left out",
    "only the first group of a model is simulated, as if it had the whole pool",
    "hazard: all sizes learn from one table of keys; in a sample it learns from other keys than the pool, and its "
    "figures were up to 1.5 points off either way, which its bars include",
    "arc: in a sample up to 1 point too low",
)
"""What the simulation leaves out, in words."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Prompt tokens an hour that need not be computed, and the time that computing them would take."""

    hit_tokens_per_hour: float | None = field(metadata={"description": "null before a minute of requests was recorded"})
    prefill_seconds_per_hour: float | None = field(
        metadata={"description": "at the measured prefill rate; null before one is measured"}
    )


@dataclass(frozen=True, slots=True)
class Point(Saving):
    """What a pool of one size would have served, together with the device."""

    pool_bytes: int
    hit_rate: float = field(metadata={"description": "share of the prompt tokens, 0 to 1"})
    low: float = field(metadata={"description": "lower end of the 95% bar"})
    high: float = field(metadata={"description": "upper end of the 95% bar"})


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates over sizes, the smallest first."""

    eviction_policy: str
    store_mode: StoreMode
    points: list[Point]
    knee_bytes: int | None = field(
        metadata={
            "description": "the smallest size from which on no next one adds 0.01 to the hit rate; null if the largest "
            "still does"
        }
    )


@dataclass(frozen=True, slots=True)
class Current:
    """The pool as it is, and what it and the device have served since `since`."""

    pool_bytes: int
    eviction_policy: str
    store_mode: StoreMode
    hit_rate: float


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """What other pools would have found of the prompts since `since`."""

    enabled: bool = field(metadata={"description": "whether requests are simulated"})
    since: str | None = field(metadata={"description": "RFC 3339; null before the first request"})
    prompt_tokens: int
    current: Current
    curves: list[Curve]
    next_gib: Saving = field(metadata={"description": "what 1 GiB more would add, with the present policy and mode"})
    sampled_share: float | None = field(
        metadata={"description": "share of the keys that is simulated; null before the first request"}
    )
    dropped_requests: int = field(metadata={"description": "requests that came while the queue was full"})
    bias: list[str] = field(metadata={"description": "what the simulation leaves out"})
    auto: AutoState | None = field(
        default=None, metadata={"description": "what `auto` is doing; null for a trace, which has no service"}
    )


@dataclass(frozen=True, slots=True)
class Present:
    """The pool and its settings, at one moment; `token_s` is the measured time to compute a token."""

    num_slots: int
    slot_bytes: int
    eviction_policy: str
    store_mode: StoreMode
    token_s: float | None = None

    @classmethod
    def of(cls, scheduler: OffloadScheduler) -> Present:
        """Return the pool and settings of a scheduler."""
        manager = scheduler.manager
        return cls(
            manager.table.target_slots,
            manager.slot_bytes,
            manager.evictor.policy.name,
            scheduler.store_mode,
            scheduler.cost_model.tokens_rate.estimate_s(1),
        )


@dataclass(frozen=True, slots=True)
class _Scale:
    """How to turn a share of the prompt tokens into savings an hour."""

    tokens_per_hour: float | None
    token_s: float | None

    def tokens(self, share: float) -> float | None:
        return None if self.tokens_per_hour is None else share * self.tokens_per_hour

    def seconds(self, share: float) -> float | None:
        tokens = self.tokens(share)
        return None if tokens is None or self.token_s is None else tokens * self.token_s


def describe(
    caches: ShadowCaches | None, present: Present, num_dropped: int = 0, *, is_enabled: bool = True
) -> WhatIfAnswer:
    """Return the answer for caches that are not changed meanwhile."""
    prompt_tokens, served_tokens = (0, 0) if caches is None else caches.totals
    hit_rate = served_tokens / prompt_tokens if prompt_tokens else 0.0
    span_s = 0.0 if caches is None else caches.span_s
    scale = _Scale(prompt_tokens / span_s * 3600 if span_s >= _MIN_SPAN_S else None, present.token_s)
    curves = [] if caches is None else list(_curves(caches, present.slot_bytes, scale))
    pool_bytes = present.num_slots * present.slot_bytes
    now = next((one for one in curves if _is_present(one, present)), None)
    gain = None if now is None else _rate_at(now.points, pool_bytes + _GIB) - _rate_at(now.points, pool_bytes)
    return WhatIfAnswer(
        enabled=is_enabled,
        since=None if caches is None else rfc3339_or_none(caches.since_s),
        prompt_tokens=prompt_tokens,
        current=Current(pool_bytes, present.eviction_policy, present.store_mode, hit_rate),
        curves=curves,
        next_gib=Saving(None, None) if gain is None else Saving(scale.tokens(gain), scale.seconds(gain)),
        sampled_share=None if caches is None else caches.share,
        dropped_requests=num_dropped,
        bias=list(BIAS),
    )


def _is_present(curve: Curve, present: Present) -> bool:
    return (curve.eviction_policy, curve.store_mode) == (present.eviction_policy, present.store_mode)


def _curves(caches: ShadowCaches, slot_bytes: int, scale: _Scale) -> Sequence[Curve]:
    both = zip(caches.configurations, caches.estimates(), strict=True)
    curves = []
    for (policy, mode), group in groupby(both, key=lambda each: each[0][:2]):
        points = [_point(one.num_slots * slot_bytes, estimate, scale) for one, estimate in group]
        curves.append(Curve(policy, mode, points, _knee(points)))
    return curves


def _knee(points: Sequence[Point]) -> int | None:
    knee: int | None = points[0].pool_bytes
    for number, (less, more) in enumerate(pairwise(points), start=2):
        if more.hit_rate - less.hit_rate >= _KNEE_RATE:
            knee = more.pool_bytes if number < len(points) else None
    return knee


def _point(pool_bytes: int, estimate: Estimate, scale: _Scale) -> Point:
    rate = estimate.hit_rate
    return Point(
        hit_tokens_per_hour=scale.tokens(rate),
        prefill_seconds_per_hour=scale.seconds(rate),
        pool_bytes=pool_bytes,
        hit_rate=rate,
        low=estimate.low,
        high=estimate.high,
    )


def _rate_at(points: Sequence[Point], pool_bytes: int) -> float:
    """Return the hit rate at a size, on the line between the points around it; outside, that of the last point."""
    for less, more in pairwise(points):
        if pool_bytes <= more.pool_bytes:
            part = max(pool_bytes - less.pool_bytes, 0) / max(more.pool_bytes - less.pool_bytes, 1)
            return less.hit_rate + part * (more.hit_rate - less.hit_rate)
    return points[-1].hit_rate


class WhatIf:
    """Shadow caches of live requests, from `start` to `close`.

    `receive` only appends to a bounded queue; a thread simulates. Caches begin anew when the size of the pool changes.
    """

    def __init__(
        self,
        present: Callable[[], Present],
        device_slots: int,
        slot_tokens: int,
        watermark_slots: int,
        enabled: bool,
        follow: Callable[[ShadowCaches, int], None] = lambda caches, num_requests: None,
    ) -> None:
        """Prepare the queue and the thread.

        Args:
            present: Returns the pool as it is.
            device_slots: Size of the device in slots of the pool, 0 if it is unknown.
            slot_tokens: Tokens that a slot holds.
            watermark_slots: Slots that lazy mode stores ahead.
            enabled: Whether requests are recorded.
            follow: Called on the thread with the caches and how many requests they have just replayed.
        """
        self._present = present
        self._sizes = device_slots, slot_tokens, watermark_slots
        self._is_enabled = enabled
        self._follow = follow
        self._queue: deque[RequestBlocks] = deque()
        self._num_queued_keys = 0
        self._num_taken_keys = 0
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._caches: ShadowCaches | None = None
        self._fault: str | None = None
        self.thread = WatchedThread(
            "kvferry-what-if", self._run, "requests are not simulated, and `auto` switches nothing"
        )

    def receive(self, event: CacheEvent) -> None:
        """Queue a request that has ended, or drop and count it. Requires: manager lock held."""
        if not isinstance(event, RequestBlocks) or not self._is_enabled:
            return
        # Each of both counters is written by one thread. A request longer than the queue may wait alone.
        if self.num_queued_keys and self.num_queued_keys + len(event.keys) > MAX_QUEUED_KEYS:
            self._num_dropped += 1
            return
        self._num_queued_keys += len(event.keys)
        self._queue.append(event)

    def enable(self, is_enabled: bool) -> None:
        """Record requests or not; off, the caches are freed. Thread: any."""
        self._is_enabled = is_enabled
        if not is_enabled:
            with self._lock:
                self._caches = None

    @property
    def num_queued_keys(self) -> int:
        """Number of keys of the requests that wait for the thread, or that it simulates."""
        return self._num_queued_keys - self._num_taken_keys

    def answer(self) -> WhatIfAnswer:
        """Return what other pools would have found so far. Thread: any but the engine's."""
        present = self._present()
        with self._lock:
            return describe(self._caches, present, self._num_dropped, is_enabled=self._is_enabled)

    def degraded(self) -> list[str]:
        """Return why requests are not simulated; empty if they are."""
        fault = self._fault
        return [] if fault is None else [f"what-if: {fault}; its curves have begun anew"]

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """End the thread. May be called before `start`."""
        self.thread.close(CLOSE_S)

    def _run(self) -> None:
        with self._lock:
            # An earlier thread may have died while it changed them.
            self._caches = None
        while not self.thread.closing.wait(_POLL_S):
            while self._queue and not self.thread.closing.is_set():
                requests = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_REQUESTS))]
                try:
                    self._simulate(requests)
                    self._fault = None
                except Exception as error:  # noqa: BLE001 - the thread must not die
                    if self._fault is None:
                        _log.exception("what-if: requests were not simulated")
                    self._fault = f"requests were not simulated: {type(error).__name__}"
                    with self._lock:
                        self._caches = None
                finally:
                    self._num_taken_keys += sum(len(request.keys) for request in requests)

    def _simulate(self, requests: Sequence[RequestBlocks]) -> None:
        num_slots = self._present().num_slots
        caches = self._caches
        if caches is None or caches.setup.num_slots != num_slots:
            device_slots, slot_tokens, watermark_slots = self._sizes
            caches = ShadowCaches(ShadowSetup(num_slots, device_slots, slot_tokens, watermark_slots))
        with self._lock:
            if not self._is_enabled:
                return
            self._caches = caches
            caches.record(*requests)
        # Only this thread changes them.
        self._follow(caches, len(requests))
