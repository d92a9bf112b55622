"""The running balance of offloading: measured cost against measured gain, and the pause that follows it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.app.common.times import rfc3339_or_none
from kvferry.app.telemetry.history import StatsHistory, totals
from kvferry.core.auto_pause import WINDOW_S, AutoPause, Storing
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.stats import Snapshot

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sums:
    """Cost and gain of a time, in seconds; see docs/balance.md."""

    cost_s: float = field(metadata={"description": "`hook_s + load_wait_s`"})
    gain_s: float | None = field(
        metadata={
            "description": "time that computing the saved tokens would have taken; null while no prefill rate is "
            "measured and tokens were saved"
        }
    )
    net_s: float | None = field(metadata={"description": "`gain_s - cost_s`; null with `gain_s`"})
    hook_s: float = field(metadata={"description": "time in the engine's hooks"})
    load_wait_s: float = field(
        metadata={"description": "time for which requests waited for loads and tiers before their first token"}
    )
    saved_tokens: int = field(metadata={"description": "prompt tokens loaded from the pool or tiers"})
    stored_bytes: int
    loaded_bytes: int


@dataclass(frozen=True, slots=True)
class Balance(Sums):
    """The running balance, of the last `window_s` seconds."""

    window_s: float = field(metadata={"description": "up to 600, less after a start"})
    prefill_tokens_per_s: float | None = field(
        metadata={"description": "measured rate of computing prompts; null while too few steps were measured"}
    )
    total: Sums = field(metadata={"description": "since the start"})
    auto_pause: bool = field(metadata={"description": "KVFERRY_AUTO_PAUSE"})
    storing: Storing = field(
        metadata={"description": "`on`; `paused`: nothing is stored; `probing`: stored again for a window, as a trial"}
    )
    paused: bool = field(metadata={"description": "whether nothing is stored"})
    since: str | None = field(metadata={"description": "when the pause or the trial began; null while storing is on"})
    reason: str | None = field(metadata={"description": "why storing was paused; null while it is on"})


class BalanceWatch:
    """The running balance, and the pause of storing that follows it once a second. Thread: any."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        samples: StatsHistory,
        on_change: Callable[[Mapping[str, Any], float], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_change` publishes JSON values about a change of storing, and its Unix time."""
        self._scheduler = scheduler
        self._samples = samples
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = AutoPause()
        self._is_enabled = False
        self._epoch = scheduler.manager.epoch
        self._since_s: float | None = None
        self._reason: str | None = None

    @property
    def is_paused(self) -> bool:
        """Whether nothing is stored."""
        return self._pause.state is Storing.PAUSED

    def enable(self, is_enabled: bool) -> None:
        """Switch the automatic pause on or off; off, storing goes on at once."""
        with self._lock:
            if is_enabled is not self._is_enabled:
                self._is_enabled = is_enabled
                self._restart("KVFERRY_AUTO_PAUSE was switched off")

    def check(self, now_s: float) -> None:
        """Follow the running balance; `now_s` is by a clock that is never set back. Called once a second."""
        if not self._is_enabled:
            return
        now = self._scheduler.snapshot()
        window_s, increases = self._samples.increases(now, WINDOW_S)
        window = _sums(now, increases)
        with self._lock:
            if now.epoch != self._epoch:
                # What was saved so far is gone, and stores have to pay anew.
                self._epoch = now.epoch
                self._restart("all blocks were dropped by a reset")
            elif self._pause.observe(window.net_s, now_s):
                self._follow(window, window_s)

    def balance(self, now: Snapshot) -> Balance:
        """Return the balance up to a snapshot."""
        window_s, increases = self._samples.increases(now, WINDOW_S)
        with self._lock:
            return Balance(
                **asdict(_sums(now, increases)),
                window_s=window_s,
                prefill_tokens_per_s=now.balance.prefill_tokens_per_s,
                total=_sums(now, totals(now)),
                auto_pause=self._is_enabled,
                storing=self._pause.state,
                paused=self._pause.state is Storing.PAUSED,
                since=rfc3339_or_none(self._since_s),
                reason=self._reason,
            )

    def degraded(self) -> list[str]:
        """Return why nothing is stored; empty while blocks are stored."""
        with self._lock:
            return [f"storing is paused: {self._reason}"] if self._pause.state is Storing.PAUSED else []

    def _restart(self, why: str) -> None:
        was_on = self._pause.state is Storing.ON
        self._pause.restart()
        if not was_on:
            self._apply(None)
            self._publish(why)

    def _follow(self, window: Sums, window_s: float) -> None:
        """Apply and publish a change of the state."""
        pause = self._pause
        gain_s = window.gain_s or 0.0
        text = f"in the last {window_s:.0f} s offloading cost {window.cost_s:.1f} s and saved {gain_s:.1f} s"
        if pause.state is Storing.PAUSED:
            self._apply(f"{text}; storing is tried again after {pause.pause_s / 60:.0f} minutes")
        else:
            self._apply(self._reason if pause.state is Storing.PROBING else None)
        self._publish(text if pause.state is not Storing.PROBING else f"a trial of {WINDOW_S:.0f} s")

    def _apply(self, reason: str | None) -> None:
        is_on = self._pause.state is Storing.ON
        self._since_s, self._reason = None if is_on else self._clock(), reason
        self._scheduler.pause_stores(self._pause.state is Storing.PAUSED)

    def _publish(self, why: str) -> None:
        state = self._pause.state
        _log.warning("auto pause: storing is now %s: %s", state.value, why)
        self._on_change({"storing": state.value, "reason": why}, self._clock())


def _sums(now: Snapshot, counts: Mapping[str, float]) -> Sums:
    """Return sums of counts by name; the gain is unknown while loaded tokens wait for a measured prefill rate."""
    cost_s, load_wait_s = counts["cost_s"], counts["load_wait_s"]
    gain_s = None if now.balance.unpriced_tokens else counts["gain_s"]
    return Sums(
        cost_s=cost_s,
        gain_s=gain_s,
        net_s=None if gain_s is None else gain_s - cost_s,
        # Not below 0 by rounding.
        hook_s=max(0.0, cost_s - load_wait_s),
        load_wait_s=load_wait_s,
        saved_tokens=int(counts["host_hit"] + counts["tier_hit"]),
        stored_bytes=int(counts["stored_bytes"]),
        loaded_bytes=int(counts["loaded_bytes"]),
    )
