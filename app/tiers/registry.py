"""The tiers of a service: those of the settings, and what operators attach, disable and detach while it serves."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.app.common.call_errors import Conflict, NotFound
from kvferry.app.settings.tiers import MAX_TIERS, TierSettings, read_tiers
from kvferry.app.tiers.opening import close_tiers
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.scheduler.scheduler import OffloadScheduler

MAX_NAMES = 64
"""Most names of tiers in the life of a process: each has series of its own in `/metrics`."""
DRAIN_S = 10.0
"""Time for which a tier that is detached may end its jobs."""
_POLL_S = 0.02

OpenTiers = Callable[[Sequence[TierSettings]], dict[str, ThreadedTier]]
"""Opens tiers by their settings. Raises `TierRefused`."""
PrepareResets = Callable[[str], Callable[[float], None]]
"""Reads the resets of a tier that an earlier process left open; the result repeats them at a time."""


class NoSuchTier(NotFound):
    """There is no tier of this name."""


class TierConflict(Conflict):
    """A change of the tiers that is not possible now."""

    slug = "tier-conflict"


@dataclass(frozen=True, slots=True)
class TierState:
    """An attached tier: its definition with secrets masked, and whether new jobs are submitted to it.

    `namespace` is equal for engines that share the blocks of the tier, None if it is not shared or not known yet.
    """

    name: str
    definition: Mapping[str, Any]
    is_enabled: bool
    is_of_settings: bool
    namespace: str | None


class TierRegistry:
    """Attached tiers by name. Changes are lost at the next start. Thread: any.

    Tiers are attached and detached one at a time; meanwhile a second attempt is refused, and other calls do not wait.

    `tiers` are the open ones, which the owner closes in the end.
    """

    def __init__(
        self,
        entries: Sequence[TierSettings],
        tiers: dict[str, ThreadedTier],
        scheduler: OffloadScheduler,
        prepare_resets: PrepareResets,
        open_tiers: OpenTiers | None,
    ) -> None:
        """`open_tiers` is None in a process that cannot open tiers, as it does not map the pool."""
        self._entries = {entry.name: entry for entry in entries}
        self._of_settings = set(self._entries)
        self._names = set(self._entries)
        self._tiers = tiers
        self._scheduler = scheduler
        self._prepare_resets = prepare_resets
        self._open_tiers = open_tiers
        self._lock = threading.Lock()
        for entry in entries:
            scheduler.tiers.cascade_when(entry.name, entry.when)

    def states(self) -> list[TierState]:
        """Return all attached tiers, the fastest first."""
        enabled, tiers = self._scheduler.tiers.enabled(), dict(self._tiers)
        return [
            TierState(name, entry.shown(), enabled[name], name in self._of_settings, _namespace_of(tiers.get(name)))
            for name, entry in dict(self._entries).items()
            if name in enabled
        ]

    def state(self, name: str) -> TierState:
        """Return one tier. Raises `NoSuchTier`."""
        states = {state.name: state for state in self.states()}
        if name not in states:
            raise NoSuchTier(f"there is no tier called {name}; there are: {', '.join(states) or 'none'}")
        return states[name]

    def attach(self, name: str, definition: Mapping[str, Any]) -> TierState:
        """Open a tier, as at start, and use it from now on.

        Resets that an earlier process left open, and those since the tier was detached, are repeated before it is used.

        Raises `ValueError` for a bad definition, `TierRefused` if the tier cannot be opened, `TierConflict`, and
        whatever `PrepareResets` raises.
        """
        (entry,) = read_tiers([{**definition, "name": name}])
        with self._changing():
            if name in self._entries:
                raise TierConflict(f"there is a tier called {name}: detach it first, or choose another name")
            if len(self._entries) >= MAX_TIERS:
                raise TierConflict(f"there are {MAX_TIERS} tiers, the most that there may be: detach one first")
            if name not in self._names and len(self._names) >= MAX_NAMES:
                raise TierConflict(f"{MAX_NAMES} names of tiers were used since the start: use one of them again")
            if self._open_tiers is None:
                raise TierConflict("this process does not map the pool, so that it cannot use tiers")
            repeat_resets = self._prepare_resets(name)
            opened = self._open_tiers([entry])
            self._names.add(name)
            self._tiers |= opened
            self._scheduler.tiers.attach(name, opened[name], is_enabled=False)
            self._scheduler.tiers.cascade_when(name, entry.when)
            repeat_resets(time.time())
            self._scheduler.resets.repeat_detached(name, time.time())
            self._scheduler.tiers.enable(name, is_enabled=True)
            # Last, because an operator can enable it from here on.
            self._entries[name] = entry
            return self.state(name)

    def enable(self, name: str, *, is_enabled: bool) -> TierState:
        """Submit new jobs to a tier, or none. Raises `NoSuchTier`."""
        self.state(name)
        try:
            self._scheduler.tiers.enable(name, is_enabled=is_enabled)
        except ValueError as error:
            raise NoSuchTier(str(error)) from None
        return self.state(name)

    def detach(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Stop using a tier, let its jobs end for a limited time, cancel the others, and close it.

        Raises `NoSuchTier`, and `TierConflict` if the tier may still touch slots or has not ended a reset, or while
        another one is attached or detached.
        """
        tiers = self._scheduler.tiers
        with self._changing():
            self.state(name)
            tiers.enable(name, is_enabled=False)
            deadline_s = time.monotonic() + drain_s
            while not tiers.is_idle(name) and time.monotonic() < deadline_s:
                tiers.poll(time.time())
                time.sleep(_POLL_S)
            if not tiers.detach(name, time.time()):
                raise TierConflict(
                    f"tier {name} is not used any more and cannot be closed yet, as it has not ended a reset or a job "
                    "that could not be canceled: try again later"
                )
            del self._entries[name]
            self._of_settings.discard(name)
            close_tiers({name: self._tiers.pop(name)})

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise TierConflict("a tier is being attached or detached: try again once that has ended")
        try:
            yield
        finally:
            self._lock.release()


def _namespace_of(tier: ThreadedTier | None) -> str | None:
    """Return a digest of the epoch: an identifier in the store itself, whatever address an engine reaches it by."""
    epoch = b"" if tier is None else tier.shared_epoch()
    return hashlib.sha256(epoch).hexdigest()[:16] if epoch else None
