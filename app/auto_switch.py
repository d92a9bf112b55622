"""`auto` as eviction policy and store mode: the switches that follow from what the shadow caches find."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kvferry.app.times import rfc3339
from kvferry.core.auto_policy import AutoPolicy, Choice, Switch
from kvferry.core.counters import counter
from kvferry.core.engine_api import StoreMode
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.shadow.caches import ShadowCaches

_log = logging.getLogger(__name__)

MAX_SHOWN = 10
CHECK_REQUESTS = 25
"""Requests between two looks at the caches."""


@dataclass(frozen=True, slots=True)
class PastSwitch:
    """A switch that the service has made by itself."""

    time: str = field(metadata={"description": "RFC 3339"})
    previous_eviction_policy: str
    previous_store_mode: StoreMode
    eviction_policy: str
    store_mode: StoreMode
    reason: str


@dataclass(frozen=True, slots=True)
class AutoState:
    """What `auto` is doing."""

    eviction_policy: bool = field(metadata={"description": "whether `KVFERRY_EVICTION_POLICY` is `auto`"})
    store_mode: bool = field(metadata={"description": "whether `KVFERRY_STORE_MODE` is `auto`"})
    requests: int = field(
        metadata={"description": "requests compared since the last switch, or since `auto` or the simulation began"}
    )
    num_switches: int = counter("Switches that EVICTION_POLICY=auto or STORE_MODE=auto has made", "auto_switches")
    last: list[PastSwitch] = field(
        default_factory=list, metadata={"description": f"the last {MAX_SHOWN} switches, the newest first"}
    )


class AutoSwitch:
    """Applies eviction policy and store mode as operators set them, and switches those that are left to `auto`.

    `apply` and `state` may be called on any thread, `follow` on the one of the shadow caches.
    """

    def __init__(
        self,
        scheduler: OffloadScheduler,
        guarding: Callable[[str], AbstractContextManager[None]],
        on_switch: Callable[[Mapping[str, Any], float], None],
    ) -> None:
        """`on_switch` publishes and records JSON values about a switch, and its Unix time; it must not block."""
        self._scheduler = scheduler
        self._guarding = guarding
        self._on_switch = on_switch
        self._lock = threading.Lock()
        self._fixed_policy: str | None = scheduler.manager.evictor.policy.name
        self._fixed_mode: StoreMode | None = scheduler.store_mode
        self._decision = AutoPolicy(self._present())
        self._caches: ShadowCaches | None = None
        self._since_s: float | None = None
        self._seen: tuple[int, dict[Choice, float]] = (0, {})
        self._num_unseen = 0
        self._num_switches = 0
        self._last: deque[PastSwitch] = deque(maxlen=MAX_SHOWN)

    def apply(self, policy: str | None, mode: StoreMode | None) -> None:
        """Switch to what an operator has set; None leaves it to `auto`, which begins with the present one."""
        with self._lock:
            if (policy, mode) != (self._fixed_policy, self._fixed_mode):
                self._fixed_policy, self._fixed_mode = policy, mode
                self._caches = None
            present = self._present()
            self._switch(Choice(policy or present.eviction_policy, mode or present.store_mode))

    def follow(self, caches: ShadowCaches, num_requests: int) -> None:
        """Take into account requests that the caches have replayed, and switch if they show that another is better."""
        if self._fixed_policy is not None and self._fixed_mode is not None:
            return
        with self._lock:
            self._num_unseen += num_requests
            # An hour that is forgotten after a day takes its counts with it.
            if caches is not self._caches or caches.since_s != self._since_s:
                if caches is not self._caches:
                    self._decision.restart(self._present())
                self._caches, self._since_s = caches, caches.since_s
                self._look(caches)
            elif self._num_unseen >= CHECK_REQUESTS:
                num_unseen, (tokens_before, before) = self._num_unseen, self._seen
                tokens, found = self._look(caches)
                new = {choice: found[choice] - before[choice] for choice in found}
                switch = self._decision.observe(num_unseen, tokens - tokens_before, new)
                if switch is not None:
                    with self._guarding("auto"):
                        self._switch(switch.after)
                    self._publish(switch)

    def state(self) -> AutoState:
        """Return what `auto` is doing."""
        with self._lock:
            is_on = self._fixed_policy is None or self._fixed_mode is None
            return AutoState(
                self._fixed_policy is None,
                self._fixed_mode is None,
                self._decision.num_since if is_on and self._caches is not None else 0,
                self._num_switches,
                list(self._last),
            )

    def _present(self) -> Choice:
        return Choice(self._scheduler.manager.evictor.policy.name, self._scheduler.store_mode)

    def _look(self, caches: ShadowCaches) -> tuple[int, dict[Choice, float]]:
        """Return the prompt tokens counted, and those that each allowed choice would have served."""
        tokens, _ = caches.totals
        found = {}
        for one, estimate in zip(caches.configurations, caches.estimates(), strict=True):
            policy, mode = self._fixed_policy or one.eviction_policy, self._fixed_mode or one.store_mode
            if (policy, mode) == one[:2] and one.num_slots == caches.setup.num_slots:
                found[Choice(policy, mode)] = tokens * estimate.hit_rate
        self._seen, self._num_unseen = (tokens, found), 0
        return self._seen

    def _switch(self, to: Choice) -> None:
        self._scheduler.manager.switch_policy(to.eviction_policy)
        if to.store_mode is not self._scheduler.store_mode:
            self._scheduler.set_store_mode(to.store_mode)

    def _publish(self, switch: Switch) -> None:
        before, after, now_s = switch.before, switch.after, time.time()
        reason = (
            f"of the last {switch.num_requests:,} requests' prompt tokens {_words(after)} would have served "
            f"{switch.rate_after:.1%}, {_words(before)} {switch.rate_before:.1%}"
        )
        _log.warning("auto: switched to %s: %s", _words(after), reason)
        past = PastSwitch(rfc3339(now_s), *before, *after, reason)
        self._num_switches += 1
        self._last.appendleft(past)
        what = {
            "eviction_policy": after.eviction_policy,
            "store_mode": after.store_mode.value,
            "previous_eviction_policy": before.eviction_policy,
            "previous_store_mode": before.store_mode.value,
            "reason": reason,
        }
        self._on_switch(what, now_s)


def _words(choice: Choice) -> str:
    return f"{choice.eviction_policy} ({choice.store_mode.value})"
