"""The settings in force: those read at start, with what was changed while running laid over them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvferry.app.settings.model import Settings

_log = logging.getLogger(__name__)


def _all_good(_: Settings, __: Collection[str]) -> None:
    """Whatever validated will do."""


class LiveSettings:
    """Frozen settings that can be exchanged while running. Thread-safe.

    `check` is called with the new settings and the names that were given, and raises what they are refused with; then
    `apply`, before they are in force, carries them to whoever holds a copy. If it raises, it is called with the
    settings in force, so that all of a change is applied or nothing. The caller of `change` waits for both. Changes are
    forgotten at the next start.
    """

    def __init__(
        self,
        at_start: Settings,
        apply: Callable[[Settings], None],
        *,
        check: Callable[[Settings, Collection[str]], None] = _all_good,
    ) -> None:
        self._at_start = at_start
        self._apply = apply
        self._check = check
        self.mutable = tuple(Settings.mutable_names())
        self._changes: dict[str, Any] = {}
        self._current = at_start
        self._shortfalls: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def current(self) -> Settings:
        """The settings in force now."""
        return self._current

    @property
    def shortfalls(self) -> Mapping[str, str]:
        """By setting, why what was asked for last is not in force."""
        return self._shortfalls

    def change(self, patch: Mapping[str, Any]) -> Settings:
        """Change some settings; None gives one its value at start back.

        Raises `BadSettings` for unknown names and bad values, `NeedsRestart` for settings that are fixed while running,
        and what `check` and `apply` raise.
        """
        with self._lock:
            taken_back = {name for name, value in patch.items() if value is None and name in self.mutable}
            given = {name: value for name, value in patch.items() if name not in taken_back}
            changes = {name: value for name, value in self._changes.items() if name not in taken_back} | given
            settings = self._at_start.change(changes, self.mutable)
            self._check(settings, patch)
            try:
                self._apply(settings)
            except Exception:
                self._restore()
                raise
            self._changes = changes
            self._current = settings
            self._shortfalls = {name: why for name, why in self._shortfalls.items() if name not in patch}
            return settings

    def _restore(self) -> None:
        """Apply the settings in force again, since a change was applied in part."""
        try:
            self._apply(self._current)
        except Exception:  # noqa: BLE001 - the caller gets the error of the change itself
            _log.exception("settings: a failed change could not be taken back")

    def fall_short(self, name: str, asked: object, value: object, why: str) -> None:
        """What was asked for of a setting could not be had, and `value` is in force, unless more was asked since."""
        with self._lock:
            if getattr(self._current, name) != asked:
                return
            self._changes = self._changes | {name: value}
            self._current = self._at_start.change(self._changes, self.mutable)
            self._shortfalls = self._shortfalls | {name: f"{name}={asked} could not be had: {why}"}
