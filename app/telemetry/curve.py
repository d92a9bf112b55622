"""Hit rate over cache sizes, from the requests that end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvferry.app.common.times import rfc3339
from kvferry.app.telemetry.prompts import PromptEvent
from kvferry.core.curve import ReuseCurve
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout
from kvferry.core.pool.events import RequestBlocks, ResetEvent
from kvferry.core.scheduler.scheduler import OffloadScheduler

_GIB = 1 << 30
MIN_SPAN_S = 60.0
"""Time over which requests were counted, before which there are no figures an hour."""
_STEPS_PER_OCTAVE = 4
_MIN_OCTAVE, _MAX_OCTAVE = -4, 3
"""Sizes of the curve's points, as powers of two of device and pool together."""
NOTES = (
    "Requests are counted one after another as they end; priorities, pins, admission, limits of tenants, resets by "
    "match and tiers are left out.",
    "Requests that may neither store nor load are left out. Blocks that are not stored, such as those of answers, are "
    "left out until they are part of a prompt that is stored, although the device may have them.",
)
GROUPS_NOTE = (
    "The keys of one group stand for all, as if a hit needed whole prefixes of each; sizes count all groups' slots."
)


@dataclass(frozen=True, slots=True)
class Saving:
    """Prompt tokens an hour that need not be computed, and the time that computing them would take."""

    hit_tokens_per_hour: float | None = field(metadata={"description": "null before a minute of requests was counted"})
    prefill_seconds_per_hour: float | None = field(
        metadata={"description": "at the measured prefill rate; null before one is measured"}
    )


@dataclass(frozen=True, slots=True)
class Point:
    """What one LRU cache of this size would have served."""

    bytes: int
    hit_rate: float = field(metadata={"description": "share of the prompt tokens, 0 to 1"})


@dataclass(frozen=True, slots=True)
class Current:
    """Pool and device as they are, and what they and the tiers have served since `since`."""

    pool_bytes: int
    device_bytes: int = field(metadata={"description": "of all ranks; 0 if unknown"})
    eviction_policy: str
    store_mode: StoreMode
    hit_rate: float


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """What LRU caches of other sizes would have served of the prompts since `since`."""

    since: str = field(metadata={"description": "RFC 3339: start, last resize, or last change of policy or mode"})
    prompt_tokens: int = field(metadata={"description": "of requests that may store or load"})
    current: Current
    points: list[Point] = field(metadata={"description": "the smallest first; empty before the first request"})
    unit_tokens: int = field(metadata={"description": "tokens of a slot, the unit of hits"})
    sampled: float = field(metadata={"description": "share of the keys that is remembered"})
    notes: list[str] = field(metadata={"description": "what is left out"})
    ceiling: float = field(metadata={"description": "hit rate of a cache that keeps everything"})
    eager: float = field(metadata={"description": "hit rate of the larger of pool and device"})
    lazy: float = field(metadata={"description": "hit rate of pool and device together"})
    next_gib: Saving = field(metadata={"description": "what a pool larger by 1 GiB would serve in addition"})
    twice_pool: Saving = field(
        metadata={"description": "what a pool of twice the size would serve beyond the curve here and what is measured"}
    )
    lazy_mode: Saving = field(metadata={"description": "the same of lazy mode; 0 in lazy mode"})


@dataclass(frozen=True, slots=True)
class Present:
    """The pool and its settings, at one moment; `token_s` is the measured time to compute a token."""

    num_slots: int
    eviction_policy: str
    store_mode: StoreMode
    token_s: float | None = None

    @classmethod
    def of(cls, scheduler: OffloadScheduler) -> Present:
        """Return the pool and settings of a scheduler."""
        manager = scheduler.manager
        return cls(
            manager.table.target_slots,
            manager.evictor.policy.name,
            scheduler.store_mode,
            scheduler.cost_model.tokens_rate.estimate_s(1),
        )


class WhatIf:
    """The curve of live requests. Requires: the feed's lock held.

    Counts begin anew when the size of the pool, the eviction policy or the store mode changes, and a reset of the pool
    clears what the curve remembers.
    """

    def __init__(
        self,
        present: Callable[[], Present],
        layout: GroupLayout,
        device_bytes: int,
        enabled: bool,
        min_span_s: float = MIN_SPAN_S,
    ) -> None:
        """Begin to count.

        Args:
            present: Returns the pool as it is.
            layout: The groups of the model.
            device_bytes: Size of the device's KV cache on all ranks, 0 if it is unknown.
            enabled: Whether requests are counted.
            min_span_s: Time of counting before which savings are unknown.
        """
        self._min_span_s = min_span_s
        group = layout.prefix_group
        self._slot_bytes = layout.slot_bytes
        self._unit_bytes = layout.slot_bytes * sum(group.slot_tokens / each.slot_tokens for each in layout.groups)
        self._device_bytes = device_bytes
        self._notes = [*NOTES, *([GROUPS_NOTE] if len(layout) > 1 else [])]
        self._present = present
        self._is_enabled = enabled
        self._enabled_s = 0.0
        """Requests that ended earlier are not counted: they came while nothing was."""
        self._unit_tokens = group.slot_tokens
        self._curve = ReuseCurve(group.slot_tokens)
        self._counted: Present | None = None
        self._since_s = time.time()

    def read(self, batch: Sequence[PromptEvent]) -> None:
        """See `PromptReader`."""
        if self._is_enabled:
            self._count(batch)

    def begin_anew(self) -> None:
        """See `PromptReader`."""
        self._curve = ReuseCurve(self._unit_tokens)
        self._since_s = time.time()

    def enable(self, is_enabled: bool) -> None:
        """Count requests or not; off, what was counted is freed."""
        if is_enabled != self._is_enabled:
            self._is_enabled, self._enabled_s = is_enabled, time.time()
            self.begin_anew()

    def answer(self, num_dropped: int) -> WhatIfAnswer:
        """Return what caches of other sizes would have served so far, with `num_dropped` requests left out."""
        present = self._follow()
        curve, now_s = self._curve, time.time()
        pool_bytes, token_s = present.num_slots * self._slot_bytes, present.token_s
        total_bytes = pool_bytes + self._device_bytes
        tokens = curve.prompt_tokens
        rate, hit_rate = self._rate_beside_device(pool_bytes, present), curve.served_tokens / tokens if tokens else 0.0
        # Tiers may serve already what a pool would.
        served = max(rate, hit_rate)
        span_s = now_s - self._since_s

        def saving(gain: float) -> Saving:
            per_hour = gain * tokens / span_s * 3600 if tokens and span_s >= self._min_span_s else None
            return Saving(per_hour, None if per_hour is None or token_s is None else per_hour * token_s)

        return WhatIfAnswer(
            since=rfc3339(self._since_s),
            prompt_tokens=tokens,
            current=Current(
                pool_bytes,
                self._device_bytes,
                present.eviction_policy,
                present.store_mode,
                hit_rate,
            ),
            points=[Point(size, self._rate(size)) for size in _sizes(total_bytes)] if tokens else [],
            unit_tokens=self._unit_tokens,
            sampled=curve.sampled_share,
            notes=self._all_notes(num_dropped),
            ceiling=curve.ceiling(),
            eager=self._rate(max(pool_bytes, self._device_bytes)),
            lazy=self._rate(total_bytes),
            next_gib=saving(self._rate_beside_device(pool_bytes + _GIB, present) - rate),
            twice_pool=saving(max(self._rate_beside_device(2 * pool_bytes, present) - served, 0.0)),
            lazy_mode=saving(max(self._rate(total_bytes) - served, 0.0)),
        )

    def _rate(self, size_bytes: int) -> float:
        return self._curve.hit_rate(size_bytes / self._unit_bytes)

    def _rate_beside_device(self, pool_bytes: int, present: Present) -> float:
        """Return the rate of a pool of this size with the device in front of it, in the present store mode."""
        if present.store_mode is StoreMode.LAZY:
            return self._rate(pool_bytes + self._device_bytes)
        return self._rate(max(pool_bytes, self._device_bytes))

    def _all_notes(self, num_dropped: int) -> list[str]:
        notes = [] if self._is_enabled else ["Nothing is counted: KVFERRY_WHAT_IF=false."]
        if num_dropped:
            notes.append(f"{num_dropped:,} requests are left out: they came faster than they were counted.")
        return [*notes, *self._notes]

    def _follow(self) -> Present:
        """Return the pool as it is; if it has changed, count anew."""
        present = self._present()
        now = replace(present, token_s=None)
        if self._counted not in (None, now):
            self._since_s = time.time()
            self._curve.restart()
        self._counted = now
        total_bytes = present.num_slots * self._slot_bytes + self._device_bytes
        self._curve.near_units = int(total_bytes * 2**_MAX_OCTAVE / self._unit_bytes)
        return present

    def _count(self, batch: Sequence[PromptEvent]) -> None:
        self._follow()
        for is_reset, some in groupby(batch, lambda one: isinstance(one, ResetEvent)):
            if is_reset:
                self._curve.clear()
            else:
                ended = (one for one in some if isinstance(one, RequestBlocks))
                counted = (one for one in ended if one.time_s >= self._enabled_s)
                # The device serves requests without offloading too, more than the curve knows: "now" would exceed it.
                self._curve.record([one for one in counted if one.may_load or one.num_storable])


def _sizes(total_bytes: int) -> list[int]:
    """Return the sizes of the curve's points, the smallest first."""
    steps = range(_MIN_OCTAVE * _STEPS_PER_OCTAVE, _MAX_OCTAVE * _STEPS_PER_OCTAVE + 1)
    return [round(total_bytes * 2 ** (step / _STEPS_PER_OCTAVE)) for step in steps]
