"""The current settings: those read at start, with the changes made while running."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from kvferry.app.settings.errors import BadSettings
from kvferry.app.settings.fields import MUTABLE_NAMES
from kvferry.app.settings.settings import TOKENS, Settings

_log = logging.getLogger(__name__)


class LiveSettings:
    """Frozen settings that are replaced by `change`. Changes are lost at the next start. Thread: any.

    Args:
        at_start: The settings that were read at start.
        apply: Applies changed settings before they are current, given the changed names, or raises if they are refused.
            Then it is called again with the current settings.
    """

    def __init__(self, at_start: Settings, apply: Callable[[Settings, Collection[str]], None]) -> None:
        self._at_start = at_start
        self._apply = apply
        self._changes: dict[str, Any] = {}
        self.current = at_start
        """The current settings."""
        self.unapplied: Mapping[str, str] = {}
        """By setting, why the value that was last requested was not applied."""
        self._stale: str | None = None
        """Why the tokens in files are not those in use."""
        self._lock = threading.Lock()

    def degraded(self) -> list[str]:
        """Return which requested values, and which tokens in files, were not applied, and why."""
        return [*self.unapplied.values(), *([] if self._stale is None else [self._stale])]

    def change(self, patch: Mapping[str, Any]) -> Settings:
        """Change some settings; None restores the value at start.

        Raises `BadSettings` for unknown names and invalid values, `NeedsRestart` for settings that are fixed while
        running, and the errors of `apply`.
        """
        with self._lock:
            restored = {name for name, value in patch.items() if value is None and name in MUTABLE_NAMES}
            changes = {name: value for name, value in (self._changes | dict(patch)).items() if name not in restored}
            settings = self._at_start.change(changes)
            try:
                self._apply(settings, patch)
            except Exception:
                # A change is applied completely or not at all. The caller gets its error, not that of the way back.
                with suppress(Exception):
                    self._apply(self.current, patch)
                raise
            self._changes = changes
            self.current = settings
            self.unapplied = {name: why for name, why in self.unapplied.items() if name not in patch}
            return settings

    def reread_tokens(self) -> None:
        """Use the tokens that are in their files now. While these cannot be read, the tokens in use stay."""
        with self._lock:
            try:
                at_start = self._at_start.reread_tokens()
                changed = at_start.change(self._changes) if at_start is not self._at_start else self.current
            except BadSettings as error:
                stale = f"tokens in use are those read before: {'; '.join(map(str, error.problems))}"
                if self._stale is None:
                    _log.warning("settings: %s", stale)
                self._stale = stale
                return
            self._stale = None
            if changed is not self.current:
                self._apply(changed, TOKENS)
                self._at_start, self.current = at_start, changed
                _log.info("settings: tokens were read again from their files")

    def record_unapplied(self, name: str, requested: object, value: object, why: str) -> None:
        """Record that `value` applies instead of the requested one, unless the setting was changed since."""
        with self._lock:
            if getattr(self.current, name) != requested:
                return
            self._changes = self._changes | {name: value}
            self.current = self._at_start.change(self._changes)
            self.unapplied = {**self.unapplied, name: f"{name}={requested} was not applied: {why}"}
