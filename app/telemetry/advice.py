"""Advice: the one change that is worth most by what is measured; see docs/balance.md."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.app.settings.types import format_size
from kvferry.app.telemetry.curve import WhatIf, WhatIfAnswer
from kvferry.app.telemetry.history import StatsHistory
from kvferry.app.telemetry.prompts import PromptFeed
from kvferry.core.auto_pause import NOISE_S, WINDOW_S
from kvferry.core.breaks import WINDOW_S as BREAKS_S
from kvferry.core.breaks import Break
from kvferry.core.partings import Partings
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.stats import EvictionReason, NotStored, Snapshot

HOUR_S = 3600.0
MIN_GAIN_S = NOISE_S / WINDOW_S * HOUR_S
"""Seconds an hour below which no advice is given: 0.5% of the time, as a balance has to be negative by."""
_CHECKS = 60
"""Looks for advice in a running balance's time."""
_OF_LIMITS = (
    f"missed_tokens.evicted.{EvictionReason.TENANT_LIMIT}",
    f"missed_tokens.not_stored.{NotStored.TENANT_LIMIT}",
)
"""Columns of the history: tokens computed because a tenant was at its limit."""


class AdviceKind(StrEnum):
    """What to change."""

    POOL = "pool"
    LAZY = "lazy"
    TENANT = "tenant"
    BREAK = "break"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, and what it is worth."""

    kind: AdviceKind
    seconds_per_hour: float = field(metadata={"description": "time of prefill, or of waiting, that it would save"})
    text: str
    command: str


class Adviser:
    """Finds the advice of stats. Thread: the supervisor's; any for `latest`."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        samples: StatsHistory,
        prompts: PromptFeed,
        what_if: WhatIf,
        partings: Partings,
        limits: TenantLimits,
        window_s: float = WINDOW_S,
    ) -> None:
        """`prompts` has the lock of `what_if` and `partings`. Advises after `window_s`."""
        self.latest: Advice | None = None
        self._scheduler = scheduler
        self._samples = samples
        self._prompts = prompts
        self._what_if = what_if
        self._partings = partings
        self._limits = limits
        self._window_s = window_s
        self._started_s = self._checked_s = time.monotonic()

    def check(self) -> None:
        """Look for the advice that is worth most, at intervals, once a running balance was measured."""
        now_s = time.monotonic()
        if now_s - self._started_s >= self._window_s and now_s - self._checked_s >= self._window_s / _CHECKS:
            self._checked_s = now_s
            found = (one for one in self._find(now_s - self._started_s) if one.seconds_per_hour >= MIN_GAIN_S)
            self.latest = max(found, key=lambda one: one.seconds_per_hour, default=None)

    def _find(self, uptime_s: float) -> Iterator[Advice]:
        token_s = self._scheduler.cost_model.tokens_rate.estimate_s(1)
        if token_s is None:
            return
        now = self._scheduler.snapshot()
        # Not since the start: what has changed meanwhile would show, or be forgotten, after days only.
        window_s, increases = self._samples.increases(now, WINDOW_S)
        per_hour = HOUR_S / (window_s or uptime_s)
        with self._prompts.lock:
            answer = self._what_if.answer(self._prompts.num_dropped)
            _, breaks = self._partings.breaks.find(time.time(), BREAKS_S)
        yield from _of_curve(answer)
        yield from _of_breaks(breaks, token_s * HOUR_S / min(uptime_s, BREAKS_S))
        yield from self._of_tenants(now, sum(increases[column] for column in _OF_LIMITS) * token_s * per_hour)
        waited_s, saved_s = increases["tier_wait_s"] * per_hour, increases["tier_hit"] * token_s * per_hour
        # One may have been attached since `now`.
        enabled = [name for name, is_on in self._scheduler.tiers.enabled().items() if is_on and name in now.tiers]
        yield from _of_tiers(now, enabled, waited_s, saved_s)

    def _of_tenants(self, now: Snapshot, seconds_per_hour: float) -> Iterator[Advice]:
        if not seconds_per_hour:
            return
        own, default = self._limits.own_limits(), self._limits.default_bytes
        used = {tenant: size for tenant, size in self._limits.usage().items() if tenant is not None}
        limits = {tenant: limit for tenant in used if (limit := own.get(tenant, default)) is not None}
        # Advised is twice the limit, which must not take the space of others.
        free_bytes = now.pool.free * now.pool.slot_bytes
        full = [one for one, limit in limits.items() if limit - now.pool.slot_bytes < used[one] and limit <= free_bytes]
        if full:
            tenant = max(full, key=used.__getitem__)
            yield Advice(
                AdviceKind.TENANT,
                seconds_per_hour,
                f"Limits of tenants kept out of the pool what took {seconds_per_hour:,.0f} s an hour to compute. "
                f"Tenant {tenant} is at its limit of {format_size(limits[tenant])}.",
                f"kvferry tenants limit {format_size(2 * limits[tenant])} {tenant}",
            )


def _of_curve(answer: WhatIfAnswer) -> Iterator[Advice]:
    pool_s, lazy_s = answer.twice_pool.prefill_seconds_per_hour, answer.lazy_mode.prefill_seconds_per_hour
    twice = format_size(2 * answer.current.pool_bytes)
    # Lazy mode first: of equal ones, it takes no memory.
    if lazy_s is not None:
        text = (
            f"Lazy mode would save {lazy_s:,.0f} s of prefill an hour, by the curve of what if; a kept pool and shared "
            "tiers then lack what the device still has."
        )
        yield Advice(AdviceKind.LAZY, lazy_s, text, "kvferry config set store_mode=lazy")
    if pool_s is not None:
        text = f"A pool of twice the size would save {pool_s:,.0f} s of prefill an hour, by the curve of what if."
        yield Advice(AdviceKind.POOL, pool_s, text, f"kvferry config set pool_bytes={twice}")


def _of_breaks(breaks: Sequence[Break], factor: float) -> Iterator[Advice]:
    for one in breaks[:1]:
        text = (
            f"{one.num_requests:,} prompts differ from token {one.position:,} on and are equal again behind: computing "
            f"that took {one.num_tokens * factor:,.0f} s an hour."
        )
        yield Advice(AdviceKind.BREAK, one.num_tokens * factor, text, "kvferry breaks")


def _of_tiers(now: Snapshot, enabled: Sequence[str], waited_s: float, saved_s: float) -> Iterator[Advice]:
    """Advise to disable the tier that answers last, since a request waits for all that its blocks are looked up in."""
    if enabled:
        slowest = max(enabled, key=lambda name: now.tiers[name].use.look_up_s or 0.0)
        yield Advice(
            AdviceKind.TIER,
            waited_s - saved_s,
            f"Requests waited for tiers for {waited_s:,.0f} s an hour, and what these had saved {saved_s:,.0f} s. The "
            f"last to answer is {slowest}.",
            f"kvferry tiers disable {slowest}",
        )
